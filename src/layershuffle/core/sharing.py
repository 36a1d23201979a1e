"""Whether the blocks of a model share anything but the state: found out by running them.

Two orders with a common beginning may share its outputs, and samples with different orders may run
in one batch, if no block depends on what another one left behind (a dictionary with the values of
the first block, a counter, statistics of routing) and none mixes the samples of a batch. Nothing is
guessed from the code: the real blocks run on two images, together and alone, and the states after
every block are compared. Buffers, modes and generators are put back.

A verdict holds for a model and a kind of call: modes, flags, autocast, and which arguments are
tensors. A gate that was zero may have been trained since: whatever scores a model under many orders
begins by `forget`, and an order per sample, as training has it, is tried again at the 4th, 16th,
64th ... call. Not seen: what only happens in blocks in
training mode (they are tried in eval mode, without dropout), and branches that two images do not
take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layershuffle.core.entries import Axes, Call, Entry, Shared, along, grouped
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import PLAIN, changed, holders, in_eval, is_compiled, never_asked
from layershuffle.core.tensors import mapped, tensors_of
from layershuffle.ground.errors import StackError

_Verdicts = dict[Hashable, tuple[int, Any]]  # number of calls, verdict
# By stack, and by the module that is called around it.
_VERDICTS: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, _Verdicts]] = (
    WeakKeyDictionary()
)
# Of two trials at a time, each would restore the modes that the other one set. The lock is
# reentrant because a backbone may contain a model with its own stack.
_LOCK = threading.RLock()
_WHY = (
    "samples get another result together than alone: the backbone does more between its blocks "
    "than pass the state on, or its blocks share something beside the state, or mix the samples of "
    "a batch"
)
_MOST_KINDS = 64  # calls whose flags never repeat would fill the memory


@dataclass(frozen=True)
class Beginnings:
    """Whether orders may share what a common beginning computed, and bytes of a state per image."""

    shared: bool
    bytes_per_image: int


@dataclass
class _Trace:
    """What passed through the entries of one forward, in the order of their calls."""

    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)

    def of(self, entry: Call) -> Entry:
        """`entry`, with its inputs and outputs noted."""

        def call(state: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = tensors_of((state, args, kwargs))
            out = entry(state, *args, **kwargs)
            self.inputs.append(inputs)
            # A copy, because the next block may write into it.
            self.outputs.append([tensor.detach().clone() for tensor in tensors_of(out)])
            return out

        return Entry(entry, call)


def forget(stack: nn.Module) -> None:
    """End the verdicts on all models around `stack`."""
    _VERDICTS.pop(stack, None)


# --- orders with a common beginning ---------------------------------------------------------------


def beginnings(
    model: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    images: Tensor,
    forward: Callable[[Any], Any],
) -> Beginnings:
    """Whether the orders of `forward(images)`, which calls `model`, may share their beginnings."""

    def find_out() -> Beginnings:
        few, depth, ids = images[:2], len(blocks), _steps(len(blocks))
        first = ExecutionOrder(ids, depth)

        def trace(order: ExecutionOrder, shared: Shared | None = None) -> _Trace:
            entries = along(blocks, order, run=PLAIN, shared=shared)
            return _trace(stack, entries, lambda: forward(few))

        same = True
        # Two lengths, as blocks may do something at every second position; the end repeats the
        # first block, which may have kept something.
        for shares in (len(ids) // 2, len(ids) // 2 + 1):
            end = (*ids[shares:][:0:-1], ids[0])
            second = ExecutionOrder((*ids[:shares], *end), depth)
            shared = Shared(kept=shares)
            try:
                with _apart(model, stack):
                    alone = trace(second)
                    trace(first, shared)
                    shared.reused, shared.kept = shares, 0
                    together = trace(second, shared)
            # The backbone runs its blocks in parts: there is no whole output to share.
            except StackError:
                return Beginnings(shared=False, bytes_per_image=0)
            if not alone.inputs:
                raise never_asked(model)
            wanted, got = (*alone.outputs, alone.answer), (*together.outputs, together.answer)
            pairs = zip(wanted, got, strict=True)
            same &= all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)
        return Beginnings(shared=same, bytes_per_image=alone.inputs[0][0].nbytes // len(few))

    kind = ("beginnings", *_kind(model, stack, images, samples=len(images)))
    # Found once: what has many orders forgets before it begins.
    verdict: Beginnings = _verdict(model, stack, kind=kind, find_out=find_out, tries_again=False)
    return verdict


def _steps(depth: int) -> tuple[int, ...]:
    """The blocks in sequence, at least three: of fewer steps, no two orders begin alike and end in
    another way, and the mean of two states is the last one if a sample waits for one.
    """
    return tuple(place % depth for place in range(max(depth, 3)))


# --- an order per sample --------------------------------------------------------------------------


def sample_axes(
    module: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    arguments: Any,
    samples: int,
    forward: Callable[[Any], Any],
    uneven: bool,
    exits: bool,
) -> Axes:
    """Where the samples lie in the arguments and outputs of blocks, if each may have its own order.

    `forward(arguments)` calls `module` for `samples` samples. `uneven`: orders have several
    lengths; `exits`: states leave early. Raises `StackError` with the reason if samples do not get
    what they get alone.
    """

    def trace(entries: Sequence[Call], count: int) -> _Trace:
        return _trace(stack, entries, lambda: forward(_samples(arguments, samples, count)))

    def find_out(uneven: bool) -> Axes | str:
        depth, ids = len(blocks), _steps(len(blocks))
        first = ExecutionOrder(ids, depth)
        second = ExecutionOrder((*ids[1:], ids[0])[: len(ids) - uneven], depth)

        with _apart(module, stack):
            small, large = (trace(along(blocks, first, run=PLAIN), n) for n in (2, 3))
            if not small.inputs:
                raise never_asked(module)
            inputs = _axes(small.inputs, large.inputs)
            outputs = _axes(small.outputs, large.outputs)
            states = {axis[0] for axis in (*inputs, *outputs)}
            state = states.pop()
            if states or state is None:
                return "the states at its blocks do not have their samples on one axis"
            axes = Axes(state, inputs, outputs)
            try:
                other = trace(along(blocks, second, run=PLAIN), 2)
            except StackError as error:  # a backbone that counts its blocks
                return error.cause
            both = _together(trace, blocks, [first, second], axes=axes)
            if both is None or (
                exits and not _leave_early(trace, blocks, [first, second], axes=axes)
            ):
                return _WHY
        for row, alone in enumerate((small, other)):
            if not _same_row(alone, both, row=row, axes=axes):
                return _WHY
        return axes

    kind = ("samples", exits, *_kind(module, stack, arguments, samples=samples))
    # Orders of several lengths ask for more, so that one trial answers for both where it succeeds.
    for asks_most in (True, False) if not (uneven or exits) else (True,):
        verdict = _verdict(
            module,
            stack,
            kind=(asks_most, *kind),
            find_out=partial(find_out, asks_most),
            tries_again=True,
        )
        if isinstance(verdict, Axes):
            return verdict
    lengths = " with orders of several lengths, or an exit," if uneven or exits else ""
    raise StackError(
        f"{type(module).__name__} cannot run an order per sample{lengths} in one batch: {verdict}",
        hint="use one order for the whole batch"
        + (", or orders of one length without an exit" if lengths else "")
        + "; layershuffle.Method.loss runs such orders one after the other",
    )


_Trial = Callable[[Sequence[Call], int], _Trace]  # runs entries on that many samples


def _together(
    trace: _Trial,
    blocks: Sequence[nn.Module],
    orders: list[ExecutionOrder],
    *,
    axes: Axes,
    exit_after: int | None = None,
) -> _Trace | None:
    """Two samples along `orders` in one batch; `None` if their states do not fit together."""
    try:
        return trace(grouped(blocks, orders, run=PLAIN, axes=axes, exit_after=exit_after), 2)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of the backbone or of a block, about shapes
        return None


def _leave_early(
    trace: _Trial, blocks: Sequence[nn.Module], orders: list[ExecutionOrder], *, axes: Axes
) -> bool:
    """Whether the answers at an exit after one step are those of the orders cut there."""
    cut = [order.beginning(1) for order in orders]
    both = _together(trace, blocks, orders, axes=axes, exit_after=1)
    early = _together(trace, blocks, cut, axes=axes)
    if both is None or early is None:
        return False
    rows = [answer for answer in both.answer if answer.dim() and len(answer) == 4]
    return all(_close(a, row[2:]) for a, row in zip(early.answer, rows, strict=False))


def _axes(
    small: list[list[Tensor]], large: list[list[Tensor]]
) -> tuple[tuple[int | None, ...], ...]:
    """The axis of the samples of every tensor, from forwards with two and with three samples."""
    return tuple(
        tuple(_axis(a.shape, b.shape) for a, b in zip(few, more, strict=True))
        for few, more in zip(small, large, strict=True)
    )


def _axis(few: torch.Size, more: torch.Size) -> int | None:
    changing = [axis for axis in range(len(few)) if few[axis] != more[axis]]
    if not changing:
        return None
    if [(few[axis], more[axis]) for axis in changing] != [(2, 3)]:
        raise StackError(
            f"The backbone folds its samples into an axis of other things (a tensor of shape "
            f"{tuple(few)} for two samples), so they cannot run along orders of their own",
            hint="use one order for the whole batch",
        )
    return changing[0]


def _same_row(alone: _Trace, both: _Trace, *, row: int, axes: Axes) -> bool:
    """Whether sample `row` has the same states in both traces, up to the rounding of kernels."""
    for a, b in zip(alone.outputs, both.outputs, strict=False):
        if not _close(a[0].select(axes.state, row), b[0].select(axes.state, row)):
            return False
    return all(
        _close(a[row], b[row])
        for a, b in zip(alone.answer, both.answer, strict=True)
        if a.dim() and len(a) == 2 and a.is_floating_point()
    )


def _close(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by no more than what other sizes of a batch round away."""
    dtype = value.dtype
    if torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    eps = torch.finfo(dtype).eps
    # On fp32 about ten times the largest difference seen; bf16 has only 8 bits.
    most = max(100 * 2**-23, 8 * eps if eps > 2**-23 else 0) * float(value.abs().max())
    return torch.allclose(value.double(), other.double(), rtol=0, atol=most, equal_nan=True)


def _samples(arguments: Any, samples: int, count: int) -> Any:
    """`arguments` for `count` of the samples, some of them repeatedly if there are fewer."""
    rows = torch.tensor([row % samples for row in range(count)])

    def few(leaf: Tensor) -> Tensor:
        if not leaf.dim() or len(leaf) != samples:
            return leaf
        return leaf.index_select(0, rows.to(leaf.device))

    return mapped(arguments, few)


# --- trials ---------------------------------------------------------------------------------------


def _verdict(
    model: nn.Module,
    stack: nn.Module,
    *,
    kind: Hashable,
    find_out: Callable[[], Any],
    tries_again: bool,
) -> Any:
    with _LOCK:
        verdicts = _VERDICTS.setdefault(stack, WeakKeyDictionary()).setdefault(model, {})
        calls, verdict = verdicts.get(kind, (0, None))
        calls += 1
        # At the 1st, 4th, 16th ... call: a wrong verdict lives for three times the calls before.
        due = calls.bit_count() == 1 and calls.bit_length() % 2
        if calls == 1 or (tries_again and due):
            verdict = find_out()
        if kind not in verdicts and len(verdicts) == _MOST_KINDS:
            verdicts.clear()
        verdicts[kind] = calls, verdict
        return verdict


def _kind(
    model: nn.Module, stack: nn.Module, arguments: Any, *, samples: int
) -> tuple[Hashable, ...]:
    """A key that is equal for calls in which a backbone takes the same branches."""

    def kinds(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return "tensor", value.dim(), value.dtype, bool(value.dim()) and len(value) == samples
        if isinstance(value, dict):
            return tuple((key, kinds(item)) for key, item in value.items())
        if isinstance(value, tuple | list):
            return tuple(map(kinds, value))
        # Values without a hash equal nothing, so that every such call is tried.
        return type(value), value if isinstance(value, Hashable) else object()

    modes = tuple(module.training for module in (*holders(model, stack), stack))
    device = next((tensor.device.type for tensor in tensors_of(arguments)), "cpu")
    cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (*modes, cast, kinds(arguments))


def _trace(stack: nn.Module, entries: Sequence[Call], forward: Callable[[], Any]) -> _Trace:
    """What passes through `entries` in one forward. It begins with the same random numbers."""
    trace = _Trace()
    watched = [trace.of(entry) for entry in entries]
    devices = {p.device for p in stack.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices), changed(stack, entries=lambda _: watched, asked=None):
        trace.answer = [tensor.detach() for tensor in tensors_of(forward())]
    return trace


@contextmanager
def _apart(model: nn.Module, stack: nn.Module) -> Iterator[None]:
    """Run `model` without gradients, dropout or compiling; buffers and modes are put back.

    The modules around the stack keep their modes, because their code is what is tried.
    """
    around = {module: module.training for module in holders(model, stack)}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    compiled = any(map(is_compiled, model.modules()))
    # A few forwards do not justify a graph.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with in_eval(model), torch.no_grad(), eager:
        for module, training in around.items():
            module.training = training
        try:
            yield
        finally:
            for module, name, buffer, before in buffers:
                # Writing what is there already would spoil graphs that have saved the buffer.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
