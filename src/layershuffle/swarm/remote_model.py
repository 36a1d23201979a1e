"""The host model at the gateway: its stem and head run here, its block stack walks the swarm.

A forward runs in a worker thread. Where the stack would run, the thread hands the state to the
router on the router's event loop and sleeps until the state comes back. The blocks' weights are
dropped: the hosts hold them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from layershuffle.errors import LayerShuffleError, StackError, UsageError
from layershuffle.models import host_of, logits_of, num_classes_of
from layershuffle.models.origin import trained_with
from layershuffle.position import PositionedModel
from layershuffle.stack import BlockCall, blocks_of, depth_of, stack_of, walking, wrap
from layershuffle.swarm.messages import Route
from layershuffle.swarm.router import Router, State

_MILLI = 1000.0
STALL = 0.5
"""Seconds after a deadline at which a worker stops waiting for its router: a backstop, since the
router itself ends before the deadline."""
_HEAD_WEIGHT = 0.2  # of the newest measurement in the average time of the head


@dataclass(frozen=True)
class Classified:
    """Logits `[images, classes]` (float32, on the CPU), the route, and where the time went (ms)."""

    logits: Tensor
    route: Route
    stem_ms: float
    swarm_ms: float
    head_ms: float


class NotAnswered(LayerShuffleError):
    """A request that the swarm could not answer; `route` says how far it came, if it began."""

    def __init__(self, cause: str, *, route: Route | None = None, hint: str | None = None) -> None:
        super().__init__(cause, hint=hint)
        self.route = route


class RemoteModel:
    """A model whose forward walks the swarm. It takes `model` over and drops its blocks' weights.

    `loop` is the router's event loop; `workers` bounds the forwards under way, each in a thread.
    `saved_bytes` is what the dropped weights took. Raises `StackError` for models with position
    encoding, `UsageError` if `router` counts other blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        router: Router,
        loop: asyncio.AbstractEventLoop,
        *,
        workers: int = 32,
    ) -> None:
        self.model = served_host(model).eval()
        self.router, self.loop = router, loop
        self.depth = depth_of(self.model)
        if router.depth != self.depth:
            raise UsageError(
                f"The router sends states through {router.depth} blocks, the model has {self.depth}"
            )
        self.saved_bytes = drop_blocks(self.model)
        self._device = next(p.device for p in self.model.parameters() if not p.is_meta)
        self._head = 0.0
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="front")

    async def classify(
        self,
        images: Tensor,
        *,
        deadline: float,
        min_blocks: int = 1,
        order: tuple[int, ...] | None = None,
    ) -> Classified:
        """What the model says of `images` `[n, channels, height, width]`, as its view wants them.

        `deadline` by the router's clock. Raises `NotAnswered` for fewer than `min_blocks`
        blocks and for a fixed-order pipeline that broke. Being cancelled ends the walk as well.
        """
        errand = _Errand(self.router, self.loop, deadline, min_blocks, order)
        forward = partial(self._forward, images, errand)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, forward)
        except asyncio.CancelledError:
            errand.cancel()
            raise

    def close(self) -> None:
        """End the worker threads, once their forwards are over."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _forward(self, images: Tensor, errand: _Errand) -> Classified:
        begun = time.perf_counter()
        errand.deadline -= self._late_by()
        with torch.inference_mode(), walking(self.model, errand.walk):
            output = self.model(images.to(self._device))
            logits = logits_of(output).to("cpu", torch.float32)
        ended = time.perf_counter()
        if errand.route is None:
            raise StackError(f"{type(self.model).__name__} never called its block stack")
        if not bool(torch.isfinite(logits).all()):
            raise NotAnswered(
                "The model's head gave numbers that are not finite", route=errand.route
            )
        self._head += _HEAD_WEIGHT * (ended - errand.left - self._head)
        return Classified(
            logits=logits,
            route=errand.route,
            stem_ms=(errand.entered - begun) * _MILLI,
            swarm_ms=(errand.left - errand.entered) * _MILLI,
            head_ms=(ended - errand.left) * _MILLI,
        )

    def _late_by(self) -> float:
        """Seconds by which the head takes longer than the router keeps back for it."""
        return max(0.0, self._head - self.router.limits.reserve_ms / _MILLI)


@dataclass
class _Errand:
    """One forward's way through the swarm: `walk` stands for the block stack."""

    router: Router
    loop: asyncio.AbstractEventLoop
    deadline: float
    min_blocks: int
    order: tuple[int, ...] | None
    route: Route | None = None
    entered: float = 0.0
    left: float = 0.0
    _call: concurrent.futures.Future[tuple[State, Route]] | None = None
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def walk(self, call: BlockCall, state: Tensor) -> Tensor:
        """The state after the swarm, as `layershuffle.stack.Walk` wants it."""
        del call  # the blocks are elsewhere
        self.entered = time.perf_counter()
        start = state.detach().to("cpu", torch.float32).contiguous().numpy()
        after, self.route = self._sent(start)
        self.left = time.perf_counter()
        check_enough(self.route, min_blocks=self.min_blocks)
        # A transport may hand out memory that is not to be written to.
        whole = np.require(after, np.float32, ["C_CONTIGUOUS", "WRITEABLE"])
        return torch.from_numpy(whole).to(state.device, state.dtype)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def _sent(self, start: State) -> tuple[State, Route]:
        with self._lock:
            if self._cancelled:
                raise NotAnswered("The request was given up")
            walk = self.router.walk(
                start, deadline=self.deadline, min_blocks=self.min_blocks, order=self.order
            )
            self._call = _submitted(walk, self.loop)
        patience = max(0.0, self.deadline - self.router.clock()) + STALL
        try:
            return self._call.result(timeout=patience)
        except TimeoutError as error:
            self._call.cancel()
            raise NotAnswered(
                "The router gave no answer before the deadline", hint="its event loop is blocked"
            ) from error
        except concurrent.futures.CancelledError as error:
            raise NotAnswered("The request was given up") from error


def _submitted(
    walk: Coroutine[Any, Any, tuple[State, Route]], loop: asyncio.AbstractEventLoop
) -> concurrent.futures.Future[tuple[State, Route]]:
    """`walk` under way on `loop`; raises `NotAnswered` if that loop has ended."""
    try:
        return asyncio.run_coroutine_threadsafe(walk, loop)
    except RuntimeError as error:
        walk.close()
        raise NotAnswered("The swarm has been shut down") from error


def check_enough(route: Route, *, min_blocks: int) -> None:
    """Raises `NotAnswered` if a route is none to answer from: too few blocks ran, or it broke."""
    if route.ending == "lost":
        first = min(route.skipped, default=0)
        raise NotAnswered(
            f"The pipeline broke at block {first}: {route.skipped.get(first, 'no reason known')}",
            route=route,
            hint="order-free routing would go on without it",
        )
    if len(route.order) < min_blocks:
        why = sorted(set(route.skipped.values()))
        raise NotAnswered(
            f"{len(route.order)} of {route.depth} blocks could be run, {min_blocks} are needed "
            f"({'; '.join(why[:3]) or 'no reason known'})",
            route=route,
            hint="try again later, allow a later deadline, or ask for fewer blocks (min_blocks)",
        )


def served_host(model: nn.Module) -> nn.Module:
    """The wrapped host model that a swarm can serve; a position prediction is left aside.

    Raises `StackError` for models with position encoding.
    """
    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise StackError(
            "A model with position encoding cannot be served by a swarm: its blocks compute "
            "something else at every position, and block hosts do not know theirs",
            hint="serve a model refined by layershuffle or layershuffle-depth",
        )
    return wrap(host_of(model))


def drop_blocks(model: nn.Module) -> int:
    """Empty the blocks of `model`, which keep their shapes alone; the bytes that this frees.

    What a block shares with the rest of the model stays, and is not counted.
    """
    rest = set(_around(model, stack_of(model)))
    inside = {module for block in blocks_of(model) for module in block.modules()} - rest
    held = {id(one): one for module in inside for one in _tensors(module)}
    for module in inside:
        module.to_empty(device="meta", recurse=False)
    kept = {id(one) for module in rest for one in _tensors(module)}
    return sum(one.nbytes for key, one in held.items() if key not in kept)


def _around(module: nn.Module, stack: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child is not stack:
            yield from _around(child, stack)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def resize_of(model: nn.Module) -> Literal["crop", "squash"]:
    """How images are brought to the model's size, as in its training. Digit pairs fill theirs."""
    settings = trained_with(host_of(model))
    if str(settings.get("data", "")).startswith("digit-pairs"):
        return "squash"
    resize = settings.get("resize", "crop")
    return cast(Literal["crop", "squash"], resize if resize in ("crop", "squash") else "crop")


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the model's classes as far as it knows them, else "0", "1", ..."""
    from layershuffle.data.digits import CLASSES

    host = host_of(model)
    count = num_classes_of(host)
    names = getattr(getattr(host, "config", None), "id2label", None)
    if isinstance(names, dict) and set(names) == set(range(count)):
        known = tuple(str(names[index]) for index in range(count))
        if known != tuple(f"LABEL_{index}" for index in range(count)):  # transformers' filler
            return known
    if str(trained_with(host).get("data", "")).startswith("digit-pairs") and count == len(CLASSES):
        return CLASSES
    return tuple(str(index) for index in range(count))
