"""Write what `layershuffle reproduce formula-cpu` has measured into docs/science.md.

python scripts/formula_page.py
"""

from __future__ import annotations

from breaks_page import Interval, interval
from science_page import ANY, COLUMNS, ORDERED, PAGE, ROOT, Arm, Scores, read_scores, with_marked

from layershuffle.files import write_text
from layershuffle.text import markdown_table

RESULTS = ROOT / "docs" / "results" / "formula-cpu" / "results.csv"
IMAGES = 2_000
"""Test images of the recipe."""
ARMS = (
    Arm(name="baseline", label="ordinary training", different=12),
    Arm(name="layershuffle", label="LayerShuffle", different=12),
    Arm(name="layershuffle-mixed", label="four orders, 1/4 in order", different=12),
    Arm(
        name="layershuffle-mixed-exit",
        label="four orders, 1/4 in order, exit loss",
        different=12,
    ),
    Arm(name="layershuffle-depth", label="LayerShuffle-depth", different=12),
    Arm(
        name="layershuffle-tied-3-mixed",
        label="tied, three blocks, four orders, 1/4 in order",
        different=3,
    ),
    Arm(
        name="layershuffle-tied-3-mixed-exit",
        label="tied, three blocks, four orders, 1/4 in order, exit loss",
        different=3,
    ),
    Arm(name="layershuffle-tied", label="tied, one block", different=1),
)
REFERENCES = {
    "layershuffle-mixed-exit": "layershuffle-mixed",
    "layershuffle-tied-3-mixed": "layershuffle-mixed",
    "layershuffle-tied-3-mixed-exit": "layershuffle-mixed-exit",
}
"""What an arm is compared with, where that is not LayerShuffle: one change at a time."""
SHOWN = (
    "in order", "any order", "6 alive, once", "6 alive, twice", "3 alive, once", "3 alive, 4 times"
)  # fmt: skip


def interval_of(scores: Scores, arm: str, column: tuple[str, int, int]) -> Interval:
    """Of the one model of an arm: over orders or images, whichever end is farther out."""
    (values,) = scores[arm, *column].values()
    return interval(values, IMAGES)


def compared(sample: Interval, reference: Interval) -> str:
    """The criterion for two models: their intervals do not overlap.

    It says nothing about other models of the same arms: how another seed comes out is not covered.
    """
    if sample.low > reference.high:
        return "better"
    return "worse" if sample.high < reference.low else "not told apart"


def accuracy_table(scores: Scores) -> str:
    """Top-1 in percent of every model, and whether it is told apart from another one."""
    labels = {arm.name: arm.label for arm in ARMS}
    head = ["arm", "different blocks", *SHOWN]
    head += ["compared with the model of", "in order it is", "in any order"]
    rows = []
    for arm in ARMS:
        shown = [interval_of(scores, arm.name, COLUMNS[name]) for name in SHOWN]
        cells = [arm.label, str(arm.different)]
        cells += [f"{cell.mean:.1f} ({cell.low:.1f}-{cell.high:.1f})" for cell in shown]
        if arm.name != "layershuffle":
            reference = REFERENCES.get(arm.name, "layershuffle")
            cells.append(labels[reference])
            for column in (ORDERED, ANY):
                sides = [interval_of(scores, name, column) for name in (arm.name, reference)]
                cells.append(compared(*sides))
        rows.append([*cells, *[""] * (len(head) - len(cells))])
    return markdown_table(head, rows, align="lr" + "r" * len(SHOWN) + "lll")


def with_table(page: str) -> str:
    """`page` with a new table between its marks."""
    return with_marked(page, "formula", accuracy_table(read_scores(RESULTS)))


if __name__ == "__main__":
    write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
