"""Writes docs/results/tables/fashion-dinov2*.csv from the studies beside them, and prints the merges.

    fashion_dinov2_tables.py [DIRECTORY]   # of the files of fashion_dinov2_gpu.py: stopping when sure
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable
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


def cells(study: Path) -> Callable[..., str]:
    """The mean over the models of an arm, with its interval, by mode, blocks kept and rounds."""
    scores: dict[tuple[str, str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader((study / "results.csv").open()):
        key = row["method"], row["mode"], int(row["kept"]), int(row.get("parallel", 1))
        scores[key][row["seed"]].append(float(row["top1"]))

    def cell(arm: str, mode: str, kept: int, parallel: int = 1) -> str:
        return shown([mean(values) for values in scores[arm, mode, kept, parallel].values()])

    return cell


cell = cells(STUDY)
write("fashion-dinov2-320.csv", [
    {
        "method": title, "models": "3", "rate": rate, "sequential": cell(arm, "sequential", 12),
        "arbitrary": cell(arm, "arbitrary", 12), "rounds": cell(arm, "arbitrary", 12, 4),
        "nine": cell(arm, "arbitrary", 9), "six": cell(arm, "arbitrary", 6), "three": cell(arm, "arbitrary", 3), "paper": paper,
    }
    for arm, (title, rate, paper) in ARMS.items()
])

short, table = cells(ROOT / "docs/results/fashion-anyorder-64"), TABLES / "fashion-dinov2.csv"
others = [row for row in csv.DictReader(table.open()) if not row["method"].startswith("anyorder (ours)")]
write(table.name, others + [
    dict.fromkeys(others[0], "") | {
        "method": "anyorder (ours)", "models": "2", "rate": "4e-4", "sequential": short("anyorder", "sequential", 12),
        "arbitrary": short("anyorder", "arbitrary", 12), "nine": short("anyorder", "arbitrary", 9),
        "six": short("anyorder", "arbitrary", 6), "three": short("anyorder", "arbitrary", 3),
    }
])

merges: dict[tuple[str, str], list[float]] = defaultdict(list)
for row in csv.DictReader((STUDY / "merging.csv").open()):
    merges[row["arm"], row["kind"]].append(float(row["top1"]))
for key, values in merges.items():
    print(*key, len(values), f"{mean(values):.1f}", f"{min(values):.1f} to {max(values):.1f}")
if len(sys.argv) == 1:
    sys.exit()

sure: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
for line in Path(sys.argv[1], "sure.jsonl").read_text().splitlines():
    row = json.loads(line)
    sure[row["arm"], row["mode"], str(row["stop"])].append((row["blocks"] or 12.0, row["top1"]))


def stopped(arm: str, mode: str, stop: str) -> str:
    values = sure[arm, mode, stop]
    return f"{mean(b for b, _ in values):.1f} blocks, {mean(t for _, t in values):.1f} %"


write("fashion-dinov2-320-sure.csv", [
    {
        "rule": "12 blocks" if stop == "None" else f"at {stop}", "baseline_sequential": stopped("baseline", "sequential", stop),
        "layershuffle": stopped("layershuffle", "arbitrary", stop), "anyorder": stopped("anyorder", "arbitrary", stop),
        "anyorder_sequential": stopped("anyorder", "sequential", stop),
    }
    for stop in ("0.8", "0.9", "0.95", "0.98", "0.99", "0.999", "None")
])
