"""Do siblings merge better if their blocks have a part in common?

    python research/siblings.py independent 0 1 --steps 500
    python research/siblings.py shared 0 1 --steps 500 --own-rate 1e-3

trains two `anyorder` models side by side from the pretrained model of the digit pairs, with the
seeds that are given. `independent`: each as if it were alone. `shared`: the weights of a block are
a part that both models have, which gets the gradients of both, plus a part of its own; after the
training they are added up, and the models are ordinary ones. Stem and head are always their own.
Adds a line for each kind of model to docs/results/tables/sibling-merges.csv: top-1 on 2,000 test
pairs, in order and over six drawn orders (two of a merge), of the models, of ten merges with every
block at its own place, of ten with blocks at any place, and of the mean of the weights.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from records.record import batches, pairs, rate_share
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import layershuffle as ls

TABLE = Path(__file__).resolve().parents[1] / "docs/results/tables/sibling-merges.csv"
COLUMNS = ("arm", "own_rate", "steps", "seeds", "models", "count", "sequential", "arbitrary")
RATE = 4e-3  # the best one of `anyorder` on the digit pairs
MERGES = 10
IMAGES = 2000


class SharedParts:
    """The weights of the models' blocks as the sum of one part for all and a part for each.

    The models hold the sums. `gather` hands their gradients to the parts, `spread` writes the sums
    back after a step of the optimiser. At first a model's own part is its weights, and the shared
    one is zero.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._sums = [inside(model) for model in models]
        self.shared = [torch.zeros_like(weight) for weight in self._sums[0]]
        self.own = [[weight.detach().clone() for weight in sums] for sums in self._sums]

    def gather(self) -> None:
        """The shared part gets the sum of all gradients, an own part those of its model."""
        for number, shared in enumerate(self.shared):
            gradients = [sums[number].grad for sums in self._sums]
            shared.grad = torch.stack([g for g in gradients if g is not None]).sum(0)
            for own, gradient in zip(self.own, gradients, strict=True):
                own[number].grad = gradient

    def spread(self) -> None:
        """Write the sums into the models."""
        with torch.no_grad():
            for sums, own in zip(self._sums, self.own, strict=True):
                for weight, part, shared in zip(sums, own, self.shared, strict=True):
                    weight.copy_(part + shared)


def trained(arm: str, seeds: Sequence[int], *, steps: int, own_rate: float) -> list[nn.Module]:
    """A model for each seed, all after so many steps of 64 pairs each."""
    images, labels = pairs("train")
    methods = [ls.Method("anyorder", branch_scale=1, seed=seed) for seed in seeds]
    models = [method.prepare(ls.load("bundled:digits")).train() for method in methods]
    parts = SharedParts(models) if arm == "shared" else None
    if parts is None:
        groups = [{"params": [weight for model in models for weight in model.parameters()]}]
    else:
        common = [*parts.shared, *(weight for model in models for weight in outside(model))]
        own = [weight for weights in parts.own for weight in weights]
        groups = [{"params": common}, {"params": own, "lr": own_rate}]
    optimizer = AdamW(groups, lr=RATE, eps=1e-6, weight_decay=0.0)
    schedule = LambdaLR(optimizer, partial(rate_share, steps=steps))
    streams = [batches(len(images), seed) for seed in seeds]
    for step in range(steps):
        for model, method, stream in zip(models, methods, streams, strict=True):
            rows = next(stream)
            method.loss(model, images[rows], labels[rows], step=step).backward()
            clip_grad_norm_(model.parameters(), max_norm=1.0)
        if parts is not None:
            parts.gather()
        optimizer.step()
        schedule.step()
        if parts is not None:
            parts.spread()
        for model in models:
            model.zero_grad()
    return models


def inside(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all blocks."""
    return [weight for block in ls.blocks_of(model) for weight in block.parameters()]


def outside(model: nn.Module) -> list[nn.Parameter]:
    """The weights of stem and head."""
    known = {id(weight) for weight in inside(model)}
    return [weight for weight in model.parameters() if id(weight) not in known]


def top1(
    models: Sequence[nn.Module],
    held_out: Sequence[tuple[Tensor, Tensor]],
    *,
    modes: str,
    orders: int,
) -> float:
    """The mean over models and orders, in percent."""
    scores: list[float] = []
    for model in models:
        scores += [s.top1 for s in ls.evaluate(model, held_out, modes=modes, num_orders=orders)]
    return mean(scores)


def main() -> None:
    """Train, merge, score, and add the lines to the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=("independent", "shared"))
    parser.add_argument("seeds", type=int, nargs=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--own-rate", type=float, default=RATE)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    models = trained(asked.arm, asked.seeds, steps=asked.steps, own_rate=asked.own_rate)
    group = ls.MergeGroup(models)
    compared: dict[str, list[nn.Module]] = {"single": models, "soup": [ls.uniform_soup(models)]}
    for slots in ("own", "random"):
        plans = ls.sample_plans(
            2, 12, count=MERGES, seed=0, replacement=True, slots=slots, fixed=(1, 1)
        )
        compared[f"merges, {slots} places"] = [group.merge(plan) for plan in plans]
    images, labels = (values[:IMAGES].split(500) for values in pairs("test"))
    held_out = list(zip(images, labels, strict=True))
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(COLUMNS)
        for name, kind in compared.items():
            in_order = top1(kind, held_out, modes="sequential", orders=1)
            orders = 6 if len(kind) < MERGES else 2
            any_order = top1(kind, held_out, modes="arbitrary", orders=orders)
            seeds = " ".join(map(str, asked.seeds))
            own_rate = "" if asked.arm == "independent" else asked.own_rate
            line = [asked.arm, own_rate, asked.steps, seeds, name, len(kind)]
            writer.writerow([*line, f"{in_order:.2f}", f"{any_order:.2f}"])
            print(*line, f"{in_order:.2f} in order, {any_order:.2f} in any order", flush=True)


if __name__ == "__main__":
    main()
