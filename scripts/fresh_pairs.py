"""Score trained models on test pairs that no choice was made on, for docs/recipes.md.

    python scripts/fresh_pairs.py runs/digits-recipes
    python scripts/recipes_page.py

The recipes of the page were compared on pairs 0 to 4,999 of the test split. `FRESH` pairs behind
them, of the same handwritten digits, were never scored while recipes were chosen. The study needs
a run of each of `ARMS`; those of digits-paper can be trained in a study of their own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from breaks import finish
from open_questions import SEEDS, keep, model_of, rows_of
from science_page import judged
from torch import Tensor

import layershuffle as ls
from layershuffle.data.digits import PAIRS, DigitPairs
from layershuffle.stats import compare, estimate, mean
from layershuffle.text import markdown_table

CSV = "fresh-pairs.csv"
FRESH, ORDERS, BATCH = 3_000, 6, 250
ORDINARY, PLAIN, TWELVE, THREE = ARMS = (
    "baseline-8000",
    "layershuffle-8000",
    "layershuffle-mixed-exit-8000",
    "layershuffle-tied-3-mixed-exit-8000",
)
COMPARED = ((TWELVE, ORDINARY), (TWELVE, PLAIN), (THREE, PLAIN), (THREE, TWELVE))
MODES = {
    "in order": "sequential",
    "any order": "arbitrary",
    "6 alive": "kept:6:arbitrary",
    "3 alive": "kept:3:arbitrary",
    "rounds of two": "arbitrary:parallel=2",
    "rounds of four": "arbitrary:parallel=4",
}


@dataclass(frozen=True, kw_only=True)
class FreshRow:
    """Top-1 in percent on the fresh pairs, one value per drawn order, separated by spaces."""

    arm: str
    seed: int
    mode: str
    top1: str


def fresh_batches() -> list[tuple[Tensor, Tensor]]:
    """Images and labels of the fresh pairs."""
    first = PAIRS["test"]
    pairs = DigitPairs("test", first + FRESH)
    images, labels = finish(pairs.canvases[first:]), pairs.labels[first:]
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def measure(study: Path) -> Iterator[FreshRow]:
    """Score every model in every mode."""
    batches = fresh_batches()
    for arm in ARMS:
        for seed in SEEDS:
            scores = ls.evaluate(
                model_of(study, arm, seed),
                batches,
                modes=",".join(MODES.values()),
                num_orders=ORDERS,
            )
            for label, mode in MODES.items():
                values = [f"{score.top1:.2f}" for score in scores if str(score.mode) == mode]
                yield FreshRow(arm=arm, seed=seed, mode=label, top1=" ".join(values))
            print(f"fresh pairs: {arm}, seed {seed}", flush=True)


def read_scores() -> dict[tuple[str, str], dict[int, list[float]]]:
    """Top-1 of an arm in a mode: one value per drawn order, by seed."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(dict)
    for row in rows_of(CSV):
        values = [float(value) for value in row["top1"].split()]
        scores[row["arm"], row["mode"]][int(row["seed"])] = values
    return scores


def accuracy_table(labels: Mapping[str, str]) -> str:
    """The table of mean top-1 over models and its 95 % interval; `labels` of the arms."""
    scores, rows = read_scores(), []
    for arm in ARMS:
        cells = [estimate(scores[arm, mode], images=FRESH) for mode in MODES]
        texts = [f"{cell.mean:.1f} ({cell.low:.1f}-{cell.high:.1f})" for cell in cells]
        rows.append([labels[arm], *texts])
    return markdown_table(["recipe", *MODES], rows, align="l" + "r" * len(MODES))


def verdict_table(labels: Mapping[str, str]) -> str:
    """The table of the differences of `COMPARED`, in pairs over seeds."""
    scores, rows = read_scores(), []
    for arms in COMPARED:
        texts = []
        for mode in MODES:
            sides = [
                {seed: mean(values) for seed, values in scores[arm, mode].items()} for arm in arms
            ]
            texts.append(judged(compare(*sides)))
        rows.append([*(labels[arm] for arm in arms), *texts])
    return markdown_table(["recipe", "less", *MODES], rows, align="ll" + "l" * len(MODES))


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep(CSV, list(measure(Path(sys.argv[1]))))
