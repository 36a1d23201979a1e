"""Where a model may be written: a training of hours must not be lost to a directory's name.

All commands have one rule. What a command reads is never written over. What else is there is
replaced only if that is asked for, and only if it is a saved model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from layershuffle.bundled import asset
from layershuffle.errors import UsageError
from layershuffle.models.files import CONFIG, PROCESSOR, WEIGHTS_INDEX
from layershuffle.models.metadata import METADATA_FILE
from layershuffle.models.position_files import PARTS
from layershuffle.models.spec import parse_spec

CARD = "README.md"
_OF_A_MODEL = frozenset(
    # The last one belongs to these weights (layershuffle.swarm), so it goes with them.
    {METADATA_FILE, PARTS, CARD, CONFIG, PROCESSOR, WEIGHTS_INDEX, "calibration.json"}
)


def check_output(out: Path, *, reads: Iterable[str], overwrite: bool) -> None:
    """Raises `UsageError` if a command that reads the models `reads` (specs) must not write `out`.

    `out` must not be, hold, or lie inside of the directory of one of them, whatever `overwrite`
    says. Without `overwrite` it must be new, or an empty directory.
    """
    target = out.resolve()  # links are followed: two names may lead to one directory
    for spec in reads:
        place = directory_of(spec)
        if place is None:
            continue
        place = place.resolve()
        if target == place or target in place.parents or place in target.parents:
            raise UsageError(
                f"Writing here would destroy {spec}, from which the result is made",
                place=out,
                hint="name another --out; --overwrite never covers a model that is read",
            )
    if not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise UsageError(
            "This path exists already", place=out, hint="name another --out, or add --overwrite"
        )


def check_replaceable(directory: Path) -> None:
    """Raises `UsageError` if `directory` holds files that are not those of a saved model."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(
            "The model needs a directory, but a file has this name",
            place=directory,
            hint="name another",
        )
    others = sorted(
        path.name for path in directory.iterdir()
        if path.name not in _OF_A_MODEL and not path.match("model*.safetensors")
    )  # fmt: skip
    if others:
        raise UsageError(
            f"The directory holds other files ({', '.join(others[:3])}), which saving would delete",
            place=directory,
            hint="name a new directory, or an older saved model to replace",
        )


def own_directory(spec: str) -> Path | None:
    """The directory of a bundled, saved or trained model; `None` for a model of a host library.

    Raises `UsageError` for an invalid spec.
    """
    return directory_of(spec) if parse_spec(spec).scheme in ("bundled", "dir") else None


def directory_of(spec: str) -> Path | None:
    """The directory with the files of the model `spec`, `None` where a library fetches or makes it.

    Raises `UsageError` for an invalid spec.
    """
    parsed = parse_spec(spec)
    if parsed.scheme == "bundled":
        return asset(parsed.place)
    if "checkpoint" in parsed.settings:
        return Path(str(parsed.settings["checkpoint"])).expanduser().parent
    path = Path(parsed.place.removeprefix("local-dir:")).expanduser()
    if parsed.scheme != "dir":
        # Names of the hub are not paths, unless there is a directory of that name here.
        return path if path.is_dir() else None
    # What `fit` writes has the model one level below its checkpoints.
    below = path / "model"
    return below if (below / METADATA_FILE).is_file() else path
