"""Calls of a model along an order: what is refused or tried before its blocks run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from layershuffle.core.checks.blocks import unused_stack
from layershuffle.core.checks.orders import is_integer
from layershuffle.core.checks.rounds import refuse_rounds
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import StackRequests, changed_stacks, holders, run_of
from layershuffle.core.tensors import tensors_of
from layershuffle.core.torch_private import is_compiled
from layershuffle.ground.errors import StackError, UsageError


def count_samples(arguments: Any) -> int:
    """The number of samples in the arguments of a call: the length of its first tensor."""
    return next((len(tensor) for tensor in tensors_of(arguments) if tensor.dim()), 0)


def watched_calls(
    model: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    order: ExecutionOrder,
    requests: StackRequests,
) -> AbstractContextManager[None]:
    """Check every call of `model` along one order for the whole batch, where it needs a check.

    `requests` are those of the forwards along this order. An order without older versions of the
    state and without repeats needs no check.
    """
    if order.versions is None and not order.has_repeats:
        return nullcontext()
    return _Calls(stack, blocks=blocks, order=order, requests=requests).watched(model)


class _Calls:
    """The calls of a model along one order, the outermost of which is tried."""

    def __init__(
        self,
        stack: nn.Module,
        *,
        blocks: Sequence[nn.Module],
        order: ExecutionOrder,
        requests: StackRequests,
    ) -> None:
        self._stack = stack
        self._blocks = blocks
        self._order = order
        self._requests = requests
        self._depth = 0

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Put hooks on `model`, and on the modules in it that hold the stack.

        Raises `StackError` for a model that is compiled as a whole, if steps read older states.
        """
        callers = holders(model, self._stack)
        compiled = any(map(is_compiled, callers))
        if compiled and self._order.versions is not None:
            # A hook would be compiled into the model, and a graph cannot be tried.
            raise StackError(
                f"{type(model).__name__} is compiled as a whole, so whether its blocks can run "
                "side by side cannot be tried",
                hint="compile its blocks instead: layershuffle.compiling, or block.compile()",
            )
        with ExitStack() as hooks:
            for module in [] if compiled else callers:
                before = module.register_forward_pre_hook(
                    self._before, prepend=True, with_kwargs=True
                )
                hooks.enter_context(before)
                hooks.enter_context(module.register_forward_hook(self._after, always_call=True))
            yield

    def _ours(self) -> bool:
        # The hooks belong to the model, so other threads and trials call them, too.
        return not torch.compiler.is_compiling() and run_of(self._stack).requests is self._requests

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch adds a hook first and registers afterwards that it takes keywords. A forward of
        # another thread in between calls it without them, but is never ours.
        if kwargs is None or not self._ours():
            return
        self._depth += 1
        if self._order.has_repeats:
            refuse_cache(module, kwargs)
        if self._order.versions is None:
            return
        refuse_hidden_states(module, kwargs, what="blocks side by side")
        if self._depth > 1:
            return
        refuse_rounds(
            module,
            self._stack,
            blocks=self._blocks,
            arguments=(args, kwargs),
            samples=count_samples((args, kwargs)),
            forward=lambda call: module(*call[0], **call[1]),
        )

    def _after(self, *_: object) -> None:
        if self._ours():
            self._depth -= 1


def refuse_hidden_states(module: nn.Module, kwargs: dict[str, Any], *, what: str) -> None:
    """Raises `UsageError` where transformers records states between the blocks, beside `what`."""
    # It records the states by hooks on the blocks, which see groups of samples, or what a block
    # returns in place of the state after its step.
    config = getattr(module, "config", None)
    if kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
        raise UsageError(
            f"output_hidden_states cannot be combined with {what}",
            hint="record the outputs of blocks with layershuffle.tap(model), whose records name "
            "their steps and samples, or use one order for the whole batch in which every step "
            "reads the newest state",
        )


def refuse_cache(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises `UsageError` where a decoder keeps keys and values, as an order repeats blocks."""
    # A block that runs again would append to its own part of the cache, and read both.
    names = inspect.signature(module.forward).parameters
    if "past_key_values" not in names:
        return
    config = getattr(module, "config", None)
    on = kwargs.get("use_cache")
    if on is None:
        on = getattr(config, "use_cache", False)
    if on or kwargs.get("past_key_values") is not None:
        raise UsageError(
            f"{type(module).__name__} keeps the keys and values of every block (use_cache), and an "
            "order with repeats would write those of a block twice and read both",
            hint="switch the cache off: model(..., use_cache=False), or "
            "model.config.use_cache = False",
        )


def check_exit(exit_after: object, *, longest: int) -> None:
    """Raises `UsageError` unless `exit_after` is a step of orders, the longest of which has so
    many."""
    if not is_integer(exit_after) or not 1 <= exit_after <= longest:
        raise UsageError(
            f"exit_after must be in [1, {longest}] for these orders, got {exit_after!r}"
        )


def refuse_labels(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises `UsageError` for labels in a call of a model with an exit."""
    if kwargs.get("labels") is not None:
        raise UsageError(
            f"{type(module).__name__} cannot compute a loss from labels under exit_after: its "
            "output has twice as many rows as there are labels",
            hint="leave out labels, and compute both losses from the pair that it returns",
        )


def untried_call() -> StackError:
    """The error for an order per sample, or an exit, where no call of the model began."""
    return StackError(
        "An order per sample, and an exit, need a call of the model itself: whether its blocks "
        "allow that cannot be tried in a compiled graph or in another method",
        hint="call model(images), and compile its blocks instead of the whole model",
    )


def lost_rows(module: nn.Module, rows: int, *, states: int) -> StackError:
    """The error for a head that returned another number of rows than it got `states`."""
    return StackError(
        f"The head of {type(module).__name__} returned {rows} rows for {states} states, so the "
        "answers at the exit cannot be separated from the others",
        hint="let it take the number of samples from its input, not from the images",
    )


def refuse_unused_stack(module: nn.Module, *_: object) -> None:
    """A hook on models with an order or hooks. Raises `StackError` if a call used no block.

    It takes the module as an argument and is no closure, because a copy of a model keeps its hooks.
    """
    if torch.compiler.is_compiling():
        return
    for stack in changed_stacks():
        requests = run_of(stack).requests
        if requests is not None and not requests.length:
            callers = holders(module, stack)
            # A compiled model uses its stack only while it is being compiled.
            if callers and not any(map(is_compiled, callers)):
                raise unused_stack(module)


def stack_use_check(model: nn.Module) -> AbstractContextManager[Any]:
    """Refuse calls of `model` that use no block of its stack."""
    # A hook would be compiled into the model.
    return nullcontext() if is_compiled(model) else model.register_forward_hook(refuse_unused_stack)
