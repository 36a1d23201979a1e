"""scripts/trainings.py: batches, steps, and runs in stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import trainings


def training(**changes: int) -> trainings.TrainingRun:
    return trainings.TrainingRun(arm="a", seed=0, start="bundled", **changes)


@pytest.mark.parametrize(("count", "size"), [(128, 64), (64, 32)])
def test_every_row_is_used_equally_often(count: int, size: int) -> None:
    rows = trainings.batches_of(training(steps=5), count, size=size)
    counts = torch.bincount(rows.flatten(), minlength=count)
    assert rows.shape == (5, size)
    assert (int(counts.min()), int(counts.max())) == (2, 3)


def test_the_rate_rises_and_falls_to_zero() -> None:
    run = training(steps=150, warmup=50)
    assert trainings.warm_cosine(0, run) == 1 / 50
    assert trainings.warm_cosine(49, run) == trainings.warm_cosine(50, run) == 1
    assert math.isclose(trainings.warm_cosine(100, run), 0.5)
    assert trainings.warm_cosine(150, run) == 0


def test_a_step_clips_some_gradients_and_moves_all_weights() -> None:
    clipped, free = (torch.zeros(3, requires_grad=True) for _ in range(2))
    run = training(steps=10, warmup=2)
    step_down = trainings.stepper([clipped, free], run, clipped=[clipped])
    gradients = []
    for weight in (clipped, free):
        weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad))
    step_down(30 * clipped.sum() + 40 * free.sum())
    # Clipping changes the gradients in place, after these hooks.
    norms = sorted(float(gradient.norm()) for gradient in gradients)
    assert norms == pytest.approx([1, 40 * math.sqrt(3)], rel=1e-5)
    # The first step of AdamW is the rate, whatever the gradient; half of it, as the rate rises.
    for weight in (clipped, free):
        torch.testing.assert_close(weight.detach(), torch.full((3,), -2e-3), rtol=1e-4, atol=0)
        assert weight.grad is None


@dataclass(frozen=True)
class Row:
    arm: str
    seed: int
    score: float


def measure(run: trainings.TrainingRun, *, log: Path) -> Row:
    """Returns a row, and appends a letter to a file, which counts the calls."""
    with log.open("a", encoding="utf-8") as file:
        file.write(run.arm)
    return Row(arm=run.arm, seed=run.seed, score=1.5)


def test_stages_are_measured_in_turn_and_kept_once(tmp_path: Path) -> None:
    table, log = tmp_path / "folder" / "rows.csv", tmp_path / "log"
    key = ("arm", "seed")
    runs = [trainings.TrainingRun(arm=arm, seed=3, start="bundled") for arm in "abc"]
    assert trainings.finished(table, key) == set()
    stages = [runs[:2], runs[2:], runs[:1]]
    work = partial(measure, log=log)
    trainings.train_stages(stages, work, table=table, key=key, workers=1)
    assert log.read_text(encoding="utf-8") == "abca"
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines == ["arm,seed,score", "a,3,1.5", "b,3,1.5", "c,3,1.5"]
    assert trainings.finished(table, key) == {("a", "3"), ("b", "3"), ("c", "3")}
