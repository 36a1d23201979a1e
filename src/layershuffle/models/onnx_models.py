"""The files of `layershuffle export` as a model: ONNX Runtime computes, torch holds the states.

They are loaded as any other directory, so `eval` and `predict` score and use them in every order.
They cannot be trained, resized or saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from torch import Tensor, nn

from layershuffle.core.orders import check_ends
from layershuffle.core.runs import run_of
from layershuffle.core.stack import stack_of, wrap
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.text import one_line
from layershuffle.models.files import library_errors
from layershuffle.models.manifest import ExportManifest, content_of, is_quantised, read_manifest
from layershuffle.models.origin import Origin, remember

NAME = "onnxruntime"
_AGAIN = "export the model again"


class OnnxGraph(nn.Module):
    """One ONNX graph as a module. `weights`: safetensors of a block, if `graph` is of blocks.

    Without a `graph` it stands for a block that keeps its place, which stem or head compute.
    """

    def __init__(
        self, graph: bytes | None, weights: bytes | None = None, *, threads: int = 0
    ) -> None:
        super().__init__()
        import onnxruntime

        # Whoever scores asks the blocks for dtype and device by their weights.
        self.place = nn.Parameter(torch.zeros(()), requires_grad=False)
        self._session = None
        if graph is None:
            return
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
        self._image_by_image = is_quantised(graph)

    def forward(self, values: Tensor, *_: Any) -> Tensor:
        """The output, float32, on the device of `values`."""
        if values.dtype != torch.float32:
            raise UsageError(
                f"Exported files take float32, not {values.dtype}", hint="leave out --precision"
            )
        if self._session is None:
            return values
        states = values.numpy(force=True)
        parts = np.split(states, len(states)) if self._image_by_image else [states]
        outputs = [self._session.run(None, {self._input: part})[0] for part in parts]
        return torch.from_numpy(np.concatenate(outputs)).to(values.device)


class ExportedModel(nn.Module):
    """Stem, blocks and head of an exported directory: images to logits.

    It has all blocks of the model. Those that keep their place are in the graphs of stem and head,
    so an order that moves one or leaves one out cannot be run at all, and raises `UsageError`.
    """

    def __init__(self, manifest: ExportManifest, contents: Mapping[str, bytes]) -> None:
        super().__init__()
        self.manifest = manifest
        self.stem = OnnxGraph(contents["stem.onnx"])
        self.head = OnnxGraph(contents["head.onnx"])
        hosted = [
            OnnxGraph(contents[block.graph], contents[block.weights]) for block in manifest.blocks
        ]
        first, last = manifest.fixed
        before = [OnnxGraph(None) for _ in range(first)]
        after = [OnnxGraph(None) for _ in range(last)]
        self.blocks = nn.ModuleList([*before, *hosted, *after])

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[n, classes]` of images `[n, channels, height, width]`."""
        self._refuse_moved_ends()
        state = self.stem(images)
        for block in self.blocks:
            state = block(state)
        logits: Tensor = self.head(state)
        return logits

    def _refuse_moved_ends(self) -> None:
        """Raises `UsageError` if the forward that begins would move an end, which has no graph."""
        order: Any = run_of(self.blocks).order
        # With an exit, or an order per sample, it is a pair of the orders and the exit.
        if isinstance(order, tuple):
            order = order[0]
        if order is None or not any(self.manifest.fixed):
            return
        orders = order if isinstance(order, tuple) else (order,)
        check_ends(
            orders,
            self.manifest.fixed,
            hint="its graphs hold the ends: run the order on the model itself",
        )


def read(directory: Path, *, seed: int) -> nn.Module:
    """The model of an exported directory, wrapped, with its ends.

    Raises `ModelFileError` for files that are not those of its manifest.
    """
    del seed
    require("export", "onnxruntime")
    manifest = read_manifest(directory)
    contents = {name: content_of(directory, name, manifest=manifest) for name in manifest.files}
    with library_errors("The loader", directory, hint=_AGAIN):
        model = ExportedModel(manifest, contents)
    wrap(model, "blocks")
    stack_of(model).fixed = manifest.fixed
    trained = manifest.trained
    origin = Origin(
        view=manifest.image_view,
        class_names=manifest.class_names,
        record={"method": trained.method, "settings": trained.settings},
    )
    return remember(model, origin)


# --- what every library can be asked (`models.libraries.Library`) ---------------------------------


def owns(model: nn.Module) -> bool:
    """Whether `model` consists of exported files."""
    return isinstance(model, ExportedModel)


def num_classes(backbone: Any) -> int:
    """The number of logits that the exported head returns for an image."""
    return int(backbone.manifest.classes)


def class_names(_: nn.Module) -> None:
    """`None`: the names in the manifest are in the origin, as the image view is."""


def _only_run(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "Exported files can only be run", hint="change the model itself, and export it again"
    )


# Nothing else can be done with files.
build = resize_head = set_depth = image_view = write = _only_run
