"""`compare`: settings that differ, and scores in pairs against a slow path."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.cli.compare import different, settings_of
from layershuffle.core.evaluation import Score
from layershuffle.data import Split
from layershuffle.ground.errors import UsageError
from layershuffle.scoring.paired import paired_scores
from refusals import refuses

DATA = "digit-pairs?train=8&validation=8&test=40"


def score(order: str, right: list[int]) -> Score:
    """A score along an order of three blocks of images that were right (1) or not."""
    answers = torch.tensor(right, dtype=torch.bool)
    return Score(
        mode=None,
        index=0,
        order=ls.ExecutionOrder.parse(order, depth=3),
        images=len(right),
        top1=100.0 * sum(right) / len(right),
        top5=100.0,
        cross_entropy=1.0,
        right=answers,
    )


def test_the_interval_is_that_of_paired_differences() -> None:
    """Student's t over the differences of the images: 0, 1, 1, -1, 0 of 1, in percent."""
    first = [score("0,1,2", [1, 0, 0, 1, 1])]
    second = [score("0,1,2", [1, 1, 1, 0, 1])]
    split = Split(dataset=[None] * 5)
    (paired,) = paired_scores(first, second, split=split)
    assert (paired.first, paired.second) == (60.0, 80.0)
    assert paired.difference == pytest.approx(20.0)
    deviation = math.sqrt(sum((d - 0.2) ** 2 for d in (0, 1, 1, -1, 0)) / 4)
    half = 2.7764451 * 100 * deviation / math.sqrt(5)  # t(0.975, 4)
    assert paired.low == pytest.approx(20.0 - half, rel=1e-6)
    assert paired.high == pytest.approx(20.0 + half, rel=1e-6)


def test_other_orders_or_images_are_no_pairs() -> None:
    split = Split(dataset=[None] * 2)
    with refuses(UsageError):
        paired_scores([score("0,1,2", [1, 0])], [score("1,0,2", [1, 0])], split=split)
    with refuses(UsageError):
        paired_scores([score("0,1,2", [1, 0])], [score("0,1,2", [1, 0, 1])], split=split)


def test_settings_that_differ() -> None:
    first = {"lr": 0.1, "seed": 0, "encoding.table": "per-block"}
    second = {"lr": 0.1, "seed": 1, "opt": "lamb", "encoding.table": "per-block"}
    assert different(first, second) == {"seed": (0, 1), "opt": (None, "lamb")}
    assert settings_of("bundled:digits")["method"] == "baseline"
    assert settings_of("timm:vit_tiny_patch16_224") == {}


def test_settings_are_those_in_force(tmp_path: Path) -> None:
    """Not those that were typed: a preset's own value is the same as that value."""
    words = ["--model", DIGITS_VIT, "--data", DATA, "--steps", "1", "--batch-size", "4"]
    given = ["--fixed", "1,1", "--branch-scale", "0.1"]
    assert main(["fit", *words, "--out", str(tmp_path / "a")]) == 0
    assert main(["fit", *words, *given, "--out", str(tmp_path / "b")]) == 0
    assert settings_of(str(tmp_path / "a"))["fixed"] == [1, 1]
    assert settings_of(str(tmp_path / "a")) == settings_of(str(tmp_path / "b"))
    assert settings_of(str(tmp_path / "a")) == settings_of(str(tmp_path / "a" / "model"))


def test_two_models_as_evaluate_scores_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        ls.save(redraw(ls.load(DIGITS_VIT), seed=seed), tmp_path / name)
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--data", DATA, "--num-orders", "3"]
    assert main(["compare", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    scores = {}
    for name in ("a", "b"):
        options = ["--data", DATA, "--num-orders", "3", "--json"]
        assert main(["eval", str(tmp_path / name), *options]) == 0
        scores[name] = json.loads(capsys.readouterr().out)["modes"]
    for row, one, other in zip(report["scores"], scores["a"], scores["b"], strict=True):
        assert row["first"] == pytest.approx(one["top1"]["mean"])
        assert row["second"] == pytest.approx(other["top1"]["mean"])
        assert row["difference"] == pytest.approx(row["second"] - row["first"])
        assert row["low"] <= row["difference"] <= row["high"]
    assert main(["compare", *words[:2]]) == 2
    assert "no record of the images" in capsys.readouterr().err
