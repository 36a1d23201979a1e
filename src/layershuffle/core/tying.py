"""Tied blocks: several places of the stack share the weights of one block.

A place has its own module (drop path, hooks and graphs belong to places), but the parameters and
buffers of the block to which it is tied. So a `state_dict` has the keys of an untied model, and
`save` writes an ordinary model of full size. Its library loads the places untied: the outputs
are equal, but further training changes every place separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from layershuffle.core.policies import drawn_blocks
from layershuffle.core.stack import blocks_of, fixed_of, wrap
from layershuffle.ground.errors import UsageError


def tie(
    model: nn.Module, places: Sequence[int] | None = None, *, distinct: int | None = None
) -> nn.Module:
    """Share weights between the places of `model`, in place; returns it wrapped.

    Place i gets the weights of block `places[i]`. `distinct` instead keeps that number of different
    blocks, each for a run of neighbouring places: of 12, `distinct=3` keeps blocks 1, 5 and 9. The
    ends of a model, which keep their place, then stay as they are, and the others are tied.
    Raises `UsageError` for another number of places, for unknown blocks, and for blocks whose
    tensors have different shapes.

        model = ls.tie(ls.load("bundled:digits"), distinct=3)
    """
    stack = blocks_of(wrap(model))
    blocks = places
    if distinct is not None and places is None:
        drawn = drawn_blocks(len(stack), fixed_of(model))
        tied = [drawn[place] for place in middle_blocks(distinct, len(drawn))]
        blocks = [*range(drawn.start), *tied, *range(drawn.stop, len(stack))]
    if blocks is None or (distinct is not None and places is not None):
        raise UsageError(
            "tie takes the block of each place, or the number of different blocks",
            hint="tie(model, distinct=3)",
        )
    if len(blocks) != len(stack) or not all(0 <= block < len(stack) for block in blocks):
        raise UsageError(
            f"The model has {len(stack)} places; {list(blocks)} does not name a block for each"
        )
    # Collected before any is replaced, because a block may both give weights and get others.
    tensors: list[dict[str, Tensor]] = []
    for block in stack:
        tensors.append({**dict(block.named_parameters()), **dict(block.named_buffers())})
    for place, source in enumerate(blocks):
        if _shapes(tensors[place]) != _shapes(tensors[source]):
            raise UsageError(
                f"Place {place} cannot have the weights of block {source}: their shapes differ"
            )
        for path in tensors[place]:
            parent, _, name = path.rpartition(".")
            setattr(stack[place].get_submodule(parent), name, tensors[source][path])
    return model


def places_tied(blocks: Iterable[nn.Module]) -> tuple[int, ...] | None:
    """For each place the first place with the same weights; `None` if no places share weights.

    Places that share only some weights count as different: `load` does not tie them again.
    """
    stack = list(blocks)
    places: list[int] = []
    for block in stack:
        first = 0
        while not _is_same(block, stack[first]):
            first += 1
        places.append(first)
    return None if places == list(range(len(stack))) else tuple(places)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def share_weights(blocks: Iterable[nn.Module]) -> bool:
    """Whether a parameter belongs to several blocks."""
    owners: Counter[int] = Counter()
    for block in blocks:
        owners.update(set(map(id, block.parameters())))
    return any(count > 1 for count in owners.values())


def _is_same(block: nn.Module, other: nn.Module) -> bool:
    """Whether both are the same module, or share all parameters and have equal buffers."""
    if block is other:
        return True
    weights = dict(block.named_parameters())
    others = dict(other.named_parameters())
    if not weights or weights.keys() != others.keys():
        return False
    for name, weight in weights.items():
        if weight is not others[name]:
            return False
    # `Module.to` keeps parameters shared, but creates separate buffers for every place.
    buffers = dict(block.named_buffers())
    copies = dict(other.named_buffers())
    if buffers.keys() != copies.keys():
        return False
    return all(torch.equal(buffer, copies[name]) for name, buffer in buffers.items())


def middle_blocks(distinct: int, depth: int) -> tuple[int, ...]:
    """The block of each of `depth` places, if `distinct` blocks are repeated in runs of places.

    The runs have nearly equal lengths, and a run gets the block in its middle.
    Raises `UsageError` unless 1 <= distinct <= depth.
    """
    if not 1 <= distinct <= depth:
        raise UsageError(
            f"Among {depth} drawn blocks there cannot be {distinct} different ones",
            hint=f"choose distinct between 1 and {depth}",
        )
    blocks: list[int] = []
    for run in range(distinct):
        begin = run * depth // distinct
        end = (run + 1) * depth // distinct
        blocks += [(begin + end - 1) // 2] * (end - begin)
    return tuple(blocks)
