"""Specs, random weights, heads and logits of the three host libraries."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import timm
import torch
import transformers
from saved_models import RECORD, TINY, assert_same_model, outputs

import layershuffle as ls
from common import FAMILIES, global_generators_untouched, redraw
from layershuffle.core.position import backbone_of
from layershuffle.core.tensors import logits_of
from layershuffle.ground.errors import UsageError
from layershuffle.models import num_classes_of
from layershuffle.models.origin import origin_of
from layershuffle.models.spec import parse_spec
from refusals import refuses


def test_settings_are_yaml_scalars_and_lists() -> None:
    spec = parse_spec("timm:vit?img_size=12,20&depth=2&init_values=1e-5&pretrained=no&act=gelu")
    assert (spec.scheme, spec.place) == ("timm", "vit")
    assert spec.settings == {
        "img_size": (12, 20), "depth": 2, "init_values": 1e-5, "pretrained": False, "act": "gelu",
    }  # fmt: skip


def test_a_path_that_exists_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "odd:name?x").mkdir()
    spec = parse_spec(str(tmp_path / "odd:name?x"))
    assert (spec.scheme, spec.place) == ("dir", str(tmp_path / "odd:name?x"))


# What is wrong, and a word that helps: the error names it.
BAD_SPECS = {
    "tim:vit_tiny_patch16_224": "timm",
    "vit_tiny_patch16_224": "timm:vit_tiny_patch16_224",
    "vit_tiny_patch16_224.augreg_in21k?depth=2": "timm:vit_tiny_patch16_224.augreg_in21k?depth=2",
    "google/vit-base-patch16-224": "hf:google/vit-base-patch16-224",
    "vit_tiny": "bundled:digits",
    "gs:bucket": "bundled:digits",
    "timm:": "timm:NAME",
    "timm:vit_tiny_patch16_224?img_size": "img_size=224",
    "timm:vit_tiny_patch16_224?depth=2&depth=3": "depth=3",
    "timm:vit_tiny_patch16_224?img_size=[1": "[1",
    "timm:vit_tiny_patch16_24": "vit_tiny_patch16_224",
    "timm:vit_tiny_patch16_224.agreg_in21k": "agreg_in21k",
    "timm:hf-hub:someone/model": "list_models",
    "timm:vit_tiny_patch16_224?pretrained=perhaps": "perhaps",
    "timm:vit_tiny_patch16_224?pretrained=false&colour=3": "colour",
    "timm:vit_tiny_patch16_224?pretrained=false&img_size=abc": "abc",
    "timm:test_vit?pretrained=false&img_size=100": "img_size=96",
    "timm:vit_tiny_patch16_224?pretrained=false&img_size=7": "img_size=16",
    "timm:vit_tiny_patch16_224?checkpoint_path=x.pth": "checkpoint_path",
    "timm:vit_tiny_patch16_224?pretrained_cfg_overlay=x": "pretrained_cfg_overlay",
    f"timm:vit_tiny_patch16_224?{TINY}&mean=abc": "mean",
    f"timm:vit_tiny_patch16_224?{TINY}&std=0": "std",
    f"timm:vit_tiny_patch16_224?{TINY}&interpolation=cubic": "bicubic",
    "timm:vit_huge_patch14_gap_224": "pretrained=false",
    "hf:someone/model?colour=3": "colour",
    "hf:someone/model?pretrained=0": "true or false",
    "bundled:cats": "digits",
    "bundled:../data": "digits",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_bad_specs_are_usage_errors(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        ls.load(spec)
    assert BAD_SPECS[spec] in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_impossible_head_is_refused_before_anything_is_built() -> None:
    with refuses(UsageError):
        ls.load("timm:vit_tiny_patch16_224", num_classes=0)


@pytest.mark.parametrize("kind", ["timm", "hf"])
def test_random_weights_are_a_function_of_the_seed_alone(kind: str, hf_directory: Path) -> None:
    spec = f"timm:deit_tiny_distilled_patch16_224?{TINY}&num_classes=9"
    if kind == "hf":
        spec = f"hf:{hf_directory}?pretrained=false"
    with global_generators_untouched():
        first = ls.load(spec, seed=3, num_classes=7)
    torch.manual_seed(99)
    second, other = ls.load(spec, seed=3, num_classes=7), ls.load(spec, seed=4, num_classes=7)
    assert_same_model(first, second)
    different = [
        name for name, tensor in first.state_dict().items()
        if tensor.dim() > 1 and not torch.equal(tensor, other.state_dict()[name])
    ]  # fmt: skip
    assert any("head" in name or "classifier" in name for name in different)
    # timm's name, and those of newer and of older releases of transformers.
    assert any(name.endswith(("qkv.weight", "q_proj.weight", "query.weight")) for name in different)


HEADED = ["timm-vit", "timm-deit-distilled", "hf-vit", "hf-deit-teacher", "hf-siglip",
          "hf-timm-wrapper"]  # fmt: skip


@pytest.mark.parametrize("name", HEADED)
def test_another_number_of_classes_gives_a_fresh_head_loudly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = FAMILIES[name].wrapped()
    ls.save(before, tmp_path / "m", record=RECORD)
    with global_generators_untouched():
        model = ls.load(f"dir:{tmp_path / 'm'}", num_classes=11, seed=2)
    assert "5 -> 11 classes" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING
    assert num_classes_of(model) == 11
    assert not model.training
    if name.startswith("hf"):
        assert (model.config.num_labels, model.num_labels, len(model.config.id2label)) == (11,) * 3
    assert outputs(model).shape == (3, 11)
    same = {n for n, t in before.state_dict().items() if torch.equal(t, model.state_dict()[n])}
    changed = before.state_dict().keys() - same
    assert changed
    assert all("head" in n or "classifier" in n for n in changed)
    assert origin_of(backbone_of(model)).record == {}
    # And the model with the new head is whole: it can be saved and read again.
    redraw(model, seed=5)
    ls.save(model, tmp_path / "new")
    caplog.clear()
    again = ls.load(f"dir:{tmp_path / 'new'}", num_classes=11)
    assert torch.equal(outputs(again), outputs(model))
    assert caplog.text == ""


def test_logits_of_every_kind_of_output() -> None:
    plain = torch.tensor([[1.0, 2.0]])
    model = torch.nn.Identity()
    output = transformers.modeling_outputs.ImageClassifierOutput(logits=plain)
    assert logits_of(plain, model) is plain
    assert logits_of(output, model) is plain
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2)
    distilled.set_distilled_training(True)
    assert torch.equal(logits_of((plain, 3 * plain), distilled), 2 * plain)
    for other in ((plain, 3 * plain), {"boxes": plain}):
        with refuses(UsageError):
            logits_of(other, model)
