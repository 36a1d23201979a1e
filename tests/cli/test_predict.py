"""`layershuffle predict` against a model rebuilt in the given order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.core.policies import Kept
from layershuffle.models import set_class_names, truncate

SPEC = DIGITS_VIT.replace("classes=100", "classes=3")
NAMES = ("cat", "dog", "fox")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model with class names, and three images of its size."""
    model = redraw(ls.load(SPEC), seed=0)
    set_class_names(model, NAMES)
    ls.save(model, tmp_path / "model")
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 20), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_hand(order: str) -> list[list[float]]:
    """Probabilities of the three images, from a model with its blocks in that order."""
    rebuilt = truncate(ls.load("model"), order)
    rebuilt = ls.unwrap(rebuilt).eval()
    stock = timm.create_model("local-dir:model", pretrained=True)
    transform = create_transform(**resolve_data_config(stock.pretrained_cfg))
    images = torch.stack([transform(Image.open(f"{number}.png")) for number in range(3)])
    with torch.inference_mode():
        probabilities: list[list[float]] = rebuilt(images).softmax(dim=-1).tolist()
    return probabilities


def drawn(mode_kept: int, seed: int) -> str:
    return str(Kept(mode_kept, order="arbitrary").draw(4, seed=seed, step=0))


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ([], "0,1,2,3"),
        (["--modes", "sequential"], "0,1,2,3"),
        (["--order", "2,0"], "2,0"),
        (["--modes", "kept:3:arbitrary", "--seed", "5"], drawn(3, 5)),
    ],
)
def test_predictions_equal_those_of_a_model_in_that_order(
    work: Path, capsys: pytest.CaptureFixture[str], flags: list[str], order: str
) -> None:
    images = [f"{number}.png" for number in range(3)]
    assert main(["predict", "model", *images, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["order"]) == ("model", order)
    assert [answer["image"] for answer in report["images"]] == images
    for answer, expected in zip(report["images"], by_hand(order), strict=True):
        ranking = sorted(range(3), key=lambda index: -expected[index])
        assert [guess["label"] for guess in answer["top"]] == [NAMES[i] for i in ranking]
        assert [guess["index"] for guess in answer["top"]] == ranking
        probabilities = [guess["probability"] for guess in answer["top"]]
        assert probabilities == pytest.approx([expected[i] for i in ranking], abs=1e-6)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as the package does
def test_pictures_that_models_cannot_see(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thin one would have 144 million pixels; of a drawing on nothing, nothing is left."""
    Image.new("L", (1_000_000, 1)).save("thin.png")
    Image.new("RGBA", (20, 12), (0, 0, 0, 90)).save("blank.png")
    Image.fromarray(np.zeros((12, 20), np.float32)).save("float.tif")
    Image.new("RGB", (20, 12)).save("dark.png")
    Image.new("1", (10_000, 10_000)).save("huge.png")
    code = main(["predict", "model", "thin.png", "float.tif", "blank.png", "dark.png", "huge.png"])
    answers, refusals = capsys.readouterr()
    assert code == 1
    assert answers.startswith("blank.png: ")
    assert "thin.png. Next: crop it." in refusals
    assert "float.tif. Next: convert the image to 8 or 16 bits" in refusals
    assert "blank.png: models see one colour" in refusals
    assert "dark.png: models" not in refusals
    assert "huge.png. Next: shrink it." in refusals


def test_an_unreadable_file_does_not_stop_the_others(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "model", "0.png", "model/config.json", "1.png", "--order", "3,1", "--top=1"]
    assert main(words) == 1
    printed = capsys.readouterr()
    *lines, last = printed.out.splitlines()
    for line, number, expected in zip(lines, (0, 1), by_hand("3,1"), strict=False):
        best = max(range(3), key=lambda index: expected[index])
        assert line == f"{number}.png: {NAMES[best]} {100 * expected[best]:.1f} %"
    assert last == "model, 2 of 4 blocks in the order 3,1"
    assert "Where: model/config.json. Next: give whole image files" in printed.err
    assert main([*words, "--json"]) == 1
    images = json.loads(capsys.readouterr().out)["images"]
    assert [answer["image"] for answer in images] == ["0.png", "model/config.json", "1.png"]
    assert [list(answer.get("error", ())) for answer in images] == [[], ["cause", "hint"], []]
    # More than a batch of files, none of which can be read, before one that can.
    assert main(["predict", "model", *["model/config.json"] * 70, *words[4:]]) == 1
    assert capsys.readouterr().out.splitlines()[0] == lines[1]
