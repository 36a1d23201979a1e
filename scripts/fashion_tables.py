"""Write the tables of Fashion-MNIST on docs pages from the kept studies.

    python scripts/fashion_tables.py

Reads docs/results/fashion-dinov2-320, and for 64 images a step docs/results/fashion-dinov2 (the
paper's methods), docs/results/fashion-anyorder-64 (`anyorder` with all blocks drawn) and
docs/results/fashion-ends. Writes into docs/results/tables, and draws
docs/results/fashion-dinov2/length.svg. Afterwards scripts/tables.py renders the pages.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import mean

from layershuffle.ground.plotting import STYLES, draw_legend, figure_bytes, new_figure, style_axes
from layershuffle.ground.stats import t_interval
from layershuffle.study.paper.numbers import paper_number

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
STUDY = RESULTS / "fashion-dinov2-320"
PAPER = RESULTS / "fashion-dinov2"
SHORT = RESULTS / "fashion-anyorder-64"
ENDS = RESULTS / "fashion-ends"
TABLES = RESULTS / "tables"
# Arms beside which the table has the paper's scores on ImageNet, in order and in any order.
PAPERS = ("baseline", "layershuffle", "layershuffle-position", "layershuffle-predict")
# Arm -> its name on the page and its learning rate, of 320 images a step.
LARGE_ARMS = {
    "baseline": ("baseline", "5e-5"),
    "layershuffle": ("LayerShuffle", "4e-4"),
    "anyorder": ("anyorder --fixed 0,0 --branch-scale 1 (ours)", "4e-4"),
    "anyorder-3-distinct": ("the same, --distinct 3 (ours)", "4e-4"),
}
# The same with 64 images a step: all blocks drawn, then with the first and the last in their place.
SMALL_ARMS = {
    "probed": ("the head alone, nothing refined", ""),
    "baseline": ("baseline", "2e-5"),
    "layershuffle": ("LayerShuffle", "2e-4"),
    "layershuffle-position": ("LayerShuffle-position", "4e-4"),
    "layershuffle-predict": ("LayerShuffle-predict", "2e-4"),
    "layerdrop": ("LayerDrop (p = 0.2)", "5e-5"),
    "truncated-9": ("refined at 9 blocks", "5e-5"),
    "truncated-6": ("refined at 6 blocks", "5e-5"),
    "truncated-3": ("refined at 3 blocks", "5e-5"),
}
DRAWN_ARMS = {"anyorder": LARGE_ARMS["anyorder"]}
ENDS_ARMS = {
    "layershuffle-start": ("LayerShuffle --fixed 1,1 --branch-scale 0.1", "2.5e-5"),
    "anyorder-scale-1-1e-4": ("anyorder --branch-scale 1 (ours)", "1e-4"),
    "anyorder-ends-0-0": ("anyorder --fixed 0,0 (ours)", "2.5e-5"),
    "anyorder-ends-1-0": ("anyorder --fixed 1,0 (ours)", "2.5e-5"),
    "anyorder": ("anyorder (ours)", "2.5e-5"),
    "anyorder-ends-1-2": ("anyorder --fixed 1,2 (ours)", "2.5e-5"),
    "anyorder-ends-2-2": ("anyorder --fixed 2,2 (ours)", "2.5e-5"),
    "anyorder-features-2-2": ("anyorder --fixed 2,2 --keep-features 3 (ours)", "2.5e-5"),
    "baseline-6000": ("baseline, 6,000 steps", "2e-5"),
    "anyorder-6000": ("anyorder, 6,000 steps (ours)", "2.5e-5"),
}
# Steps of 64 images -> the arms of that length: ordinary training, and ours.
LENGTHS = {
    500: ("baseline-500", "anyorder-500"),
    1000: ("baseline-1000", "anyorder-1000"),
    2000: ("baseline", "anyorder"),
    6000: ("baseline-6000", "anyorder-6000"),
}
BATCH = 64
# Column of the table of lengths -> its name in the figure, the goal in points, and its style.
CURVES = {
    "arbitrary_behind": ("any order, all blocks", 3, STYLES[1]),
    "six_behind": ("any order, 6 of 12 blocks", 5, STYLES[2]),
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


def mean_of(scores: Scores, arm: str, mode: str, kept: int = 12) -> float:
    """The mean over models, blocks one after the other and once."""
    return mean(map(mean, scores[arm, mode, kept, 1, 1].values()))


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


def papers_scores(arm: str) -> str:
    """The paper's scores of a method on ImageNet, as in 75.22 / 62.77."""
    texts = []
    for mode in ("sequential", "arbitrary"):
        number = paper_number(arm, mode, kept=12, depth=12)
        assert number is not None
        texts.append(f"{number.value:.2f}")
    return " / ".join(texts)


def table_rows(scores: Scores, arms: dict[str, tuple[str, str]]) -> list[dict[str, str]]:
    """The lines of `arms`."""
    rows = []
    for arm, (name, rate) in arms.items():
        # A model that was made of fewer blocks has all of them.
        whole = max(key[2] for key in scores if key[:2] == (arm, "sequential"))
        rows.append(
            {
                "method": name,
                "models": str(len(scores[arm, "sequential", whole, 1, 1])),
                "rate": rate,
                "sequential": cell(scores, arm, "sequential", whole),
                "arbitrary": cell(scores, arm, "arbitrary", whole),
                "rounds": cell(scores, arm, "arbitrary", whole, side_by_side=4),
                "nine": cell(scores, arm, "arbitrary", 9) if whole == 12 else "",
                "six": cell(scores, arm, "arbitrary", 6) if whole == 12 else "",
                "three": cell(scores, arm, "arbitrary", 3) if whole == 12 else "",
                "paper": papers_scores(arm) if arm in PAPERS else "",
            }
        )
    return rows


def stopped(sure: Stopped, arm: str, mode: str, stop: str) -> str:
    """Blocks and accuracy of an arm that stops at a threshold, means over the orders."""
    scored = sure[arm, mode, stop]
    blocks = mean(blocks for blocks, _ in scored)
    top1 = mean(top1 for _, top1 in scored)
    return f"{blocks:.1f} blocks, {top1:.1f} %"


def write_scores() -> None:
    """The tables of 320 images a step and of 64."""
    large = scores_of(STUDY / "results.csv")
    write_table("fashion-dinov2-320.csv", table_rows(large, LARGE_ARMS))
    rows = table_rows(scores_of(PAPER / "probed.csv", PAPER / "results.csv"), SMALL_ARMS)
    rows += table_rows(scores_of(SHORT / "results.csv"), DRAWN_ARMS)
    rows += table_rows(scores_of(ENDS / "results.csv"), ENDS_ARMS)
    write_table("fashion-dinov2.csv", rows)


def write_lengths() -> list[dict[str, str]]:
    """The table of what a longer training brings beside ordinary training; returns its rows.

    A row is behind the best ordinary training of at most as many images: a longer one may be worse,
    because it overfits before its rate has fallen.
    """
    scores = scores_of(PAPER / "results.csv", ENDS / "results.csv")
    rows = []
    best = 0.0
    for steps, (ordinary, ours) in LENGTHS.items():
        best = max(best, mean_of(scores, ordinary, "sequential"))
        rows.append(
            {
                "steps": str(steps),
                "ordinary": cell(scores, ordinary, "sequential"),
                "models": str(len(scores[ours, "sequential", 12, 1, 1])),
                "sequential": cell(scores, ours, "sequential"),
                "arbitrary": cell(scores, ours, "arbitrary"),
                "six": cell(scores, ours, "arbitrary", 6),
                "arbitrary_behind": f"{best - mean_of(scores, ours, 'arbitrary'):.2f}",
                "six_behind": f"{best - mean_of(scores, ours, 'arbitrary', 6):.2f}",
            }
        )
    write_table("fashion-dinov2-length.csv", rows)
    return rows


def draw_lengths(rows: list[dict[str, str]]) -> None:
    """Points behind the best ordinary training by images, with the goals as thin lines."""
    figure = new_figure(6.4, 3.4)
    axes = figure.add_subplot()
    style_axes(axes, "Points of top-1 behind the best ordinary training of at most as many images")
    images = [int(row["steps"]) * BATCH for row in rows]
    entries = []
    for column, (name, goal, (colour, marker, dash)) in CURVES.items():
        behind = [float(row[column]) for row in rows]
        (line,) = axes.plot(images, behind, color=colour, marker=marker, linestyle=dash)
        limit = axes.axhline(goal, color=colour, linestyle=dash, linewidth=0.8)
        entries += [(line, name), (limit, f"the goal, {goal} points")]
    axes.set_xscale("log")
    axes.set_xticks(images, [f"{count:,}" for count in images])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training images")
    draw_legend(figure, entries)
    (PAPER / "length.svg").write_bytes(figure_bytes(figure, "svg"))


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


if __name__ == "__main__":
    write_scores()
    draw_lengths(write_lengths())
    write_rounds()
    write_stops()
