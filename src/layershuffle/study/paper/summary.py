"""Summarise the rows of a study: a cell per arm, mode, number of kept blocks and their choice.

Pure: from `Study` to `Summary`, no files. Tables, figures and report take their numbers from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layershuffle.results import CHOICES, DRAWS, MODES, MergingRow, ScoreRow, by_model
from layershuffle.stats import Estimate, estimate, mean
from layershuffle.study.paper.markdown import printable
from layershuffle.study.paper.numbers import PaperNumber, paper_number
from layershuffle.study.store import Study

_QUARTERS = (3, 2, 1)
# The paper's spelling; suffixes of a method's name are appended unchanged.
_LABELS = {
    "layershuffle": "LayerShuffle",
    "layerdrop": "LayerDrop",
    "truncated": "refined at that depth",
}


@dataclass(frozen=True, kw_only=True)
class ScoreCell:
    """All scores of one arm under one condition, over its seeds and orders."""

    arm: str
    mode: str
    kept: int
    choose: str
    draw: str
    top1: Estimate
    rows: tuple[ScoreRow, ...]

    @property
    def model_means(self) -> dict[int, float]:
        """The mean top-1 of every model, by seed."""
        seeds = sorted({row.seed for row in self.rows})
        return {seed: mean([row.top1 for row in self.rows if row.seed == seed]) for seed in seeds}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study with its cells. `depth`: blocks of the deepest model; 0 while no run is done.

    `choose`: how the pruned columns of the main table choose their blocks ("" if none is pruned).
    `cells`: one block after the other, each once. The paper has no others.
    """

    study: Study
    arms: tuple[str, ...]
    cells: tuple[ScoreCell, ...]
    depth: int
    choose: str

    @property
    def chance(self) -> float:
        """The top-1 of guesses, in percent; 0 while no run is done."""
        classes = [result.data.classes for _, result in self.study.runs]
        return 100 / classes[0] if classes else 0.0

    def name(self, arm: str) -> str:
        """The display name of an arm, with the number of blocks that are drawn if it has ends."""
        ends = max((sum(run.fixed) for run in self.study.plan.runs if run.row == arm), default=0)
        drawn = f", {self.depth - ends} of {self.depth} drawn" if ends and self.depth else ""
        return label(arm) + drawn

    def cell(self, arm: str, mode: str, *, kept: int | None = None) -> ScoreCell | None:
        """The cell for the main table and the figure: one order per pass before one per batch.

        `kept=None`: with all blocks.
        """
        fitting = [
            cell
            for cell in self.cells
            if (cell.arm, cell.mode, cell.kept) == (arm, mode, kept or self.depth)
            and cell.choose in ("", self.choose)
        ]
        # One order per pass shows the spread over orders; one per batch averages it.
        return min(fitting, key=lambda cell: DRAWS.index(cell.draw), default=None)

    def paper(self, arm: str, mode: str, *, kept: int | None = None) -> PaperNumber | None:
        """The paper's number for this cell, `None` if there is none."""
        return paper_number(arm, mode, kept=kept or self.depth, depth=self.depth)

    def means(self, arm: str, mode: str, *, kept: int | None = None) -> dict[int, float]:
        """The models' mean top-1 of an arm, by seed; `kept=None`: with all blocks."""
        cell = self.cell(arm, mode, kept=kept)
        return {} if cell is None else cell.model_means

    def held_out(self, method: str) -> dict[str, float]:
        """The arms of a method with the mean held-out cross-entropy of their checkpoints.

        Empty if several arms cannot be compared by it, because of other metrics or test images.
        """
        values: dict[str, list[float]] = {}
        metrics, picked_on_test = set[str](), False
        for task, result in self.study.runs:
            if task.settings.method == method and task.row in self.arms:
                values.setdefault(task.arm, []).append(result.selected.value)
                metrics.add(result.selected.metric)
                picked_on_test = picked_on_test or result.paper_protocol
        if (picked_on_test or len(metrics) > 1) and len(values) > 1:
            return {}
        return {arm: mean(losses) for arm, losses in values.items()}

    def lengths(self, arm: str) -> dict[int, str]:
        """The labels of an arm and of its curve, by the number of steps."""
        # The arm itself comes first in a plan, and is preferred to a curve with the same length.
        return {
            result.steps: task.arm
            for task, result in reversed(self.study.runs)
            if task.curve == arm
        }

    def merging_rows(self, arm: str, *, name: str | None = None) -> list[MergingRow]:
        """Rows of the arm's merging: the main variants, or those with `name`; empty until done."""
        results = [result for task, result in self.study.mergings if task.arm == arm]
        rows = [row for result in results for row in result.rows]
        return [row for row in rows if (row.main if name is None else row.name == name)]

    def merging(self, arm: str, kind: str, *, name: str | None = None) -> list[float]:
        """The mean top-1 of every donor, merge or ensemble of an arm."""
        rows = [row for row in self.merging_rows(arm, name=name) if row.kind == kind]
        return [mean(scores) for scores in by_model(rows).values()]

    def merged_arms(self, method: str) -> list[str]:
        """The arms of a method whose models were merged."""
        tasks = [task for task, _ in self.study.mergings]
        return [task.arm for task in tasks if task.donors[0].settings.method == method]

    def fact(self, analysis: str, arm: str, *, path: tuple[str, ...]) -> float | None:
        """A number of an analysis by its path in the facts, averaged over the analysed models."""
        numbers = []
        for task, result in self.study.analyses:
            if (task.kind, task.arm) == (analysis, arm):
                value: Any = result.facts
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                # A missing number counts as not measured.
                if isinstance(value, int | float):
                    numbers.append(float(value))
        return mean(numbers) if numbers else None

    def curve(self, arm: str, mode: str) -> tuple[ScoreCell, ...]:
        """The cells of one line of the figure, by number of blocks kept, ascending."""
        levels = sorted({cell.kept for cell in self.cells})
        cells = (self.cell(arm, mode, kept=kept) for kept in levels)
        return tuple(cell for cell in cells if cell is not None)

    @property
    def columns(self) -> tuple[tuple[str, int], ...]:
        """The main table's columns for which some arm was measured: mode, and blocks kept.

        All blocks come first, in both modes; then arbitrary and sequential order with the numbers
        of blocks that are nearest to 3/4, 1/2 and 1/4 of the depth; the figure shows every number.
        """
        fewer = sorted({cell.kept for cell in self.cells if cell.kept < self.depth})
        quarters = (self.depth * quarter / 4 for quarter in _QUARTERS if fewer)
        levels = dict.fromkeys(min(fewer, key=lambda kept: abs(kept - q)) for q in quarters)
        columns = [(mode, self.depth) for mode in MODES]
        # Arbitrary order first, because it is the purpose of the method.
        columns += [(mode, kept) for mode in reversed(MODES) for kept in levels]
        measured = {(cell.mode, cell.kept) for cell in self.cells}
        return tuple(column for column in columns if column in measured)


def summarise(study: Study) -> Summary:
    """The summary of all finished runs of the main part; arms in the order of the plan.

    The reduced-depth models share one row, each in the column of its own depth, as in the paper's
    Figure 1b.
    """
    arms = tuple(dict.fromkeys(run.row for run in study.plan.runs if run.part == "main"))
    groups: dict[tuple[str, str, int, str, str], list[ScoreRow]] = {}
    for task, result in study.runs:
        for row in result.rows if task.part == "main" else ():
            if row.parallel == row.passes == 1:
                key = (task.row, row.mode, row.kept, row.choose, row.draw)
                groups.setdefault(key, []).append(row)

    def place(cell: ScoreCell) -> tuple[int, ...]:
        # Most blocks first, as in the tables.
        which = (CHOICES.index(cell.choose), DRAWS.index(cell.draw))
        return (arms.index(cell.arm), MODES.index(cell.mode), -cell.kept, *which)

    cells = [
        ScoreCell(
            arm=arm,
            mode=mode,
            kept=kept,
            choose=choose,
            draw=draw,
            top1=estimate_of(rows),
            rows=tuple(rows),
        )
        for (arm, mode, kept, choose, draw), rows in groups.items()
    ]
    rows = [row for group in groups.values() for row in group]
    return Summary(
        study=study,
        arms=arms,
        cells=tuple(sorted(cells, key=place)),
        depth=max(map(_depth_shown, rows), default=0),
        choose=min({row.choose for row in rows} - {""}, key=CHOICES.index, default=""),
    )


def label(arm: str) -> str:
    """The display name of an arm, as "LayerShuffle-depth"; one line, only printable characters."""
    clean = printable(arm)
    for start, shown in _LABELS.items():
        if clean == start or clean.startswith(f"{start}-"):
            return shown + clean.removeprefix(start)
    return clean


def _depth_shown(row: ScoreRow) -> int:
    """The least number of blocks of the model, according to this row."""
    # A score with fewer blocks shows the depth only by its highest block id.
    return max([row.kept, *(int(block) + 1 for block in row.order.split(",") if block)])


def estimate_of(rows: Sequence[ScoreRow]) -> Estimate:
    """Top-1 of rows of one condition, over their seeds and orders."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row.seed, []).append(row.top1)
    # The fewest images give the widest interval.
    return estimate(scores, images=min(row.n for row in rows), effective=rows[0].top1_n)
