"""What timm, transformers and the paper's authors saved, and what the hub has, loads unchanged."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub import HfApi, RepoUrl, constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from saved_models import (
    LIBRARIES,
    RECORD,
    Sentinel,
    assert_same_model,
    front_matter,
    outputs,
    positioned,
)
from timm.models._hub import save_for_hf
from torch import Tensor, nn

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    WIDTH,
    assert_close,
    global_generators_untouched,
    images,
    redraw,
)
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.images.view import resized_as
from layershuffle.models import (
    class_names_of,
    image_view,
    push_to_hub,
    read_record,
    set_class_names,
    set_image_view,
)
from layershuffle.models.origin import origin_of
from refusals import refuses

NAMES = ["ant", "bee", "cat", "dog", "elk"]
ARGS = "img_size=32&patch_size=8&embed_dim=32&depth=4&num_heads=2"
SPEC = f"timm:vit_tiny_patch16_224?{ARGS}&num_classes=5"


# --- directories ----------------------------------------------------------------------------------


@pytest.fixture
def timm_directory(tmp_path: Path) -> Path:
    """A directory as timm pushes it to the hub."""
    model = FAMILIES["timm-vit"].plain()
    view = {"crop_mode": "squash", "crop_pct": 0.8, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    model.pretrained_cfg = {**model.pretrained_cfg, **view}
    config = {"label_names": NAMES}
    save_for_hf(model, tmp_path / "stock", config, safe_serialization=True)
    return tmp_path / "stock"


@pytest.mark.parametrize("form", ["hf:{}", "dir:{}", "{}"])
def test_a_directory_that_timm_saved(form: str, timm_directory: Path) -> None:
    model = ls.load(form.format(timm_directory))
    assert_same_model(model, FAMILIES["timm-vit"].wrapped())
    view = image_view(model)
    assert (view.resize, view.crop_pct, view.size) == ("squash", 0.8, (32, 32))
    assert (view.mean, view.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert class_names_of(model) == tuple(NAMES)
    ls.save(model, timm_directory.parent / "ours")
    again = ls.load(str(timm_directory.parent / "ours"))
    assert_same_model(model, again)
    assert image_view(again) == view


def test_a_directory_of_timm_without_arguments(timm_directory: Path) -> None:
    """Older releases wrote no model_args; the sizes are only in pretrained_cfg."""
    model = redraw(timm.create_model("test_vit", img_size=64, num_classes=7, in_chans=1), seed=1)
    save_for_hf(model, timm_directory, safe_serialization=True)
    config = json.loads((timm_directory / "config.json").read_text())
    config.pop("model_args", None)
    config["pretrained_cfg"] |= {"input_size": [1, 64, 64], "fixed_input_size": True}
    (timm_directory / "config.json").write_text(json.dumps(config))
    again = ls.load(str(timm_directory))
    assert_same_model(again, ls.wrap(model))
    assert (image_view(again).channels, image_view(again).size) == (1, (64, 64))


# --- timm's training checkpoints ------------------------------------------------------------------


def checkpoint(path: Path, **content: Any) -> Path:
    """What timm's CheckpointSaver writes, the arguments of the training included."""
    args = argparse.Namespace(model="vit_tiny_patch16_224", lr=0.1)
    torch.save({"epoch": 3, "arch": "vit_tiny_patch16_224", "args": args, **content}, path)
    return path


def test_a_training_checkpoint_of_timm(tmp_path: Path) -> None:
    stock = FAMILIES["timm-vit"].plain()
    path = checkpoint(tmp_path / "model_best.pth.tar", state_dict=stock.state_dict())
    assert_same_model(ls.load(f"{SPEC}&checkpoint={path}"), ls.wrap(stock))
    # As timm: the average of the weights, if the training kept one.
    average = redraw(FAMILIES["timm-vit"].plain(), seed=9)
    checkpoint(path, state_dict=stock.state_dict(), state_dict_ema=average.state_dict())
    wanted = FAMILIES["timm-vit"].plain()
    timm.models.load_checkpoint(wanted, str(path))
    model = ls.load(f"{SPEC}&checkpoint={path}")
    assert_same_model(model, ls.wrap(wanted))
    ls.save(model, tmp_path / "m")
    assert torch.equal(outputs(ls.load(str(tmp_path / "m"))), outputs(wanted))


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = checkpoint(tmp_path / "m.pth.tar", state_dict={"a": Sentinel(trap)})
    with pytest.raises(ModelFileError) as caught:
        ls.load(f"{SPEC}&checkpoint={path}")
    assert caught.value.place == path
    assert not trap.exists()


def test_a_checkpoint_of_lightning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model is compiled, inside of a module that has a loss, too; nobody knows the order of
    classes."""
    stock = FAMILIES["timm-vit"].plain()
    tensors = {
        f"net._orig_mod.model.{name.replace('blocks.1.', 'blocks.1._orig_mod.')}": tensor
        for name, tensor in stock.state_dict().items()
    }
    path = checkpoint(tmp_path / "last.ckpt", state_dict={**tensors, "loss.weight": torch.ones(5)})
    model = ls.load(f"{SPEC}&checkpoint={path}")
    assert_same_model(model, ls.wrap(stock))
    assert "not used: loss.weight" in caplog.text
    assert not origin_of(model).natural_classes


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m.pth.tar", state_dict=FAMILIES["timm-vit"].plain().state_dict())
    with refuses(ModelFileError):
        ls.load(f"timm:vit_tiny_patch16_224?{ARGS}&checkpoint={path}")
    with refuses(ModelFileError):
        ls.load(str(path))
    checkpoint(tmp_path / "other.pth.tar", state_dict={"epoch": 3})
    whole = path.read_bytes()
    broken = {
        "empty.pth": b"",
        "text.pth": b"text",
        "page.pth": b"<!DOCTYPE html><html>404</html>",
        "cut.pth.tar": whole[:3000],
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    for name in (*broken, "absent.pth.tar", "other.pth.tar"):
        with pytest.raises(ModelFileError) as caught:
            ls.load(f"{SPEC}&checkpoint={tmp_path / name}")
        assert caught.value.place == tmp_path / name


# --- the authors' checkpoints ---------------------------------------------------------------------

FEATURES = 6
Tensors = dict[str, Tensor]


def authors_directory(place: Path, kind: str, *, encoding: bool, prediction: bool) -> Tensors:
    """A checkpoint with the authors' names, and its position parts by those names."""
    FAMILIES[f"hf-{kind}"].plain().save_pretrained(place)
    draw = torch.Generator().manual_seed(3)
    parts: Tensors = {}
    sizes = {
        "projection": (WIDTH + FEATURES, WIDTH) if encoding else None,
        "position_mlp": (WIDTH, DEPTH) if prediction else None,
    }
    if encoding:
        parts[f"{kind}.encoder.embedding.weight"] = torch.randn(DEPTH, FEATURES, generator=draw)
    for block in range(DEPTH):
        for part, size in sizes.items():
            if size is not None:
                name = f"{kind}.encoder.layer.{block}.{part}.net"
                parts[f"{name}.0.weight"] = torch.rand(size[0], generator=draw)
                parts[f"{name}.0.bias"] = torch.rand(size[0], generator=draw)
                parts[f"{name}.1.weight"] = torch.randn(size[1], size[0], generator=draw) / 6
                parts[f"{name}.1.bias"] = torch.rand(size[1], generator=draw)
    file = place / "model.safetensors"
    save_file(load_file(file) | parts, file, metadata={"format": "pt"})
    return parts


def in_their_words(
    host: nn.Module, kind: str, parts: Tensors, order: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Logits and position predictions by the paper's formulas, with stock modules."""
    inner = host.get_submodule(kind)
    blocks = FAMILIES[f"hf-{kind}"].container(host)
    state = inner.get_submodule("embeddings")(images())
    guesses = []
    for position, block in enumerate(order):

        def layered(part: str, x: Tensor, block: int = block) -> Tensor:
            own = f"{kind}.encoder.layer.{block}.{part}.net"
            weights = [parts[f"{own}.{k}.{name}"] for k in "01" for name in ("weight", "bias")]
            return F.linear(F.layer_norm(x, x.shape[-1:], *weights[:2]), *weights[2:])

        table = parts.get(f"{kind}.encoder.embedding.weight")
        if table is not None:
            place = table[position].expand(*state.shape[:-1], -1)
            state = state + F.gelu(layered("projection", torch.cat([state, place], dim=-1)))
        state = blocks[block](state)
        if f"{kind}.encoder.layer.{block}.position_mlp.net.0.weight" in parts:
            guesses.append(layered("position_mlp", state.mean(dim=1)))
    pooled = inner.get_submodule("layernorm")(state)[:, 0]
    return host.get_submodule("classifier")(pooled), guesses


@pytest.mark.parametrize("kind", ["vit", "deit"])
@pytest.mark.parametrize("parts", [(True, False), (False, True), (True, True)])
def test_the_authors_position_parts_are_converted(
    kind: str, parts: tuple[bool, bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = authors_directory(tmp_path / "a", kind, encoding=parts[0], prediction=parts[1])
    model = ls.load(f"hf:{tmp_path / 'a'}")
    assert isinstance(model, ls.PositionedModel)
    assert caplog.text == ""
    assert (model.encoding is not None, model.prediction is not None) == parts
    plain = FAMILIES[f"hf-{kind}"].plain()
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        with torch.no_grad(), ls.running(model, order):
            if model.prediction is None:
                got, guesses = model(images()).logits, []
            else:
                with model.guessing() as asked:
                    got = model(images()).logits
                guesses = [guess.logits for guess in asked.items]
            wanted, theirs = in_their_words(plain, kind, stored, order)
        assert_close(got, wanted, tolerance=1e-5)
        assert len(guesses) == len(theirs)
        for ours, their in zip(guesses, theirs, strict=True):
            assert_close(ours, their, tolerance=1e-5)
    if model.prediction is not None:
        assert model.prediction.form == ls.PredictionForm()
    ls.save(model, tmp_path / "ours")
    assert_same_model(ls.load(str(tmp_path / "ours")), model)


def test_parts_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    stored = authors_directory(tmp_path, "vit", encoding=True, prediction=False)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for gone, named in (
        ("vit.encoder.layer.2.projection.net.1.bias", "encoding.projections.2.bias"),
        ("vit.encoder.embedding.weight", "encoding.table"),
    ):
        assert gone in stored
        rest = {name: tensor for name, tensor in whole.items() if name != gone}
        save_file(rest, file, metadata={"format": "pt"})
        with refuses(ModelFileError, tmp_path) as caught:
            ls.load(f"hf:{tmp_path}")
        assert named in str(caught.value)


# --- the hub --------------------------------------------------------------------------------------


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


def test_timm_weights_come_from_the_cache_and_name_imagenet(
    timm_weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Published weights have no class names; ImageNet folders in another order are renumbered."""
    with global_generators_untouched():
        model = ls.load("timm:test_vit")
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, timm_weights[n])] == []
    names = class_names_of(model)
    assert names is not None
    assert (len(set(names)), names[0], names[-1]) == (1000, "n01440764", "n15075141")
    ls.save(model, tmp_path / "m")
    assert read_record(tmp_path / "m")["base_model"] == TIMM_HUB
    assert front_matter(tmp_path / "m")["base_model"] == TIMM_HUB
    assert class_names_of(ls.load(str(tmp_path / "m"))) == names
    for spec in ("timm:test_vit?num_classes=7", "timm:test_vit?pretrained=false"):
        assert class_names_of(ls.load(spec)) is None


def test_timm_never_falls_back_to_the_pickle_in_the_cache(hub: Path, tmp_path: Path) -> None:
    place = snapshot(hub, TIMM_HUB) / "pytorch_model.bin"
    place.write_bytes(pickle.dumps({"weight": Sentinel(tmp_path / "ran")}))
    with refuses(ModelFileError) as caught:
        ls.load("timm:test_vit")
    assert Path(caught.value.place).name == "model.safetensors"
    assert not (tmp_path / "ran").exists()
    pickle.loads(place.read_bytes())  # the trap works
    assert (tmp_path / "ran").exists()


def test_a_hub_model_in_the_cache_is_read_like_a_directory(hub: Path, tmp_path: Path) -> None:
    save_for_hf(
        FAMILIES["timm-vit"].plain(), snapshot(hub, "someone/timm"), safe_serialization=True
    )
    assert_same_model(ls.load("hf:someone/timm"), FAMILIES["timm-vit"].wrapped())
    FAMILIES["hf-dinov2"].plain().save_pretrained(snapshot(hub, "someone/model"))
    model = ls.load("hf:someone/model")
    assert_same_model(model, FAMILIES["hf-dinov2"].wrapped())
    ls.save(model, tmp_path / "m")
    assert read_record(tmp_path / "m")["base_model"] == "someone/model"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("spec", "next_step"),
    [
        ("timm:test_vit", "hf download timm/test_vit.r160_in1k"),
        ("timm:test_vit", "?pretrained=false"),
        ("hf:google/vit-base-patch16-224", "hf download google/vit-base-patch16-224"),
    ],
)
def test_missing_weights_offline_name_the_command(spec: str, next_step: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        ls.load(spec)
    text = str(caught.value)
    assert "HF_HUB_OFFLINE" in text
    assert next_step in text
    assert "\n" not in text


@pytest.fixture
def pushed(hub: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that takes what is pushed into the cache of this machine; the calls that it got."""
    calls: dict[str, Any] = {}

    def create_repo(_: HfApi, repo_id: str, **options: Any) -> RepoUrl:
        calls["create_repo"] = options
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(_: HfApi, *, repo_id: str, folder_path: str, **options: Any) -> None:
        calls["upload_folder"] = options
        place = hub / f"models--{repo_id.replace('/', '--')}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder_path, snapshot(hub, repo_id), dirs_exist_ok=True)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return calls


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_pushed_model_comes_back_whole(name: str, pushed: dict[str, Any], hub: Path) -> None:
    model = positioned(FAMILIES[name].wrapped())
    set_class_names(model, NAMES)
    set_image_view(model, resized_as(image_view(model), "squash"))
    url = push_to_hub(model, "someone/any-order", private=True, record=RECORD)
    assert url == "https://huggingface.co/someone/any-order"
    assert pushed["create_repo"] == {"private": True, "exist_ok": True}
    again = ls.load("hf:someone/any-order")
    assert_same_model(again, model)
    assert class_names_of(again) == tuple(NAMES)
    assert image_view(again) == image_view(model)
    place = hub / "models--someone--any-order" / "snapshots" / ("0" * 40)
    assert {key: read_record(place)[key] for key in RECORD} == RECORD
    assert 'ls.load("hf:someone/any-order")' in (place / "README.md").read_text()
    # The next push removes what it does not bring, and nothing of others.
    gone = filter_repo_objects(
        ["layershuffle.safetensors", "model-1-of-2.safetensors", "thesis.tex"],
        allow_patterns=pushed["upload_folder"]["delete_patterns"],
    )
    assert list(gone) == ["layershuffle.safetensors", "model-1-of-2.safetensors"]


def test_what_the_hub_refuses_is_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise HTTPError("no route")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ModelFileError) as caught:
        push_to_hub(FAMILIES["timm-vit"].wrapped(), "someone/model")
    assert "hf auth login" in str(caught.value)
    with pytest.raises(UsageError):
        push_to_hub(torch.nn.Linear(2, 2), "someone/model")
