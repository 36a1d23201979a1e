# Ran at commit 8550626.
"""Write the results of scripts/scenes.py into docs/open-questions.md.

python scripts/scenes_page.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import recipes_page
from open_questions import PAGE, rows_of
from performance_page import with_marked

from layershuffle.files import write_text
from layershuffle.stats import mean, t_interval
from layershuffle.text import markdown_table

BASELINE, STEPS = "baseline", 500
LABELS = {
    "baseline": "ordinary training",
    "layershuffle": "LayerShuffle",
    "layershuffle-mixed": "four orders, 1/4 in order",
    "layershuffle-tied-3-mixed-exit": "three tied blocks, four orders, 1/4 in order, exit loss",
    "frozen baseline": "frozen ordinary classifier, linear head",
    "frozen layershuffle": "frozen LayerShuffle classifier, linear head",
}
TASKS = {"miou": "segmentation, mIoU", "map": "detection, mAP"}


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """A score of a model in percent, in order and in each drawn order."""

    in_order: float
    any_order: Sequence[float]


Measured = Mapping[tuple[str, str], Mapping[int, TaskScores]]  # arm, task; by seed


def read_values() -> Measured:
    """All committed scores."""
    measured: dict[tuple[str, str], dict[int, TaskScores]] = {}
    for row in rows_of("scenes.csv"):
        for task in TASKS:
            drawn = [float(value) for value in row[f"any_{task}"].split()]
            values = TaskScores(in_order=float(row[task]), any_order=drawn)
            measured.setdefault((row["arm"], task), {})[int(row["seed"])] = values
    return measured


def relative(value: float, reference: float) -> float:
    """The loss of `value` against `reference`, in percent of `reference`."""
    return 100 * (1 - value / reference)


def losses(measured: Measured, arm: str, task: str) -> dict[int, list[float]]:
    """The relative loss against ordinary training in order, by seed, for each drawn order."""
    ordinary, sample = measured[BASELINE, task], measured[arm, task]
    return {
        seed: [relative(value, ordinary[seed].in_order) for value in sample[seed].any_order]
        for seed in sorted(sample.keys() & ordinary.keys())
    }


def classification_losses(scores: recipes_page.RecipeScores, arm: str) -> list[float]:
    """The relative loss of top-1 on digit pairs after as many steps, one mean per seed."""
    ordinary = scores[BASELINE, STEPS, recipes_page.ORDERED]
    sample = scores[arm, STEPS, recipes_page.ANY]
    return [
        relative(mean(sample[seed]), mean(ordinary[seed]))
        for seed in sorted(sample.keys() & ordinary.keys())
    ]


def beside(dense: Mapping[int, Sequence[float]], classification: Sequence[float]) -> str:
    """The verdict: whether the intervals of all pairs of models exceed all losses of classifiers.

    Or are below them all. The intervals are at 95 %, over orders.
    """
    intervals = [t_interval(values) for values in dense.values()]
    if min(low for low, _ in intervals) > max(classification):
        return "loses more"
    if max(high for _, high in intervals) < min(classification):
        return "loses less"
    return "not told apart"


def score_table(measured: Measured) -> str:
    """The table of both scores of every arm, means over the models."""
    rows = []
    for arm, label in LABELS.items():
        seeds = sorted(measured.get((arm, "miou"), {}))
        if not seeds:
            continue
        cells = []
        for task in TASKS:
            models = [measured[arm, task][seed] for seed in seeds]
            cells.append(mean([model.in_order for model in models]))
            cells.append(mean([mean(model.any_order) for model in models]))
        rows.append([label, len(seeds), *(f"{cell:.1f}" for cell in cells)])
    columns = [text for name in TASKS.values() for text in (f"{name}: in order", "any order")]
    return markdown_table(["training", "seeds", *columns], rows, align="lrrrrr")


def loss_table(measured: Measured, scores: recipes_page.RecipeScores) -> str:
    """The table of the relative loss in any order by task, against ordinary training in order."""
    rows = []
    for arm, label in LABELS.items():
        if (arm, "miou") not in measured or not losses(measured, arm, "miou"):
            continue
        classification = classification_losses(scores, arm)
        # Ordinary training is at chance in any order, which differs between the tasks.
        judged = bool(classification) and arm != BASELINE
        cells = [label, f"{mean(classification):.1f}" if classification else ""]
        for task in TASKS:
            dense = losses(measured, arm, task)
            cells.append(f"{mean([mean(values) for values in dense.values()]):.1f}")
            cells.append(f"**{beside(dense, classification)}**" if judged else "")
        rows.append(cells)
    columns = [text for name in TASKS.values() for text in (name, "beside digit pairs")]
    return markdown_table(["training", "digit pairs, top-1", *columns], rows, align="lrrlrl")


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    measured = read_values()
    page = with_marked(page, "scenes", score_table(measured))
    return with_marked(page, "scene-losses", loss_table(measured, recipes_page.read_scores()))


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
