"""Run many orders over one batch, and every shared prefix only once.

Orders are put into a prefix trie; a depth-first walk runs each node's block once, so at most
`depth` activations are alive. `run_stem` and `run_head` are the two ends of a forward, on either
side of the blocks. Outputs are bit-equal to running the orders one by one.

The trie is used by `evaluate`, and so by eval, reproduce, merges and soups, by ensembles (member by
member), and by the analysis leave-one-out. The other analyses look into the blocks under balanced
orders, which have every block at every position once: no two begin alike, so nothing is shared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn

from layershuffle.core.chain import host_of_stack
from layershuffle.core.entries import BlockCall, HostBehaviour
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.residual import added
from layershuffle.core.stack import depth_of, running, stack_of, walking
from layershuffle.errors import StackError

_log = logging.getLogger("layershuffle")
# Bytes of a state on a CPU, and the fewest images; with fewer the weights are read too often.
_CACHED_BYTES, _LEAST_IMAGES = 1 << 20, 4
_LOOPS_SAID: WeakSet[nn.Module] = WeakSet()


@dataclass
class TrieNode:
    """A prefix: the steps (block, version) that follow it, and the orders that end here.

    `ends` are the indices of these orders. `older` are the versions of the state that later steps
    read after a newer version exists.
    """

    children: dict[tuple[int, int], TrieNode] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    older: set[int] = field(default_factory=set)


def build_trie(orders: Sequence[ExecutionOrder]) -> TrieNode:
    """The trie of `orders`; the node at which an order ends holds its index."""
    root = TrieNode()
    for index, order in enumerate(orders):
        node, last = root, order.last_readers()
        for position, step in enumerate(order.steps):
            node.older.update(v for v, reader in last.items() if reader >= position)
            node = node.children.setdefault(step, TrieNode())
        node.ends.append(index)
    return root


def block_executions(node: TrieNode) -> int:
    """The number of block runs in a walk of the trie."""
    return sum(1 + block_executions(child) for child in node.children.values())


def forward_trie(
    model: nn.Module, images: Tensor, *, trie: TrieNode, forward: Callable[[Tensor], Tensor]
) -> Iterator[tuple[list[int], Tensor]]:
    """(indices of orders, their logits) for every distinct order, depth first.

    `model` is wrapped; `forward(images)` calls it and returns logits `[batch, classes]`. Inference
    only: run it under `torch.inference_mode()`. A model that does more between its blocks than pass
    the state on runs the orders one by one.
    """
    if not _is_chain(model, images, forward=forward):
        for ends, steps in _orders(trie):
            blocks, versions = zip(*steps, strict=True)
            with running(model, ExecutionOrder(blocks, depth_of(model), versions)):
                logits = forward(images)
            yield ends, logits
        return
    start, call = run_stem(model, images, forward=forward, older=bool(trie.older))
    for ends, state in _walk(trie, (start,), call):
        yield ends, run_head(model, images, state=state, forward=forward)


def images_at_once(model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]) -> int:
    """The number of `images` that a walk should take at a time; `forward` as in `forward_trie`.

    On a CPU the images are split into even parts whose state stays in the cache from block to
    block: measured best at widths 64, 192 and 768 (docs/log.md). A GPU takes all images. Logits are
    those of another batch size, equal up to the rounding of batched kernels.
    """
    if images.device.type != "cpu" or len(images) < 2:
        return max(1, len(images))
    if not _is_chain(model, images, forward=forward):
        return len(images)
    state, _ = run_stem(model, images[:1], forward=forward)
    # The limit is in bytes, not images: with parts of 8 to 32 images the digits model takes up to
    # 2.2 times as long (docs/log.md).
    most = max(_LEAST_IMAGES, _CACHED_BYTES // state.nbytes)
    # Even parts, because a rest of one or two images would read all weights for little work.
    parts = -(-len(images) // most)
    return -(-len(images) // parts)


def run_stem(
    model: nn.Module,
    images: Tensor,
    *,
    forward: Callable[[Tensor], Tensor],
    older: bool = False,
) -> tuple[Tensor, BlockCall]:
    """The state `[batch, tokens, width]` that enters the first block, and how to call a block.

    `model` is wrapped; `forward(images)` calls it. No block runs. Raises `StackError` for a host
    that never calls its blocks and, if steps read `older` versions of the state than the newest,
    for blocks that do not add to their state.
    """

    def stop(call: BlockCall, state: Tensor) -> Tensor:
        raise _Reached(call, state)

    try:
        with walking(model, stop, older=older):
            forward(images)
    except _Reached as reached:
        return reached.state, reached.call
    raise StackError(f"{type(model).__name__} never called its block stack")


def run_head(
    model: nn.Module, images: Tensor, *, state: Tensor, forward: Callable[[Tensor], Tensor]
) -> Tensor:
    """The output of `forward(images)` if its blocks return `state`.

    The stem runs once per finished order because the head is only reachable through the host's own
    forward. It is small beside the blocks (0.7 % of the operations of a ViT-B).
    """

    def walk(call: BlockCall, initial: Tensor) -> Tensor:
        del call, initial
        # A copy, because some hosts change the state in place, and the caller may need it again.
        return torch.clone(state)

    with walking(model, walk):
        return forward(images)


class _Reached(BaseException):
    """Leaves the host's forward at its blocks. It is not an `Exception`, so no host catches it."""

    def __init__(self, call: BlockCall, state: Tensor) -> None:
        super().__init__()
        self.call, self.state = call, state


def _walk(
    node: TrieNode, states: tuple[Tensor, ...], call: BlockCall
) -> Iterator[tuple[list[int], Tensor]]:
    """Run the steps below `node`; `states` are the versions of the state up to it."""
    position, state = len(states) - 1, states[-1]
    # An order may end where another one continues, as subsets of one permutation do.
    if node.ends:
        yield node.ends, state
    readers = len(node.children)
    for (block, version), child in node.children.items():
        readers -= 1
        read, newest = states[version], version == position
        # A block may write into its input, which blocks of other orders still have to read.
        out = call(block, position, read.clone() if readers else read, None)
        after = out if newest else added(state, read=read, out=out)
        yield from _walk(child, (*states, after), call)


def _orders(
    node: TrieNode, steps: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[list[int], tuple[tuple[int, int], ...]]]:
    """(indices of orders, their steps) for every distinct order, depth first."""
    if node.ends:
        yield node.ends, steps
    for step, child in node.children.items():
        yield from _orders(child, (*steps, step))


def refuse_loops(model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]) -> None:
    """Raises `StackError` if the host's forward is not just its stem, blocks and head."""
    if not _tried(model, images, forward).chain:
        raise StackError(
            f"{type(model).__name__} does more between its blocks than pass the state on (several "
            "states, a read-out, gates ...), so it cannot be split into stem, blocks and head",
            hint="whole forwards work: layershuffle.running, fit and eval",
        )


def _is_chain(model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]) -> bool:
    """Whether a walk may replace the host's loop; log it once if it may not."""
    stack, chain = stack_of(model), _tried(model, images, forward).chain
    if not chain and stack not in _LOOPS_SAID:
        _LOOPS_SAID.add(stack)
        _log.warning(
            "%s seems to do more between its blocks than pass the state on, or its blocks write "
            "into it, so its orders run one by one: this takes longer, the scores are the same",
            type(model).__name__,
        )
    return chain


def _tried(model: nn.Module, images: Tensor, forward: Callable[[Tensor], Tensor]) -> HostBehaviour:
    return host_of_stack(
        stack_of(model), model=model, arguments=images, batch=len(images), forward=forward
    )
