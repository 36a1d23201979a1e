# Ran at commit fe3aa8e.
"""Does an exit learn more if the run's own final answer teaches it beside the labels?

    python research/scripts/exit_own_answer.py

Arms, all `anyorder` with an exit loss of weight 0.3 (arXiv 2604.09168 does this for loops):
labels: cross-entropy with the labels, as it is; both: cross-entropy plus KL divergence from the
softmax of the final logits, detached, at temperature 1; halves: half of each; double:
cross-entropy twice, hence weight 0.6 against labels alone, the total weight of `both`.

Every finished model adds a row per mode to research/results/exit-own-answer.csv at once: top-1 in
percent and cross-entropy, means over the orders of the mode, on `n` pairs. Models that are in the
file are not trained again.
"""

from __future__ import annotations

import csv
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_scheduler

import layershuffle as ls
from layershuffle.data.digits import DIGIT_VIEW, LEVELS, PAIRS, DigitPairs
from layershuffle.data.transforms import PixelFinish
from layershuffle.models import load
from layershuffle.stats import compare, mean
from layershuffle.training.loop import EpochSampler

CSV = Path(__file__).resolve().parent.parent / "results" / "exit-own-answer.csv"
COLUMNS = ("arm", "steps", "seed", "mode", "kept", "top1", "cross_entropy", "n")
SHARES = {"labels": (1.0, 0.0), "both": (1.0, 1.0), "halves": (0.5, 0.5), "double": (2.0, 0.0)}
"""By arm: what the exit loss takes of the labels and of the run's own answer."""
SEEDS = (0, 1, 2)
PLAN = [
    *((arm, 500, seed) for seed in SEEDS for arm in ("labels", "both")),
    *((arm, 500, seed) for arm in ("halves", "double") for seed in SEEDS),
    *((arm, 2_000, seed) for seed in SEEDS for arm in ("labels", "both")),
    *(("double", 2_000, seed) for seed in SEEDS),
]
# Earlier experiments scored pairs 0 to 7,999 of the test split; some of them chose recipes.
FIRST, FRESH = PAIRS["test"] + 3_000, 2_000
MODES = ("sequential", "arbitrary", *(f"kept:{kept}:arbitrary" for kept in (9, 6, 3)))
ORDERS = 8

finish = PixelFinish(DIGIT_VIEW, LEVELS)


class Taught:
    """The criterion of one forward: `loss_along` calls it with final logits, then with early."""

    def __init__(self, labels: float, own: float) -> None:
        self.labels, self.own = labels, own
        self.final: Tensor | None = None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        truth = F.cross_entropy(logits, labels)
        if self.final is None:
            self.final = logits.detach()
            return truth
        target = self.final.log_softmax(-1)
        self.final = None
        if not self.own:
            return self.labels * truth
        own = F.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")
        return self.labels * truth + self.own * own


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of every step, as `fit` draws them."""
    pairs = DigitPairs("train", PAIRS["train"])
    sampler, epoch = EpochSampler(pairs, seed), 0
    while True:
        sampler.set_epoch(epoch)
        for pixels, labels in DataLoader(pairs, batch_size=64, sampler=sampler):
            yield finish(pixels), labels
        epoch += 1


def trained(arm: str, steps: int, seed: int) -> nn.Module:
    """A model trained with the settings of the recipe digits-quick; the last weights count."""
    torch.manual_seed(seed)
    model = ls.wrap(load("bundled:digits", seed=seed)).train()
    method = ls.Method("anyorder", seed=seed)
    optimiser = AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0, fused=True)
    schedule = get_scheduler("cosine", optimiser, num_warmup_steps=50, num_training_steps=steps)
    for step, (images, labels) in enumerate(islice(batches(seed), steps)):
        criterion = Taught(*SHARES[arm])
        loss = method.loss(model, images, labels, step=step, criterion=criterion)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return model


def scored(model: nn.Module) -> Iterator[tuple[str, int, float, float, int]]:
    """Mode, blocks kept, top-1 in percent, cross-entropy and number of pairs, one per mode."""
    pairs = DigitPairs("test", FIRST + FRESH)
    images, labels = finish(pairs.canvases[FIRST:]), pairs.labels[FIRST:]
    held_out = list(zip(images.split(250), labels.split(250), strict=True))
    scores = ls.evaluate(model, held_out, modes=list(MODES), num_orders=ORDERS)
    for mode in MODES:
        own = [score for score in scores if score.label == mode]
        top1, loss = mean([s.top1 for s in own]), mean([s.cross_entropy for s in own])
        yield mode, own[0].kept, top1, loss, own[0].images


def measure() -> None:
    """Train and score what the file lacks."""
    done = set()
    if CSV.exists():
        done = {(r["arm"], int(r["steps"]), int(r["seed"])) for r in rows()}
    else:
        CSV.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    for arm, steps, seed in PLAN:
        if (arm, steps, seed) in done:
            continue
        start = time.monotonic()
        model = trained(arm, steps, seed)
        seconds = time.monotonic() - start
        with CSV.open("a", encoding="utf-8") as file:
            for mode, kept, top1, loss, n in scored(model):
                row = (arm, steps, seed, mode, kept, f"{top1:.4f}", f"{loss:.5f}", n)
                file.write(",".join(map(str, row)) + "\n")
        print(f"{arm}, {steps} steps, seed {seed}: {seconds:.0f} s of training", flush=True)


def rows() -> list[dict[str, str]]:
    """The rows of the file."""
    with CSV.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def report() -> None:
    """Print means over seeds, and differences to `labels` in pairs over seeds."""
    scores: dict[tuple[str, int, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows():
        for column in ("top1", "cross_entropy"):
            key = (row["arm"], int(row["steps"]), row["mode"], column)
            scores[key][int(row["seed"])] = float(row[column])
    for (arm, steps, mode, column), values in scores.items():
        text = f"{steps:5} {arm:7} {mode:18} {column:13} {mean(values):8.3f}"
        if arm != "labels":
            gap = compare(values, scores["labels", steps, mode, column])
            text += f"  {gap.points:+.3f} ({gap.low:+.3f} to {gap.high:+.3f}), {gap.seeds} seeds"
        print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure()
    report()
