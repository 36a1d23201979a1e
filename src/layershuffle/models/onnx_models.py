"""The files of `layershuffle export` as a model: ONNX Runtime computes, torch holds the states.

They are loaded as any other directory, so `eval` and `predict` score and use them in every order.
They cannot be trained, resized or saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_tensors
from torch import Tensor, nn

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.extras import require
from layershuffle.image_view import ImageView
from layershuffle.models.files import read_json, refused_by
from layershuffle.models.origin import Origin, origin_of, remember
from layershuffle.text import one_line

NAME = "onnxruntime"
MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
WEIGHTS_LOCATION = "weights"
"""The one place that a block's graph names for its weights; the loader gives it their content."""
_AGAIN = "export the model again"


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


class ExportManifest(_FromManifest):
    """The part of manifest.json that running the files needs."""

    schema_: Literal[1] = Field(alias="schema")
    family: str
    classes: int
    class_names: tuple[str, ...] | None
    image_view: ImageView
    trained: Trained
    state: StateForm
    blocks: tuple[StoredBlock, ...]
    files: dict[str, StoredFile]


class OnnxGraph(nn.Module):
    """One ONNX graph as a module. `weights`: safetensors of a block, if `graph` is of blocks."""

    def __init__(self, graph: bytes, weights: bytes | None = None, *, threads: int = 0) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        # Waiting threads would spin, beside those of torch.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        if weights is not None:
            tensors = load_tensors(weights)
            # The session copies them.
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(t) for t in tensors.values()]
            options.add_external_initializers(list(tensors), values)
        try:
            self._session = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ModelFileError(
                f"ONNX Runtime refuses a graph ({one_line(error)})", hint=_AGAIN
            ) from error
        self._input = self._session.get_inputs()[0].name
        # Whoever scores asks the blocks for dtype and device by their weights.
        self.place = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, values: Tensor, *_: Any) -> Tensor:
        """The output, float32, on the device of `values`."""
        if values.dtype != torch.float32:
            raise UsageError(
                f"Exported files take float32, not {values.dtype}", hint="leave out --precision"
            )
        (output,) = self._session.run(None, {self._input: values.numpy(force=True)})
        return torch.from_numpy(output).to(values.device)


class ExportedModel(nn.Module):
    """Stem, blocks and head of an exported directory: images to logits."""

    def __init__(self, manifest: ExportManifest, contents: Mapping[str, bytes]) -> None:
        super().__init__()
        self.manifest = manifest
        self.stem, self.head = OnnxGraph(contents["stem.onnx"]), OnnxGraph(contents["head.onnx"])
        self.blocks = nn.ModuleList(
            OnnxGraph(contents[block.graph], contents[block.weights]) for block in manifest.blocks
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[n, classes]` of images `[n, channels, height, width]`."""
        state = self.stem(images)
        for block in self.blocks:
            state = block(state)
        logits: Tensor = self.head(state)
        return logits


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of an exported directory. Raises `ModelFileError` for anything else."""
    place = directory / MANIFEST
    manifest = read_json(place)
    if "order" in manifest:
        raise ModelFileError(
            "This export is one file of one order, for other programs, and has no blocks",
            place=place,
            hint="export the model without --whole",
        )
    with refused_by("pydantic", place, hint="name a directory of layershuffle export"):
        return ExportManifest.model_validate_json(json.dumps(manifest))


def read(directory: Path, *, seed: int) -> tuple[nn.Module, str]:
    """The model of an exported directory, and its family.

    Raises `ModelFileError` for files that are not those of its manifest.
    """
    del seed
    require("export", "onnxruntime")
    manifest = read_manifest(directory)
    # A name with a path would lead out of the directory.
    files = {Path(name).name: facts.sha256 for name, facts in manifest.files.items()}
    contents = {name: _checked(directory / name, digest) for name, digest in files.items()}
    with refused_by("The loader", directory, hint=_AGAIN):
        model = ExportedModel(manifest, contents)
    origin = Origin(
        view=manifest.image_view,
        class_names=manifest.class_names,
        record={"method": manifest.trained.method, "settings": {"data": manifest.trained.data}},
    )
    return remember(model, origin), manifest.family


def _checked(path: Path, digest: str) -> bytes:
    if not path.is_file():
        raise ModelFileError("There is no such file", place=path, hint=_AGAIN)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelFileError("The file is not the one of its manifest", place=path, hint=_AGAIN)
    return content


# --- what every library can be asked (`models.store.Library`) -------------------------------------


def owns(model: nn.Module) -> bool:
    """Whether `model` consists of exported files."""
    return isinstance(model, ExportedModel)


def num_classes(backbone: Any) -> int:
    """The number of logits."""
    return int(backbone.manifest.classes)


def class_names(backbone: nn.Module) -> tuple[str, ...] | None:
    """The names of the classes, `None` if they have none."""
    return origin_of(backbone).class_names


def image_view(backbone: nn.Module) -> ImageView:
    """How images are prepared."""
    view = origin_of(backbone).view
    assert view is not None
    return view


def _only_run(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "Exported files can only be run", hint="change the model itself, and export it again"
    )


# Nothing else can be done with files.
build = resize_head = set_class_names = set_depth = write = _only_run
