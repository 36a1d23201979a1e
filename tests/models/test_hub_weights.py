"""Weights from the hub, offline: from the cache, or refused with the command to type."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from huggingface_hub import HfApi, RepoUrl, constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from saved_models import RECORD, Sentinel, assert_same_model, front_matter, positioned
from timm.models import save_for_hf

import layershuffle as ls
from common import FAMILIES, global_generators_untouched, redraw
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import resized_as
from layershuffle.models import (
    class_names_of,
    image_view,
    push_to_hub,
    read_record,
    set_class_names,
    set_image_view,
)
from refusals import refuses


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


@pytest.mark.usefixtures("timm_weights")
def test_trained_timm_models_name_imagenet(tmp_path: Path) -> None:
    """Published weights have no class names; ImageNet folders in another order are renumbered."""
    model = ls.load("timm:test_vit")
    names = ls.models.class_names_of(model)
    assert names is not None
    assert (len(set(names)), names[0], names[-1]) == (1000, "n01440764", "n15075141")
    ls.save(model, tmp_path / "m")
    assert ls.models.class_names_of(ls.load(str(tmp_path / "m"))) == names
    for spec in ("timm:test_vit?num_classes=7", "timm:test_vit?pretrained=false"):
        assert ls.models.class_names_of(ls.load(spec)) is None


def poison(path: Path, sentinel: Path) -> None:
    with path.open("wb") as file:
        pickle.dump({"weight": Sentinel(sentinel)}, file)


def test_timm_never_falls_back_to_the_pickle_in_the_cache(hub: Path, tmp_path: Path) -> None:
    place = snapshot(hub, TIMM_HUB) / "pytorch_model.bin"
    poison(place, tmp_path / "ran")
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


def test_torchvision_weights_are_read_with_the_hash_checked_and_tensors_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    asked: dict[str, Any] = {}

    def no_network(url: str, **kwargs: Any) -> None:
        asked.update(kwargs)
        raise URLError("no route")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", no_network)
    with refuses(ModelFileError, tmp_path / "hub"):
        ls.load("torchvision:vit_b_32")
    assert asked["weights_only"] is True
    assert asked["check_hash"] is True


# --- models that are put on the hub ---------------------------------------------------------------

NAMES = ("ant", "bee", "cat", "dog", "elk")


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


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "torchvision-vit"])
def test_a_pushed_model_comes_back_whole(name: str, pushed: dict[str, Any], hub: Path) -> None:
    model = positioned(FAMILIES[name].wrapped())
    set_class_names(model, NAMES)
    set_image_view(model, resized_as(image_view(model), "squash"))
    url = push_to_hub(model, "someone/any-order", private=True, record=RECORD)
    assert url == "https://huggingface.co/someone/any-order"
    assert pushed["create_repo"] == {"private": True, "exist_ok": True}
    again = ls.load("hf:someone/any-order")
    assert_same_model(again, model)
    assert class_names_of(again) == NAMES
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
