"""Trials: a few forwards with the real blocks on two images, and the verdicts that they gave.

A verdict holds for a model and a kind of call: modes, flags, autocast, and which arguments are
tensors. A gate that was zero may have been trained since, so whatever scores a model under many
orders begins by `forget`, and what a training asks for is tried again at the 4th, 16th, 64th ...
call. Not seen: what only happens in blocks in training mode (they are tried in eval mode, without
dropout), and branches that two images do not take.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layershuffle.core.checks.untouched import nothing_noted
from layershuffle.core.entries import Call, Entry, order_entries
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import PLAIN, RunChange, holders, in_eval
from layershuffle.core.tensors import map_tensors, tensors_of
from layershuffle.core.torch_private import is_compiled
from layershuffle.ground.errors import StackError

T = TypeVar("T")
_Verdicts = dict[Hashable, tuple[int, Any]]  # number of calls, verdict
# By stack, and by the module that is called around it.
_VERDICTS: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, _Verdicts]] = (
    WeakKeyDictionary()
)
# Of two trials at a time, each would restore the modes that the other one set. The lock is
# reentrant because a backbone may contain a model with its own stack.
_LOCK = threading.RLock()
_MOST_KINDS = 64  # calls whose flags never repeat would fill the memory


@dataclass
class Trace:
    """What passed through the entries of one forward, in the order of their calls."""

    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)

    def watched(self, entry: Call) -> Entry:
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


def verdict_on(
    model: nn.Module,
    stack: nn.Module,
    *,
    kind: Hashable,
    find_out: Callable[[], Any],
    tries_again: bool,
) -> Any:
    """What `find_out` said of this kind of call; with `tries_again`, it is asked again at times."""
    with _LOCK:
        verdicts = _VERDICTS.setdefault(stack, WeakKeyDictionary()).setdefault(model, {})
        calls, verdict = verdicts.get(kind, (0, None))
        calls += 1
        # A wrong verdict lives for three times the calls before it.
        if calls == 1 or (tries_again and _is_power_of_four(calls)):
            verdict = find_out()
        if kind not in verdicts and len(verdicts) == _MOST_KINDS:
            verdicts.clear()
        verdicts[kind] = calls, verdict
        return verdict


def _is_power_of_four(number: int) -> bool:
    while number % 4 == 0:
        number //= 4
    return number == 1


def kind_of_call(
    model: nn.Module, stack: nn.Module, *, arguments: Any, samples: int
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

    modes = [module.training for module in (*holders(model, stack), stack)]
    tensors = tensors_of(arguments)
    device = tensors[0].device.type if tensors else "cpu"
    cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (*modes, cast, kinds(arguments))


def trace_forward(
    stack: nn.Module, entries: Sequence[Call], *, forward: Callable[[], Any]
) -> Trace:
    """What passes through `entries` in one forward. It begins with the same random numbers."""
    trace = Trace()
    watched = [trace.watched(entry) for entry in entries]
    devices = {p.device for p in stack.parameters() if p.is_cuda}
    with (
        torch.random.fork_rng(devices),
        RunChange(stack, entries=lambda _: watched, requests=None),
    ):
        trace.answer = [tensor.detach() for tensor in tensors_of(forward())]
    return trace


def run_plain(
    stack: nn.Module, blocks: Sequence[nn.Module], *, forward: Callable[[], Any]
) -> Trace:
    """One forward along the sequential order."""
    order = ExecutionOrder.sequential(len(blocks))
    return trace_forward(stack, order_entries(blocks, order, run=PLAIN), forward=forward)


@contextmanager
def trial_conditions(model: nn.Module, stack: nn.Module) -> Iterator[None]:
    """Run `model` without gradients, dropout or compiling, and put back what it notes.

    The modules around the stack keep their modes, because their code is what is tried.
    """
    modes = {module: module.training for module in holders(model, stack)}
    compiled = any(map(is_compiled, model.modules()))
    # A few forwards do not justify a graph.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with (
        warnings.catch_warnings(action="ignore"),
        in_eval(model),
        torch.no_grad(),
        eager,
        nothing_noted(model),
    ):
        # In a model that is being scored they are in eval mode already.
        for module, training in modes.items():
            module.training = training
        yield


def attempt(model: nn.Module, stack: nn.Module, *, run: Callable[[], T]) -> T | Exception:
    """What `run` returns as a trial of `model`, or the error in which it ended.

    Raises `torch.OutOfMemoryError` alone, which says nothing about the model.
    """
    try:
        with trial_conditions(model, stack):
            return run()
    except torch.OutOfMemoryError:
        raise
    # Of the backbone, a block or a hook: the reason why it cannot run so, whatever its class.
    except Exception as error:  # noqa: BLE001
        return error


def samples_of(arguments: Any, *, samples: int, count: int) -> Any:
    """`arguments` for `count` of the samples, some of them repeatedly if there are fewer."""
    rows = torch.arange(count) % samples

    def few(leaf: Tensor) -> Tensor:
        if not leaf.dim() or len(leaf) != samples:
            return leaf
        return leaf.index_select(0, rows.to(leaf.device))

    return map_tensors(arguments, few)


def are_equal(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    if torch.equal(value, other):
        return True
    if value.shape != other.shape or not value.dtype.is_floating_point:
        return False
    return torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)


def are_close(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by no more than what other sizes of a batch round away."""
    if value.shape != other.shape:
        return False
    dtype = value.dtype
    if not dtype.is_floating_point:
        return torch.equal(value, other)
    if torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    if not value.numel():
        return True
    eps = torch.finfo(dtype).eps
    # On fp32 about ten times the largest difference seen; bf16 has only 8 bits.
    largest = float(value[value.isfinite()].abs().amax()) if value.isfinite().any() else 0.0
    most = max(100 * 2**-23, 8 * eps if eps > 2**-23 else 0) * largest
    return torch.allclose(value.double(), other.double(), rtol=0, atol=most, equal_nan=True)


def cause_of(error: Exception, run_whole: Callable[[], object]) -> str:
    """Why a trial ended in `error`, as the reason of a refusal.

    `run_whole` is the call itself along a plain order: an error of it is the caller's, and raised.
    """
    if isinstance(error, StackError):
        return error.cause
    run_whole()
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else "no reason"
    return f"a trial of it with two samples ended in {type(error).__name__}: {line}"
