# Ran at commit 143de8b.
"""Draw docs/sure.svg, and write the tables of how sure the shipped model's answers are.

    python research/scripts/sure_page.py

Left: top-1 against the blocks that ran, by a fixed number and by a chance that ends the request
(results/tables/shipped-sure.csv, by `layershuffle eval`). Right: the share of right answers against
their chance, over all numbers of blocks, 2,000 test pairs in 6 random orders.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from layershuffle.bundled import asset
from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import depth_of
from layershuffle.data import DataOptions, open_data
from layershuffle.models import file_view, load
from layershuffle.plotting import figure_bytes, legend_below, new_figure, style_axes
from layershuffle.swarm.calibration import served_host
from layershuffle.swarm.sureness import answers_by_blocks, chances_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES = DOCS / "results" / "tables"
BINS = 10


def measured() -> list[float]:
    """The temperatures in the shipped calibration, which are written as a table."""
    calibration = json.loads((asset("digits-swarm") / "calibration.json").read_bytes())
    sure = calibration["sureness"]
    columns = [sure[name] for name in ("temperatures", "raw_error", "error")]
    with (TABLES / "sureness.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["blocks", "temperature", "raw_error", "error"])
        for blocks, values in enumerate(zip(*columns, strict=True), start=1):
            writer.writerow([blocks, *(f"{value:.6g}" for value in values)])
    with (TABLES / "sure-stops.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["confidence", "blocks", "top1"])
        for stop in sure["stops"]:
            writer.writerow([f"{stop[name]:.6g}" for name in ("confidence", "blocks", "top1")])
    return columns[0]


def reliability(chances: np.ndarray, right: np.ndarray) -> tuple[list[float], list[float]]:
    """(mean chance, share of right answers) in percent of every tenth of the chances."""
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    each = [bins == number for number in range(BINS)]
    means = [100 * float(chances[one].mean()) for one in each if one.any()]
    return means, [100 * float(right[one].mean()) for one in each if one.any()]


def draw(temperatures: list[float]) -> None:
    """Measure, and write the figure."""
    host = served_host(load("bundled:digits-swarm"))
    data = open_data("digit-pairs", file_view(host), options=DataOptions(train=False, max_test=2000))
    orders = [Shuffled().draw(depth_of(host), seed=0, step=k).blocks for k in range(6)]
    logits, labels = answers_by_blocks(
        host, data, split=data.splits["test"], permutations=orders, batch_size=250
    )
    right = logits.argmax(axis=-1) == labels
    figure = new_figure(9, 3.6)
    left, middle = figure.subplots(1, 2)
    with (TABLES / "shipped-sure.csv").open() as file:
        rows = list(csv.DictReader(file))
    entries = []
    for rule, name, colour in (
        ("stop", "ends when it is sure", "#0b6e99"),
        ("fixed", "a fixed number of blocks", "#b5651d"),
    ):
        points = sorted((float(r["blocks"]), float(r["top1"])) for r in rows if r["rule"] == rule)
        (line,) = left.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour)
        entries.append((line, name))
    left.set(xlabel="blocks that ran, mean", ylabel="top-1, %")
    style_axes(left, "Sure against fixed")
    for used, name, colour in (
        ([1.0] * len(temperatures), "as the model says", "#999999"),
        (temperatures, "with temperatures", "#3a7d44"),
    ):
        chances = chances_of(logits, used)
        (line,) = middle.plot(
            *reliability(chances, right), marker="o", markersize=4, color=colour
        )
        entries.append((line, name))
    middle.plot([0, 100], [0, 100], color="#cccccc", linewidth=1, zorder=0)
    middle.set(xlabel="chance of being right, %", ylabel="right, %")
    style_axes(middle, "Reliability")
    legend_below(figure, entries)
    (DOCS / "sure.svg").write_bytes(figure_bytes(figure, "svg"))


if __name__ == "__main__":
    draw(measured())
