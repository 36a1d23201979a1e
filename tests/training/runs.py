"""Runs that take a second: a model of four blocks on a few digit pairs, and how to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common import DIGITS_VIT
from layershuffle.training.settings import FitSettings

MODEL, NO_DROPOUT = f"{DIGITS_VIT}&proj_drop_rate=0.1", f"{DIGITS_VIT}&proj_drop_rate=0"
DATA = "digit-pairs?train=96&validation=32&test=32"
BASE = {
    "model": MODEL,
    "data": DATA,
    "steps": 8,
    "batch_size": 16,
    "lr": 1e-3,
    "schedule": "cosine",
    "warmup": 2,
    "eval_every": 4,
    "eval_orders": 2,
    "checkpoint_every": 2,
    "log_every": 1,
    "seed": 5,
}


def settings(**changes: Any) -> FitSettings:
    """The settings of a run."""
    return FitSettings(**{**BASE, "method": "layershuffle", **changes})


def weights(out: Path) -> dict[str, torch.Tensor]:
    """All weights of a run's saved model."""
    model = load_file(out / "model" / "model.safetensors")
    parts = out / "model" / "layershuffle.safetensors"
    return {**model, **(load_file(parts) if parts.is_file() else {})}


def assert_same_weights(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], *, tolerance: float = 0.0
) -> None:
    """Equal bit for bit, or within `tolerance`."""
    assert left.keys() == right.keys()
    for name, weight in left.items():
        error = float((weight - right[name]).abs().max())
        assert error <= tolerance, f"{name}: max error {error}"


def losses(events: list[dict[str, Any]]) -> list[float]:
    """The losses that a run reported."""
    return [event["loss"] for event in events if event["kind"] == "log"]
