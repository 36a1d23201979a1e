"""The image view of a model: from its file, or from its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from saved_models import DIGITS, positioned

import layershuffle as ls
from common import CLASSES, FAMILIES
from layershuffle.errors import ModelFileError
from layershuffle.image_view import ImageView
from layershuffle.models import image_view
from refusals import refuses


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
    settings: dict[str, Any], size: tuple[int, int], crop_pct: float, tmp_path: Path
) -> None:
    """If the model takes images of that size, as DINOv2 does, which interpolates its positions."""
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
    settings["image_processor_type"] = "ViTImageProcessor"
    for name in ("hf-dinov2", "hf-vit"):
        FAMILIES[name].plain().save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(settings))
    model = ls.load(f"hf:{tmp_path / 'hf-dinov2'}")
    view = image_view(model)
    assert (view.size, view.crop_pct) == (size, crop_pct)
    assert (view.mean, view.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert view.interpolation == "bicubic"
    with torch.no_grad():
        assert model(torch.zeros(1, 3, *size)).logits.shape == (1, CLASSES)
    if size != (32, 32):
        with refuses(ModelFileError, tmp_path / "hf-vit" / "preprocessor_config.json"):
            ls.load(f"hf:{tmp_path / 'hf-vit'}")
