"""A separate execution order for every sample of a batch.

Samples with the same order stay together as one group. At each position the groups that need the
same block next are joined, and every block runs once: the same FLOPs as one shared order. A group
that shares its block with no other group is not copied. This happens in the host's own loop, or
replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layershuffle.core.chain import host_of_stack
from layershuffle.core.entries import (
    BlockCall,
    BlockWalk,
    Entry,
    HostBehaviour,
    Walked,
    state_first,
    state_of,
)
from layershuffle.core.orders import ExecutionOrder, is_integer
from layershuffle.core.residual import States, added
from layershuffle.core.runs import PLAIN, Run, in_backward, run_of
from layershuffle.errors import StackError, UsageError
from layershuffle.machine import to_device


def run_grouped(
    state: Tensor,
    orders: Sequence[ExecutionOrder],
    *,
    call: BlockCall,
    exit_after: int | None = None,
) -> Tensor:
    """Run sample i of `state` `[batch, ...]` along `orders[i]`, and return the new state.

    `call(block, position, chunk, rows)` runs one block on the samples `rows`. Orders may differ in
    length. The result equals that of running the samples one by one, up to the rounding of batched
    kernels. With `exit_after` it is `[2 * batch, ...]`: the final states, followed by the states
    after this number of steps (or after all, in shorter orders). Raises `UsageError` unless there
    is one order per sample.
    """
    if len(orders) != state.shape[0]:
        raise UsageError(
            f"{len(orders)} orders were given for a batch of {state.shape[0]} samples",
            hint="give one order per sample, or a single order for the whole batch (also if the "
            "blocks do not take one row per sample)",
        )
    rows_of: dict[ExecutionOrder, list[int]] = {}
    for row, order in enumerate(orders):
        rows_of.setdefault(order, []).append(row)
    # From here on the rows of a group are adjacent, so that groups are joined and split as slices.
    arranged = [row for rows in rows_of.values() for row in rows]
    chunks = torch.split(_rearranged(state, arranged), list(map(len, rows_of.values())))
    groups = [
        _SampleGroup(order, rows, state if len(chunks) == 1 else chunk)
        for (order, rows), chunk in zip(rows_of.items(), chunks, strict=True)
    ]
    # The number of block runs is that of one order, but the calls are smaller: this takes 2.7 times
    # as long at width 64 and 1.2 times at width 192 (docs/log.md).
    left: list[Tensor] = []
    for position in range(max(map(len, rows_of))):
        if position == exit_after:
            # No copy is needed: blocks that write into their input run in the host's own loop.
            left = [group.state for group in groups]
        for block, members in _by_next_block(groups, position).items():
            parts = [group.read(position) for group in members]
            # torch.cat copies even a single tensor, so a single group runs in place.
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            rows = tuple(row for group in members for row in group.rows)
            out = call(block, position, joined, rows)
            outs = [out] if len(parts) == 1 else torch.split(out, list(map(len, parts)))
            for group, part in zip(members, outs, strict=True):
                group.advance(position, part)
    # The inverse permutation, computed on the CPU, so that no data come back from a GPU.
    original = sorted(range(len(arranged)), key=arranged.__getitem__)
    ends = _rearranged(torch.cat([group.state for group in groups]), original)
    if exit_after is None:
        return ends
    # If no state left early, no order has more than `exit_after` steps.
    return torch.cat([ends, _rearranged(torch.cat(left), original) if left else ends])


class _SampleGroup:
    """The samples with one order: their rows in the batch and their current state."""

    def __init__(self, order: ExecutionOrder, rows: Sequence[int], state: Tensor) -> None:
        self.steps, self.rows, self.state = order.steps, rows, state
        self._older, self._read = States(order), state

    def read(self, position: int) -> Tensor:
        """The state that the step at `position` reads, before it runs."""
        self._older.keep(position, self.state)
        version = self.steps[position][1]
        newest = version == position
        self._read = self.state if newest else self._older.read(version, position=position)
        return self._read

    def advance(self, position: int, out: Tensor) -> None:
        """The step at `position` returned `out`."""
        newest = self.steps[position][1] == position
        self.state = out if newest else added(self.state, read=self._read, out=out)


def _by_next_block(groups: Sequence[_SampleGroup], position: int) -> dict[int, list[_SampleGroup]]:
    """The groups that run a block at `position`, keyed by that block, ascending."""
    members: dict[int, list[_SampleGroup]] = {}
    for group in groups:
        if position < len(group.steps):
            members.setdefault(group.steps[position][0], []).append(group)
    # Sorted, so that the sequence of kernels does not depend on which sample comes first.
    return dict(sorted(members.items()))


def _rearranged(state: Tensor, rows: Sequence[int]) -> Tensor:
    """`state[rows]`; the same tensor if no row moves."""
    if all(row == place for place, row in enumerate(rows)):
        return state
    return state.index_select(0, to_device(torch.tensor(rows), state.device))


class SampleOrders:
    """The entries for an order per sample: a single walk, or one entry per position.

    The walk keeps samples of one order together from the first block to the last, and needs a host
    that does nothing between its blocks. With one entry per position, the host's own loop runs.
    """

    def __init__(
        self, stack: nn.Module, orders: Sequence[ExecutionOrder], *, exit_after: int | None = None
    ) -> None:
        longest = max(map(len, orders))
        if exit_after is not None and (
            not is_integer(exit_after) or not 1 <= exit_after <= longest
        ):
            raise UsageError(
                f"exit_after must be in [1, {longest}] for these orders, got {exit_after!r}"
            )
        self.orders, self.called, self.exit_after = tuple(orders), 0, exit_after
        self._older = any(order.versions is not None for order in self.orders)
        self.host: HostBehaviour | None = None
        self._stack = stack

    def entries(self, run: Run) -> list[Entry]:
        """The entries for the host."""
        # A replay happens outside of the model's call, and must run as its forward did.
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
        return run_grouped(state, self.orders, call=call, exit_after=self.exit_after)

    def _at(self, position: int) -> BlockWalk:
        steps = [ExecutionOrder((order.blocks[position],), order.depth) for order in self.orders]

        def walk(call: BlockCall, state: Tensor) -> Tensor:
            return run_grouped(
                state, steps, call=lambda block, _, chunk, rows: call(block, position, chunk, rows)
            )

        return walk

    def _refuse_uneven(self) -> None:
        cause = (
            "The host model does more between its blocks than pass the state on (or runs in "
            "another way than by its own call), so samples "
        )
        if self.exit_after is not None:
            raise StackError(
                cause + "have no state that could leave the blocks early",
                hint="train without an exit: no exit_after, no --exit-weight, no layershuffle-exit",
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
    """One position of the host's own loop, at which every sample runs its own block."""

    one_block = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The state after every sample ran its block."""
        out = super().__call__(*args, **kwargs)
        if isinstance(out, tuple | list) and len(out) > 1:
            raise StackError(
                f"The blocks return {len(out)} values and the host model uses more than the state; "
                "the others cannot be combined from samples with different orders",
                hint="use one order for the whole batch",
            )
        if self._host is not None and self._host.writes:
            # Write in place as the blocks do, for a host with another reference to the state.
            state = state_first(self._module, args=args, kwargs=kwargs)[0]
            return self._host.form.filled(state.copy_(state_of(out)))
        return out


@contextmanager
def calls_seen(model: nn.Module, stack: nn.Module, *, samples: SampleOrders) -> Iterator[None]:
    """Track calls of the modules around the stack, and try once what the host does around it."""

    def ours() -> bool:
        # The hooks belong to the model, so other threads and the trial call them too.
        run = PLAIN if torch.compiler.is_compiling() else run_of(stack)
        return run.samples is samples.orders

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch adds a hook first and registers afterwards that it takes keywords. A forward of
        # another thread in between calls it without them, but is never ours.
        if kwargs is None or not ours():
            return
        samples.called += 1
        _refuse_hidden_states(
            module,
            kwargs,
            "an order per sample: blocks run on groups of samples, so the states would be those "
            "of groups",
        )
        if samples.exit_after is not None and kwargs.get("labels") is not None:
            raise UsageError(
                f"{type(module).__name__} cannot compute a loss from labels under exit_after: its "
                "output has twice as many rows as there are labels",
                hint="leave out labels, and compute both losses from "
                "logits, early = model(images).logits.chunk(2)",
            )
        # Only the outermost call is tried; the calls inside follow from it.
        if samples.called == 1:
            samples.host = host_of_stack(
                stack,
                model=module,
                arguments=(args, kwargs),
                batch=len(samples.orders),
                forward=lambda call: module(*call[0], **call[1]),
            )

    def after(module: nn.Module, _args: object, output: Any) -> None:
        if not ours():
            return
        samples.called -= 1
        if samples.exit_after is None or samples.called:
            return
        rows = 2 * len(samples.orders)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != rows:
                raise StackError(
                    f"The head of {type(module).__name__} returned {len(leaf)} rows for {rows} "
                    "states, so the answers at the exit cannot be separated from the others",
                    hint="let it take the number of samples from its input, not from the images",
                )

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
    """Refuse to let a host record its states while a step of `order` reads an older one."""

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        del args
        # As above: the hooks belong to the model, and other threads have their own orders.
        if kwargs is None or torch.compiler.is_compiling() or run_of(stack).order is not order:
            return
        _refuse_hidden_states(
            module,
            kwargs,
            "blocks side by side: the output of a block is not the state after its step",
        )

    with ExitStack() as hooks:
        for module in holders(model, stack):
            if hasattr(module, "config"):
                handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def _refuse_hidden_states(module: nn.Module, kwargs: dict[str, Any], why: str) -> None:
    # transformers records the states by hooks on the blocks.
    config = getattr(module, "config", None)
    if kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
        raise UsageError(
            f"output_hidden_states cannot be combined with {why}",
            hint="record the outputs of blocks with layershuffle.tap(model), whose records name "
            "their steps and samples, or use one order for the whole batch in which every step "
            "reads the newest state",
        )


def holders(module: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """`module` and the modules in it that contain `stack`, whose calls run it."""
    children = [child for child in module._modules.values() if child is not None]
    inner = [h for child in children if child is not stack for h in holders(child, stack)]
    return [module, *inner] if inner or stack in children else []


def is_per_sample(order: object) -> bool:
    """Whether `order` is a sequence of orders, one per sample, and not a single order."""
    return (
        isinstance(order, Sequence)
        and not isinstance(order, str)
        and bool(order)
        and isinstance(order[0], ExecutionOrder | Sequence)
    )
