"""Adversarial training: the attack of a step, and the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import adversarial
import breaks
import pytest
import robustness
import torch
import trainings

import layershuffle as ls

RADIUS = 8 / 255
ORDER = robustness.drawn(1)[0]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_a_fast_attack_is_one_step_from_a_random_start() -> None:
    model = ls.load("bundled:digits-swarm").eval()
    images, labels = robustness.split_images("validation", 8)
    worst = adversarial.fast_attack(
        model, images, labels, ORDER, radius=RADIUS, generator=generator()
    )
    start = images + RADIUS * (2 * torch.rand(images.shape, generator=generator()) - 1)
    _, gradient = robustness.attack_gradient(model, start, labels, [ORDER])
    for pixel in images.flatten().nonzero()[:50].flatten().tolist():
        change = float((start - images).flatten()[pixel])
        change += 1.25 * RADIUS * float(gradient.flatten()[pixel].sign())
        change = min(max(change, -RADIUS), RADIUS)
        wanted = min(max(float(images.flatten()[pixel]) + change, 0.0), 1.0)
        assert float(worst.flatten()[pixel]) == pytest.approx(wanted, abs=1e-6)
    before, after = (
        robustness.attack_gradient(model, pixels, labels, [ORDER])[0].mean()
        for pixels in (images, worst)
    )
    assert after > before


@pytest.mark.parametrize("arm", ["baseline", "layershuffle"])
def test_attacks_of_no_reach_leave_ordinary_training(arm: str) -> None:
    run = breaks.BreakRun(
        question="", case="", arm=arm, seed=1, start="bundled", steps=4, warmup=2, pairs=128
    )
    usual, _ = breaks.train(run, Path())
    model = adversarial.train(replace(run, arm=f"{arm}-adversarial"), radius=0.0, pairs=128)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, usual.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_attacks_of_some_reach_do_not() -> None:
    run = trainings.TrainingRun(
        arm="baseline-adversarial", seed=1, start="bundled", steps=3, warmup=1
    )
    near, far = (
        adversarial.train(run, radius=radius, pairs=64).state_dict() for radius in (0.0, RADIUS)
    )
    assert max(float((near[name] - far[name]).abs().max()) for name in near) > 1e-3
