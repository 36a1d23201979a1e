"""Write the tables of Fashion-MNIST on docs pages from the kept studies, and print their merges.

    python scripts/fashion_tables.py

Reads docs/results/fashion-dinov2-320 and, for the rows of `anyorder` with 64 images a step,
docs/results/fashion-anyorder-64 (all blocks drawn) and docs/results/fashion-ends; for the rounds
of LayerShuffle docs/results/fashion-dinov2. Writes into docs/results/tables. Afterwards
scripts/tables.py renders the pages.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import mean

from layershuffle.ground.stats import t_interval

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
STUDY = RESULTS / "fashion-dinov2-320"
PAPER = RESULTS / "fashion-dinov2"
SHORT = RESULTS / "fashion-anyorder-64"
ENDS = RESULTS / "fashion-ends"
TABLES = RESULTS / "tables"
# Arm -> its name on the page, its learning rate, and the paper's scores on ImageNet.
ARMS = {
    "baseline": ("baseline", "5e-5", "82.61 / 0.13"),
    "layershuffle": ("LayerShuffle", "4e-4", "75.22 / 62.77"),
    "anyorder": ("anyorder --fixed 0,0 --branch-scale 1 (ours)", "4e-4", ""),
    "anyorder-3-distinct": ("the same, --distinct 3 (ours)", "4e-4", ""),
}
# The same of the arms whose first and last block keep their place.
ENDS_ARMS = {
    "layershuffle-ends-1-1": ("LayerShuffle --fixed 1,1", "4e-4", ""),
    "anyorder-scale-1-5e-5": ("anyorder --branch-scale 1 (ours)", "5e-5", ""),
    "anyorder": ("anyorder (ours)", "2.5e-5", ""),
    "anyorder-6000": ("anyorder, 6,000 steps (ours)", "2.5e-5", ""),
}
STOPS = ("0.8", "0.95", "0.98", "")

# (arm, mode, blocks kept, blocks side by side, passes) -> seed -> top-1 of every order, in percent.
Scores = dict[tuple[str, str, int, int, int], dict[str, list[float]]]
# (arm, mode, threshold) -> (mean number of blocks, top-1 in percent) of every order.
Stopped = dict[tuple[str, str, str], list[tuple[float, float]]]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_table(name: str, rows: list[dict[str, str]]) -> None:
    """Write the CSV file `name` of the tables, with the columns of the first row."""
    with (TABLES / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def scores_of(*files: Path) -> Scores:
    """All scores in the tables of a study."""
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for row in chain.from_iterable(map(read_rows, files)):
        side_by_side = int(row.get("parallel") or 1)
        passes = int(row.get("passes") or 1)
        key = (row["method"], row["mode"], int(row["kept"]), side_by_side, passes)
        scores[key][row["seed"]].append(float(row["top1"]))
    return scores


def cell(
    scores: Scores, arm: str, mode: str, kept: int = 12, *, side_by_side: int = 1, passes: int = 1
) -> str:
    """The mean over models, of several with half of its 95 % interval; empty without scores."""
    of_seeds = scores[arm, mode, kept, side_by_side, passes]
    if not of_seeds:
        return ""
    means = [mean(values) for values in of_seeds.values()]
    if len(means) == 1:
        return f"{means[0]:.1f}"
    low, high = t_interval(means)
    return f"{mean(means):.1f} &plusmn;{(high - low) / 2:.1f}"


def table_row(scores: Scores, arm: str, facts: tuple[str, str, str]) -> dict[str, str]:
    """The line of an arm, `facts` of which are in `ARMS` or `ENDS_ARMS`."""
    name, rate, paper = facts
    return {
        "method": name,
        "models": str(len(scores[arm, "sequential", 12, 1, 1])),
        "rate": rate,
        "sequential": cell(scores, arm, "sequential"),
        "arbitrary": cell(scores, arm, "arbitrary"),
        "rounds": cell(scores, arm, "arbitrary", side_by_side=4),
        "nine": cell(scores, arm, "arbitrary", 9),
        "six": cell(scores, arm, "arbitrary", 6),
        "three": cell(scores, arm, "arbitrary", 3),
        "paper": paper,
    }


def stopped(sure: Stopped, arm: str, mode: str, stop: str) -> str:
    """Blocks and accuracy of an arm that stops at a threshold, means over the orders."""
    scored = sure[arm, mode, stop]
    blocks = mean(blocks for blocks, _ in scored)
    top1 = mean(top1 for _, top1 in scored)
    return f"{blocks:.1f} blocks, {top1:.1f} %"


def write_scores() -> None:
    """The table of 320 images a step, and the rows of `anyorder` in that of 64."""
    scores = scores_of(STUDY / "results.csv")
    write_table("fashion-dinov2-320.csv", [table_row(scores, *item) for item in ARMS.items()])
    table = read_rows(TABLES / "fashion-dinov2.csv")
    ours = [table_row(scores_of(SHORT / "results.csv"), "anyorder", ARMS["anyorder"])]
    ours += [table_row(scores_of(ENDS / "results.csv"), *item) for item in ENDS_ARMS.items()]
    names = {row["method"] for row in ours}
    rows = [row for row in table if row["method"] not in names]
    for row in ours:
        rows.append({column: row.get(column, "") for column in table[0]})
    write_table("fashion-dinov2.csv", rows)


def write_rounds() -> None:
    """The table of blocks side by side, and of six blocks that run once or twice.

    Of `anyorder` it has the models of which all of it was scored.
    """
    shuffled = scores_of(PAPER / "results.csv")
    ours = scores_of(ENDS / "results.csv", ENDS / "rounds.csv")
    arm = "anyorder"
    scored = ours[arm, "arbitrary", 12, 4, 1]
    for of_seeds in ours.values():
        for seed in of_seeds.keys() - scored.keys():
            del of_seeds[seed]
    rows = [rounds_row(shuffled, "layershuffle", "LayerShuffle")]
    rows.append(rounds_row(ours, arm, "anyorder (ours)"))
    write_table("fashion-dinov2-rounds.csv", rows)


def rounds_row(scores: Scores, arm: str, name: str) -> dict[str, str]:
    """The line of an arm in the table of rounds."""
    return {
        "method": name,
        "models": str(len(scores[arm, "arbitrary", 12, 4, 1])),
        "one": cell(scores, arm, "arbitrary"),
        "two": cell(scores, arm, "arbitrary", side_by_side=2),
        "three": cell(scores, arm, "arbitrary", side_by_side=3),
        "four": cell(scores, arm, "arbitrary", side_by_side=4),
        "six": cell(scores, arm, "arbitrary", 6),
        "twice": cell(scores, arm, "arbitrary", 6, passes=2),
    }


def write_stops() -> None:
    """The table of answers that are given as soon as the head is sure.

    `anyorder` is that of 64 images a step, the others are those of 320.
    """
    sure: Stopped = defaultdict(list)
    others = [row for row in read_rows(STUDY / "sure.csv") if row["arm"] != "anyorder"]
    for row in others + read_rows(ENDS / "sure.csv"):
        scored = (float(row["blocks"]), float(row["top1"]))
        sure[row["arm"], row["mode"], row["stop"]].append(scored)
    rows = [
        {
            "rule": f"at {stop}" if stop else "12 blocks",
            "baseline_sequential": stopped(sure, "baseline", "sequential", stop),
            "layershuffle": stopped(sure, "layershuffle", "arbitrary", stop),
            "anyorder": stopped(sure, "anyorder", "arbitrary", stop),
            "anyorder_sequential": stopped(sure, "anyorder", "sequential", stop),
        }
        for stop in STOPS
    ]
    write_table("fashion-dinov2-sure.csv", rows)


def print_merges() -> None:
    """How many merges of each kind there are, with the mean and the range of their top-1."""
    merges: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in read_rows(STUDY / "merging.csv"):
        merges[row["arm"], row["kind"], row["name"]].append(float(row["top1"]))
    for key, values in merges.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(*key, len(values), f"{mean(values):.1f}", spread)


if __name__ == "__main__":
    write_scores()
    write_rounds()
    write_stops()
    print_merges()
