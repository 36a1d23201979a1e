"""Weights from the hub, offline: from the cache, or refused with the command to type."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import save_file
from saved_models import Sentinel, assert_same_model, front_matter

import layershuffle as ls
from common import FAMILIES, global_generators_untouched, redraw
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.models import (
    read_record,
)


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
    unchanged = [n for n, t in model.state_dict().items() if torch.equal(t, timm_weights[n])]
    assert set(timm_weights) - set(unchanged) == {"head.weight", "head.bias"}


@pytest.mark.usefixtures("timm_weights")
def test_weights_that_do_not_fit_the_arguments_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Missing key"):
        ls.load("timm:test_vit?depth=8")


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
def test_missing_weights_offline_name_the_command(spec: str, next_step: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        ls.load(spec)
    text = str(caught.value)
    assert "HF_HUB_OFFLINE" in text
    assert next_step in text
    assert "\n" not in text


def test_a_network_failure_is_reported(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
