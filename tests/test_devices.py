"""Devices by their names: which there are, which one cuda means, and what is refused."""

from __future__ import annotations

import pytest
import torch

from layershuffle.core.tensors import in_float64
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.machine import choose_precision, device_of, hardware
from layershuffle.training.settings import FitSettings
from refusals import refuses


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch says that it finds two GPUs; the list has those that became the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_gpu_by_its_number_is_the_one_that_cuda_means(two_gpus: list[int]) -> None:
    assert [device_of(name) for name in ("auto", "cuda", "cpu", "cuda:1")] == [
        "cuda",
        "cuda",
        "cpu",
        "cuda",
    ]
    assert two_gpus == [1]
    with refuses(UsageError):
        device_of("cuda:2")


def test_a_record_names_the_device_of_its_computation(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert hardware("fp32", device="cpu")["gpu"] is None
    assert hardware("fp32", device="cuda")["gpu"] == "H200"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device_of("auto") == "cpu"
    for name in ("cuda", "cuda:0", "mps"):
        with refuses(UsageError):
            device_of(name)


def test_a_mac_computes_in_fp32_on_its_gpu_where_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (device_of("auto"), device_of("mps")) == ("cpu", "mps")
    assert choose_precision("auto", device="mps", training=True)[0] == "fp32"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda1", "mps:0", ""])
def test_words_that_name_no_device(name: str) -> None:
    with refuses(UsageError):
        device_of(name)
    with refuses(SettingsError):
        FitSettings(model="bundled:digits", data="digit-pairs", device=name)


def test_float64() -> None:
    third = torch.tensor(1 / 3)
    assert in_float64(third).dtype == torch.float64
    assert float(in_float64(third)) == float(third)
