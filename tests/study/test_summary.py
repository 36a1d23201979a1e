"""The summary of a study's rows: cells, columns, and the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fixture import write_study

from layershuffle.results import ScoreRow
from layershuffle.study.paper.numbers import paper_number
from layershuffle.study.paper.summary import Column, Summary, summarise
from layershuffle.study.store import read_study


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", orders=3)


def with_rows(out: Path, change: Callable[[ScoreRow], list[ScoreRow]]) -> Summary:
    """The summary after every row was replaced."""
    study = read_study(out)
    runs = []
    for task, result in study.runs:
        rows = tuple(new for row in result.rows for new in change(row))
        runs.append((task, result.model_copy(update={"rows": rows})))
    return summarise(replace(study, runs=tuple(runs)))


def test_many_levels_are_thinned_to_quarters(out: Path):
    def all_depths(row: ScoreRow) -> list[ScoreRow]:
        if (row.mode, row.kept, row.order_seed) != ("arbitrary", 12, 0):
            return [row] if row.kept == 12 else []
        fewer = (row.model_copy(update={"kept": k, "choose": "random"}) for k in range(1, 12))
        return [row, *fewer]

    summary = with_rows(out, all_depths)
    assert [c.kept for c in summary.columns if c.mode == "arbitrary"] == [12, 9, 6, 3]
    assert [cell.kept for cell in summary.curve("layershuffle", "arbitrary")] == list(range(1, 13))


def test_random_choice_leads_and_others_stay_apart(out: Path):
    def and_spaced(row: ScoreRow) -> list[ScoreRow]:
        return [row, row.model_copy(update={"choose": "spaced"})] if row.choose else [row]

    summary = with_rows(out, and_spaced)
    assert summary.choose == "random"
    cell = summary.cell("baseline", Column("arbitrary", 9))
    assert cell is not None
    assert (cell.choose, cell.top1.orders) == ("random", 3)
    assert sum(cell.choose == "spaced" for cell in summary.cells) == 4 * 6


def test_rounds_and_passes_are_no_cells_of_the_paper(out: Path):
    def and_rounds(row: ScoreRow) -> list[ScoreRow]:
        return [row, row.model_copy(update={"parallel": 2}), row.model_copy(update={"passes": 3})]

    assert with_rows(out, and_rounds).cells == summarise(read_study(out)).cells


def test_arms_of_another_depth_stand_under_their_number_of_blocks(out: Path):
    def shallow(row: ScoreRow) -> list[ScoreRow]:
        fields = {"kept": 3, "order": "0,1,2", "top1": 44.0, "choose": ""}
        if row.method != "layerdrop":
            return [row]
        is_first = (row.mode, row.kept) == ("sequential", 12)
        return [row.model_copy(update=fields)] if is_first else []

    summary = with_rows(out, shallow)
    cell = summary.cell("layerdrop", Column("sequential", 3))
    assert cell is not None
    assert cell.top1.mean == 44.0
    assert summary.depth == 12
    assert summary.cell("layerdrop", Column("sequential", 12)) is None


@pytest.mark.parametrize(
    ("arm", "mode", "kept", "depth", "shown"),
    [
        ("baseline", "arbitrary", 12, 12, "0.13 +-0.03"),
        ("layershuffle", "sequential", 3, 12, "~18"),
        ("layerdrop", "sequential", 9, 12, "~70-80"),
        ("layershuffle", "arbitrary", 6, 6, "62.77 +-0.41"),
        ("layershuffle", "sequential", 3, 6, "None"),
        ("layershuffle", "arbitrary", 9, 12, "None"),
        ("layerdrop-p0.5", "sequential", 9, 12, "None"),
    ],
)
def test_the_papers_number_for_a_cell(arm: str, mode: str, kept: int, depth: int, shown: str):
    assert str(paper_number(arm, mode, kept=kept, depth=depth)) == shown
