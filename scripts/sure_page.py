"""Draw docs/sure.svg, and write the tables of how sure the shipped model's answers are.

    python scripts/sure_page.py

Left: top-1 against the blocks that ran, by a fixed number and by a chance that ends the request
(results/tables/shipped-sure.csv, by `layershuffle eval`). Right: the share of right answers against
their chance, over all numbers of blocks, 2,000 test pairs in 6 random orders. The tables come from
the calibration that ships with the model.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from torch import Tensor

import layershuffle as ls
from layershuffle.data import DataOptions, open_data
from layershuffle.ground.bundled import asset
from layershuffle.ground.plotting import draw_legend, figure_bytes, new_figure, style_axes
from layershuffle.models import image_view

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLES = DOCS / "results" / "tables"
MODEL = "bundled:digits-swarm"
IMAGES = 2000
ORDERS = 6
BATCH = 250
BINS = 10


def write_table(name: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """Write a CSV file of the tables."""
    with (TABLES / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def write_tables() -> list[float]:
    """Write what the calibration measured; returns its temperature of every number of blocks."""
    sure = json.loads(asset("digits-swarm", "calibration.json").read_bytes())["sureness"]
    measured = zip(sure["temperatures"], sure["raw_error"], sure["error"], strict=True)
    rows = [
        [str(blocks), *(f"{value:.6g}" for value in values)]
        for blocks, values in enumerate(measured, start=1)
    ]
    write_table("sureness.csv", ("blocks", "temperature", "raw_error", "error"), rows)
    rows = []
    for stop in sure["stops"]:
        depth = len(sure["temperatures"])
        whole = [r for r in stop["unsure"] if (r["kept"], r["parallel"]) == (depth, 1)]
        cells = [f"{stop[name]:.6g}" for name in ("confidence", "blocks", "top1")]
        # A kind that hardly came up was not measured.
        cells.append("" if stop["sure"] is None else f"{stop['sure']['top1']:.6g}")
        cells.append(f"{whole[0]['top1']:.6g}" if whole else "")
        rows.append(cells)
    write_table("sure-stops.csv", ("confidence", "blocks", "top1", "sure", "unsure"), rows)
    return [float(temperature) for temperature in sure["temperatures"]]


def answers() -> tuple[Tensor, Tensor]:
    """Logits `[orders * depth, images, classes]`, those of one order in a row, and labels."""
    model = ls.wrap(ls.load(MODEL)).eval()
    depth = ls.depth_of(model)
    options = DataOptions(train=False, max_test=IMAGES)
    data = open_data("digit-pairs", image_view(model), options=options)
    loader = torch.utils.data.DataLoader(data.splits["test"].dataset, batch_size=BATCH)
    drawn = [ls.Shuffled().draw(depth, seed=0, step=step) for step in range(ORDERS)]
    orders = [order.beginning(count) for order in drawn for count in range(1, depth + 1)]
    parts = []
    truth = []
    with torch.no_grad():
        for pixels, labels in loader:
            logits = dict(ls.forward_many(model, data.finish(pixels), orders))
            parts.append(torch.stack([logits[index] for index in range(len(orders))]))
            truth.append(labels)
    return torch.cat(parts, dim=1), torch.cat(truth)


def chances_of(logits: Tensor, temperatures: list[float]) -> Tensor:
    """The largest probability of every answer, `[orders * depth, images]`, after the division of
    its logits by the temperature of its number of blocks."""
    divisors = torch.tensor(temperatures * ORDERS)[:, None, None]
    return (logits / divisors).softmax(dim=-1).amax(dim=-1)


def reliability(chances: Tensor, right: Tensor) -> tuple[list[float], list[float]]:
    """(mean chance, share of right answers) in percent of every tenth of the chances."""
    bins = (chances * BINS).long().clamp(max=BINS - 1)
    means = []
    shares = []
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            means.append(100 * float(chances[inside].double().mean()))
            shares.append(100 * float(right[inside].double().mean()))
    return means, shares


def draw(temperatures: list[float]) -> None:
    """Measure, and write the figure."""
    logits, labels = answers()
    right = logits.argmax(dim=-1) == labels
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
        points_of = reliability(chances_of(logits, used), right)
        (line,) = middle.plot(*points_of, marker="o", markersize=4, color=colour)
        entries.append((line, name))
    middle.plot([0, 100], [0, 100], color="#cccccc", linewidth=1, zorder=0)
    middle.set(xlabel="chance of being right, %", ylabel="right, %")
    style_axes(middle, "Reliability")
    draw_legend(figure, entries)
    (DOCS / "sure.svg").write_bytes(figure_bytes(figure, "svg"))


if __name__ == "__main__":
    draw(write_tables())
