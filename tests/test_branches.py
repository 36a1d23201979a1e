"""Scaled branches: what the drawn blocks add to the state when a training begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layershuffle as ls
from common import DEPTH, FAMILIES, Family, assert_close, images
from layershuffle.core.branches import scale_branches
from layershuffle.core.tensors import state_of

OTHERS = ("timm-mixer", "timm-xcit")
"""Their blocks mix tokens by a layer of another shape, or pass three branches."""


def states_added(model: nn.Module) -> list[Tensor]:
    """What each block adds to its state in a forward in order."""
    added: list[Tensor] = []

    def note(_block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        added.append(state_of(output) - args[0])

    hooks = [block.register_forward_hook(note) for block in ls.blocks_of(model)]
    with torch.no_grad():
        model.eval()(images())
    for hook in hooks:
        hook.remove()
    return added


def scaled(family: Family, factor: float, **options: Any) -> nn.Module:
    model = ls.Method("anyorder", **options).prepare(family.wrapped())
    return scale_branches(model, images(), factor=factor)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHERS])
def test_half_the_factor_adds_half(name: str) -> None:
    """Where blocks add little, the state is the same, and so is what their layers compute."""
    family = FAMILIES[name]
    first = states_added(scaled(family, 2e-2))
    second = states_added(scaled(family, 1e-2))
    for block in range(1, DEPTH - 1):
        assert_close(second[block] * 2, first[block], tolerance=0.05 * first[block].abs().max())
    assert torch.equal(first[0], states_added(family.wrapped())[0])


def test_a_block_adds_the_factor_of_each_branch() -> None:
    plain = FAMILIES["timm-vit"].wrapped()
    block = ls.blocks_of(plain)[1]
    state = torch.randn(2, 5, plain.embed_dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        between = state + 0.1 * block.attn(block.norm1(state))
        wanted = between + 0.1 * block.mlp(block.norm2(between))
        got = ls.blocks_of(scaled(FAMILIES["timm-vit"], 0.1))[1](state)
    assert_close(got, wanted, tolerance=1e-6)


def test_ends_and_all_other_weights_stay() -> None:
    before = FAMILIES["hf-dinov2"].wrapped().state_dict()
    after = scaled(FAMILIES["hf-dinov2"], 0.1, fixed=(1, 0)).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split("layer.")[1] for name in changed} == {
        f"{block}.{layer}.{part}"
        for block in range(1, DEPTH)
        for layer in ("attention.o_proj", "mlp.fc2")
        for part in ("weight", "bias")
    }


def test_tied_blocks_are_scaled_once() -> None:
    before = FAMILIES["timm-vit"].wrapped()
    tied = scaled(FAMILIES["timm-vit"], 0.5, distinct=1, fixed=(0, 0))
    chosen = ls.blocks_of(ls.tie(before, distinct=1))[0].mlp.fc2.weight
    for block in ls.blocks_of(tied):
        assert torch.equal(block.mlp.fc2.weight, chosen * 0.5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_are_refused_and_stay(name: str) -> None:
    model = FAMILIES[name].wrapped()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ls.StackError, match="without a branch scale"):
        scale_branches(model, images(), factor=0.1)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
