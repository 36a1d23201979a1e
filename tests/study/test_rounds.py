"""Reports of blocks in rounds and of repeated passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fixture import write_study

from layershuffle.core.orders import ExecutionOrder
from layershuffle.results import ScoreRow, read_rows, write_rows
from layershuffle.study.report import write_report
from layershuffle.study.score_tables import in_passes, in_rounds, rounds_section
from layershuffle.study.store import read_study
from layershuffle.study.summary import Summary, summarise

ARMS = {"layershuffle": "layershuffle", "layershuffle-depth": "layershuffle"}
SIDE_BY_SIDE = {2: 74.0, 3: 72.0, 12: 40.0}  # top-1 by blocks in a round
AGAIN = {(12, 2): 73.0, (6, 2): 45.0, (6, 3): 44.0, (3, 2): 20.0}  # by blocks alive and passes


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A study of two seeds with rows of rounds and passes; the second seed scores a point more."""
    out = write_study(tmp_path / "study", arms=ARMS, seeds=(0, 1), orders=3)
    for path in out.glob("runs/*/results.csv"):
        rows = list(read_rows(path, ScoreRow))
        template = next(row for row in rows if (row.mode, row.kept) == ("arbitrary", 12))
        for parallel, top1 in SIDE_BY_SIDE.items():
            rounds = [range(k, k + parallel) for k in range(0, 12, parallel)]
            order = str(ExecutionOrder.in_rounds(rounds, 12))
            fields = {"parallel": parallel, "order": order, "top1": top1 + template.seed}
            rows.append(template.model_copy(update=fields))
        for (kept, passes), top1 in AGAIN.items():
            order = ",".join(map(str, [*range(kept)] * passes))
            fields = {"kept": kept, "passes": passes, "order": order, "top1": top1 + template.seed}
            rows.append(template.model_copy(update={**fields, "choose": "random"}))
        write_rows(path, rows, padded=False)
    return out


@pytest.fixture
def summary(out: Path) -> Summary:
    return summarise(read_study(out))


def test_the_paper_s_cells_are_those_without_rounds(summary: Summary) -> None:
    assert len(summary.cells) == 2 * 8
    assert len(summary.others) == 2 * (len(SIDE_BY_SIDE) + len(AGAIN))
    assert summary.depth == 12
    assert [c.kept for c in summary.curve("layershuffle", "arbitrary")] == [3, 6, 9, 12]


def test_rounds_are_counted(summary: Summary) -> None:
    cells = in_rounds(summary, "layershuffle", mode="arbitrary")
    assert [(cell.rounds, cell.parallel) for cell in cells] == [(12, 1), (6, 2), (4, 3), (1, 12)]
    assert [cell.top1.mean for cell in cells[1:]] == [74.5, 72.5, 40.5]
    assert cells[1].order == "arbitrary, 2 side by side"


def test_passes_are_beside_each_other(summary: Summary) -> None:
    twice = in_passes(summary, "layershuffle", passes=2)
    assert [(cell.kept, cell.top1.mean) for cell in twice] == [(12, 73.5), (6, 45.5), (3, 20.5)]
    assert [cell.kept for cell in in_passes(summary, "layershuffle", passes=1)] == [12, 9, 6, 3]
    section = rounds_section(summary)
    assert section is not None
    rounds, passes = section.tables
    assert rounds.head == ("Arm", "Order", "12 rounds", "6 rounds", "4 rounds", "1 round")
    assert passes.head == ("Arm", "Blocks", "once", "twice", "3 times")
    row = next(row for row in passes.rows if row[:2] == ("LayerShuffle", "6"))
    assert [cell.split()[0] for cell in row[3:]] == ["45.5", "44.5"]
    assert not any(row[1] == "9" for row in passes.rows), "nine blocks ran once alone"


def test_the_report_has_the_figures(out: Path) -> None:
    report = write_report(out)
    assert {"rounds.svg", "passes.svg"} <= {path.name for path in report.files}
    text = (out / "report.md").read_text()
    assert "Blocks side by side, and blocks that run again" in text
    rows = read_rows(out / "results.csv", ScoreRow)
    assert {(row.parallel, row.passes) for row in rows} == {
        (1, 1), *((parallel, 1) for parallel in SIDE_BY_SIDE), (1, 2), (1, 3)
    }  # fmt: skip


def test_more_arms_than_panels_of_a_row_have_the_tables_alone(summary: Summary) -> None:
    section = rounds_section(replace(summary, arms=(*summary.arms, "a", "b", "c")))
    assert section is not None
    assert (len(section.tables), section.pictures) == (2, ())


def test_a_study_of_the_paper_has_no_such_section(tmp_path: Path) -> None:
    out = write_study(tmp_path / "study", arms=ARMS, orders=2)
    assert rounds_section(summarise(read_study(out))) is None
