# Ran at commit 8550626.
"""Score trained models on test pairs that no choice was made on, for docs/recipes.md.

    python scripts/fresh_pairs.py runs/digits-paper runs/digits-recipes
    python scripts/recipes_page.py

The recipes of the page were compared on pairs 0 to 4,999 of the test split. `FRESH` pairs behind
them, of the same handwritten digits, were never scored while recipes were chosen.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from breaks import pair_batches
from open_questions import SEEDS, keep, rows_of
from robustness import loaded
from science_page import estimate_text, gap, judged
from torch import Tensor

import layershuffle as ls
from layershuffle.data.digits import PAIRS, DigitPairs
from layershuffle.stats import estimate
from layershuffle.text import markdown_table

CSV = "fresh-pairs.csv"
FRESH, ORDERS = 3_000, 6
ORDINARY, PLAIN, TWELVE, THREE = ARMS = (
    "baseline-8000",
    "layershuffle-8000",
    "layershuffle-mixed-exit-8000",
    "layershuffle-tied-3-mixed-exit-8000",
)
RUNS = {ORDINARY: "baseline-8000-steps", PLAIN: "layershuffle-8000-steps"}
"""The names of the arms of digits-paper there."""
COMPARED = ((TWELVE, ORDINARY), (TWELVE, PLAIN), (THREE, PLAIN), (THREE, TWELVE))
MODES = {
    "in order": "sequential",
    "any order": "arbitrary",
    "6 alive": "kept:6:arbitrary",
    "3 alive": "kept:3:arbitrary",
    "rounds of two": "arbitrary:parallel=2",
    "rounds of four": "arbitrary:parallel=4",
}


FreshScores = dict[tuple[str, str], dict[int, list[float]]]
# By arm and mode: of each seed, one top-1 per drawn order.


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
    return pair_batches(DigitPairs("test", first + FRESH), first=first)


def measure(studies: Sequence[Path]) -> Iterator[FreshRow]:
    """Score every model in every mode."""
    batches = fresh_batches()
    for arm in ARMS:
        for seed in SEEDS:
            model = loaded(studies, RUNS.get(arm, arm), seed)
            scores = ls.evaluate(model, batches, modes=list(MODES.values()), num_orders=ORDERS)
            for label, mode in MODES.items():
                values = [f"{score.top1:.2f}" for score in scores if str(score.mode) == mode]
                yield FreshRow(arm=arm, seed=seed, mode=label, top1=" ".join(values))
            print(f"fresh pairs: {arm}, seed {seed}", flush=True)


def read_scores() -> FreshScores:
    """The committed scores."""
    scores: FreshScores = defaultdict(dict)
    for row in rows_of(CSV):
        values = [float(value) for value in row["top1"].split()]
        scores[row["arm"], row["mode"]][int(row["seed"])] = values
    return scores


def accuracy_table(scores: FreshScores, labels: Mapping[str, str]) -> str:
    """The table of mean top-1 over models and its 95 % interval; `labels` of the arms."""
    rows = []
    for arm in ARMS:
        cells = [estimate(scores[arm, mode], images=FRESH) for mode in MODES]
        rows.append([labels[arm], *map(estimate_text, cells)])
    return markdown_table(["recipe", *MODES], rows, align="l" + "r" * len(MODES))


def verdict_table(scores: FreshScores, labels: Mapping[str, str]) -> str:
    """The table of the differences of `COMPARED`, in pairs over seeds."""
    rows = []
    for arm, reference in COMPARED:
        texts = [judged(gap(scores, (arm, mode), (reference, mode))) for mode in MODES]
        rows.append([labels[arm], labels[reference], *texts])
    return markdown_table(["recipe", "less", *MODES], rows, align="ll" + "l" * len(MODES))


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep(CSV, list(measure([Path(study) for study in sys.argv[1:]])))
