"""Check whether a model may be written to a directory, before hours of training.

All commands have the same rule: a model that the command reads is never overwritten; another saved
model is replaced only with --overwrite, and other files never.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from layershuffle.ground.errors import UsageError
from layershuffle.models.files import CONFIG, PROCESSOR, WEIGHTS_INDEX
from layershuffle.models.manifest import CALIBRATION
from layershuffle.models.metadata import METADATA_FILE
from layershuffle.models.position_files import PARTS
from layershuffle.models.spec import directory_of

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
