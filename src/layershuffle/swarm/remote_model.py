"""The host model at the gateway: its stem and head run here, its blocks on the block hosts.

A request is three awaits: stem in a thread, walk through the swarm, head in a thread. The blocks'
weights are dropped here, because the hosts hold them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import blocks_of, depth_of, stack_of, wrap
from layershuffle.core.tensors import logits_of
from layershuffle.errors import StackError, UsageError
from layershuffle.models import image_view
from layershuffle.models.ends import refuse_more_than_blocks, run_head, run_stem
from layershuffle.swarm.messages import NotAnswered, Route, State
from layershuffle.swarm.router import Router

_MILLI = 1000.0
_HEAD_WEIGHT = 0.2  # weight of the newest measurement in the average time of the head


@dataclass(frozen=True)
class Classified:
    """Logits `[images, classes]` (float32, on the CPU), the route, and times in milliseconds."""

    logits: Tensor
    route: Route
    stem_ms: float
    swarm_ms: float
    head_ms: float


class RemoteModel:
    """A model whose blocks run in the swarm. It owns `model` and drops its blocks' weights.

    `workers`: most stems and heads that compute at a time, each in a thread; a walk needs no
    thread. `saved_bytes`: size of the dropped weights; `head_seconds`: average time of a head.
    Raises `StackError` for models with position encoding, `UsageError` if `router` has another
    depth. Use it from the router's event loop.
    """

    def __init__(self, model: nn.Module, router: Router, *, workers: int = 8) -> None:
        self.model = served_host(model).eval()
        self.router = router
        self.depth = depth_of(self.model)
        if router.depth != self.depth:
            raise UsageError(
                f"The router sends states through {router.depth} blocks, but the model has "
                f"{self.depth}"
            )
        self.saved_bytes = drop_blocks(self.model)
        self.head_seconds = 0.0
        # The blocks are empty by now, so this is a parameter of stem or head.
        like = next(parameter for parameter in self.model.parameters() if not parameter.is_meta)
        self._device, self._dtype = like.device, like.dtype
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="remote-model")

    async def classify(
        self,
        images: Tensor,
        *,
        deadline: float,
        min_blocks: int = 1,
        useful_blocks: int = 1,
        order: ExecutionOrder | str | Iterable[int] | None = None,
    ) -> Classified:
        """Classify `images` `[n, channels, height, width]`, prepared for the model's view.

        `deadline`: in seconds of the router's clock. With fewer than `useful_blocks` blocks it
        waits for hosts that may come back, but still answers in time. `order`: the steps to run.
        Raises `NotAnswered` for fewer than `min_blocks` blocks, for a stem that could not run in
        time, and for a fixed-order pipeline that broke; `UsageError` for an order that the model
        or the routing refuses. Cancellation ends the walk as well.
        """
        loop, router = asyncio.get_running_loop(), self.router
        steps = None if order is None else order_of(order, self.depth)
        # The router reserves `reserve_ms` for the head; if heads take longer, it must finish
        # earlier.
        late_by = max(0.0, self.head_seconds - router.limits.reserve_ms / _MILLI)
        begun = time.perf_counter()
        try:
            # A cancelled stem that is still queued never runs.
            async with asyncio.timeout(max(0.0, deadline - router.clock())):
                start = await loop.run_in_executor(self._pool, self._stem, images)
        except TimeoutError as error:
            raise NotAnswered(
                "The deadline passed before the model's stem had run",
                hint="try again later, allow a later deadline, or send fewer images",
            ) from error
        entered = time.perf_counter()
        # A plan may ask for fewer blocks than the calibration's useful ones.
        useful = min(useful_blocks, router.most_blocks or self.depth)
        state, route = await router.walk(
            start, deadline=deadline - late_by, min_blocks=max(min_blocks, useful), order=steps
        )
        try:
            check_enough(route, min_blocks=min_blocks)
        except NotAnswered:
            # Without this, no head would run and update the average: after one stall of ten seconds
            # every request of two seconds would be refused forever.
            if late_by:
                self.head_seconds *= 1 - _HEAD_WEIGHT
            raise
        left = time.perf_counter()
        logits = await loop.run_in_executor(self._pool, self._head, images, state)
        ended = time.perf_counter()
        self.head_seconds += _HEAD_WEIGHT * (ended - left - self.head_seconds)
        # Every hop was finite, but a head may overflow.
        if not bool(torch.isfinite(logits).all()):
            raise NotAnswered(
                "The model's head gave numbers that are not finite",
                route=route,
                hint="the weights are broken: score the model by layershuffle eval",
            )
        return Classified(
            logits=logits,
            route=route,
            stem_ms=(entered - begun) * _MILLI,
            swarm_ms=(left - entered) * _MILLI,
            head_ms=(ended - left) * _MILLI,
        )

    def close(self) -> None:
        """End the worker threads after their current computations."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _forward(self, images: Tensor) -> Tensor:
        return logits_of(self.model(images))

    def _stem(self, images: Tensor) -> State:
        """The state before the first block, float32 `[images, tokens, width]`."""
        with torch.inference_mode():
            state, _ = run_stem(self.model, images.to(self._device), forward=self._forward)
            start: State = state.to("cpu", torch.float32).contiguous().numpy()
            return start

    def _head(self, images: Tensor, state: State) -> Tensor:
        """Logits, float32 on the CPU, of the state after the last block."""
        # A transport may return read-only memory.
        whole = np.require(state, np.float32, ["C_CONTIGUOUS", "WRITEABLE"])
        with torch.inference_mode():
            after = torch.from_numpy(whole).to(self._device, self._dtype)
            # The stem runs again here (0.7 % of the operations of a ViT-B), because only the
            # model's own forward reaches the head (decision 014).
            logits = run_head(
                self.model, images.to(self._device), state=after, forward=self._forward
            )
            return logits.to("cpu", torch.float32)


def check_enough(route: Route, *, min_blocks: int) -> None:
    """Raises `NotAnswered` if too few blocks ran, or the pipeline broke."""
    if route.ending == "lost":
        first = min(route.skipped, default=0)
        raise NotAnswered(
            f"The pipeline broke at block {first}: {route.skipped.get(first, 'no reason known')}",
            route=route,
            hint="order-free routing would go on without it",
        )
    if route.kept < min_blocks:
        why = sorted(set(route.skipped.values()))
        raise NotAnswered(
            f"{route.kept} of {route.depth} blocks could be run, {min_blocks} are needed "
            f"({'; '.join(why[:3]) or 'no reason known'})",
            route=route,
            hint="try again later, allow a later deadline, or ask for fewer blocks (min_blocks; on "
            "a command line --min-blocks)",
        )


def served_host(model: nn.Module) -> nn.Module:
    """The wrapped host model, without a position prediction, for a swarm.

    Raises `StackError` for models with position encoding, and for models that compute something
    between their blocks.
    """
    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise StackError(
            "A model with position encoding cannot be served by a swarm: its blocks compute "
            "something else at every position, and block hosts do not know theirs",
            hint="serve a model refined by layershuffle or anyorder",
        )
    host = wrap(backbone_of(model))
    weight = next(blocks_of(host)[0].parameters())
    # Dropped blocks cannot run; such a model was checked before they were dropped.
    if not weight.is_meta:
        view = image_view(host)
        images = weight.new_zeros(2, view.channels, view.height, view.width)
        refuse_more_than_blocks(host, images, forward=lambda pixels: logits_of(host(pixels)))
    return host


def drop_blocks(model: nn.Module) -> int:
    """Empty the blocks of `model`, which keep only their shapes. Returns the bytes freed.

    Tensors that a block shares with the rest of the model stay, and are not counted.
    """
    outside = set(_around(model, stack_of(model)))
    inside = {module for block in blocks_of(model) for module in block.modules()} - outside
    dropped = {id(tensor): tensor for module in inside for tensor in _tensors(module)}
    for module in inside:
        module.to_empty(device="meta", recurse=False)
    shared = {id(tensor) for module in outside for tensor in _tensors(module)}
    return sum(tensor.nbytes for key, tensor in dropped.items() if key not in shared)


def _around(module: nn.Module, stack: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child is not stack:
            yield from _around(child, stack)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
