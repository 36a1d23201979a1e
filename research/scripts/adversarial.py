# Ran at commit 8550626.
"""Train models against attacks, at half the steps, for scripts/robustness.py.

    python scripts/adversarial.py runs/digits-tied --workers 2

The models of `ARMS` are saved in runs/digits-tied/adversarial; existing ones are not trained again.
A step computes one gradient for the attack and one for the weights (FGSM from a random start, arXiv
2001.03994), so 1,000 steps cost as much as 2,000 steps of `digits-tied`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from breaks import BATCH, DEPTH, PAIRS
from open_questions import SEEDS
from robustness import (
    SEQUENTIAL,
    attack_gradient,
    attacked,
    drawn,
    normalised,
    split_images,
    top1,
)
from torch import Tensor, nn
from torch.nn import functional
from trainings import TrainingRun, batches_of, in_processes, read_arguments, stepper

import layershuffle as ls
from layershuffle.core.losses import logits_of

ARMS = {"baseline-adversarial": ls.Sequential(), "layershuffle-adversarial": ls.Shuffled()}
RADIUS = 10 / 255
"""The radius of the attacks on the page, which `chosen_radius` finds on validation pairs."""
REACH = 1.25
"""Length of the attack's step over the radius, as in the paper; the result is clipped to it."""
GROWING = 0.5
"""The share of the steps in which the radius grows from 0. With the full radius from the beginning,
LayerShuffle fell to chance and stayed there (validation pairs, one seed)."""


def fast_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    order: ls.ExecutionOrder,
    *,
    radius: float,
    generator: torch.Generator,
) -> Tensor:
    """One step along the sign of the gradient, from a random start within `radius` of `images`."""
    start = radius * (2 * torch.rand(images.shape, generator=generator) - 1)
    _, gradient = attack_gradient(model, images + start, labels, [order])
    change = (start + REACH * radius * gradient.sign()).clamp(-radius, radius)
    return (images + change).clamp(0, 1)


def train(run: TrainingRun, *, radius: float = RADIUS, pairs: int = PAIRS) -> nn.Module:
    """The bundled model, refined only on attacked images; attack and step use the same order."""
    model = ls.load("bundled:digits", seed=run.seed)
    images, labels = split_images("train", pairs)
    weights = list(model.parameters())
    step_down = stepper(weights, run, clipped=weights)
    generator = torch.Generator().manual_seed(run.seed)
    model.train()
    for step, rows in enumerate(batches_of(run, pairs, size=BATCH)):
        order = ARMS[run.arm].draw(DEPTH, seed=run.seed, step=step)
        reach = radius * min(1.0, step / (GROWING * run.steps))
        worst = fast_attack(
            model, images[rows], labels[rows], order, radius=reach, generator=generator
        )
        with ls.running(model, order):
            loss = functional.cross_entropy(logits_of(model(normalised(worst))), labels[rows])
        step_down(loss)
    return model.eval()


def train_and_save(run: TrainingRun, directory: Path) -> str:
    """Train and save a model. Returns a line with its top-1 on validation pairs, in percent.

    Such training may suddenly overfit to the attack of one step (catastrophic overfitting), which
    the second number, of an attack of twenty steps, would show.
    """
    torch.set_num_threads(1)
    model = train(run)
    ls.save(model, directory / f"{run.arm}-seed{run.seed}")
    images, labels = split_images("validation", 100)
    orders = SEQUENTIAL if run.arm.startswith("baseline") else drawn(1)
    worst = attacked(model, images, labels, lambda _: orders, radius=RADIUS)
    scores = [top1(model, pixels, labels, orders) for pixels in (images, worst)]
    return f"{run.arm}, seed {run.seed}: clean {scores[0]:.1f}, attacked {scores[1]:.1f}"


if __name__ == "__main__":
    arguments = read_arguments(
        "Train models against attacks.", directory="the directory of the study digits-tied"
    )
    directory = arguments.directory / "adversarial"
    left = [
        TrainingRun(arm=arm, seed=seed, start="bundled", steps=1000)
        for seed in SEEDS
        for arm in ARMS
        if not (directory / f"{arm}-seed{seed}").exists()
    ]
    work = partial(train_and_save, directory=directory)
    for line in in_processes(work, left, workers=arguments.workers):
        print(line, flush=True)
