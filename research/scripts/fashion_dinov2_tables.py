"""Writes the tables of 320 images a step, and the row of anyorder in that of 64, to
docs/results/tables, from the studies beside them, and prints the merges.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from layershuffle.stats import t_interval

ROOT = Path(__file__).resolve().parents[2]
STUDY, TABLES = ROOT / "docs/results/fashion-dinov2-320", ROOT / "docs/results/tables"
ARMS = {
    "baseline": ("baseline", "5e-5", "82.61 / 0.13"),
    "layershuffle": ("LayerShuffle", "4e-4", "75.22 / 62.77"),
    "anyorder": ("anyorder (ours)", "4e-4", ""),
    "anyorder-3-distinct": ("anyorder, 3 distinct blocks (ours)", "4e-4", ""),
}


def shown(values: list[float]) -> str:
    low, high = t_interval(values)
    return f"{mean(values):.1f} &plusmn;{(high - low) / 2:.1f}"


def write(name: str, rows: list[dict[str, str]]) -> None:
    with (TABLES / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


Scores = dict[tuple[str, str, int, int], dict[str, list[float]]]


def scores_of(study: Path) -> Scores:
    """The top-1 of every order, by arm, mode, blocks kept and rounds, and there by seed."""
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader((study / "results.csv").open()):
        key = row["method"], row["mode"], int(row["kept"]), int(row.get("parallel", 1))
        scores[key][row["seed"]].append(float(row["top1"]))
    return scores


def table_row(scores: Scores, arm: str, *, title: str, rate: str, paper: str = "") -> dict[str, str]:
    def cell(mode: str, kept: int, parallel: int = 1) -> str:
        values = [mean(values) for values in scores[arm, mode, kept, parallel].values()]
        return shown(values) if values else ""

    return {
        "method": title, "models": str(len(scores[arm, "sequential", 12, 1])), "rate": rate,
        "sequential": cell("sequential", 12), "arbitrary": cell("arbitrary", 12), "rounds": cell("arbitrary", 12, 4),
        "nine": cell("arbitrary", 9), "six": cell("arbitrary", 6), "three": cell("arbitrary", 3), "paper": paper,
    }


long, short = scores_of(STUDY), scores_of(ROOT / "docs/results/fashion-anyorder-64")
write("fashion-dinov2-320.csv", [
    table_row(long, arm, title=title, rate=rate, paper=paper) for arm, (title, rate, paper) in ARMS.items()
])
table = TABLES / "fashion-dinov2.csv"
others = [row for row in csv.DictReader(table.open()) if row["method"] != "anyorder (ours)"]
row = table_row(short, "anyorder", title="anyorder (ours)", rate="4e-4")
write(table.name, [*others, {column: row.get(column, "") for column in others[0]}])

merges: dict[tuple[str, str, str], list[float]] = defaultdict(list)
for row in csv.DictReader((STUDY / "merging.csv").open()):
    merges[row["arm"], row["kind"], row["name"]].append(float(row["top1"]))
for key, values in merges.items():
    print(*key, len(values), f"{mean(values):.1f}", f"{min(values):.1f} to {max(values):.1f}")

sure: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
for row in csv.DictReader((STUDY / "sure.csv").open()):
    scored = float(row["blocks"]), float(row["top1"])
    sure[row["arm"], row["mode"], row["stop"]].append(scored)


def stopped(arm: str, mode: str, stop: str) -> str:
    values = sure[arm, mode, stop]
    return f"{mean(b for b, _ in values):.1f} blocks, {mean(t for _, t in values):.1f} %"


write("fashion-dinov2-320-sure.csv", [
    {
        "rule": f"at {stop}" if stop else "12 blocks", "baseline_sequential": stopped("baseline", "sequential", stop),
        "layershuffle": stopped("layershuffle", "arbitrary", stop), "anyorder": stopped("anyorder", "arbitrary", stop),
        "anyorder_sequential": stopped("anyorder", "sequential", stop),
    }
    for stop in ("0.8", "0.9", "0.95", "0.98", "0.99", "0.999", "")
])
