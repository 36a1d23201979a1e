"""Draw docs/sure.svg, and write the tables of the shipped model with fewer blocks.

    python scripts/sure_page.py

Left: top-1 against the blocks that ran, by a fixed number and by a chance that ends the image.
Right: the share of right answers against their chance, over all numbers of blocks, 2,000 test pairs
in 6 random orders.

Of results/tables it writes calibration.csv, sureness.csv and sure-stops.csv from the calibration
that ships with the model, shipped-sure.csv and shipped-rounds.csv by measuring, as
`layershuffle eval` does.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from torch import Tensor

import layershuffle as ls
from layershuffle.core.evaluation import Score
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.stack import fixed_of
from layershuffle.data import DataOptions, open_data
from layershuffle.ground.bundled import asset
from layershuffle.ground.plotting import draw_legend, figure_bytes, new_figure, style_axes
from layershuffle.ground.stats import mean, t_interval
from layershuffle.models import image_view
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLES = DOCS / "results" / "tables"
MODEL = "bundled:digits-swarm"
IMAGES = 2000
ORDERS = 6
BATCH = 250
BINS = 10
ACCURACY = ("top1", "low", "high", "orders_low", "orders_high")
LIMITS = (0.8, 0.9, 0.95, 0.98, 0.99)
KEPT = (9, 8, 7, 6, 5, 4, 3)


def write_table(name: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """Write a CSV file of the tables."""
    with (TABLES / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def write_calibration(cells: list[dict[str, float]]) -> None:
    """Write the accuracy of every number of blocks, from all downwards."""
    top1 = {}
    for cell in cells:
        top1[cell["kept"], cell["passes"], cell["parallel"]] = f"{cell['top1']:.6g}"
    kinds = [(passes, parallel) for passes in (1, 2) for parallel in (1, 2, 3, 4)]
    rows = []
    for cell in reversed(cells):
        if (cell["passes"], cell["parallel"]) == (1, 1):
            row = [str(cell["kept"])]
            row += [f"{cell[name]:.6g}" for name in ACCURACY]
            for passes, parallel in kinds:
                row.append(top1.get((cell["kept"], passes, parallel), ""))
            rows.append(row)
    names = [f"p{passes}_f{parallel}" for passes, parallel in kinds]
    write_table("calibration.csv", ("kept", *ACCURACY, *names), rows)


def write_tables() -> list[float]:
    """Write what the calibration measured; returns its temperature of every number of blocks."""
    calibration = json.loads(asset("digits-swarm", "calibration.json").read_bytes())
    write_calibration(calibration["rows"])
    sure = calibration["sureness"]
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


def scored(modes: str, *, orders: int, images: int, stop: float | None = None) -> list[list[Score]]:
    """The scores of every mode on test pairs, mode by mode."""
    settings = EvalSettings(modes=modes, num_orders=orders, max_images=images)
    scores = evaluate_spec(MODEL, "digit-pairs", settings=settings, stop=stop).scores
    return [scores[start : start + orders] for start in range(0, len(scores), orders)]


def over_orders(scores: list[Score]) -> list[str]:
    """Mean and 95 % interval of the top-1 over orders."""
    top1 = [score.top1 for score in scores]
    return [f"{value:.6g}" for value in (mean(top1), *t_interval(top1))]


def measure_stops() -> None:
    """Write what images take that end when they are sure, beside fixed numbers of blocks."""
    rows = []
    for stop in LIMITS:
        (scores,) = scored("arbitrary", orders=ORDERS, images=IMAGES, stop=stop)
        blocks = mean([float(score.blocks or 0) for score in scores])
        rows.append(["stop", str(stop), f"{blocks:.6g}", *over_orders(scores)])
    modes = ["arbitrary", *(f"kept:{kept}:arbitrary" for kept in KEPT)]
    for scores in scored(",".join(modes), orders=ORDERS, images=IMAGES):
        rows.append(["fixed", "", str(scores[0].kept), *over_orders(scores)])
    write_table("shipped-sure.csv", ("rule", "stop", "blocks", "top1", "low", "high"), rows)


def measure_rounds() -> None:
    """Write the accuracy of blocks side by side, and of those that are left in several passes."""
    side_by_side = (1, 2, 3, 4, 6)
    again = ((9, 1), (9, 2), (6, 1), (6, 2), (3, 1), (3, 2), (3, 4))
    modes = [f"arbitrary:parallel={count}" for count in side_by_side]
    modes += [f"kept:{kept}:arbitrary:passes={passes}" for kept, passes in again]
    groups = scored(",".join(modes), orders=8, images=600)
    rows = []
    for count, scores in zip(side_by_side, groups[: len(side_by_side)], strict=True):
        order = scores[0].order
        assert order is not None
        rows.append(["rounds", str(count), str(len(order.rounds)), "1", *over_orders(scores)])
    for (kept, passes), scores in zip(again, groups[len(side_by_side) :], strict=True):
        rows.append(["alive", str(kept), "", str(passes), *over_orders(scores)])
    columns = ("case", "count", "rounds", "passes", "top1", "low", "high")
    write_table("shipped-rounds.csv", columns, rows)


def answers() -> tuple[Tensor, Tensor]:
    """Logits `[orders * counts, images, classes]`, those of one order in a row, and labels."""
    model = ls.wrap(ls.load(MODEL)).eval()
    depth = ls.depth_of(model)
    fixed = fixed_of(model)
    hosted = drawn_blocks(depth, fixed)
    options = DataOptions(train=False, max_test=IMAGES)
    data = open_data("digit-pairs", image_view(model), options=options)
    loader = torch.utils.data.DataLoader(data.splits["test"].dataset, batch_size=BATCH)
    orders = []
    for step in range(ORDERS):
        drawn = ls.Shuffled(fixed=fixed).draw(depth, seed=0, step=step).blocks
        for count in range(hosted.start + 1, hosted.stop + 1):
            begun = ls.ExecutionOrder(drawn[hosted.start : count], depth)
            orders.append(begun.within_ends(fixed))
    parts = []
    truth = []
    with torch.no_grad():
        for pixels, labels in loader:
            logits = dict(ls.forward_many(model, data.finish(pixels), orders))
            parts.append(torch.stack([logits[index] for index in range(len(orders))]))
            truth.append(labels)
    return torch.cat(parts, dim=1), torch.cat(truth)


def chances_of(logits: Tensor, temperatures: list[float]) -> Tensor:
    """The largest probability of every answer, `[orders * counts, images]`, after the division of
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
    measure_stops()
    measure_rounds()
    draw(write_tables())
