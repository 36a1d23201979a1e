"""Runs that take a second: a model of four blocks on a few digit pairs, and how to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from layershuffle.settings import FitSettings

MODEL = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=32&depth=4&num_heads=2&mlp_ratio=2&proj_drop_rate=0.1"
)
NO_DROPOUT = MODEL.replace("proj_drop_rate=0.1", "proj_drop_rate=0")
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
