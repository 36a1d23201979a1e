"""A model that a gateway serves: the files of an export, its stem and head in this process.

Nothing here imports torch, so a gateway starts in a second. The blocks' files go to the hosts;
here they compute what hosts should have answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layershuffle.gateway.brain.assignment import BlockFile
from layershuffle.gateway.brain.state import State
from layershuffle.ground.bundled import asset
from layershuffle.ground.files import user_path
from layershuffle.models.manifest import (
    MANIFEST,
    MANIFEST_SCHEMA,
    content_of,
    is_quantised,
    read_manifest,
)
from layershuffle_host.blocks import Block

_SEED = 20407
_log = logging.getLogger(__name__)


class ServedModel:
    """The exported model in `directory`, which its `manifest` describes.

    `depth`: the number of its blocks; `hosted`: the ids of those that hosts serve. The others keep
    their place, and stem and head have them. `quantised`: whether blocks compute in int8, which
    rounds differently on other processors. Raises `ModelFileError` for files that are not those of
    the manifest.

        model = ServedModel(Path("digits"))
        logits = model.head(model.stem(images))
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.shape = self.manifest.state.shape
        self.depth = self.manifest.depth
        self.hosted = self.manifest.hosted
        self._stem = self._session("stem.onnx")
        self._head = self._session("head.onnx")
        self.quantised = False
        for name in {block.graph for block in self.manifest.blocks}:
            self.quantised = self.quantised or is_quantised(self._content(name))
        self._blocks: dict[str, Block] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The files that hosts may fetch, by their SHA-256."""
        names: set[str] = set()
        for block in self.manifest.blocks:
            names.add(block.graph)
            names.add(block.weights)
        stored = self.manifest.files
        return {stored[name].sha256: self.directory / name for name in sorted(names)}

    @cached_property
    def weights(self) -> tuple[BlockFile, ...]:
        """The weights of every block in `hosted`."""
        files: list[BlockFile] = []
        for block in self.manifest.blocks:
            stored = self.manifest.files[block.weights]
            files.append(BlockFile(stored.sha256, stored.bytes))
        return tuple(files)

    def entry(self, block: int) -> dict[str, Any]:
        """A block as an `assign` message names it; its slot is its id in the model."""
        stored = self.manifest.blocks[self.hosted.index(block)]
        return {
            "slot": block,
            "graph": self.manifest.files[stored.graph].model_dump(),
            "weights": self.manifest.files[stored.weights].model_dump(),
            "shape": list(self.shape),
        }

    @cached_property
    def sample(self) -> State:
        """A typical state of one image, float32 `[1, tokens, width]`, from drawn pixels."""
        view = self.manifest.image_view
        size = (1, view.channels, view.height, view.width)
        return self.stem(np.random.default_rng(_SEED).standard_normal(size).astype(np.float32))

    def stem(self, images: NDArray[np.float32]) -> State:
        """The state before the blocks, of images `[n, channels, height, width]`, prepared."""
        return self._run(self._stem, images)

    def head(self, state: State) -> NDArray[np.float32]:
        """Logits `[n, classes]` of the state after the blocks."""
        return self._run(self._head, state)

    async def compute(self, block: int, state: State) -> State:
        """The state after a block, computed in a thread of this process."""
        return await asyncio.to_thread(self._computed, block, state)

    def _computed(self, block: int, state: State) -> State:
        place = self.hosted.index(block)
        digest = self.weights[place].digest
        if digest not in self._blocks:
            stored = self.manifest.blocks[place]
            graph = self._content(stored.graph)
            weights = self._content(stored.weights)
            self._blocks[digest] = Block(graph, weights, shape=self.shape, threads=1)
        return self._blocks[digest].run(state)

    def _content(self, name: str) -> bytes:
        return content_of(self.directory, name, manifest=self.manifest)

    def _session(self, name: str) -> Any:
        import onnxruntime

        content = self._content(name)
        options = onnxruntime.SessionOptions()
        # Requests run side by side, each in a thread.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    @staticmethod
    def _run(session: Any, values: NDArray[np.float32]) -> NDArray[np.float32]:
        (out,) = session.run(None, {session.get_inputs()[0].name: values})
        return out  # type: ignore[no-any-return]


def served_directory(spec: str, *, say: Callable[[str], None] = _log.info) -> Path:
    """The directory with the exported files of the model `spec`.

    A model that is not exported is exported once into the user's cache. Raises the errors of
    `export_model`.
    """
    scheme, _, place = spec.partition(":")
    here = asset(place) if scheme == "bundled" else user_path(spec.removeprefix("dir:"))
    if (here / MANIFEST).is_file():
        return here
    # These import torch.
    from layershuffle.export import export_model
    from layershuffle.models.output import directory_of

    directory = directory_of(spec)
    digest = hashlib.sha256(f"{MANIFEST_SCHEMA} {spec}".encode())
    # A model that was trained further, or calibrated, is another one.
    paths = [] if directory is None else sorted(directory.glob("*"))
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    hint = "set HOME or XDG_CACHE_HOME, or serve a directory of `layershuffle export`"
    cache = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", hint=hint)
    out = cache / "layershuffle" / "exported" / digest.hexdigest()[:32]
    if not (out / MANIFEST).is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        say(f"Exporting {spec} into {out}, once ...")
        export_model(spec, out)
    return out
