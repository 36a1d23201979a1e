"""Shared by tests of saved models: models, a record, and ways to damage a directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import layershuffle as ls
from common import FAMILIES, images, logits_of, redraw
from layershuffle.core.policies import Shuffled, policy_to_json
from layershuffle.ground.errors import ModelFileError

TINY = "pretrained=false&depth=2&embed_dim=32&num_heads=2&img_size=32&patch_size=8"
DIGITS = (
    "timm:vit_tiny_patch16_224?pretrained=false&img_size=12,20&patch_size=4&in_chans=1"
    "&embed_dim=32&depth=3&num_heads=2&mlp_ratio=2&num_classes=100&mean=0.2&std=0.35"
)
# A mixer built past timm's factory has no name that timm could build it from, and models of
# torchvision have no directories.
SAVED = [name for name in FAMILIES if name not in ("timm-mixer", "torchvision-vit")]
RECORD = {
    "method": "layershuffle",
    "policy": json.loads(json.dumps(policy_to_json(Shuffled(kept=(3, None))))),
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


def assert_same_model(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
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


def front_matter(directory: Path) -> dict[str, Any]:
    return yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])


class Sentinel:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


Change = Callable[[Path], None]
WEIGHTS, FACTS, CONFIG = "model.safetensors", "layershuffle.json", "config.json"
PARTS = "layershuffle.safetensors"
LIBRARIES = ("timm-vit", "hf-vit")


def refused(spec: str | Path) -> ModelFileError:
    """The error of loading the directory, which must be one short paragraph."""
    with pytest.raises(ModelFileError) as caught:
        ls.load(str(spec))
    error = caught.value
    assert error.hint
    assert "\n" not in str(error)
    assert len(str(error)) < 1000
    return error


def put(file: str, content: bytes) -> Change:
    return lambda place: (place / file).write_bytes(content)  # type: ignore[func-returns-value]


def drop(file: str) -> Change:
    return lambda place: (place / file).unlink()


def cut(file: str, *, keep: float) -> Change:
    def change(place: Path) -> None:
        raw = (place / file).read_bytes()
        (place / file).write_bytes(raw[: int(len(raw) * keep)])

    return change


def edit(file: str, *path: str, value: Any) -> Change:
    """Set one key of a JSON file; the value `...` removes it."""

    def change(place: Path) -> None:
        data = json.loads((place / file).read_text())
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        (place / file).write_text(json.dumps(data))

    return change


def retensor(file: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def changed(place: Path) -> None:
        tensors = change(load_file(place / file))
        # Old releases of safetensors write over the file, which loaded models may have mapped.
        (place / file).unlink()
        save_file(tensors, place / file)

    return changed


def rename(tensors: dict[str, Any]) -> dict[str, Any]:
    first = sorted(tensors)[0]
    return {("strange" if name == first else name): t for name, t in tensors.items()}


def without_the_last_block(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t for name, t in tensors.items() if ".3." not in name and "layer_3." not in name}


def extra(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "backdoor": torch.zeros(3)}


def wider(tensors: dict[str, Any]) -> dict[str, Any]:
    first = next(name for name in sorted(tensors) if "bias" in name)
    return {**tensors, first: torch.zeros(1 + len(tensors[first]))}


def not_finite(tensors: dict[str, Any]) -> dict[str, Any]:
    first = next(name for name in sorted(tensors) if "weight" in name)
    changed = tensors[first].clone()
    changed.view(-1)[-1] = float("nan")
    return {**tensors, first: changed}
