"""Saved models load bit for bit, also without this package: names, card, fewer and tied blocks."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from saved_models import (
    CONFIG,
    LIBRARIES,
    RECORD,
    SAVED,
    assert_same_model,
    edit,
    front_matter,
    outputs,
    positioned,
    refused,
)
from torch import nn

import layershuffle as ls
from common import CLASSES, DEPTH, DIGITS_VIT, FAMILIES, images, redraw
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import BlockStack, blocks_of
from layershuffle.core.tying import middle_blocks, places_tied, tie
from layershuffle.ground.errors import LayerShuffleError, ModelFileError, UsageError
from layershuffle.merging.compatibility import check_compatible
from layershuffle.models import (
    class_names_of,
    image_view,
    num_classes_of,
    read_record,
    replace_head,
    set_class_names,
    truncate,
)
from layershuffle.models.files import check_finite, weights_digest
from refusals import refuses


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
    with ls.running(model, (2, 0, 3, 1)), ls.running(again, (2, 0, 3, 1)):
        assert torch.equal(outputs(again), outputs(model))
    assert image_view(again) == image_view(model)
    assert num_classes_of(again) == CLASSES


STOCK = """
import sys
from pathlib import Path
import safetensors.torch, timm, torch
from transformers import AutoModelForImageClassification

torch.set_num_threads(1)
root = Path(sys.argv[1])
x = safetensors.torch.load_file(root / "images.safetensors")["x"]

def load(name, place):
    if name.startswith("timm"):
        return timm.create_model(f"local-dir:{place}", pretrained=True).eval()
    return AutoModelForImageClassification.from_pretrained(place).eval()

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
    """Logits of every saved family, from a process without this package."""
    out = tmp_path_factory.mktemp("stock") / "logits.safetensors"
    save_file({"x": images()}, saved / "images.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", STOCK, saved, out], check=True, env=environment)
    return load_file(out)


@pytest.mark.parametrize("name", SAVED)
def test_stock_libraries_load_the_backbone_without_this_package(
    name: str, stock_outputs: dict[str, torch.Tensor]
) -> None:
    assert torch.equal(stock_outputs[name], outputs(FAMILIES[name].plain()))


@pytest.mark.parametrize("name", LIBRARIES)
def test_saving_changes_nothing_in_the_model(name: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[name].wrapped().train()
    set_class_names(model, NAMES)
    before, config = copy.deepcopy(model), str(getattr(model, "config", ""))
    cfg = copy.deepcopy(getattr(model, "pretrained_cfg", None))
    ls.save(model, tmp_path / "m")
    assert_same_model(model, before)
    assert model.training
    assert vars(model).keys() == vars(before).keys()
    assert getattr(model, "pretrained_cfg", None) == cfg
    assert str(getattr(model, "config", "")) == config
    assert type(FAMILIES[name].container(model)) is BlockStack


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_model_is_stored_in_its_dtype_and_loaded_in_float32(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].wrapped().to(torch.float16).to(memory_format=torch.channels_last)
    ls.save(positioned(model).to(torch.float16), tmp_path / "m")
    for file in ("model.safetensors", "layershuffle.safetensors"):
        stored = load_file(tmp_path / "m" / file).values()
        assert {t.dtype for t in stored if t.is_floating_point()} == {torch.float16}
    again = ls.load(tmp_path / "m")
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert_same_model(backbone_of(again), model.float())


# Settings that no shape shows: each gives other answers.
def other_epsilon(model: nn.Module) -> None:
    norm = next(part for part in model.modules() if isinstance(part, nn.LayerNorm))
    norm.eps = 0.3


def other_activation(model: nn.Module) -> None:
    places = [
        (module, name)
        for module in model.modules()
        for name, part in module.named_children()
        if "GELU" in type(part).__name__
    ]
    for module, name in places:
        setattr(module, name, nn.ReLU())


def other_heads(model: nn.Module) -> None:
    for part in model.modules():
        for key in ("num_heads", "num_attention_heads", "head_dim", "attention_head_size"):
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, 1 if key.startswith("num") else 32)


HIDDEN = [
    (change, name)
    for change in (other_epsilon, other_activation, other_heads)
    for name in ("timm-vit", "hf-vit", "hf-timm-wrapper")
]


@pytest.mark.parametrize(("change", "name"), HIDDEN)
def test_settings_that_the_files_do_not_have_are_refused(
    change: Callable[[nn.Module], None], name: str, tmp_path: Path
) -> None:
    """Otherwise the saved model would load as another one."""
    model = FAMILIES[name].wrapped()
    change(model)
    assert not torch.equal(outputs(model), outputs(FAMILIES[name].wrapped()))
    with pytest.raises(UsageError):
        ls.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_that_are_not_finite_are_not_saved(value: float, name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].wrapped()
    parameter = list(model.parameters())[5]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    with refuses(ModelFileError):
        ls.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_mask_may_be_infinite_and_no_buffer_nan() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    check_finite(model)
    model.register_buffer("mean", torch.tensor([0.0, float("nan")]))
    with refuses(ModelFileError):
        check_finite(model)


SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
WITHOUT_CLASSES = {
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=0),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES)),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SIZES)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES)),
}


@pytest.mark.parametrize("name", WITHOUT_CLASSES)
def test_models_without_a_classifier_give_the_same_features_again(
    name: str, tmp_path: Path
) -> None:
    model = ls.wrap(WITHOUT_CLASSES[name]().eval())
    ls.save(model, tmp_path / "m")
    again = ls.load(f"dir:{tmp_path / 'm'}")
    assert type(again) is type(model)
    assert image_view(again) == image_view(model)
    assert name != "clip" or image_view(model).mean == (0.48145466, 0.4578275, 0.40821073)
    assert (num_classes_of(again), read_record(tmp_path / "m")["num_classes"]) == (0, 0)
    with ls.running(model, (2, 0, 1)), ls.running(again, (2, 0, 1)), torch.no_grad():
        features, others = (
            getattr(output, "last_hidden_state", output)
            for output in (model(images()), again(images()))
        )
    assert torch.equal(features, others)
    assert front_matter(tmp_path / "m")["pipeline_tag"] == "image-feature-extraction"
    # A fresh head may be given to what timm built; transformers has another class for it.
    if name == "timm":
        assert num_classes_of(ls.load(f"dir:{tmp_path / 'm'}", num_classes=3)) == 3
    else:
        with refuses(UsageError):
            ls.load(f"dir:{tmp_path / 'm'}", num_classes=3)


def test_a_model_that_was_never_wrapped_replaces_an_older_one_below_a_run(tmp_path: Path) -> None:
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "run" / "model")
    newer = redraw(FAMILIES["hf-vit"].plain(), seed=9)
    ls.save(newer, tmp_path / "run" / "model")
    assert not [m for m in newer.modules() if isinstance(m, BlockStack)]
    for spec in (tmp_path / "run" / "model", tmp_path / "run", f"dir:{tmp_path / 'run'}"):
        assert_same_model(ls.load(str(spec)), newer)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = FAMILIES["timm-vit"].wrapped()
    with refuses(UsageError):
        ls.save(model, tmp_path / "m", record={"colour": 1})
    args = {"depth": 2, "norm_layer": nn.LayerNorm}
    pooled = transformers.ViTModel(transformers.ViTConfig(**SIZES), add_pooling_layer=False)
    unknown = FAMILIES["torchvision-vit"].plain()
    for other in (timm.create_model("vit_tiny_patch16_224", **args), pooled, unknown):
        with pytest.raises(UsageError):
            ls.save(other, tmp_path / "m")
    with pytest.raises(UsageError):
        ls.save(model, tmp_path / "m", model_args={"colour": 1})
    with refuses(UsageError):
        ls.save(nn.Linear(2, 2), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("layershuffle.models.files.save_file", full)
    with refuses(LayerShuffleError):
        ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_timm_model_that_its_arguments_do_not_describe_is_refused(tmp_path: Path) -> None:
    args = {"depth": 2, "embed_dim": 48, "num_heads": 2, "img_size": 32}
    for hidden in ("depth", "num_heads"):
        model: Any = timm.create_model("vit_tiny_patch16_224", **args)
        model._model_args = {k: v for k, v in args.items() if k != hidden}
        with refuses(UsageError):
            ls.save(model, tmp_path / "m")
        ls.save(model, tmp_path / "m", model_args={hidden: args[hidden]})
        assert_same_model(ls.load(str(tmp_path / "m")), model)
        (tmp_path / "m").rename(tmp_path / hidden)
    # Called itself, this function leaves its arguments nowhere.
    model = timm.models.vit_tiny_patch16_224(img_size=32, num_classes=3)
    assert not hasattr(model, "_model_args")
    ls.save(model, tmp_path / "m")
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_a_saved_timm_model_opens_with_the_auto_class_of_transformers(tmp_path: Path) -> None:
    model = redraw(FAMILIES["timm-vit"].wrapped(), seed=3)
    ls.save(model, tmp_path / "m")
    stock = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "m").eval()
    again = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(stock(images(3)).logits, model(images(3)))
        assert torch.equal(again(images(3)), model(images(3)))


class Adapted(nn.Module):
    """What PEFT wraps around a model: its own attributes, and those of the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model inside, where there is none here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def merge_and_unload(self) -> nn.Module:
        """The model inside."""
        return self.base_model


def test_adapters_are_merged_before_a_model_is_saved(tmp_path: Path) -> None:
    adapted = Adapted(FAMILIES["timm-vit"].wrapped())
    with refuses(UsageError) as caught:
        ls.save(adapted, tmp_path / "m")
    assert "merge_and_unload()" in caught.value.hint
    ls.save(adapted.merge_and_unload(), tmp_path / "m")


def test_random_weights_are_not_mourned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FAMILIES["hf-vit"].plain().config.save_pretrained(tmp_path)
    for spec in (DIGITS_VIT, f"hf:{tmp_path}?pretrained=false"):
        assert num_classes_of(ls.load(spec, num_classes=3)) == 3
    assert not caplog.records


def test_a_timm_model_built_past_the_factory_needs_its_name(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=4)
    with refuses(UsageError):
        ls.save(model, tmp_path / "m")
    ls.save(model, tmp_path / "m", model_args={"architecture": "vit_tiny_patch16_224", **sizes})
    assert_same_model(ls.load(str(tmp_path / "m")), model)


def test_the_record_is_kept_and_must_be_json(saved: Path, tmp_path: Path) -> None:
    """Saved again without a record, a model has that of its files, but not its scores."""
    record = read_record(saved / "timm-vit")
    assert {key: record[key] for key in RECORD} == RECORD
    assert (record["library"], record["name"]) == ("timm", "vit_tiny_patch16_224")
    assert (record["depth"], record["blocks"], record["num_classes"]) == (4, "blocks", CLASSES)
    assert record["position"]["encoding"]["features"] == 4
    model = ls.load(f"dir:{saved / 'timm-vit'}")
    ls.save(model, tmp_path / "m")
    kept = {key: value for key, value in record.items() if key != "scores"}
    assert read_record(tmp_path / "m") == kept
    ls.save(model, tmp_path / "m", record={})
    assert not RECORD.keys() & read_record(tmp_path / "m").keys()
    ls.save(model, tmp_path / "m", record={"settings": {"data": "folder:caf\udce9"}})
    assert read_record(tmp_path / "m")["settings"] == {"data": "folder:caf?"}
    for value in ({1, 2}, float("nan"), object()):
        with refuses(UsageError):
            ls.save(model, tmp_path / "m", record={"settings": {"x": value}})


def test_the_card_has_separate_scores_and_invents_nothing(saved: Path, tmp_path: Path) -> None:
    front = front_matter(saved / "timm-vit")
    assert (front["library_name"], front["tags"]) == ("timm", ["layershuffle"])
    assert front["pipeline_tag"] == "image-classification"
    assert not {"license", "base_model"} & front.keys()
    (result,) = front["model-index"][0]["results"]
    assert result["dataset"]["name"] == "digit-pairs"
    assert {metric["name"]: metric["value"] for metric in result["metrics"]} == {
        "top-1, sequential order": 81.9, "top-1, arbitrary order": 74.5,
    }  # fmt: skip
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    assert "model-index" not in front_matter(tmp_path / "m")


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_card_says_how_to_load_with_and_without_us(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines run in the directory of the model, whatever its name."""
    monkeypatch.chdir(shutil.copytree(saved / name, tmp_path / "downloaded"))
    card = Path("README.md").read_text()
    scopes: list[dict[str, Any]] = [{}, {}]
    for code, scope in zip(re.findall("```python\n(.*?)```", card, re.DOTALL), scopes, strict=True):
        exec(code, scope)
    ours, stock = (scope["model"] for scope in scopes)
    assert_same_model(ours, ls.load(f"dir:{saved / name}"))
    pairs = zip(backbone_of(ours).parameters(), stock.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "layershuffle.safetensors" in card


class Packed(torch.Tensor):
    """Stands for the packed numbers of a quantised model."""


def test_what_wraps_or_packs_the_tensors(tmp_path):
    model = FAMILIES["timm-vit"].wrapped()
    ls.save(torch.compile(model), tmp_path / "compiled")
    assert_same_model(ls.load(tmp_path / "compiled"), model)
    weight = model.head.weight.detach().as_subclass(Packed)
    model.head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with refuses(UsageError):
        ls.save(model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


# --- names of classes -----------------------------------------------------------------------------


NAMES = ("ant", "bee", "cat", "dog", "elk")


def stock_names(place: Path, library: str) -> list[str]:
    """The names that the library itself reads."""
    if library == "timm":
        return timm.create_model(f"local-dir:{place}", pretrained=True).pretrained_cfg[
            "label_names"
        ]
    config: Any = transformers.AutoConfig.from_pretrained(place)
    assert config.label2id == {name: index for index, name in enumerate(NAMES)}
    return list(config.id2label.values())


@pytest.mark.parametrize("name", [*LIBRARIES, "timm-deit-distilled", "hf-timm-wrapper"])
def test_names_are_saved_where_the_library_reads_them(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].wrapped()
    assert class_names_of(model) is None
    with refuses(UsageError):
        set_class_names(model, ("ant", "bee"))
    set_class_names(model, NAMES)
    ls.save(model, tmp_path / "m")
    assert stock_names(tmp_path / "m", FAMILIES[name].library) == list(NAMES)
    again = ls.load(str(tmp_path / "m"))
    assert class_names_of(again) == NAMES
    ls.save(again, tmp_path / "again")
    assert stock_names(tmp_path / "again", FAMILIES[name].library) == list(NAMES)
    # With as many other classes, none of the old names stays.
    replace_head(again, 5, seed=0)
    assert class_names_of(again) is None
    ls.save(again, tmp_path / "new")
    assert class_names_of(ls.load(str(tmp_path / "new"))) is None


@pytest.mark.parametrize("names", [["ant", "bee"], "antbe"])
def test_names_of_other_classes_are_refused(names: object, tmp_path: Path) -> None:
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    edit(CONFIG, "label_names", value=names)(tmp_path / "m")
    assert refused(tmp_path / "m").place


@pytest.mark.parametrize(
    ("keys", "names"), [("43210", NAMES[::-1]), (("n01", "n02", "n03", "n04", "n05"), None)]
)
def test_timm_s_names_may_be_a_mapping(
    keys: Sequence[str], names: Sequence[str] | None, tmp_path: Path
) -> None:
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    edit(CONFIG, "label_names", value=dict(zip(keys, NAMES, strict=True)))(tmp_path / "m")
    assert class_names_of(ls.load(str(tmp_path / "m"))) == names


def test_the_bundled_models_know_their_classes() -> None:
    for spec in ("bundled:digits", "bundled:digits-swarm"):
        assert class_names_of(ls.load(spec)) == tuple(f"{pair:02d}" for pair in range(100))


# --- fewer blocks, tied blocks --------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_blocks_equal_the_pruned_order_or_are_refused_unharmed(name, tmp_path):
    model = FAMILIES[name].wrapped()
    with ls.running(model, "0,3"):
        wanted = outputs(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        short = truncate(model, (0, 3))
    except UsageError:
        assert name not in LIBRARIES  # which can describe another depth
        assert ls.depth_of(model) == DEPTH
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        return
    assert ls.depth_of(short) == 2
    assert torch.equal(outputs(short), wanted)
    ls.save(short, tmp_path / "short")
    again = ls.load(f"dir:{tmp_path / 'short'}")
    assert ls.depth_of(again) == 2
    assert torch.equal(outputs(again), wanted)


def test_blocks_that_a_model_cannot_be_made_of():
    model = FAMILIES["timm-vit"].wrapped()
    with refuses(UsageError):
        truncate(model, (0, 0))
    positioned = ls.add_position(model, encoding=ls.EncodingForm())
    with refuses(UsageError):
        truncate(positioned, (0, 1))


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tied_model_computes_repeats_and_is_tied_again(name, tmp_path):
    model = FAMILIES[name].wrapped()
    with ls.running(model, (0, 0, 2, 2)):
        wanted = outputs(model)
    assert torch.equal(outputs(tie(model, (0, 0, 2, 2))), wanted)
    ls.save(model, tmp_path / "tied")
    assert "4 blocks, of which 2 are different" in (tmp_path / "tied" / "README.md").read_text()
    again = ls.load(f"dir:{tmp_path / 'tied'}")
    assert_same_model(again, model)
    assert places_tied(blocks_of(again)) == (0, 0, 2, 2)
    assert torch.equal(outputs(again), outputs(model))
    # What its library reads has the blocks one by one.
    (tmp_path / "tied" / "layershuffle.json").unlink()
    stock = ls.load(f"dir:{tmp_path / 'tied'}")
    assert places_tied(blocks_of(stock)) is None
    assert torch.equal(outputs(stock), outputs(model))


def test_a_place_that_shares_a_part_of_its_weights_is_saved_as_it_is(tmp_path):
    model = tie(FAMILIES["timm-vit"].wrapped(), (0, 0, 2, 2)).eval()
    layer = blocks_of(model)[1].mlp.fc1
    layer.bias = nn.Parameter(layer.bias.detach() + 1)
    assert places_tied(blocks_of(model)) == (0, 1, 2, 2)
    ls.save(model, tmp_path / "partly")
    again = ls.load(f"dir:{tmp_path / 'partly'}")
    assert places_tied(blocks_of(again)) == (0, 1, 2, 2)
    assert torch.equal(outputs(again), outputs(model))
    # A merge would overwrite the block of one donor with that of another.
    with refuses(UsageError, "a"):
        check_compatible([model, model], names=["a", "b"])


def test_tied_places_with_different_weights_are_refused(tmp_path):
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "model")
    path = tmp_path / "model" / "layershuffle.json"
    metadata = json.loads(path.read_text())
    for places in ([0, 0, 2, 3], [0]):
        path.write_text(json.dumps({**metadata, "tied": places}))
        with refuses(ModelFileError):
            ls.load(f"dir:{tmp_path / 'model'}")


def test_the_middle_of_a_run_of_places_stands_for_it():
    assert middle_blocks(1, 12) == (5,) * 12
    assert middle_blocks(3, 12) == (1,) * 4 + (5,) * 4 + (9,) * 4
    assert middle_blocks(12, 12) == tuple(range(12))
    # 12 = 2 + 2 + 3 + 2 + 3 places.
    assert middle_blocks(5, 12) == (0, 0, 2, 2, 5, 5, 5, 7, 7, 10, 10, 10)
    for distinct in (0, 13):
        with refuses(UsageError):
            middle_blocks(distinct, 12)


def test_wrong_places_and_merges_are_refused():
    model = FAMILIES["timm-vit"].wrapped().eval()
    before = weights_digest(model)
    for places in ((0, 0), (0, 1, 2, 4)):
        with refuses(UsageError):
            tie(model, places)
    assert weights_digest(model) == before
    tie(model, (0, 0, 0, 0))
    with refuses(UsageError):
        check_compatible([model, model], names=["a", "b"])
