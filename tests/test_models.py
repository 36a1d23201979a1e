"""Specs, loading, saving: what comes back is what was saved, also without this package."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
import transformers
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

import layershuffle as ls
from common import CLASSES, FAMILIES, global_generators_untouched, images, redraw
from layershuffle.data.view import ImageView
from layershuffle.errors import LayerShuffleError, ModelFileError, StackError, UsageError
from layershuffle.models import (
    host_of,
    image_view,
    logits_of,
    num_classes_of,
    read_record,
)
from layershuffle.models.origin import origin_of
from layershuffle.models.spec import parse_spec
from layershuffle.policies import Shuffled, policy_from_json, policy_to_json
from layershuffle.stack import BlockStack

TINY = "pretrained=false&depth=2&embed_dim=32&num_heads=2&img_size=32&patch_size=8"
DIGITS = (
    "timm:vit_tiny_patch16_224?pretrained=false&img_size=12,20&patch_size=4&in_chans=1"
    "&embed_dim=32&depth=3&num_heads=2&mlp_ratio=2&num_classes=100&mean=0.2&std=0.35"
)
# A mixer built past timm's factory has no name that timm could build it from.
SAVED = [name for name in FAMILIES if name != "timm-mixer"]
RECORD = {
    "method": "layershuffle",
    "policy": json.loads(json.dumps(policy_to_json(Shuffled(depth=(3, None))))),
    "settings": {"lr": 1e-3},
    "scores": {
        "sequential": {"top1": 81.9, "cross_entropy": 0.5},
        "arbitrary": {"top1": 74.5, "cross_entropy": 0.9},
    },
    "provenance": {"data": "digit-pairs", "base": "bundled:digits"},
}


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model.eval()(images()))


def assert_same_model(one: nn.Module, two: nn.Module) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    assert list(ours) == list(theirs)
    assert [n for n, t in ours.items() if t.dtype != theirs[n].dtype] == []
    assert [n for n, t in ours.items() if not torch.equal(t, theirs[n])] == []


def positioned(model: nn.Module) -> ls.PositionedModel:
    parts = ls.add_position(
        model,
        encoding=ls.EncodingForm(features=4),
        prediction=ls.PredictionForm(pooling="mean", loss="mean"),
    )
    for part in (parts.encoding, parts.prediction):
        redraw(part, seed=3)
    return parts


# --- specs ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tim:vit_tiny_patch16_224", "did you mean timm?"),
        ("vit_tiny_patch16_224", "neither a path that exists nor a model spec"),
        ("gs:bucket", "The forms are bundled:digits"),
        ("timm:", "names no model"),
        ("timm:vit_tiny_patch16_224?img_size", "is not one setting"),
        ("timm:vit_tiny_patch16_224?depth=2&depth=3", "is not one setting"),
        ("timm:vit_tiny_patch16_224?img_size=[1", "is not a value"),
        ("timm:vit_tiny_patch16_24", "did you mean vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.agreg_in21k", "did you mean vit_tiny_patch16_224.augreg_in21k"),
        ("timm:hf-hub:someone/model", "There is no timm model"),
        ("timm:vit_tiny_patch16_224?pretrained=perhaps", "true or false"),
        ("timm:vit_tiny_patch16_224?pretrained=false&colour=3", "unexpected keyword argument"),
        ("timm:vit_tiny_patch16_224?pretrained=false&img_size=abc", "cannot build"),
        ("timm:vit_tiny_patch16_224?checkpoint_path=x.pth", "'checkpoint_path' is not an argument"),
        ("timm:vit_tiny_patch16_224?pretrained_cfg_overlay=x", "is not an argument of a model"),
        (f"timm:vit_tiny_patch16_224?{TINY}&mean=abc", "cannot be fitted"),
        (f"timm:vit_tiny_patch16_224?{TINY}&std=0", "must be above 0"),
        (f"timm:vit_tiny_patch16_224?{TINY}&interpolation=cubic", "interpolation is one of"),
        ("timm:gcvit_xxtiny", "no weights of 'gcvit_xxtiny' in safetensors"),
        ("hf:someone/model?colour=3", "no setting 'colour'"),
        ("torchvision:vit_b_17", "did you mean vit_b_16"),
        ("torchvision:vit_b_16?weights=BEST", "DEFAULT, IMAGENET1K_V1"),
        ("torchvision:vit_b_16?weights=none&image_size=15", "indivisible"),
        ("bundled:cats", "There is no bundled model 'cats'"),
        ("bundled:../data", "There is no bundled model"),
    ],
)
def test_bad_specs_are_usage_errors(spec: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ls.load(spec)
    assert said in str(caught.value)


def test_swin_is_refused_with_the_reason() -> None:
    with pytest.raises(StackError, match="stand in 4 places"):
        ls.load(
            "timm:swin_tiny_patch4_window7_224?pretrained=false&embed_dim=8&depths=2,2,6,2"
            "&num_heads=1,1,1,1"
        )


def test_an_impossible_head_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UsageError, match="at least one class, not 0"):
        ls.load("timm:vit_tiny_patch16_224", num_classes=0)


# --- random weights -------------------------------------------------------------------------------


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    """A stock transformers directory of a ViT with 5 classes."""
    FAMILIES["hf-vit"].plain().save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


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
    assert any("attn.qkv.weight" in name or "q_proj.weight" in name for name in different)


def test_torchvision_by_name_with_random_weights() -> None:
    with global_generators_untouched():
        model = ls.load("torchvision:vit_b_32?weights=none&image_size=64", num_classes=3)
    assert isinstance(model.get_submodule("encoder.layers"), BlockStack)
    assert (ls.depth_of(model), num_classes_of(model)) == (12, 3)
    assert image_view(model).size == (64, 64)


def test_loaded_models_are_wrapped_and_in_eval_mode() -> None:
    model = ls.load(f"timm:vit_tiny_patch16_224?{TINY}")
    assert not model.training
    assert ls.depth_of(model) == 2


# --- heads ----------------------------------------------------------------------------------------

HEADED = ["timm-vit", "timm-deit-distilled", "hf-vit", "hf-deit-teacher", "hf-siglip",
          "hf-timm-wrapper", "torchvision-vit"]  # fmt: skip


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
    assert outputs(model).shape == (3, 11)
    same = {n for n, t in before.state_dict().items() if torch.equal(t, model.state_dict()[n])}
    changed = before.state_dict().keys() - same
    assert changed
    assert all("head" in n or "classifier" in n for n in changed)
    assert origin_of(host_of(model)).record == {}
    # And the model with the new head is whole: it can be saved and read again.
    redraw(model, seed=5)
    ls.save(model, tmp_path / "new")
    again = ls.load(f"dir:{tmp_path / 'new'}", num_classes=11)
    assert torch.equal(outputs(again), outputs(model))


def test_transformers_heads_keep_config_and_labels_consistent(hf_directory: Path) -> None:
    model: Any = ls.load(f"hf:{hf_directory}", num_classes=3)
    assert (model.config.num_labels, model.num_labels, len(model.config.id2label)) == (3, 3, 3)


def test_the_same_number_of_classes_keeps_the_head(
    hf_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ls.load(f"hf:{hf_directory}", num_classes=CLASSES)
    assert_same_model(model, FAMILIES["hf-vit"].wrapped())
    assert caplog.text == ""


def test_the_warning_is_seen_without_any_logging_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    ls.load(f"timm:vit_tiny_patch16_224?{TINY}", num_classes=3)
    assert "1000 -> 3 classes" in capsys.readouterr().err


# --- the round trip -------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family with position parts, saved under its name."""
    root = tmp_path_factory.mktemp("saved")
    for name in SAVED:
        ls.save(positioned(FAMILIES[name].wrapped()), root / name, record=RECORD)
    return root


@pytest.mark.parametrize("name", SAVED)
def test_the_round_trip_is_bit_exact_position_parts_included(name: str, saved: Path) -> None:
    model, again = positioned(FAMILIES[name].wrapped()), ls.load(f"dir:{saved / name}")
    assert isinstance(again, ls.PositionedModel)
    assert_same_model(again, model)
    assert (again.encoding.form, again.prediction.form) == (
        model.encoding.form, model.prediction.form,
    )  # fmt: skip
    assert all(parameter.requires_grad for parameter in again.encoding.parameters())
    with ls.running(model.host, (2, 0, 3, 1)), ls.running(again.host, (2, 0, 3, 1)):
        assert torch.equal(outputs(again), outputs(model))
    assert image_view(again) == image_view(model)
    assert num_classes_of(again) == CLASSES


STOCK = """
import json, sys
from pathlib import Path
import safetensors.torch, timm, torch, torchvision
from transformers import AutoModelForImageClassification

torch.set_num_threads(1)
root = Path(sys.argv[1])
x = safetensors.torch.load_file(root / "images.safetensors")["x"]

def load(name, place):
    if name.startswith("timm"):
        return timm.create_model(f"local-dir:{place}", pretrained=True).eval()
    if name.startswith("hf"):
        return AutoModelForImageClassification.from_pretrained(place).eval()
    model = torchvision.models.VisionTransformer(**json.load(open(place / "config.json"))["kwargs"])
    model.load_state_dict(safetensors.torch.load_file(place / "model.safetensors"))
    return model.eval()

found = {}
for place in sorted(p for p in root.iterdir() if p.is_dir()):
    with torch.no_grad():
        out = load(place.name, place)(x)
    found[place.name] = getattr(out, "logits", out).contiguous()
assert not [m for m in sys.modules if m.startswith("layershuffle")]
safetensors.torch.save_file(found, sys.argv[2])
"""


@pytest.fixture(scope="module")
def stock_outputs(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Logits of every saved family, computed by a process that never heard of this package."""
    out = tmp_path_factory.mktemp("stock") / "logits.safetensors"
    save_file({"x": images()}, saved / "images.safetensors")
    subprocess.run([sys.executable, "-c", STOCK, saved, out], check=True, env=environment())
    return load_file(out)


@pytest.mark.parametrize("name", SAVED)
def test_stock_libraries_load_the_backbone_without_us(
    name: str, stock_outputs: dict[str, torch.Tensor]
) -> None:
    assert torch.equal(stock_outputs[name], outputs(FAMILIES[name].plain()))


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "torchvision-vit"])
def test_saving_changes_nothing_in_the_model(name: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[name].wrapped().train()
    before, config = copy.deepcopy(model), str(getattr(model, "config", ""))
    cfg = copy.deepcopy(getattr(model, "pretrained_cfg", None))
    ls.save(model, tmp_path / "m")
    assert_same_model(model, before)
    assert model.training
    assert vars(model).keys() == vars(before).keys()
    assert getattr(model, "pretrained_cfg", None) == cfg
    assert str(getattr(model, "config", "")) == config
    assert type(FAMILIES[name].container(model)) is BlockStack


@pytest.mark.parametrize("name", ["timm-vit", "torchvision-vit", "hf-vit"])
def test_half_precision_and_strided_weights_survive(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].wrapped().to(torch.float16).to(memory_format=torch.channels_last)
    ls.save(model, tmp_path / "m")
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_models_that_were_never_wrapped_are_saved_too(tmp_path: Path) -> None:
    model = FAMILIES["timm-vit"].plain()
    ls.save(model, tmp_path / "m")
    assert not [m for m in model.modules() if isinstance(m, BlockStack)]
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_a_training_run_s_directory_stands_for_the_model_in_it(tmp_path: Path) -> None:
    model = FAMILIES["timm-vit"].wrapped()
    ls.save(model, tmp_path / "run" / "model")
    assert_same_model(ls.load(str(tmp_path / "run")), model)
    assert_same_model(ls.load(f"dir:{tmp_path / 'run'}"), model)


def test_saving_replaces_an_older_model(tmp_path: Path) -> None:
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    newer = redraw(FAMILIES["hf-vit"].wrapped(), seed=9)
    ls.save(newer, tmp_path / "m")
    assert_same_model(ls.load(str(tmp_path / "m")), newer)


def test_saving_does_not_delete_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = FAMILIES["timm-vit"].wrapped()
    with pytest.raises(UsageError, match="'colour'"):
        ls.save(model, tmp_path / "m", record={"colour": 1})
    with pytest.raises(UsageError, match="cannot build"):
        ls.save(model, tmp_path / "m", model_args={"colour": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("layershuffle.models.files.save_file", full)
    with pytest.raises(LayerShuffleError, match="The disk is full"):
        ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# --- what timm cannot rebuild ---------------------------------------------------------------------


def test_timm_arguments_are_found_by_comparison_where_timm_forgot_them(tmp_path: Path) -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    del model._model_args  # as timm before 1.0.31 leaves it
    ls.save(model, tmp_path / "m")
    assert read_record(tmp_path / "m")["model_args"]["img_size"] == [32, 32]
    assert_same_model(ls.load(str(tmp_path / "m")), model)


@pytest.mark.parametrize("hidden", ["depth", "num_heads"])
def test_a_timm_model_that_its_arguments_do_not_describe_is_refused(
    hidden: str, tmp_path: Path
) -> None:
    args = {"depth": 2, "embed_dim": 48, "num_heads": 2, "img_size": 32}
    model: Any = timm.create_model("vit_tiny_patch16_224", **args)
    model._model_args = {k: v for k, v in args.items() if k != hidden}
    with pytest.raises(UsageError, match=r"model_args=\{"):
        ls.save(model, tmp_path / "m")
    ls.save(model, tmp_path / "m", model_args={hidden: args[hidden]})
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_a_timm_model_built_past_the_factory_needs_its_name(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=4)
    with pytest.raises(UsageError, match="architecture"):
        ls.save(model, tmp_path / "m")
    ls.save(model, tmp_path / "m", model_args={"architecture": "vit_tiny_patch16_224", **sizes})
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_arguments_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, norm_layer=nn.LayerNorm)
    with pytest.raises(UsageError, match="no file can hold"):
        ls.save(model, tmp_path / "m")


def test_a_model_of_no_known_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Linear is not a model of timm"):
        ls.save(nn.Linear(2, 2), tmp_path / "m")


# --- records and cards ----------------------------------------------------------------------------


def test_the_record_is_kept_and_the_policy_comes_back(saved: Path) -> None:
    record = read_record(saved / "timm-vit")
    assert {key: record[key] for key in RECORD} == RECORD
    assert policy_from_json(record["policy"]) == Shuffled(depth=(3, None))
    assert (record["library"], record["name"]) == ("timm", "vit_tiny_patch16_224")
    assert (record["depth"], record["blocks"], record["num_classes"]) == (4, "blocks", CLASSES)
    assert record["position"]["encoding"]["features"] == 4


def test_saving_a_loaded_model_keeps_its_record_but_not_its_scores(
    saved: Path, tmp_path: Path
) -> None:
    model = ls.load(f"dir:{saved / 'timm-vit'}")
    ls.save(model, tmp_path / "m")
    record = read_record(tmp_path / "m")
    assert {k: record[k] for k in RECORD if k != "scores"} == {
        k: v for k, v in RECORD.items() if k != "scores"
    }
    assert "scores" not in record
    ls.save(model, tmp_path / "bare", record={})
    assert not RECORD.keys() & read_record(tmp_path / "bare").keys()


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
def test_a_record_must_be_json(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m", record={"settings": {"x": value}})


def front_matter(directory: Path) -> dict[str, Any]:
    return yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])


def test_the_card_has_separate_scores_and_invents_nothing(saved: Path, tmp_path: Path) -> None:
    front = front_matter(saved / "timm-vit")
    assert (front["library_name"], front["tags"]) == ("timm", ["layershuffle"])
    assert front["pipeline_tag"] == "image-classification"
    assert not {"license", "base_model"} & front.keys()
    values = [result["metrics"][0]["value"] for result in front["model-index"][0]["results"]]
    names = [result["task"]["name"] for result in front["model-index"][0]["results"]]
    assert dict(zip(names, values, strict=True)) == {
        "sequential order": 81.9, "arbitrary order": 74.5,
    }  # fmt: skip
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m", record={"method": "baseline"})
    assert "model-index" not in front_matter(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("timm-vit", 'timm.create_model("local-dir:timm-vit", pretrained=True)'),
        ("hf-vit", '.from_pretrained("hf-vit")'),
        ("torchvision-vit", 'load_file("torchvision-vit/model.safetensors")'),
    ],
)
def test_the_card_says_how_to_load_with_and_without_us(name: str, stock: str, saved: Path) -> None:
    card = (saved / name / "README.md").read_text()
    assert f'ls.load("dir:{name}")' in card
    assert stock in card
    assert "layershuffle.safetensors" in card


# --- how models want their images -----------------------------------------------------------------


def test_the_digits_form_of_a_timm_model_knows_its_images(tmp_path: Path) -> None:
    model = ls.load(DIGITS)
    view = ImageView(
        channels=1, height=12, width=20, mean=(0.2,), std=(0.35,),
        interpolation="bicubic", crop_pct=0.9,
    )  # fmt: skip
    assert image_view(model) == view
    ls.save(model, tmp_path / "m")
    assert image_view(ls.load(str(tmp_path / "m"))) == view
    stock = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    config = timm.data.resolve_model_data_config(stock)
    assert (config["input_size"], config["mean"], config["std"]) == ((1, 12, 20), [0.2], [0.35])
    assert stock.num_classes == 100


def test_a_saved_view_wins(tmp_path: Path) -> None:
    ls.save(FAMILIES["hf-vit"].wrapped(), tmp_path / "m")
    facts = json.loads((tmp_path / "m" / "layershuffle.json").read_text())
    facts["image_view"]["mean"] = [0.1, 0.2, 0.3]
    (tmp_path / "m" / "layershuffle.json").write_text(json.dumps(facts))
    model = ls.load(str(tmp_path / "m"))
    assert image_view(model).mean == (0.1, 0.2, 0.3)
    assert image_view(positioned(model)).mean == (0.1, 0.2, 0.3)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("name", "normalisation", "interpolation", "crop_pct"),
    [
        ("timm-vit", HALF, "bicubic", 0.9),
        ("timm-deit", IMAGENET, "bicubic", 0.9),
        ("hf-vit", HALF, "bilinear", 1.0),
        ("hf-deit", IMAGENET, "bicubic", 0.875),
        ("hf-beit", HALF, "bicubic", 1.0),
        ("hf-dinov2-registers", IMAGENET, "bicubic", 0.875),
        ("hf-siglip", HALF, "bicubic", 1.0),
        ("hf-timm-wrapper", HALF, "bicubic", 0.9),
        ("torchvision-vit", IMAGENET, "bilinear", 0.875),
    ],
)
def test_views_without_a_processor_file(
    name: str, normalisation: Any, interpolation: str, crop_pct: float
) -> None:
    view = image_view(FAMILIES[name].wrapped())
    assert (view.channels, view.size) == (3, (32, 32))
    assert (view.mean, view.std) == normalisation
    assert (view.interpolation, view.crop_pct) == (interpolation, pytest.approx(crop_pct))


@pytest.mark.parametrize(
    ("settings", "size", "crop_pct"),
    [
        ({"size": {"height": 24, "width": 40}}, (24, 40), 1.0),
        ({"size": 48}, (48, 48), 1.0),
        ({"size": [24, 40]}, (24, 40), 1.0),
        ({"size": {"shortest_edge": 40}}, (40, 40), 1.0),
        (
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 30, "width": 30},
             "do_center_crop": True},
            (30, 30), 0.75,
        ),
        ({"size": {"height": 24, "width": 40}, "do_resize": False}, (32, 32), 1.0),
    ],
)  # fmt: skip
def test_the_processor_s_file_decides(
    settings: dict[str, Any], size: tuple[int, int], crop_pct: float, hf_directory: Path
) -> None:
    file = hf_directory / "preprocessor_config.json"
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
    file.write_text(json.dumps(settings))
    view = image_view(ls.load(f"hf:{hf_directory}"))
    assert (view.size, view.crop_pct) == (size, crop_pct)
    assert (view.mean, view.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert view.interpolation == "bicubic"


def test_processors_that_do_not_rescale_or_normalise(hf_directory: Path) -> None:
    file = hf_directory / "preprocessor_config.json"
    file.write_text(json.dumps({"do_rescale": False, "image_mean": [51, 51, 51], "image_std": 255}))
    view = image_view(ls.load(f"hf:{hf_directory}"))
    assert view.mean == pytest.approx((0.2, 0.2, 0.2))
    assert view.std == pytest.approx((1.0, 1.0, 1.0))
    file.write_text(json.dumps({"do_normalize": False}))
    view = image_view(ls.load(f"hf:{hf_directory}"))
    assert (view.mean, view.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_the_processor_travels_with_the_model(hf_directory: Path, tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], size=32)
    processor.save_pretrained(hf_directory)
    ls.save(ls.load(f"hf:{hf_directory}"), tmp_path / "m")
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "m")
    assert list(again.image_mean) == [0.1, 0.2, 0.3]
    assert image_view(ls.load(str(tmp_path / "m"))).mean == (0.1, 0.2, 0.3)


# --- logits ---------------------------------------------------------------------------------------


def test_logits_of_every_kind_of_output() -> None:
    plain = torch.tensor([[1.0, 2.0]])
    assert logits_of(plain) is plain
    assert logits_of(transformers.modeling_outputs.ImageClassifierOutput(logits=plain)) is plain
    assert torch.equal(logits_of((plain, 3 * plain)), 2 * plain)
    with pytest.raises(UsageError, match="no logits"):
        logits_of({"boxes": plain})


def test_the_mean_of_two_heads_is_what_timm_computes_at_evaluation() -> None:
    model = FAMILIES["timm-deit-distilled-training"].wrapped()
    expected = outputs(model)
    with torch.no_grad():
        both = model.train()(images())
    assert isinstance(both, tuple)
    assert torch.allclose(logits_of(both), expected, atol=1e-6)


# --- weights from the hub, offline ----------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub libraries, which are offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(hub: Path, repository: str) -> Path:
    """An empty snapshot of `repository` in the cache."""
    root = hub / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    place = root / "snapshots" / ("0" * 40)
    place.mkdir(parents=True)
    return place


TIMM_HUB = "timm/test_vit.r160_in1k"


@pytest.fixture
def timm_weights(hub: Path) -> dict[str, torch.Tensor]:
    """Weights of timm's smallest vision transformer, in the cache."""
    torch.manual_seed(0)
    model = redraw(timm.create_model("test_vit"), seed=1)
    save_file(model.state_dict(), snapshot(hub, TIMM_HUB) / "model.safetensors")
    return model.state_dict()


def test_timm_weights_come_from_the_cache(
    timm_weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with global_generators_untouched():
        model = ls.load("timm:test_vit")
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, timm_weights[n])] == []
    ls.save(model, tmp_path / "m")
    assert read_record(tmp_path / "m")["base_model"] == TIMM_HUB
    assert front_matter(tmp_path / "m")["base_model"] == TIMM_HUB


@pytest.mark.parametrize("way", ["argument", "spec"])
def test_a_trained_timm_model_loses_its_head_loudly(
    way: str, timm_weights: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = (
        ls.load("timm:test_vit", num_classes=7)
        if way == "argument"
        else ls.load("timm:test_vit?num_classes=7")
    )
    assert "1000 -> 7 classes" in caplog.text
    kept = [n for n, t in model.state_dict().items() if torch.equal(t, timm_weights[n])]
    assert set(timm_weights) - set(kept) == {"head.weight", "head.bias"}


@pytest.mark.usefixtures("timm_weights")
def test_weights_that_do_not_fit_the_arguments_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Missing key"):
        ls.load("timm:test_vit?depth=8")


class Sentinel:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def poison(path: Path, sentinel: Path) -> None:
    with path.open("wb") as file:
        pickle.dump({"weight": Sentinel(sentinel)}, file)


def test_the_sentinel_would_notice(tmp_path: Path) -> None:
    poison(tmp_path / "x.bin", tmp_path / "ran")
    pickle.loads((tmp_path / "x.bin").read_bytes())
    assert (tmp_path / "ran").exists()


def test_timm_never_falls_back_to_the_pickle_in_the_cache(hub: Path, tmp_path: Path) -> None:
    poison(snapshot(hub, TIMM_HUB) / "pytorch_model.bin", tmp_path / "ran")
    with pytest.raises(ModelFileError, match=r"hf download timm/test_vit\.r160_in1k"):
        ls.load("timm:test_vit")
    assert not (tmp_path / "ran").exists()


def test_a_hub_model_with_a_pickle_alone_is_refused(hub: Path, tmp_path: Path) -> None:
    place = snapshot(hub, "someone/model")
    FAMILIES["hf-vit"].plain().config.save_pretrained(place)
    poison(place / "pytorch_model.bin", tmp_path / "ran")
    with pytest.raises(ModelFileError, match="a pickle"):
        ls.load("hf:someone/model")
    assert not (tmp_path / "ran").exists()


def test_a_hub_model_in_the_cache_is_read_like_a_directory(hub: Path, tmp_path: Path) -> None:
    FAMILIES["hf-dinov2"].plain().save_pretrained(snapshot(hub, "someone/model"))
    model = ls.load("hf:someone/model")
    assert_same_model(model, FAMILIES["hf-dinov2"].wrapped())
    ls.save(model, tmp_path / "m")
    assert read_record(tmp_path / "m")["base_model"] == "someone/model"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("spec", "next_step"),
    [
        ("timm:test_vit", "hf download timm/test_vit.r160_in1k model.safetensors"),
        ("timm:test_vit", "timm:test_vit?pretrained=false for random weights"),
        ("hf:google/vit-base-patch16-224", "hf download google/vit-base-patch16-224"),
    ],
)
def test_missing_weights_offline_say_what_to_type(spec: str, next_step: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        ls.load(spec)
    text = str(caught.value)
    assert "HF_HUB_OFFLINE" in text
    assert next_step in text
    assert "\n" not in text


def test_a_network_that_is_down_says_so(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def down(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("layershuffle.models.timm_host.hf_hub_download", down)
    with pytest.raises(ModelFileError, match="cannot be reached over the network"):
        ls.load("timm:test_vit")


def test_torchvision_weights_are_read_with_the_hash_checked_and_tensors_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def no_network(url: str, **kwargs: Any) -> None:
        asked.update(kwargs)
        raise URLError("no route")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", no_network)
    with pytest.raises(ModelFileError, match=r"torchvision:vit_b_32\?weights=none"):
        ls.load("torchvision:vit_b_32")
    assert asked["weights_only"] is True
    assert asked["check_hash"] is True


# --- the bundled model ----------------------------------------------------------------------------


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same name whose assets are empty."""
    monkeypatch.setattr("layershuffle.models.store.resources.files", lambda _: tmp_path)
    (tmp_path / "assets").mkdir()
    return tmp_path / "assets"


def test_the_bundled_model_is_a_saved_directory_in_the_package(assets: Path) -> None:
    model = ls.load(DIGITS, seed=1)
    ls.save(model, assets / "digits")
    assert_same_model(ls.load("bundled:digits"), model)


@pytest.mark.usefixtures("assets")
def test_a_bundled_model_that_is_absent_says_how_to_make_it() -> None:
    with pytest.raises(ModelFileError, match="layershuffle pretrain"):
        ls.load("bundled:digits")
