"""Scaled branches: what the drawn blocks add to the state when a training begins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, PATCH, SIZE, WIDTH, Family, assert_close, images
from layershuffle.core.stack import fixed_of
from layershuffle.core.tensors import state_of
from layershuffle.core.tying import share_weights
from refusals import refuses


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
    return ls.Method("anyorder", branch_scale=factor, **options).prepare(family.wrapped(), images())


@pytest.mark.parametrize("name", FAMILIES)
def test_half_the_factor_adds_half(name: str) -> None:
    """Where blocks add little, the state is the same, and so is what their layers compute."""
    family = FAMILIES[name]
    first = states_added(scaled(family, 2e-2))
    second = states_added(scaled(family, 1e-2))
    for block in range(1, DEPTH - 1):
        assert_close(second[block] * 2, first[block], tolerance=0.05 * first[block].abs().max())
    assert torch.equal(first[0], states_added(family.wrapped())[0])


@pytest.mark.parametrize("inside", ["qk_norm", "scale_attn_inner"])
def test_a_block_adds_the_factor_of_each_branch(inside: str) -> None:
    """Also with norms inside the attention, whose other layers keep the shape of the state."""
    torch.manual_seed(0)
    plain = timm.models.eva.Eva(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=2,
        num_classes=CLASSES, qkv_fused=False, **{inside: True},
    ).eval()  # fmt: skip
    block = copy.deepcopy(plain.blocks[1])
    state = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        between = state + 0.1 * block.attn(block.norm1(state))
        wanted = between + 0.1 * block.mlp(block.norm2(between))
        ls.Method("anyorder").prepare(plain, images())
        got = ls.blocks_of(plain)[1](state)
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


class PostNorm(nn.Module):
    """A block that normalises what its layer returns, so a smaller weight adds as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        return state + self.norm(self.layer(state))


def test_blocks_without_such_layers_are_refused_and_stay() -> None:
    torch.manual_seed(0)
    model = FAMILIES["timm-vit"].plain()
    model.blocks = nn.Sequential(*(PostNorm() for _ in range(DEPTH)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ls.StackError, match="branch_scale=1"):
        ls.Method("anyorder").prepare(model, images())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    with refuses(ls.UsageError):
        ls.Method("anyorder").loss(model, images(), torch.zeros(2, dtype=torch.long), step=0)


def test_a_model_that_is_refused_is_neither_tied_nor_given_ends() -> None:
    """Who tries again without `distinct` would else train tied blocks."""
    torch.manual_seed(0)
    model = FAMILIES["timm-vit"].plain()
    model.blocks = nn.Sequential(*(PostNorm() for _ in range(DEPTH)))
    with refuses(ls.StackError):
        ls.Method("anyorder", distinct=1).prepare(model, images())
    assert not share_weights(ls.blocks_of(model))
    assert fixed_of(model) == (0, 0)


class Called(nn.Module):
    """A model that calls its blocks as `call(block, state)`."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Plain() for _ in range(DEPTH))
        self.call = call

    def forward(self, pixels: Tensor) -> Tensor:
        state = self.stem(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            state = self.call(block, state)
        logits: Tensor = self.head(state.mean(1))
        return logits


class Plain(nn.Module):
    """A block of one linear layer, whose state may be in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.layer(x) if isinstance(x, Tensor) else (x[0] + self.layer(x[0]),)


def test_a_block_that_is_called_by_keyword() -> None:
    model = Called(lambda block, state: block(x=state))
    before = [block.layer.weight.clone() for block in model.blocks]
    ls.Method("anyorder").prepare(model, images())
    for place, weight in enumerate(before):
        factor = 0.1 if 0 < place < DEPTH - 1 else 1.0
        assert torch.equal(ls.blocks_of(model)[place].layer.weight, weight * factor)


def test_a_state_that_is_no_tensor_is_refused() -> None:
    model = Called(lambda block, state: block((state,))[0])
    with pytest.raises(ls.StackError, match="branch_scale"):
        ls.Method("anyorder").prepare(model, images())


def test_a_model_that_is_trained_again_keeps_its_weights(tmp_path: Path) -> None:
    """Also as a copy, from a file, and when it was trained by another method for drawn orders."""
    method = ls.Method("anyorder", branch_scale=0.5)
    for first in (method, ls.Method("layershuffle")):
        model = first.prepare(FAMILIES["timm-vit"].wrapped(), images())
        ls.save(model, tmp_path / first.name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for again in (model, copy.deepcopy(model), ls.load(f"dir:{tmp_path / first.name}")):
            after = method.prepare(again, images()).state_dict()
            assert all(torch.equal(after[key], before[key]) for key in before)
    ordinary = ls.Method("baseline").prepare(model)
    with pytest.raises(ls.UsageError, match="needs images"):
        method.prepare(ordinary)


def test_the_model_that_ships_is_trained_on_as_it_is() -> None:
    model = ls.load("bundled:digits-swarm")
    before = ls.blocks_of(model)[5].mlp.fc2.weight.clone()
    ls.Method("anyorder").prepare(model, torch.zeros(1, 1, 12, 20))
    assert torch.equal(ls.blocks_of(model)[5].mlp.fc2.weight, before)
