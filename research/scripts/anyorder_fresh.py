# Ran at commit b5d608cd.
"""Score the models of digits-anyorder on test pairs that no choice was made on, for docs/results.md.

    layershuffle reproduce research/recipes/digits-anyorder.yaml
    python research/scripts/anyorder_fresh.py runs/digits-anyorder

The pairs and orders are those of fresh_pairs.py: pairs 5,000 to 7,999 of the test split, six orders.
It writes research/results/anyorder-fresh.csv, and prints each mean with its interval beside that of
the same recipe with the labels as the only teacher of the exit (table fresh-pairs of
research/results/open-questions.csv), and the difference in pairs over the seeds.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch

import layershuffle as ls
from layershuffle.data.digits import LEVELS, PAIRS, DigitPairs
from layershuffle.data.transforms import PixelFinish
from layershuffle.models import image_view
from layershuffle.stats import compare, estimate, mean

RESULTS = Path(__file__).resolve().parent.parent / "results"
FRESH, ORDERS, SEEDS = 3_000, 6, (0, 1, 2)
ARMS = {
    "anyorder": "layershuffle-mixed-exit-8000",
    "anyorder-3-distinct": "layershuffle-tied-3-mixed-exit-8000",
}
"""By arm: the one of the earlier study that has the labels alone."""
MODES = {
    "in order": "sequential",
    "any order": "arbitrary",
    "6 alive": "kept:6:arbitrary",
    "3 alive": "kept:3:arbitrary",
    "rounds of two": "arbitrary:parallel=2",
    "rounds of four": "arbitrary:parallel=4",
}


def before() -> dict[tuple[str, str], dict[int, list[float]]]:
    """By arm and mode, the scores of every seed with the labels alone."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = {}
    with (RESULTS / "open-questions.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["table"] == "fresh-pairs":
                values = [float(value) for value in row["top1"].split()]
                scores.setdefault((row["arm"], row["mode"]), {})[int(row["seed"])] = values
    return scores


def main(study: Path) -> None:
    """Score, write and print."""
    first = PAIRS["test"]
    pairs = DigitPairs("test", first + FRESH)
    finish = PixelFinish(image_view(ls.load("bundled:digits")), LEVELS)
    images, labels = finish(pairs.canvases[first:]), pairs.labels[first:]
    batches = list(zip(images.split(250), labels.split(250), strict=True))
    rows, now = [], {}
    for arm in ARMS:
        for seed in SEEDS:
            model = ls.load(f"dir:{study}/runs/{arm}-seed{seed}/fit/model").eval()
            scores = ls.evaluate(model, batches, modes=list(MODES.values()), num_orders=ORDERS)
            for label, mode in MODES.items():
                values = [score.top1 for score in scores if str(score.mode) == mode]
                now.setdefault((arm, label), {})[seed] = values
                text = " ".join(f"{value:.2f}" for value in values)
                rows.append({"arm": arm, "seed": seed, "mode": label, "top1": text})
    with (RESULTS / "anyorder-fresh.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["arm", "seed", "mode", "top1"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    earlier = before()
    for (arm, label), scores in now.items():
        old = earlier[ARMS[arm], label]
        gap = compare(
            {seed: mean(values) for seed, values in scores.items()},
            {seed: mean(old[seed]) for seed in scores},
        )
        own, theirs = estimate(scores, images=FRESH), estimate(old, images=FRESH)
        print(
            f"{arm:20} {label:14} {own.mean:.4f} {own.low:.4f} {own.high:.4f}  "
            f"labels alone {theirs.mean:.2f}: {gap.points:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
