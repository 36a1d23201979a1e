"""Check whether a model may be written to a directory, before hours of training.

All commands have the same rule: a model that the command reads is never overwritten; another saved
model is replaced only with --overwrite, and other files never.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import user_path
from layershuffle.models.files import CONFIG, PROCESSOR, WEIGHTS_INDEX
from layershuffle.models.manifest import CALIBRATION
from layershuffle.models.metadata import METADATA_FILE
from layershuffle.models.position_files import PARTS
from layershuffle.models.spec import parse_spec

CARD = "README.md"
FILES_OF_A_MODEL = (
    METADATA_FILE, PARTS, CARD, CONFIG, PROCESSOR, WEIGHTS_INDEX, "model*.safetensors",
    CALIBRATION,  # (layershuffle.gateway) is only valid for these weights
)  # fmt: skip
"""The names of the files of a saved model, as patterns."""


def check_output(out: Path, *, reads: Iterable[str], overwrite: bool) -> None:
    """Raises `UsageError` if a command that reads the models `reads` (specs) may not write `out`.

    `out` must not be, contain, or be inside the directory of one of them, even with `overwrite`.
    Without `overwrite` it must be new, or an empty directory.
    """
    target = out.resolve()  # two paths may lead to one directory by links
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


def own_directory(spec: str) -> Path | None:
    """The directory of a bundled, saved or trained model; `None` for a model of another library.

    Raises `UsageError` for an invalid spec.
    """
    return directory_of(spec) if parse_spec(spec).scheme in ("bundled", "dir") else None


def directory_of(spec: str) -> Path | None:
    """The directory with the files of the model `spec`; `None` for a model that a library makes.

    Raises `UsageError` for an invalid spec.
    """
    parsed = parse_spec(spec)
    if parsed.scheme == "bundled":
        return asset(parsed.place)
    if "checkpoint" in parsed.settings:
        return user_path(str(parsed.settings["checkpoint"])).parent
    path = user_path(parsed.place)
    if parsed.scheme == "dir":
        return model_directory(path)
    # Names of the hub are no paths, unless a directory of that name exists.
    return path if path.is_dir() else None


def model_directory(place: Path) -> Path:
    """`place`; for a directory of `fit` the model in it, one level below its checkpoints."""
    model = place / "model"
    return model if (model / METADATA_FILE).is_file() else place
