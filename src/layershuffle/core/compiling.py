"""Compile blocks one by one, so that one graph serves all of them in every order.

Compiling the whole model would make a graph per order, of which there are 12 factorial, and after
the eighth torch would fall back to eager mode without an error. A block's graph does not depend on
orders: they are tuples in Python that decide which block is called next. New graphs are still
needed for another batch size, for evaluation, and for blocks that differ, as in timm if drop-path
rates rise with depth (a rate is a constant in the graph, so there is one graph per block).

Every batch size has its own graph. By default torch makes sizes symbolic once it sees a second one,
and all full batches after the first partial one would then run the slower graph.
Groups of a batch have symbolic sizes from the start, because they come in many sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.fx import GraphModule

from layershuffle.core.stack import blocks_of
from layershuffle.core.torch_private import (
    backend_named,
    compile_errors,
    compiling_is_off,
    graph_limits,
    undo_compile,
)

T = TypeVar("T")
_log = logging.getLogger("layershuffle")
# In the worst case (different drop-path rates) there is a graph per block and kind of call.
_LIMIT = 1024
OFF = "torch.compile is switched off (TORCH_COMPILE_DISABLE or a stance)"


class BlockCompiler:
    """Compiles blocks, counts their graphs, and warns when it falls back to eager mode.

    `reason` is the reason for eager mode, and `None` while the blocks are compiled. `recompiles`
    counts graphs compiled in a training step whose batch shape and blocks had occurred before; it
    should stay 0. `dynamic` makes one graph for all batch sizes instead of one for each.
    """

    def __init__(
        self, *, reason: str | None = None, dynamic: bool = False, backend: str = "inductor"
    ) -> None:
        self.reason = reason
        self.graphs = 0
        self.recompiles = 0
        self._dynamic = dynamic
        self._backend_name = backend
        self._models: list[nn.Module] = []
        self._seen: set[tuple[Any, ...]] = set()

    @property
    def on(self) -> bool:
        """Whether the blocks are compiled."""
        return self.reason is None

    def add(self, model: nn.Module) -> None:
        """Compile the blocks of `model` when they first run. Its `state_dict` does not change."""
        if not self.on:
            return
        if compiling_is_off():
            self.give_up(OFF)  # compile() would succeed and silently do nothing
            return
        self._models.append(model)
        try:
            for block in blocks_of(model):
                # `fullgraph` makes a graph break an error, which torch otherwise hides.
                block.compile(backend=self._compile, fullgraph=True, dynamic=self._dynamic)
        except RuntimeError as error:  # this Python, or this system, has no torch.compile
            self.give_up(error)

    def _compile(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = backend_named(self._backend_name)(graph, list(inputs))
        # Counted here, because the whole process shares dynamo's own counters.
        self.graphs += 1
        return compiled

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Raise torch's limit to a graph per block, and make exceeding it an error.

        By default torch falls back to eager mode at eight graphs without an error.
        """
        if not self.on:
            yield
            return
        with graph_limits(_LIMIT):
            yield

    @contextmanager
    def step(self, shape: Collection[int], blocks: Collection[int]) -> Iterator[None]:
        """Around a training step on a batch of `shape` that runs `blocks`; counts recompiles."""
        kinds = {(*shape, block) for block in blocks}
        seen_before = kinds <= self._seen
        before = self.graphs
        yield
        self._seen |= kinds
        if seen_before and self.graphs > before:
            if not self.recompiles:
                _log.warning(
                    "The blocks were compiled again in a step like earlier ones, which costs time "
                    "at every such step; TORCH_LOGS=recompiles shows the reason"
                )
            self.recompiles += self.graphs - before

    def or_eager(self, work: Callable[[], T]) -> T:
        """The result of `work`; in eager mode, with a warning, if a block cannot be compiled."""
        if not self.on:
            return work()
        try:
            return work()
        except compile_errors() as error:
            self.give_up(error)
        return work()

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work` under `limits`; in eager mode if no block can be compiled."""
        with self.limits():
            result = self.or_eager(work)
        # No error and no graph: a stance of torch.compile switched it off.
        if self.on and not self.graphs:
            self.give_up(OFF)
        return result

    def give_up(self, why: Exception | str) -> None:
        """Run the blocks in eager mode from now on, with a warning."""
        self.reason = why if isinstance(why, str) else _first_line(why)
        for model in self._models:
            for block in blocks_of(model):
                undo_compile(block)
        _log.warning(
            "The blocks are NOT compiled and run in eager mode, which is slower: %s", self.reason
        )

    def report(self) -> dict[str, Any]:
        """The outcome for result.json: mode, reason, graphs and recompiles."""
        return {
            "mode": "compiled" if self.on else "eager",
            "reason": self.reason,
            "graphs": self.graphs,
            "recompiles": self.recompiles,
        }


def _first_line(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)  # torch wraps the exception of a backend
    line = next((line for line in str(inner).splitlines() if line.strip()), "no reason given")
    return f"{type(inner).__name__}: {line.strip()}"
