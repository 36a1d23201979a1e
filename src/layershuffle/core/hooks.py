"""Hooks around every block of a stack: the `BlockHook` protocol, and the tap that records outputs.

Position encoding and prediction (`core.position`) are hooks, and so are the recorders of
`layershuffle.analysis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a block: `block` runs at `position`.

    `rows` are the samples of the batch on which it runs, `None` for all (with an order per sample a
    block runs on some). `replay` is true if gradient checkpointing runs the block a second time.
    `early` is true if the state of an exit passes through the block on its way to the head: such a
    run is beside the order, and nothing records it.
    """

    position: int
    block: int
    rows: tuple[int, ...] | None = None
    replay: bool = False
    early: bool = False


class _Place(Protocol):
    """The position and rows of a block run: a step or a record."""

    @property
    def position(self) -> int: ...
    @property
    def rows(self) -> tuple[int, ...] | None: ...


def begins_forward(step: Step, earlier: Sequence[_Place]) -> bool:
    """Whether `step` is the first of a new forward; `earlier` are the steps of the last forward."""
    # A replay is not a new forward: its records exist already.
    if step.replay or step.early or not earlier:
        return False
    # A backbone may run its blocks backwards, and a batch may have samples that the last lacked.
    begins = step.position == earlier[0].position
    return any(
        _overlap(step, place) if place.position == step.position else begins for place in earlier
    )


def _overlap(step: Step, place: _Place) -> bool:
    return step.rows is None or place.rows is None or not set(step.rows).isdisjoint(place.rows)


class BlockHook(Protocol):
    """An object whose methods run before and after every block.

    Both methods must be pure functions of their arguments, except that they may store results by
    step: gradient checkpointing calls them again in the backward pass.
    """

    def before(self, state: Tensor, step: Step) -> Tensor:
        """The block's input, `[batch, tokens, width]`, possibly changed."""

    def after(self, state: Tensor, step: Step) -> None:
        """Receives the block's output, `[batch, tokens, width]`."""


@dataclass(frozen=True)
class TapRecord:
    """One block's output: `tensor` is `[rows, tokens, width]`, attached to the graph.

    `rows` as in `Step`: `None` unless every sample of the batch has its own order.
    """

    position: int
    block: int
    tensor: Tensor
    rows: tuple[int, ...] | None = None


@dataclass
class Tap:
    """What `layershuffle.tap` yields: the records of the last forward."""

    _records: list[TapRecord] = field(default_factory=list)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Returns the input; a sample that reaches a position again begins a new forward."""
        if begins_forward(step, self._records):
            self._records = []
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """Records the output once."""
        # A replay computes the same tensor again, for the backward pass alone.
        if not (step.replay or step.early):
            self._records.append(TapRecord(step.position, step.block, state, step.rows))

    @property
    def records(self) -> tuple[TapRecord, ...]:
        """In execution order: one record per position, or per position and group of samples."""
        return tuple(self._records)
