"""Models that are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import layershuffle as ls
from common import DEPTH, FAMILIES, PERMUTED, images, logits_of
from layershuffle.core.discovery import find_blocks
from layershuffle.ground.errors import StackError
from refusals import refuses


class Block(nn.Module):
    """A residual block with settings of its own."""

    def __init__(self, width: int = 4, *, heads: int = 2, window: Any = 0, index: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.heads, self.window, self.layer_idx = heads, window, index

    def forward(self, state: Tensor) -> Tensor:
        """Residual."""
        return state + self.linear(state).relu()


class Host(nn.Module):
    """A host model with its blocks under `blocks`."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, state: Tensor) -> Tensor:
        """The blocks alone."""
        return self.blocks(state)


class Doubling(nn.Sequential):
    """A Sequential whose forward does more than run its children."""

    def forward(self, state: Tensor) -> Tensor:
        """Twice the plain result."""
        return 2 * super().forward(state)


def _swin_torchvision() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4]
    )


def _swin_timm() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=8, depths=(2, 4), num_heads=(1, 2),
        window_size=4,
    )  # fmt: skip


def _sam() -> nn.Module:
    return timm.create_model(
        "samvit_base_patch16", img_size=64, embed_dim=32, depth=4, num_heads=2, window_size=2,
        global_attn_indexes=(1, 3),
    )  # fmt: skip


def _rope_mixed() -> nn.Module:
    return timm.create_model(
        "vit_small_patch16_rope_mixed_224", img_size=32, patch_size=8, embed_dim=32, depth=4,
        num_heads=2,
    )  # fmt: skip


def _blocks(*changes: dict[str, Any]) -> Host:
    return Host(nn.Sequential(*(Block(**change) for change in changes)))


def _mixed_classes() -> nn.Module:
    return Host(nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4)), Block()))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "timm swin": _swin_timm,
    "torchvision swin": _swin_torchvision,
    "timm convnext": lambda: timm.create_model(
        "convnext_atto", depths=(1, 1, 6, 2), dims=(4, 4, 8, 8)
    ),
    "timm sam": _sam,
    "timm hiera": lambda: timm.create_model("hiera_tiny_224", img_size=64, embed_dim=8),
    "timm rope mixed": _rope_mixed,
    "own forward": lambda: Host(Doubling(Block(), Block())),
    "no stack": lambda: nn.Linear(2, 2),
    "linear layers": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    "one block": lambda: _blocks({}),
    "mixed classes": _mixed_classes,
    "two towers": lambda: nn.ModuleDict({"a": _blocks({}, {"heads": 1}), "b": _blocks({}, {})}),
    "other width": lambda: _blocks({}, {"width": 5}),
    "other heads": lambda: _blocks({}, {}, {"heads": 1}),
    "other window": lambda: _blocks({"window": (2, 2)}, {"window": (0, 0)}),
    "window or none": lambda: _blocks({"window": None}, {"window": 7}),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=list(REFUSED))
def test_refused_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    with refuses(StackError):
        ls.wrap(model)
    assert [type(module) for module in model.modules()] == classes, "a refusal changes nothing"


def test_following_the_hints_works() -> None:
    single = ls.wrap(_blocks({}), blocks="blocks")
    with ls.running(single, (0, 0)):
        assert single(torch.ones(1, 4)).shape == (1, 4)
    towers = nn.ModuleDict({"a": _blocks({}, {"heads": 1}), "b": _blocks({}, {})})
    assert ls.depth_of(ls.wrap(towers, blocks="b.blocks")) == 2
    assert type(towers["a"].blocks) is nn.Sequential, "the other stays"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FAMILIES["timm-vit"].plain, ""),
        (
            FAMILIES["timm-xcit"].plain,
            "'blocks'; cls_attn_blocks (2 ClassAttentionBlock)",
        ),
        (
            lambda: timm.create_model(
                "coat_tiny", img_size=64, embed_dims=(8, 8, 8, 8), num_heads=2, parallel_depth=3
            ),
            "'parallel_blocks'; serial_blocks1 (2 SerialBlock), serial_blocks2",
        ),
    ],
    ids=["one stack", "xcit", "coat"],
)
def test_the_chosen_of_several_stacks_is_reported(
    make: Callable[[], nn.Module], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = find_blocks(make())
    messages = [record.message for record in caplog.records if "several stacks" in record.message]
    assert len(messages) == bool(words)
    assert all(words in message for message in messages)
    caplog.clear()
    find_blocks(make(), path)
    assert not caplog.records, "what was named need not be said"


def test_differences_that_are_allowed() -> None:
    """Bookkeeping numbers and drop-path rates travel with their block."""
    model = _blocks({"index": 0}, {"index": 1})
    assert find_blocks(model)[0] == "blocks"
    beit = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8, drop_path_rate=0.3,
    )  # fmt: skip
    assert ls.depth_of(ls.wrap(transformers.BeitForImageClassification(beit))) == 4
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=4, num_heads=2, drop_path_rate=0.3
    )
    assert ls.depth_of(ls.wrap(vit)) == 4


@pytest.mark.parametrize(
    ("one", "other"), [([7, 7], [14, 14]), ({"size": [7]}, {"size": [8]}), (None, 3), ({1}, {2})]
)
def test_settings_in_collections_count(one: Any, other: Any) -> None:
    assert find_blocks(_blocks({"window": one}, {"window": one}))[0] == "blocks"
    with refuses(StackError, "blocks"):
        find_blocks(_blocks({"window": one}, {"window": other}))


def test_blocks_behind_a_longer_convolutional_stem_are_named() -> None:
    model = timm.create_model("vit_base_r50_s16_224", embed_dim=32, num_heads=2, depth=4)
    with refuses(StackError) as caught:
        ls.wrap(model)
    assert "wrap(model, blocks='blocks')" in caught.value.hint
    assert ls.depth_of(ls.wrap(model, blocks="blocks")) == 4


def test_a_number_that_changes_nothing_is_allowed_by_name() -> None:
    """Only the author of the blocks knows whether their index affects their output."""
    model = FAMILIES["timm-vit"].plain()
    wanted = ls.wrap(FAMILIES["timm-vit"].plain())
    for index, block in enumerate(model.get_submodule("blocks").children()):
        block.index = index
    with refuses(StackError):
        ls.wrap(model)
    with refuses(StackError):
        ls.wrap(model, may_differ=["number"])
    wrapped = ls.wrap(model, may_differ=["index"])
    with torch.no_grad(), ls.running(wrapped, (2, 0, 3, 1)), ls.running(wanted, (2, 0, 3, 1)):
        assert torch.equal(wrapped(images()), wanted(images()))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_path_and_container(family: Any) -> None:
    model = family.plain()
    path, container = find_blocks(model)
    assert path == family.path
    assert container is family.container(model)
    assert find_blocks(model, family.path) == (path, container)


WRONG_PATHS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{path: (FAMILIES["timm-vit"].plain, path) for path in ("head", "nowhere", "blocks.0", "")},
    # One stage of a Swin has blocks of one shape, but every second one shifts its windows.
    "shifted windows": (_swin_timm, "layers.0.blocks"),
    "own forward": (lambda: Host(Doubling(Block(), Block())), "blocks"),
    "rope mixed": (_rope_mixed, "blocks"),
}


@pytest.mark.parametrize(("make", "path"), WRONG_PATHS.values(), ids=list(WRONG_PATHS))
def test_wrong_paths(make: Callable[[], nn.Module], path: str) -> None:
    with refuses(StackError):
        ls.wrap(make(), blocks=path)


def test_the_model_itself_is_the_stack() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), Block())
    state = torch.randn(3, 4)
    wanted = state
    for block in PERMUTED:
        wanted = model[block](wanted)
    with ls.running(ls.wrap(model), PERMUTED):
        assert torch.equal(model(state), wanted)
    assert type(ls.unwrap(model)) is nn.Sequential


def test_features_only_models() -> None:
    """timm's feature extractor around a ViT: the stack is found inside, and follows positions."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=DEPTH, num_heads=2,
        features_only=True,
    ).eval()  # fmt: skip
    plain = [logits_of(feature) for feature in model(images())]
    ls.wrap(model)
    assert find_blocks(ls.unwrap(model))[0] == "model.blocks"
    ls.wrap(model)
    with ls.running(model, range(DEPTH)):
        assert all(torch.equal(a, b) for a, b in zip(model(images()), plain, strict=True))
    with ls.running(model, PERMUTED):
        assert not torch.equal(model(images())[0], plain[0])
