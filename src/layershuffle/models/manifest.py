"""The manifest of an exported model: what is in its directory, read without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from layershuffle.ground.errors import ModelFileError
from layershuffle.ground.text import one_line
from layershuffle.images.view import ImageView, view_of_files

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 2
CALIBRATION = "calibration.json"
"""What `swarm calibrate` writes beside a model, and an export copies."""
WEIGHTS_LOCATION = "weights"
"""The one place that a block's graph names for its weights; the loader gives it their content."""


class _FromManifest(BaseModel):
    # Facts for readers alone (accuracy, speed, versions) may be added.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


# Not a path: the gateway serves what a manifest names.
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
_AGAIN = "export the model again"


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
    """How the model was trained, `None` where its files do not say.

    `holdout`: the share of its training images that were held out. `paper_protocol`: none were.
    """

    method: str | None
    data: str | None
    holdout: float | None = None
    paper_protocol: bool = False

    @property
    def settings(self) -> dict[str, str | float]:
        """The settings of its run, as far as they are known."""
        return self.model_dump(exclude={"method"}, exclude_none=True)


class ExportManifest(_FromManifest):
    """The part of manifest.json that running the files needs.

    `weights`: the digest of the model in torch, which its calibration names. `fixed`: how many
    blocks at the beginning of the model are in stem.onnx, and how many at its end are in head.onnx.
    `blocks` are the others, which hosts serve, in the order of their ids in the model (`hosted`).
    """

    schema_: Literal[2] = Field(alias="schema")
    weights: str
    classes: int
    class_names: tuple[str, ...] | None
    image_view: ImageView
    trained: Trained
    state: StateForm
    fixed: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (0, 0)
    blocks: tuple[StoredBlock, ...]
    files: dict[_FileName, StoredFile]

    @model_validator(mode="after")
    def _lists_its_files(self) -> Self:
        named = {"stem.onnx", "head.onnx"}
        for block in self.blocks:
            named.add(block.graph)
            named.add(block.weights)
        missing = named - self.files.keys()
        if missing:
            raise ValueError(f"its files lack {', '.join(sorted(missing))}")
        return self

    @property
    def depth(self) -> int:
        """The number of blocks of the model, with those in stem and head."""
        return sum(self.fixed) + len(self.blocks)

    @property
    def hosted(self) -> range:
        """The ids of `blocks` in the model."""
        return range(self.fixed[0], self.depth - self.fixed[1])

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


def is_quantised(graph: bytes) -> bool:
    """Whether a block's graph computes in int8, with one scale for all states that run together."""
    return b"DynamicQuantizeLinear" in graph


def content_of(directory: Path, name: str, *, manifest: ExportManifest) -> bytes:
    """The content of a file of an exported directory. Raises `ModelFileError` if it is another."""
    place = directory / name
    try:
        content = place.read_bytes()
    except OSError as error:
        cause = f"The file cannot be read ({error.strerror or error})"
        raise ModelFileError(cause, place=place, hint=_AGAIN) from error
    if hashlib.sha256(content).hexdigest() != manifest.files[name].sha256:
        raise ModelFileError(
            "This is not the file that the manifest names", place=place, hint=_AGAIN
        )
    return content
