"""The record: 90 % of held-out digit pairs right with the blocks in any order, in few steps.

    python research/records/record.py anyorder --steps 1500
    python research/records/record.py anyorder --steps 1500 --against anyorder-ends-0-0

An entry is a function that makes a training method, and a learning rate. All else is the same for
everybody: the pretrained model, 20,000 pairs to train on, 64 of them a step, AdamW, a warm-up and
half a cosine to zero at the last step. The first command trains one model and scores it on the
validation pairs, as often as you like. The second one judges: three seeds on the test pairs, and
three of the record before at the same number of steps.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from statistics import mean, stdev

import torch
from scipy.stats import ttest_ind
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import layershuffle as ls
from layershuffle.core.draws import Stream
from layershuffle.data.digits import LEVELS, PAIRS, DigitPairs

GOAL = 90.0  # percent, the mean of the judged seeds
RECORD, FEWEST = "anyorder", 750  # the last row of the table, and its steps
MOST_CHANCE = 0.01  # of so large a lead over the record before, if the two were equal
SEEDS = (0, 1, 2)
BATCH = 64
WARMUP = 50  # steps
ORDERS = 20  # drawn for a score, by one seed
AT_ONCE = 500  # images of a forward that learns nothing


@dataclass(frozen=True)
class Entry:
    """How the blocks learn: `method` takes a seed and gives what makes the loss of a batch."""

    options: dict[str, object]
    name: str = "layershuffle"
    rate: float = 4e-3

    def method(self, seed: int) -> ls.Method:
        """The method of one training."""
        return ls.Method(self.name, seed=seed, **self.options)


# Yours goes here.
ENTRIES = {
    "layershuffle": Entry({}),
    "four-orders": Entry({"orders_per_batch": 4}),
    "anyorder-ends-0-0": Entry({"fixed": (0, 0), "branch_scale": 1}, name="anyorder"),
    "anyorder": Entry({"branch_scale": 1}, name="anyorder"),
}


def pairs(split: str) -> tuple[Tensor, Tensor]:
    """All images of a split, float32 [n, 1, 12, 20], and their classes, 0 to 99."""
    drawn = DigitPairs(split, PAIRS[split])
    return (drawn.canvases / LEVELS - 0.2) / 0.35, drawn.labels


def batches(number: int, seed: int) -> Iterator[Tensor]:
    """The rows of one batch after the other, without end. Every epoch has its own permutation."""
    for epoch in count():
        generator = torch.Generator().manual_seed(Stream(seed, epoch).below(1 << 63))
        for rows in torch.randperm(number, generator=generator).split(BATCH):
            if len(rows) == BATCH:
                yield rows


def rate_share(step: int, *, steps: int) -> float:
    """The learning rate of a step, as a share of the highest one."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))) / 2


def trained(entry: Entry, *, steps: int, seed: int) -> nn.Module:
    """The pretrained model after so many steps of the entry."""
    images, labels = pairs("train")
    method = entry.method(seed)
    model = method.prepare(ls.load("bundled:digits"), images[:1])
    optimizer = AdamW(model.parameters(), lr=entry.rate, eps=1e-6, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: rate_share(step, steps=steps))
    model.train()
    for step, rows in zip(range(steps), batches(len(images), seed), strict=False):
        loss = method.loss(model, images[rows], labels[rows], step=step)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def any_order(model: nn.Module, split: str) -> float:
    """Top-1 in percent, the mean over drawn orders. Ends that keep their place are not drawn."""
    images, labels = pairs(split)
    held_out = list(zip(images.split(AT_ONCE), labels.split(AT_ONCE), strict=True))
    return mean(
        score.top1 for score in ls.evaluate(model, held_out, modes="arbitrary", num_orders=ORDERS)
    )


def tops(name: str, *, steps: int, seeds: tuple[int, ...], split: str) -> list[float]:
    """The score of every seed, each printed with the seconds of its training."""
    scores: list[float] = []
    for seed in seeds:
        begun = time.perf_counter()
        model = trained(ENTRIES[name], steps=steps, seed=seed)
        seconds = time.perf_counter() - begun
        scores.append(any_order(model, split))
        print(
            f"{name}, {steps} steps, seed {seed}: {scores[-1]:.2f} % of the {split} pairs in any "
            f"order, {seconds:.0f} s",
            flush=True,
        )
    return scores


def main() -> None:
    """Score one entry, or judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entry", choices=ENTRIES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--against", choices=ENTRIES, help="judge it beside the record before")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.against is None:
        tops(asked.entry, steps=asked.steps, seeds=SEEDS[:1], split="validation")
        return
    ours = tops(asked.entry, steps=asked.steps, seeds=SEEDS, split="test")
    print(f"mean {mean(ours):.2f} %, spread {stdev(ours):.2f}: {GOAL:g} % is the goal")
    before = tops(asked.against, steps=asked.steps, seeds=SEEDS, split="test")
    p = ttest_ind(ours, before, equal_var=False, alternative="greater").pvalue
    print(f"{mean(ours) - mean(before):+.2f} points, p = {p:.2g} (Welch, one-sided)")
    is_shorter = asked.against == RECORD and asked.steps < FEWEST
    print("a record" if is_shorter and mean(ours) >= GOAL and p < MOST_CHANCE else "no record")


if __name__ == "__main__":
    main()
