"""A model that a gateway serves: its stem and head run here, its blocks on the hosts.

`ServedModel` is the files of an export; the blocks' files go to the hosts, and here they compute
what hosts should have answered. `RemoteModel` answers a request in three steps: stem, walk through
the swarm, head. A request that ends when it is sure has run its head after every block. Nothing
here imports torch, so a gateway starts in a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layershuffle.gateway.brain.assignment import BlockFile
from layershuffle.gateway.brain.policy import Route, probabilities
from layershuffle.gateway.brain.state import State, averaged
from layershuffle.gateway.calibration.calibration import (
    Calibration,
    read_calibration,
    rounds_of,
    useful_blocks,
)
from layershuffle.gateway.hosts.places import HeldPlace
from layershuffle.gateway.hosts.router import Router
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import printable
from layershuffle.models.manifest import (
    CALIBRATION,
    MANIFEST,
    MANIFEST_SCHEMA,
    content_of,
    is_quantised,
    read_manifest,
)
from layershuffle.models.spec import directory_of, own_directory
from layershuffle_host.blocks import Block

_SEED = 20407
_MILLI = 1000.0
_WORKERS = 8  # most stems and heads that compute at a time; a walk needs no thread
_WEIGHT = 0.2  # of the newest measurement in an average time
# Up to here stems and heads run in the event loop: changing threads takes as long, and costs more.
_INLINE_SECONDS = 0.001
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

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration among the files, `None` without one.

        Raises `ModelFileError` if it is damaged, or was measured on other weights.
        """
        return read_calibration(self.directory / CALIBRATION, weights=self.manifest.weights)

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

    A model that is not exported is exported once into the user's cache, by another process, because
    that takes torch. Raises `UsageError` for an invalid spec, and `LayerShuffleError` with what
    that process said if it fails.
    """
    own = own_directory(spec)
    if own is not None and (own / MANIFEST).is_file():
        return own
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
        ended = subprocess.run(
            [sys.executable, "-m", "layershuffle", "export", spec, "--out", str(out)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        # Another gateway may have exported it first, and then this process is refused.
        if ended.returncode and not (out / MANIFEST).is_file():
            *_, last = ["", *ended.stderr.decode(errors="replace").strip().splitlines()]
            reason = printable(last.removeprefix("error: ").rstrip("."))
            raise LayerShuffleError(f"{spec} cannot be exported: {reason}")
    return out


# --- answers ------------------------------------------------------------------------------------


class NotAnswered(LayerShuffleError):
    """The swarm could not answer a request."""


@asynccontextmanager
async def time_limit(
    deadline: float, event: str, *, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Raise `NotAnswered` within at `deadline`, in seconds of `clock`: it passed before `event`."""
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())):
            yield
    except TimeoutError as error:
        raise NotAnswered(
            f"The deadline passed before {event}",
            hint="try again later, allow a later deadline, or send a smaller image",
        ) from error


@dataclass(frozen=True)
class Classified:
    """Logits `[1, classes]`, float32, the route, and times in milliseconds.

    `temperature`: what makes their probabilities the chance of being right, `None` if unknown.
    """

    logits: NDArray[np.float32]
    temperature: float | None
    route: Route
    stem_ms: float
    swarm_ms: float
    head_ms: float


class _Timed:
    """A part of the model that runs here: in the event loop if it is short, else in a thread of
    `pool`. `seconds`: its average time, 0 before the first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.seconds = 0.0

    def run(self, part: Callable[[State], State], values: State) -> State:
        """What the part computes."""
        begun = time.perf_counter()
        out = part(values)
        seconds = time.perf_counter() - begun
        self.seconds = averaged(self.seconds or None, seconds, weight=_WEIGHT)
        return out

    async def result(self, part: Callable[[State], State], values: State) -> State:
        """The same, without holding up the loop; cancelled before its turn, it never runs."""
        if 0 < self.seconds <= _INLINE_SECONDS:
            return self.run(part, values)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.run, part, values)


class RemoteModel:
    """A model whose blocks run in the swarm.

    `calibration`: the model's, `None` if it has none; `temperatures`: by the number of blocks, as
    it measured them (`sureness`). Use it from the router's event loop.
    """

    def __init__(
        self, model: ServedModel, router: Router, *, calibration: Calibration | None = None
    ) -> None:
        self.model = model
        self.router = router
        self.calibration = calibration
        self.temperatures = () if calibration is None else calibration.temperatures
        self.router.rounds = rounds_of(calibration)
        self._useful = useful_blocks(calibration)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="remote-model")
        self._stem = _Timed(self._pool)
        self._head = _Timed(self._pool)

    async def classify(
        self,
        image: NDArray[np.float32],
        *,
        deadline: float,
        min_blocks: int | None = None,
        confidence: float | None = None,
        place: HeldPlace | None = None,
    ) -> Classified:
        """Classify an `image` `[1, channels, height, width]`, prepared for the model's view.

        `deadline`: in seconds of the router's clock; `place`: what it leaves while it waits for
        hosts. With too few blocks for half of the accuracy it waits for hosts that may come back,
        but still answers in time. It ends with fewer blocks once the chance of being right reaches
        `confidence`, which needs temperatures. Raises `NotAnswered` for fewer than `min_blocks`
        blocks, which it then waits for instead, and for a stem that could not run in time.
        Cancellation ends the walk as well.
        """
        router = self.router
        model = self.model
        answered: tuple[State, NDArray[np.float32]] | None = None
        # The router reserves `reserve_ms` for the head; if heads take longer, it must finish
        # earlier. It has half of the time in any case: after one stall of ten seconds no request of
        # two would get to its head, which brings the average down.
        head = min(self._head.seconds, (deadline - router.clock()) / 2)
        late_by = max(0.0, head - router.limits.reserve_ms / _MILLI)
        begun = time.perf_counter()
        async with time_limit(deadline, "the model's stem had run", clock=router.clock):
            start = await self._stem.result(model.stem, image)
        entered = time.perf_counter()

        async def chance(state: State, blocks: int) -> float:
            nonlocal answered
            answered = state, await self._head.result(model.head, state)
            return float(probabilities(answered[1], self.temperatures[blocks - 1]).max())

        state, route = await router.walk(
            start,
            deadline=deadline - late_by,
            min_blocks=min_blocks or self._useful,
            confidence=confidence,
            chance=chance,
            place=place,
        )
        try:
            check_enough(route, min_blocks=min_blocks or 1)
        except NotAnswered:
            # No head ran that would bring the average down: where half of the time is too little,
            # all later requests would be refused, too.
            if late_by:
                self._head.seconds *= 1 - _WEIGHT
            raise
        left = time.perf_counter()
        if answered is None or answered[0] is not state:
            answered = state, await self._head.result(model.head, state)
        logits = answered[1]
        # Every hop was finite, but a head may overflow.
        if not np.isfinite(logits).all():
            raise NotAnswered(
                "The model's head gave numbers that are not finite",
                hint="the weights are broken: score the model by layershuffle eval",
            )
        return Classified(
            logits=logits,
            temperature=self.temperatures[route.kept - 1] if self.temperatures else None,
            route=route,
            stem_ms=(entered - begun) * _MILLI,
            swarm_ms=(left - entered) * _MILLI,
            head_ms=(time.perf_counter() - left) * _MILLI,
        )

    def close(self) -> None:
        """End the worker threads after their current computations."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def check_enough(route: Route, *, min_blocks: int) -> None:
    """Raises `NotAnswered` if too few blocks ran."""
    if route.kept < min_blocks:
        why = sorted(set(route.skipped.values()))
        raise NotAnswered(
            f"{route.kept} of {route.depth - sum(route.fixed)} blocks could be run, {min_blocks} "
            "are needed "
            f"({'; '.join(why[:3]) or 'no reason known'})",
            hint="try again later, allow a later deadline, or ask for fewer blocks (min_blocks; on "
            "a command line --min-blocks)",
        )
