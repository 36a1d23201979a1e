"""Summarise the rows of a study: a cell per arm, mode, number of kept blocks and their choice.

It reads no files. Tables, figures and report take their numbers from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.ground.rows import CHOICES, DRAWS, MODES, ScoreRow
from layershuffle.ground.stats import Estimate, estimate, mean
from layershuffle.ground.text import printable
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
        scores: dict[int, list[float]] = {}
        for row in self.rows:
            scores.setdefault(row.seed, []).append(row.top1)
        return {seed: mean(scores[seed]) for seed in sorted(scores)}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study with its cells.

    `cells`: the scores under the paper's conditions, one block after the other and each once.
    `depth`: the number of blocks of the deepest model; 0 while no run is done. `choose`: how the
    pruned columns of the main table choose their blocks ("" if no model was pruned).
    """

    study: Study
    arms: tuple[str, ...]
    cells: tuple[ScoreCell, ...]
    depth: int
    choose: str

    def name(self, arm: str) -> str:
        """The display name of an arm, with the number of blocks that are drawn if it has ends."""
        ends = 0
        for run in self.study.plan.runs:
            if run.row == arm:
                ends = max(ends, sum(run.fixed))
        if not ends or not self.depth:
            return label(arm)
        return f"{label(arm)} ({self.depth - ends} of {self.depth} drawn)"

    def cell(self, arm: str, mode: str, *, kept: int | None = None) -> ScoreCell | None:
        """The cell for the main table and the figure: one order per pass before one per batch.

        `kept=None`: with all blocks.
        """
        condition = (arm, mode, kept or self.depth)
        fitting = []
        for cell in self.cells:
            if (cell.arm, cell.mode, cell.kept) == condition and cell.choose in ("", self.choose):
                fitting.append(cell)
        # One order per pass shows the spread over orders; one per batch averages it.
        return min(fitting, key=lambda cell: DRAWS.index(cell.draw), default=None)

    def paper(self, arm: str, mode: str, *, kept: int | None = None) -> PaperNumber | None:
        """The paper's number for this cell, `None` if there is none."""
        return paper_number(arm, mode, kept=kept or self.depth, depth=self.depth)

    def means(self, arm: str, mode: str) -> dict[int, float]:
        """The mean top-1 of every model of an arm with all blocks, by seed; empty before it ran."""
        cell = self.cell(arm, mode)
        return {} if cell is None else cell.model_means

    def curve(self, arm: str, mode: str) -> tuple[ScoreCell, ...]:
        """The cells of one line of the figure, by number of blocks kept, ascending."""
        line = []
        for kept in sorted({cell.kept for cell in self.cells}):
            cell = self.cell(arm, mode, kept=kept)
            if cell is not None:
                line.append(cell)
        return tuple(line)

    @property
    def columns(self) -> tuple[tuple[str, int], ...]:
        """The main table's columns for which some arm was measured: mode, and blocks kept.

        All blocks come first, in both modes; then arbitrary and sequential order with the numbers
        of blocks that are nearest to 3/4, 1/2 and 1/4 of the depth; the figure shows every number.
        """
        measured = set()
        pruned = set()
        for cell in self.cells:
            measured.add((cell.mode, cell.kept))
            if cell.kept < self.depth:
                pruned.add(cell.kept)
        fewer = sorted(pruned)
        levels: list[int] = []
        for quarters in _QUARTERS if fewer else ():
            wanted = self.depth * quarters / 4
            nearest = min(fewer, key=lambda kept: abs(kept - wanted))
            if nearest not in levels:
                levels.append(nearest)
        columns = [(mode, self.depth) for mode in MODES]
        # Arbitrary order first, because it is the purpose of the method.
        for mode in reversed(MODES):
            for kept in levels:
                columns.append((mode, kept))
        return tuple(column for column in columns if column in measured)


def summarise(study: Study) -> Summary:
    """The summary of all finished runs; arms in the order of the plan.

    The reduced-depth models share one row, each in the column of its own depth, as in the paper's
    Figure 1b.
    """
    arms = tuple(dict.fromkeys(run.row for run in study.plan.runs))
    groups: dict[tuple[str, str, int, str, str], list[ScoreRow]] = {}
    depth = 0
    choices: set[str] = set()
    for task, result in study.runs:
        for row in result.rows:
            # The paper runs one block after the other, each once.
            if row.parallel == row.passes == 1:
                key = (task.row, row.mode, row.kept, row.choose, row.draw)
                groups.setdefault(key, []).append(row)
                depth = max(depth, _depth_shown(row))
                if row.choose:
                    choices.add(row.choose)

    cells = []
    for (arm, mode, kept, choose, draw), rows in groups.items():
        cell = ScoreCell(
            arm=arm,
            mode=mode,
            kept=kept,
            choose=choose,
            draw=draw,
            top1=estimate_rows(rows),
            rows=tuple(rows),
        )
        cells.append(cell)

    def rank(cell: ScoreCell) -> tuple[int, ...]:
        # Most blocks first, as in the tables.
        return (
            arms.index(cell.arm),
            MODES.index(cell.mode),
            -cell.kept,
            CHOICES.index(cell.choose),
            DRAWS.index(cell.draw),
        )

    return Summary(
        study=study,
        arms=arms,
        cells=tuple(sorted(cells, key=rank)),
        depth=depth,
        choose=min(choices, key=CHOICES.index, default=""),
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
    depth = row.kept
    # A score with fewer blocks shows the depth only by its highest block id.
    for block in row.order.split(","):
        if block:
            depth = max(depth, int(block) + 1)
    return depth


def estimate_rows(rows: Sequence[ScoreRow]) -> Estimate:
    """Top-1 of rows of one condition, over their seeds and orders."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row.seed, []).append(row.top1)
    # The fewest images give the widest interval.
    return estimate(scores, images=min(row.top1_n or row.n for row in rows))
