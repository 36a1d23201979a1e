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
from layershuffle.errors import StackError
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


def _swin_hf() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "window_size": 4}
    config = transformers.SwinConfig(**sizes, depths=[2, 2], num_heads=[1, 2])
    return transformers.SwinForImageClassification(config)


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


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm swin": (_swin_timm, "stand in 2 places (layers.0.blocks, layers.1.blocks)"),
    "torchvision swin": (_swin_torchvision, "SwinTransformerBlock blocks of SwinTransformer stand"),
    "hf swin": (
        _swin_hf,
        "blocks 0 and 1 of ModuleList 'swin.encoder.layers' differ: parameter blocks.0",
    ),
    "timm convnext": (
        lambda: timm.create_model("convnext_atto", depths=(1, 1, 6, 2), dims=(4, 4, 8, 8)),
        "ConvNeXtBlock blocks of ConvNeXt stand in 2 places (stages.2.blocks, stages.3.blocks)",
    ),
    "timm sam": (_sam, "The blocks 0 and 1 of Sequential 'blocks' differ"),
    "timm hiera": (
        lambda: timm.create_model("hiera_tiny_224", img_size=64, embed_dim=8),
        "differ: parameter",
    ),
    "timm rope mixed": (_rope_mixed, "hands learned rotary frequencies to blocks by position"),
    "own forward": (lambda: Host(Doubling(Block(), Block())), "no stack of two or more blocks"),
    "no stack": (lambda: nn.Linear(2, 2), "Linear has no stack of two or more blocks"),
    "linear layers": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "no stack of two or more blocks of one class",
    ),
    "one block": (lambda: _blocks({}), "no stack of two or more blocks"),
    "mixed classes": (_mixed_classes, "no stack of two or more blocks of one class"),
    "other width": (
        lambda: _blocks({}, {"width": 5}),
        "parameter linear.bias is 4 in one and 5 in the other",
    ),
    "other heads": (lambda: _blocks({}, {}, {"heads": 1}), "heads is 2 in one and 1 in the other"),
    "other window": (
        lambda: _blocks({"window": (2, 2)}, {"window": (0, 0)}),
        "window is (2, 2) in one and (0, 0) in the other",
    ),
    "window or none": (
        lambda: _blocks({"window": None}, {"window": 7}),
        "window is None in one and 7 in the other",
    ),
}


@pytest.mark.parametrize(("make", "phrase"), REFUSED.values(), ids=list(REFUSED))
def test_refused_with_the_reason(make: Callable[[], nn.Module], phrase: str) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(StackError) as caught:
        ls.wrap(model)
    assert phrase in str(caught.value)
    assert "Next: " in str(caught.value)
    assert [type(module) for module in model.modules()] == classes, "a refusal changes nothing"


HINTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one block": (lambda: _blocks({}), "wrap(model, blocks='blocks') takes it as it is"),
    "own forward": (lambda: Host(Doubling(Block(), Block())), "make it an nn.ModuleList"),
    "mixed classes": (_mixed_classes, "give all of them one class"),
    "nothing": (lambda: nn.Linear(2, 2), "into one nn.ModuleList"),
    "towers": (
        lambda: nn.ModuleDict({"a": _blocks({}, {"heads": 1}), "b": _blocks({}, {})}),
        "wrap(model, blocks='b.blocks')",
    ),
}


@pytest.mark.parametrize(("make", "hint"), HINTS.values(), ids=list(HINTS))
def test_hints_lead_somewhere(make: Callable[[], nn.Module], hint: str) -> None:
    with pytest.raises(StackError) as caught:
        ls.wrap(make())
    assert hint in caught.value.hint


def test_following_the_hints_works() -> None:
    single = ls.wrap(_blocks({}), blocks="blocks")
    with ls.running(single, (0, 0)):
        assert single(torch.ones(1, 4)).shape == (1, 4)
    towers = nn.ModuleDict({"a": _blocks({}, {"heads": 1}), "b": _blocks({}, {})})
    assert ls.depth_of(ls.wrap(towers, blocks="b.blocks")) == 2
    assert "wrap(model" not in str(_error(_swin_timm())), "no stage of a Swin could be named"


def _error(model: nn.Module) -> StackError:
    with pytest.raises(StackError) as caught:
        ls.wrap(model)
    return caught.value


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


def test_shifted_windows_are_refused_by_path_too() -> None:
    """One stage of a Swin has blocks of one shape, but every second one shifts its windows."""
    with refuses(StackError):
        ls.wrap(_swin_timm(), blocks="layers.0.blocks")


def test_difference_further_down_is_named() -> None:
    with refuses(StackError):
        ls.wrap(_blocks({}, {}, {"heads": 1}))


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


WRONG_PATHS = {
    "head": "'head' is a Linear, not a Sequential or ModuleList of blocks",
    "nowhere": "VisionTransformer has no module 'nowhere'. Next: stacks found: blocks",
    "blocks.0": "'blocks.0' is a Block, not a Sequential",
    "blocks.9": "has no module 'blocks.9'",
    "": "'' is a VisionTransformer, not a Sequential",
}


@pytest.mark.parametrize(("path", "phrase"), WRONG_PATHS.items(), ids=repr)
def test_wrong_explicit_path(path: str, phrase: str) -> None:
    with pytest.raises(StackError) as caught:
        ls.wrap(FAMILIES["timm-vit"].plain(), blocks=path)
    assert phrase in str(caught.value)


def test_own_forward_is_refused_by_path_too() -> None:
    with refuses(StackError):
        ls.wrap(Host(Doubling(Block(), Block())), blocks="blocks")


def test_rope_mixed_is_refused_by_path_too() -> None:
    with refuses(StackError):
        ls.wrap(_rope_mixed(), blocks="blocks")


def test_two_towers_by_path() -> None:
    """Two stacks of one class are ambiguous; a named one runs in any order, the other stays."""
    towers = nn.ModuleDict({"a": _blocks({}, {}, {}), "b": _blocks({}, {}, {})})
    with refuses(StackError):
        ls.wrap(towers)
    ls.wrap(towers, blocks="b.blocks")
    assert ls.depth_of(towers) == 3
    assert type(towers["a"].blocks) is nn.Sequential
    with refuses(StackError):
        ls.wrap(towers, blocks="a.blocks")


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
