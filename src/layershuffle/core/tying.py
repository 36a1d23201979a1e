"""Tied blocks: several places of the stack share the weights of one block.

A place has its own module (drop path, hooks and graphs belong to places), but the parameters and
buffers of the block to which it is tied. So a `state_dict` has the keys of an untied model, and
`save` writes an ordinary model of full size. Its library loads the places untied: the outputs
are equal, but further training changes every place separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

from layershuffle.core.stack import blocks_of, wrap
from layershuffle.ground.errors import UsageError


def tie(
    model: nn.Module, places: Sequence[int] | None = None, *, distinct: int | None = None
) -> nn.Module:
    """Share weights between the places of `model`, in place; returns it wrapped.

    Place i gets the weights of block `places[i]`. `distinct` instead keeps that number of different
    blocks, each for a run of neighbouring places: of 12, `distinct=3` keeps blocks 1, 5 and 9.
    Raises `UsageError` for another number of places, for unknown blocks, and for blocks whose
    tensors have different shapes.

        model = ls.tie(ls.load("bundled:digits"), distinct=3)
    """
    stack = blocks_of(wrap(model))
    blocks = places
    if distinct is not None and places is None:
        blocks = middle_blocks(distinct, len(stack))
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
    tensors = [{**dict(block.named_parameters()), **dict(block.named_buffers())} for block in stack]
    shapes = [{name: tensor.shape for name, tensor in own.items()} for own in tensors]
    for place, block in enumerate(blocks):
        if shapes[place] != shapes[block]:
            raise UsageError(
                f"Place {place} cannot have the weights of block {block}: their shapes differ"
            )
        for path in tensors[place]:
            parent, _, name = path.rpartition(".")
            setattr(stack[place].get_submodule(parent), name, tensors[block][path])
    return model


def places_tied(blocks: Iterable[nn.Module]) -> tuple[int, ...] | None:
    """For each place the first place with the same weights; `None` if no places share weights.

    Places that share only some weights count as different: `load` does not tie them again.
    """
    stack = list(blocks)
    places = tuple(
        next(first for first, other in enumerate(stack) if _is_same(block, other))
        for block in stack
    )
    return None if places == tuple(range(len(stack))) else places


def share_weights(blocks: Iterable[nn.Module]) -> bool:
    """Whether a parameter belongs to several blocks."""
    owned = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    return sum(map(len, owned)) > len(set().union(*owned))


def _is_same(block: nn.Module, other: nn.Module) -> bool:
    """Whether both are the same module, or share all parameters and have equal buffers."""
    if block is other:
        return True
    weights, others = dict(block.named_parameters()), dict(other.named_parameters())
    if not weights or {n: id(p) for n, p in weights.items()} != {
        n: id(p) for n, p in others.items()
    }:
        return False
    # `Module.to` keeps parameters shared, but creates separate buffers for every place.
    buffers, copies = dict(block.named_buffers()), dict(other.named_buffers())
    return buffers.keys() == copies.keys() and all(
        torch.equal(buffer, copies[name]) for name, buffer in buffers.items()
    )


def middle_blocks(distinct: int, depth: int) -> tuple[int, ...]:
    """The block of each of `depth` places, if `distinct` blocks are repeated in runs of places.

    The runs have nearly equal lengths, and a run gets the block in its middle.
    Raises `UsageError` unless 1 <= distinct <= depth.
    """
    if not 1 <= distinct <= depth:
        raise UsageError(
            f"A model with {depth} blocks cannot have {distinct} different ones",
            hint=f"choose a number between 1 and {depth}",
        )
    ends = [run * depth // distinct for run in range(distinct + 1)]
    runs = pairwise(ends)
    return tuple((begin + end - 1) // 2 for begin, end in runs for _ in range(begin, end))
