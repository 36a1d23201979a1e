"""The summary of a study's rows: cells, columns, and the paper's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixture import LEVELS, write_study

from layershuffle.study.paper import NUMBERS, paper_number
from layershuffle.study.store import read_study
from layershuffle.study.summary import Column, label, summarise


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", orders=3)


def test_summary_means_equal_the_rows(out: Path):
    study = read_study(out)
    summary = summarise(study)
    assert summary.arms == tuple(LEVELS)
    assert len(summary.cells) == 4 * 8
    for cell in summary.cells:
        rows = [
            row.top1
            for row in study.rows
            if (row.method, row.mode, row.kept) == (cell.arm, cell.mode, cell.kept)
        ]
        assert cell.top1.mean == pytest.approx(sum(rows) / len(rows), rel=1e-14)


def test_main_columns_are_those_of_the_paper(out: Path):
    columns = [(column.mode, column.kept) for column in summarise(read_study(out)).columns]
    full = [("sequential", 12), ("arbitrary", 12)]
    assert columns == full + [(mode, k) for mode in ("arbitrary", "sequential") for k in (9, 6, 3)]


def _rewrite(out: Path, change: Any) -> None:
    for path in (out / "runs").glob("*/results.csv"):
        head, *lines = path.read_text().splitlines()
        path.write_text("\n".join([head, *change(lines)]) + "\n")


def test_many_levels_are_thinned_to_quarters(out: Path):
    def all_depths(lines: list[str]) -> list[str]:
        arm = lines[0].split(",")[0]
        orders = {kept: ",".join(map(str, range(kept))) for kept in range(1, 12)}
        return lines[:1] + [
            f'{arm},0,arbitrary,{kept},random,0,"{order}",5000,1.0,2.0,4.0'
            for kept, order in orders.items()
        ]

    _rewrite(out, all_depths)
    summary = summarise(read_study(out))
    assert [c.kept for c in summary.columns if c.mode == "arbitrary"] == [9, 6, 3]
    assert [cell.kept for cell in summary.curve("layershuffle", "arbitrary")] == list(range(1, 12))


def test_random_choice_leads_and_others_stay_apart(out: Path):
    def and_spaced(lines: list[str]) -> list[str]:
        return lines + [
            line.replace(",random,", ",spaced,") for line in lines if ",random," in line
        ]

    _rewrite(out, and_spaced)
    summary = summarise(read_study(out))
    assert summary.choose == "random"
    cell = summary.cell("baseline", Column("arbitrary", 9))
    assert cell is not None
    assert cell.choose == "random"
    assert cell.top1.orders == 3
    assert sum(cell.choose == "spaced" for cell in summary.cells) == 4 * 6


def test_arms_of_another_depth_stand_under_their_number_of_blocks(out: Path):
    path = out / "runs" / "layerdrop-seed0" / "results.csv"
    head, *_ = path.read_text().splitlines()
    row = 'layerdrop,0,sequential,3,,0,"0,1,2",5000,44.0,66.0,2.0'
    path.write_text(f"{head}\n{row}\n")
    summary = summarise(read_study(out))
    cell = summary.cell("layerdrop", Column("sequential", 3))
    assert cell is not None
    assert cell.top1.mean == 44.0
    assert summary.depth == 12
    assert summary.cell("layerdrop", Column("sequential", 12)) is None


@pytest.mark.parametrize(
    ("arm", "shown"),
    [
        ("layershuffle-depth", "LayerShuffle-depth"),
        ("layerdrop-p0.5", "LayerDrop-p0.5"),
        ("baseline", "baseline"),
        ("layershuffled", "layershuffled"),
        ("a\n\x1b[31mb", "a ?[31mb"),
    ],
)
def test_labels(arm: str, shown: str):
    assert label(arm) == shown


def test_papers_table_1():
    table = {(n.method, n.mode): (n.low, n.sd) for n in NUMBERS if n.source == "Table 1"}
    assert table == {
        ("baseline", "sequential"): (82.61, 0.08),
        ("baseline", "arbitrary"): (0.13, 0.03),
        ("layershuffle", "sequential"): (75.22, 0.28),
        ("layershuffle", "arbitrary"): (62.77, 0.41),
        ("layershuffle-position", "sequential"): (75.28, 0.18),
        ("layershuffle-position", "arbitrary"): (63.61, 0.23),
        ("layershuffle-predict", "sequential"): (74.41, 0.20),
        ("layershuffle-predict", "arbitrary"): (61.18, 1.06),
    }
    assert not any(n.approximate for n in NUMBERS if n.source == "Table 1")
    assert all(n.approximate and n.sd is None for n in NUMBERS if n.source != "Table 1")


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
