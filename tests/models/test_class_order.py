"""A model without names of classes is scored in the order that its library gives folders."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.models import save_for_hf

import layershuffle as ls
from common import FAMILIES, redraw
from layershuffle.errors import UsageError
from layershuffle.merging.scoring import score_ensemble
from layershuffle.merging.settings import EnsembleSettings
from layershuffle.models import name_classes, set_class_names
from layershuffle.scoring import evaluate_spec
from layershuffle.settings import EvalSettings
from refusals import refuses

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
        (f"{SPEC}&num_classes=5&checkpoint={{}}/model_best.pth.tar", True, "in natural order"),
        ("hf:{}/timm", True, "in natural order"),
        ("dir:{}/named", True, None),
        # Whatever sorted its classes is unknown, so the order of the data is taken, and said.
        (
            "dir:{}/ours",
            False,
            "for Species4, species1, species10 and 2 more, in the order of the data",
        ),
    ],
)
def test_the_order_of_classes(spec: str, right: bool, order: str | None, saved: Path) -> None:
    settings = EvalSettings(modes="sequential")
    result = evaluate_spec(spec.format(saved), f"folder:{saved / 'data'}", settings=settings)
    assert (result.scores[0].top1 == 100.0) == right
    assert any(order in note for note in result.data.notes) if order else not result.data.notes


def test_a_file_names_the_classes(saved: Path) -> None:
    """With a mark of byte order and the line ends of Windows, as some editors write."""
    file = saved / "classes.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*NATURAL, ""]).encode())
    for place in ("ours", "timm", "named"):
        settings = EvalSettings(modes="sequential", classes=file)
        result = evaluate_spec(
            f"dir:{saved / place}", f"folder:{saved / 'data'}", settings=settings
        )
        assert (result.scores[0].top1, result.data.notes) == (100.0, ())


@pytest.mark.parametrize(
    ("place", "lines"),
    [
        ("named", [*reversed(NATURAL)]),  # another order than that of the model itself
        ("ours", NATURAL[:4]),
        ("ours", [*NATURAL[:2], "", *NATURAL[3:]]),
        ("ours", None),
    ],
)
def test_names_that_do_not_fit_are_refused(
    place: str, lines: Sequence[str] | None, saved: Path
) -> None:
    file = saved / "classes.txt"
    if lines is not None:
        file.write_text("\n".join(lines), encoding="utf-8")
    with refuses(UsageError, file):
        name_classes(ls.load(saved / place), file, place=place)


def test_an_ensemble_of_a_model_with_names_and_one_without(saved: Path) -> None:
    """By number, the member without names would answer species10 where it means species2."""
    models = [f"dir:{saved / place}" for place in ("named", "timm")]
    data, settings = f"folder:{saved / 'data'}", EnsembleSettings(modes="sequential")
    (score,), notes = score_ensemble(models, data, settings=settings)
    assert score.top1 == 100.0
    assert "in natural order" in notes[0]
    # A member whose order nobody knows has that of the first one, or of the data.
    models = [models[0], f"dir:{saved / 'ours'}"]
    (score,), notes = score_ensemble(models, data, settings=settings)
    assert (score.top1, f"in the order of {models[0]}" in notes[0]) == (100.0, True)
    with refuses(UsageError):
        score_ensemble(models[::-1], data, settings=settings)
