"""A model without names of classes is scored in the order that its library gives folders."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.models import save_for_hf

import layershuffle as ls
from common import FAMILIES, redraw
from layershuffle.models import set_class_names
from layershuffle.scoring import evaluate_spec
from layershuffle.settings import EvalSettings

# As timm sorts them; by code point species10 would be the second.
NATURAL = ("species1", "species2", "species3", "Species4", "species10")
SPEC = "timm:vit_tiny_patch16_224?img_size=32&patch_size=8&embed_dim=32&depth=4&num_heads=2"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model in every form, and images in the folders of the classes that it gives them."""
    model, draw = redraw(FAMILIES["timm-vit"].plain(), seed=4), torch.Generator().manual_seed(0)
    files = [tmp_path / f"{number}.png" for number in range(60)]
    for file in files:
        pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((40, 40), Image.Resampling.BICUBIC).save(file)
    # No class is more probable than another on average, so each one gets images.
    for answer in ls.predict(ls.wrap(model), files):
        for ranked in answer.top:
            model.head.bias.data[ranked.index] -= math.log(ranked.probability) / len(files)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model_best.pth.tar")
    save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    ls.save(model, tmp_path / "ours")
    set_class_names(model, NATURAL)
    ls.save(model, tmp_path / "named")
    for file, answer in zip(files, ls.predict(ls.wrap(model), files), strict=True):
        place = tmp_path / "data" / "val" / answer.top[0].label
        place.mkdir(parents=True, exist_ok=True)
        file.rename(place / file.name)
    assert {path.name for path in (tmp_path / "data" / "val").iterdir()} == set(NATURAL)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "right", "order"),
    [
        (f"{SPEC}&num_classes=5&checkpoint={{}}/model_best.pth.tar", True, "is natural"),
        ("hf:{}/timm", True, "is natural"),
        ("dir:{}/named", True, None),
        # Whatever sorted its classes is unknown, so the order of the data is taken, and said.
        ("dir:{}/ours", False, "is theirs (Species4, species1, species10"),
    ],
)
def test_the_order_of_classes(spec: str, right: bool, order: str | None, saved: Path) -> None:
    settings = EvalSettings(modes="sequential")
    result = evaluate_spec(spec.format(saved), f"folder:{saved / 'data'}", settings=settings)
    assert (result.scores[0].top1 == 100.0) == right
    assert any(order in note for note in result.data.notes) if order else not result.data.notes
