"""Whether blocks can run side by side in a backbone: found out by running them.

A round adds what its blocks make of one state. That is a sum only if the backbone does nothing of
its own between them: no residual sum, norm or gate, and no second value that a block hands to the
next one. Three forwards on two samples show it: rounds of two blocks, the same with the blocks of
every round swapped, and a slow path in which the first entry of a round returns the whole sum and
the other one nothing new. All three must answer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from layershuffle.core.checks.blocks import unused_stack
from layershuffle.core.checks.trials import (
    Trace,
    are_close,
    attempt,
    cause_of,
    kind_of_call,
    run_plain,
    samples_of,
    trace_forward,
    trial_conditions,
    verdict_on,
)
from layershuffle.core.entries import Call, Entry, order_entries
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import PLAIN
from layershuffle.core.tensors import state_of, tensor_of
from layershuffle.ground.errors import StackError

_WHY = (
    "the answer of blocks side by side is not the sum of what they add, or changes with the order "
    "of these blocks: the backbone does something of its own between its blocks (it adds the "
    "residual, norms or gates the state, reads every state), or hands more than the state from "
    "block to block"
)


def refuse_rounds(
    module: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    arguments: Any,
    samples: int,
    forward: Callable[[Any], Any],
) -> None:
    """Raises `StackError` with the reason if blocks cannot run side by side in this call.

    `forward(arguments)` calls `module` for `samples` samples.
    """
    if len(blocks) == 1 or not samples:
        return

    def judge() -> str | None:
        def run(entries: Sequence[Call]) -> Trace:
            return trace_forward(
                stack,
                entries,
                forward=lambda: forward(samples_of(arguments, samples=samples, count=2)),
            )

        traces = attempt(
            module, stack, run=lambda: [run(entries) for entries in _three_forms(blocks)]
        )
        if isinstance(traces, Exception):
            with trial_conditions(module, stack):
                return cause_of(
                    traces, partial(run_plain, stack, blocks, forward=lambda: forward(arguments))
                )
        first, swapped, slow = traces
        if not first.inputs:
            raise unused_stack(module)
        return None if _are_alike(first, swapped) and _are_alike(first, slow) else _WHY

    kind = ("rounds", *kind_of_call(module, stack, arguments=arguments, samples=samples))
    reason = verdict_on(module, stack, kind=kind, find_out=judge, tries_again=True)
    if reason is not None:
        raise StackError(
            f"{type(module).__name__} cannot run blocks side by side: {reason}",
            hint="give an order in which every step reads the newest state (no + and no @ in it, "
            "max_parallel left out), or move what is between the blocks into their forward",
        )


def _three_forms(blocks: Sequence[nn.Module]) -> list[Sequence[Call]]:
    """The entries of rounds of two, of the same with swapped blocks, and of the slow path."""
    depth = len(blocks)
    rounds: list[tuple[int, ...]] = []
    swapped: list[tuple[int, ...]] = []
    for begin in range(0, depth, 2):
        several = tuple(range(begin, min(begin + 2, depth)))
        rounds.append(several)
        swapped.append(several[::-1])
    forms: list[Sequence[Call]] = []
    for form in (rounds, swapped):
        forms.append(order_entries(blocks, ExecutionOrder.in_rounds(form, depth), run=PLAIN))
    slow: list[Call] = []
    for several in rounds:
        slow += _slow([blocks[block] for block in several])
    return [*forms, slow]


def _slow(blocks: Sequence[nn.Module]) -> list[Call]:
    """The entries of one round: the first one computes the sum of all, the others return it."""
    outs: list[Any] = []

    def first(state: Any, *args: Any, **kwargs: Any) -> Any:
        read = tensor_of(state).clone()
        # A stack may run more than once in a forward.
        outs.clear()
        total = read.clone()
        for block in blocks:
            outs.append(block(read.clone(), *args, **kwargs))
            total = total + (state_of(outs[-1]) - read)
        return _in_form(outs[0], total)

    def later(place: int) -> Call:
        def call(state: Any, *_args: Any, **_kwargs: Any) -> Any:
            return _in_form(outs[place], tensor_of(state))

        return call

    entries: list[Call] = [Entry(blocks[0], first)]
    for place in range(1, len(blocks)):
        entries.append(Entry(blocks[place], later(place)))
    return entries


def _in_form(out: Any, state: Tensor) -> Any:
    """`state` in place of the one in a block's output."""
    return state if isinstance(out, Tensor) else type(out)((state, *out[1:]))


def _are_alike(trace: Trace, other: Trace) -> bool:
    """Whether two forwards gave the same answer, and had the same state after every round."""
    if len(trace.answer) != len(other.answer) or len(trace.inputs) != len(other.inputs):
        return False
    if not all(map(are_close, trace.answer, other.answer)):
        return False
    return are_close(trace.outputs[-1][0], other.outputs[-1][0])
