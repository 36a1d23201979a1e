"""The manifest of an exported model: what is in its directory, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from layershuffle.errors import ModelFileError
from layershuffle.image_view import ImageView, view_of_files
from layershuffle.text import one_line

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 2
CALIBRATION = "calibration.json"
"""What `swarm calibrate` writes beside a model, and an export copies."""
WEIGHTS_LOCATION = "weights"
"""The one place that a block's graph names for its weights; the loader gives it their content."""


class _FromManifest(BaseModel):
    # Facts for readers alone (accuracy, speed, versions) may be added.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class StoredFile(_FromManifest):
    """A file of an exported directory."""

    sha256: str
    bytes: int


class StoredBlock(_FromManifest):
    """The files of a block: its graph, which others may share, and its weights."""

    graph: str
    weights: str


class StateForm(_FromManifest):
    """A state of one image: (tokens, width)."""

    shape: tuple[int, int]
    dtype: Literal["float32"]


class Trained(_FromManifest):
    """How the model was trained, `None` where its files do not say."""

    method: str | None
    data: str | None


class Speed(_FromManifest):
    """Milliseconds of a block for one image, on one thread of the machine of the export."""

    block_ms: float


class ExportManifest(_FromManifest):
    """The part of manifest.json that running the files needs.

    `weights`: the digest of the model in torch, which its calibration names.
    """

    schema_: Literal[2] = Field(alias="schema")
    family: str
    weights: str
    classes: int
    class_names: tuple[str, ...] | None
    image_view: ImageView
    trained: Trained
    state: StateForm
    speed: Speed
    blocks: tuple[StoredBlock, ...]
    files: dict[str, StoredFile]

    @property
    def file_view(self) -> ImageView:
        """How image files are prepared."""
        return view_of_files(self.image_view, self.trained.data or "")


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of an exported directory. Raises `ModelFileError` for anything else."""
    place = directory / MANIFEST
    try:
        content = place.read_bytes()
        if "order" in json.loads(content):
            raise ModelFileError(
                "This export is one file of one order, for other programs, and has no blocks",
                place=place,
                hint="export the model without --whole",
            )
        return ExportManifest.model_validate_json(content)
    # What json and pydantic raise are ValueErrors; a manifest of a number is no container.
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFileError(
            f"This is no manifest of an export ({type(error).__name__}: {one_line(error)})",
            place=place,
            hint="name a directory of layershuffle export",
        ) from error
