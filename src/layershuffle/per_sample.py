"""A different order for every sample of a batch, in the host's own loop or in place of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.chain import host_of_stack
from layershuffle.entries import Entry, Host, Walk, Walked, state_first, state_of
from layershuffle.errors import StackError, UsageError
from layershuffle.grouped import BlockCall, run_grouped
from layershuffle.orders import ExecutionOrder
from layershuffle.runs import PLAIN, Run, in_backward, run_of


class SampleOrders:
    """The entries for an order per sample: a single walk, or position by position.

    The walk keeps samples of one order together from the first block to the last, and needs a host
    that does nothing between its blocks. Position by position the host's own loop runs.
    """

    def __init__(self, stack: nn.Module, orders: Sequence[ExecutionOrder]) -> None:
        self.orders, self.called = tuple(orders), 0
        self._older = any(order.versions is not None for order in self.orders)
        self.host: Host | None = None
        self._stack = stack

    def entries(self, run: Run) -> list[Entry]:
        """What the host is to call."""
        # A replay is not inside the model's call, and has to run as its forward did.
        if not self.called and not in_backward():
            self.host = None
        if self.host is not None and self.host.chain:
            return [Walked(self._stack, self._walk, run, self.host, older=self._older)]
        self._refuse_uneven()
        return [
            _Position(self._stack, self._at(position), run, self.host)
            for position in range(len(self.orders[0]))
        ]

    def _walk(self, call: BlockCall, state: Tensor) -> Tensor:
        return run_grouped(state, self.orders, call=call)

    def _at(self, position: int) -> Walk:
        steps = [ExecutionOrder((order.blocks[position],), order.depth) for order in self.orders]

        def walk(call: BlockCall, state: Tensor) -> Tensor:
            return run_grouped(
                state, steps, call=lambda block, _, chunk, rows: call(block, position, chunk, rows)
            )

        return walk

    def _refuse_uneven(self) -> None:
        cause = (
            "The host model does more between its blocks than hand on the state (or runs in "
            "another way than by its own call), so samples "
        )
        if len(set(map(len, self.orders))) > 1:
            raise StackError(
                cause + "with shorter orders cannot wait for the others",
                hint="give all samples of a batch orders of one length",
            )
        if self._older:
            raise StackError(
                cause + "cannot read older versions of the state",
                hint="give one order for the whole batch, or orders in which every step reads the "
                "newest version",
            )


class _Position(Walked):
    """One position of the host's own loop, at which every sample has its block."""

    one_block = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The state after every sample ran through its block."""
        out = super().__call__(*args, **kwargs)
        if isinstance(out, tuple | list) and len(out) > 1:
            raise StackError(
                f"The blocks return {len(out)} values and the host model uses more than the state, "
                "which cannot be put together again from samples in orders of their own",
                hint="use one order for the whole batch",
            )
        if self._host is not None and self._host.writes:
            # As the blocks do it, for a host that reads the state by another name.
            given = state_first(self._module, args=args, kwargs=kwargs)[0]
            return self._host.form.filled(given.copy_(state_of(out)))
        return out


@contextmanager
def calls_seen(model: nn.Module, stack: nn.Module, *, samples: SampleOrders) -> Iterator[None]:
    """Notes calls of the modules around the stack, and tries once how the host treats it."""

    def ours() -> bool:
        # The hooks are the model's, and so are called in other threads and in the trial too.
        run = PLAIN if torch.compiler.is_compiling() else run_of(stack)
        return run.samples is samples.orders

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch adds a hook first and notes that it takes keywords afterwards: a forward of another
        # thread in between calls it without them, but is never ours.
        if kwargs is None or not ours():
            return
        samples.called += 1
        _refuse_hidden_states(
            module,
            kwargs,
            "an order per sample: blocks run on groups of samples, and the states would be those "
            "of the groups",
        )
        # The outermost call is tried: what the others get, and what is around them, follows.
        if samples.called == 1:
            samples.host = host_of_stack(
                stack,
                model=module,
                arguments=(args, kwargs),
                batch=len(samples.orders),
                forward=lambda call: module(*call[0], **call[1]),
            )

    def after(*_: Any) -> None:
        samples.called -= ours()

    with ExitStack() as hooks:
        for module in holders(model, stack) or [stack]:
            handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def hidden_states_refused(
    model: nn.Module, stack: nn.Module, *, order: ExecutionOrder
) -> Iterator[None]:
    """Refuses states that a host would record while a step of `order` reads an older one."""

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        del args
        # As above: the hooks are the model's, and other threads have orders of their own.
        if kwargs is None or torch.compiler.is_compiling() or run_of(stack).order is not order:
            return
        _refuse_hidden_states(
            module,
            kwargs,
            "blocks side by side: what a block returns is not the state after its step",
        )

    with ExitStack() as hooks:
        for module in holders(model, stack):
            if hasattr(module, "config"):
                handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def _refuse_hidden_states(module: nn.Module, kwargs: dict[str, Any], why: str) -> None:
    # transformers records them by hooks on the blocks.
    config = getattr(module, "config", None)
    if kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
        raise UsageError(
            f"output_hidden_states cannot be combined with {why}",
            hint="record what blocks return with layershuffle.tap(model), whose records name their "
            "steps and samples, or use one order for the whole batch in which every step reads the "
            "newest state",
        )


def holders(module: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """`module` and the modules in it that hold `stack`: their calls run it."""
    children = [child for child in module._modules.values() if child is not None]
    inner = [h for child in children if child is not stack for h in holders(child, stack)]
    return [module, *inner] if inner or stack in children else []


def is_per_sample(order: object) -> bool:
    """Whether `order` is a sequence of orders, one for each sample, and not an order."""
    return (
        isinstance(order, Sequence)
        and not isinstance(order, str)
        and bool(order)
        and isinstance(order[0], ExecutionOrder | Sequence)
    )
