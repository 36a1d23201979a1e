"""The image view of a model: from its file or its kind, and as timm's and transformers' own tools
prepare images for the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from packaging.version import Version
from PIL import Image
from saved_models import DIGITS, TINY, positioned
from timm.data import create_transform, resolve_data_config
from torch import nn

import layershuffle as ls
from common import CLASSES, FAMILIES, SIZE, assert_close, logits_of
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.images.pixels import resized_size, uncropped_size
from layershuffle.images.view import ImageView, resized_as
from layershuffle.models import class_names_of, image_view, set_class_names, set_image_view
from refusals import refuses

# Wide, tall, enlarged, and with a crop at fractions of pixels.
SIZES = ((60, 43), (41, 97), (20, 19), (32, 32), (37, 35))
NAMES = ("ant", "bee", "cat", "dog", "elk")


def picture(width: int, height: int) -> Image.Image:
    """Noise that is smooth enough to tolerate other rounding."""
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def prepared(view: ImageView, image: Image.Image) -> torch.Tensor:
    return PixelFinish(view)(PlainTransform(view)(image)[None])[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"crop_mode": "center", "crop_pct": 0.9},
        {"crop_mode": "center", "crop_pct": 0.95, "interpolation": "bilinear"},
        {"crop_mode": "center", "crop_pct": 0.9, "interpolation": "lanczos"},
        {"crop_mode": "squash", "crop_pct": 0.9, "interpolation": "hamming"},
        {"crop_mode": "squash", "crop_pct": 0.9, "interpolation": "box"},
        {"crop_mode": "squash", "crop_pct": 1.0},
        {"crop_mode": "squash", "crop_pct": 0.9},
        {"crop_mode": "center", "crop_pct": 0.9, "img_size": (24, 40)},
        {"crop_mode": "squash", "crop_pct": 0.8, "img_size": (24, 40)},
    ],
    ids=str,
)
def test_timm_s_own_transform_gives_the_same_bits(settings: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
    sizes |= {"depth": 2, "img_size": settings.pop("img_size", SIZE)}
    model = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay=settings, **sizes)
    size = sizes["img_size"] if isinstance(sizes["img_size"], tuple) else (SIZE, SIZE)
    config = resolve_data_config({"input_size": (3, *size)}, model=model)
    stock = create_transform(**config)
    view = image_view(ls.wrap(model))
    for shape in SIZES:
        image = picture(*shape)
        assert_close(prepared(view, image), stock(image), tolerance=0.0)


def test_a_spec_says_how_timm_prepares_images() -> None:
    view = image_view(ls.load(f"timm:vit_tiny_patch16_224?{TINY}&crop_mode=squash&crop_pct=0.8"))
    assert (view.resize, view.crop_pct, uncropped_size(view)) == ("squash", 0.8, (40, 40))
    view = image_view(ls.load(DIGITS))
    assert (view.channels, view.size, view.mean, view.std) == (1, (12, 20), (0.2,), (0.35,))
    model = timm.create_model("test_vit", pretrained_cfg_overlay={"crop_mode": "border"})
    with refuses(UsageError, "VisionTransformer"):
        image_view(ls.wrap(model))


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
    ],
)
def test_views_without_a_processor_file(
    name: str, normalisation: Any, interpolation: str, crop_pct: float
) -> None:
    view = image_view(FAMILIES[name].wrapped())
    assert (view.channels, view.size) == (3, (32, 32))
    assert (view.mean, view.std) == normalisation
    assert (view.interpolation, view.crop_pct) == (interpolation, pytest.approx(crop_pct))


PROCESSORS = [
    # What google/vit-base-patch16-224 and facebook/deit-base-patch16-224 have in their files.
    ("hf-vit", {"size": 32, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    ("hf-deit", {"size": 37, "crop_size": 32, "resample": 3, "do_center_crop": True}),
    ("hf-vit", {"size": 32, "resample": 1}),
    ("hf-deit", {"size": 36, "crop_size": 32, "feature_extractor_type": "DeiTFeatureExtractor"}),
    ("hf-siglip", {"size": {"height": 32, "width": 32}}),
    ("hf-beit", {"size": 32, "do_center_crop": False}),
    ("hf-dinov2", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}),
    ("hf-vit", {"image_processor_type": "CLIPImageProcessor", "size": 36, "crop_size": 32}),
    ("hf-vit", {"image_processor_type": "BlipImageProcessor", "size": 32}),
    ("hf-vit", {"image_processor_type": "DINOv3ViTImageProcessor", "size": 32}),
    ("hf-vit", {"image_processor_type": "PvtImageProcessor", "size": 32}),
    ("hf-vit", {"image_processor_type": "ChineseCLIPImageProcessor", "size": 36, "crop_size": 32}),
    ("hf-vit", {"size": 32, "do_normalize": False}),
    ("hf-vit", {"size": 32, "do_rescale": False, "image_mean": [51] * 3, "image_std": [255] * 3}),
]


@pytest.mark.parametrize(("name", "settings"), PROCESSORS, ids=str)
def test_transformers_own_processor_gives_the_same_pixels(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings.get("resample") == Image.Resampling.LANCZOS and Version(
        torchvision.__version__
    ) < Version("0.27"):
        pytest.skip("transformers takes BICUBIC for LANCZOS before torchvision 0.27")
    FAMILIES[name].plain().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    stock = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    view = image_view(ls.load(f"hf:{tmp_path}"))
    for shape in SIZES:
        image = picture(*shape)
        wanted = stock(image, return_tensors="pt")["pixel_values"][0]
        # transformers resizes with torch and we with Pillow, which sometimes round differently.
        assert_close(prepared(view, image), wanted, tolerance=2.5 / 255 / min(view.std))


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": {"height": 24, "width": 40}}, (24, 40)),
        ({"size": [24, 40]}, (24, 40)),
        ({"size": {"height": 24, "width": 40}, "do_resize": False}, (32, 32)),
    ],
)
def test_the_size_in_the_processor_s_file_decides(
    settings: dict[str, Any], size: tuple[int, int], tmp_path: Path
) -> None:
    """If the model takes images of that size, as DINOv2 does, which interpolates its positions."""
    settings["image_processor_type"] = "ViTImageProcessor"
    for name in ("hf-dinov2", "hf-vit"):
        FAMILIES[name].plain().save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(settings))
    model = ls.load(f"hf:{tmp_path / 'hf-dinov2'}")
    assert image_view(model).size == size
    with torch.no_grad():
        assert model(torch.zeros(1, 3, *size)).logits.shape == (1, CLASSES)
    if size != (32, 32):
        with refuses(ModelFileError, tmp_path / "hf-vit" / "preprocessor_config.json"):
            ls.load(f"hf:{tmp_path / 'hf-vit'}")


OTHER_STEPS = ("ConvNext", "PoolFormer", "Levit", "MobileViT", "EfficientNet")
REFUSED_PROCESSORS: list[dict[str, Any]] = [
    *({"image_processor_type": f"{kind}ImageProcessor"} for kind in OTHER_STEPS),
    {"size": {"height": 40, "width": 60}, "do_center_crop": True, "crop_size": 32},
    {"size": {"shortest_edge": 32, "longest_edge": 64}},
    {"size": {"height": 30, "width": 30}, "do_center_crop": True, "crop_size": 32},
    {"size": 32, "do_pad": True},
    {"do_resize": True, "resample": 5},
    {"size": {"longest": 3}},
    {"size": "large"},
    {"size": {"height": "a", "width": 2}},
    {"size": 0},
    {"size": 10**12},
    {"image_mean": "abc"},
    {"image_mean": []},
    {"image_mean": ["a", "b", "c"]},
    {"image_std": [0, 0, 0]},
    {"resample": "best"},
]


@pytest.mark.parametrize("settings", REFUSED_PROCESSORS, ids=str)
def test_processors_that_no_view_can_express_are_refused(
    settings: dict[str, Any], hf_directory: Path
) -> None:
    file = hf_directory / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    with refuses(ModelFileError, file):
        ls.load(f"hf:{hf_directory}")


# --- what stock tools see of a model that was saved here ------------------------------------------


def own_logits(model: nn.Module, images: list[Image.Image], view: ImageView) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model(torch.stack([prepared(view, image) for image in images])))


def crops_alike(image: Image.Image, view: ImageView) -> bool:
    """transformers rounds half a pixel of a crop's corner down; timm rounds it to even."""
    sides = zip(resized_size(image.size, view), (view.width, view.height), strict=True)
    return all((side - kept) % 4 != 3 for side, kept in sides)


@pytest.mark.parametrize("resize", [None, "crop", "squash"])
@pytest.mark.parametrize(
    "name", ["hf-vit", "hf-deit", "hf-beit", "hf-dinov2-registers", "hf-siglip", "hf-timm-wrapper"]
)
def test_a_stock_pipeline_computes_what_we_do(name: str, resize: Any, tmp_path: Path) -> None:
    """For models without a processor, on images that are not square."""
    model = FAMILIES[name].wrapped()
    view = resized_as(image_view(model), resize)
    set_image_view(model, view)
    set_class_names(model, NAMES)
    ls.save(model, tmp_path / "m")
    images = [picture(50 + 3 * k, 110 + 5 * k) for k in range(12)]
    images = [image for image in images if "timm" in name or crops_alike(image, view)][:4]
    assert len(images) == 4
    stock = transformers.pipeline("image-classification", model=str(tmp_path / "m"))
    answers = stock(images, function_to_apply="none")
    scores = [{label["label"]: label["score"] for label in answer} for answer in answers]
    logits = torch.tensor([[score[label] for label in NAMES] for score in scores])
    assert_close(logits, own_logits(model, images, view), tolerance=0.005)
    other = resized_as(view, "squash" if view.resize == "crop" else "crop")
    assert (logits - own_logits(model, images, other)).abs().mean() > 0.03
    again = ls.load(str(tmp_path / "m"))
    assert image_view(again) == view
    assert class_names_of(again) == NAMES


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_timm_sees_our_view_of_a_saved_model(resize: Any, tmp_path: Path) -> None:
    model = FAMILIES["timm-vit"].wrapped()
    set_image_view(model, resized_as(image_view(model), resize))
    ls.save(model, tmp_path / "m")
    stock = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    transform = create_transform(**resolve_data_config(model=stock))
    for shape in SIZES:
        image = picture(*shape)
        assert_close(prepared(image_view(model), image), transform(image), tolerance=0.0)
    again = ls.load(f"dir:{tmp_path / 'm'}")
    assert image_view(positioned(again)) == image_view(again) == image_view(model)


def test_a_crop_that_is_not_square_has_no_processor(tmp_path: Path) -> None:
    """transformers has no such processor, and a wrong one would be worse than none."""
    model = FAMILIES["hf-vit"].wrapped()
    view = ImageView(channels=3, height=16, width=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    set_image_view(model, view)
    ls.save(model, tmp_path / "m")
    assert not (tmp_path / "m" / "preprocessor_config.json").exists()
