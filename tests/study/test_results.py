"""Reading a study: whole, half done, cut off, foreign, contradicting its plan; its summary."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture import LEVELS, write_study

from layershuffle.study.paper import NUMBERS, paper_number
from layershuffle.study.results import COLUMNS, StudyError, read_study, results_csv
from layershuffle.study.summary import Column, label, summarise

RUN = "run1-layershuffle-seed0"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", orders=3)


def test_every_row_is_read_with_its_type(out: Path):
    study = read_study(out)
    assert len(study.rows) == 4 * (1 + 7 * 3)
    row = study.rows[1]
    with (out / "runs" / "run0-baseline-seed0" / "results.csv").open() as file:
        raw = list(csv.DictReader(file))[1]
    assert {name: str(getattr(row, name)) for name in COLUMNS} == raw
    assert isinstance(row.kept, int)
    assert isinstance(row.top1, float)
    assert [run.state for run in study.runs] == ["done"] * 4


def test_facts_of_a_run(out: Path):
    facts = read_study(out).runs[1].facts
    assert facts is not None
    assert facts.selected_metric == "holdout cross-entropy, arbitrary orders"
    assert facts.paper_protocol is False
    assert facts.data["sizes"]["test"] == 5000


def test_merged_csv_equals_the_parts(out: Path):
    merged = results_csv(read_study(out).rows)
    parts = [
        (out / "runs" / name / "results.csv").read_text().splitlines()
        for name in sorted(path.name for path in (out / "runs").iterdir())
    ]
    assert merged.splitlines() == parts[0][:1] + [line for part in parts for line in part[1:]]
    assert merged.splitlines()[0] == ",".join(COLUMNS)


def test_columns_this_version_does_not_know_are_kept(out: Path):
    path = out / "runs" / RUN / "results.csv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head},seconds", *(f"{line},0.5" for line in lines)]) + "\n")
    merged = list(csv.DictReader(results_csv(read_study(out).rows).splitlines()))
    assert {row["seconds"] for row in merged if row["method"] == "layershuffle"} == {"0.5"}
    assert {row["seconds"] for row in merged if row["method"] != "layershuffle"} == {""}


def test_half_done_study(tmp_path: Path):
    out = write_study(
        tmp_path, orders=2, undone=[RUN], failed={"run2-layerdrop-seed0": "The loss became NaN.\n"}
    )
    study = read_study(out)
    assert [run.state for run in study.runs] == ["done", "missing", "failed", "done"]
    assert study.in_state("failed")[0].failure == "The loss became NaN."
    assert {row.method for row in study.rows} == {"baseline", "layershuffle-depth"}


def test_a_run_killed_before_its_last_file_is_not_done(out: Path):
    (out / "runs" / RUN / "result.json").unlink()
    path = out / "runs" / RUN / "results.csv"
    path.write_text(path.read_text()[:99])
    assert [run.state for run in read_study(out).runs] == ["done", "missing", "done", "done"]


def test_a_failure_that_was_mended_is_forgotten(out: Path):
    (out / "runs" / RUN / "failure.txt").write_text("old")
    assert read_study(out).runs[1].state == "done"


def test_directories_without_a_plan_are_named(out: Path):
    (out / "runs" / "stray").mkdir()
    (out / "runs" / ".staged-1").mkdir()
    assert read_study(out).unplanned == ("stray",)


def test_no_study_at_all(tmp_path: Path):
    with pytest.raises(StudyError, match=r"no plan\.json.*layershuffle reproduce"):
        read_study(tmp_path)


def _edit_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"steps": "many"}, "\"steps\" is 'many'"),
        ({"steps": True}, '"steps" is True'),
        ({"paper_protocol": 0}, '"paper_protocol" is 0'),
        ({"run": "other"}, "run is 'other' here"),
        ({"seed": 5}, "seed is 5 here but 0 in the plan"),
        ({"selected": {"step": 1, "metric": "m"}}, '"value" is missing'),
        ({"data": {"spec": "x"}}, '"notes" is missing'),
        ({"train_seconds": float("nan")}, "NaN is not a number"),
    ],
)
def test_wrong_result_json_is_refused(out: Path, fields: dict[str, Any], message: str):
    _edit_json(out / "runs" / RUN / "result.json", **fields)
    with pytest.raises(StudyError, match=message) as error:
        read_study(out)
    assert f"{RUN}/result.json" in str(error.value)


@pytest.mark.parametrize("name", ["../../etc", "", ".hidden", "a/b", "a\nb"])
def test_run_names_that_leave_the_directory_are_refused(out: Path, name: str):
    runs = [{"name": name, "arm": "a", "method": "a", "seed": 0}]
    _edit_json(out / "plan.json", runs=runs)
    with pytest.raises(StudyError, match="cannot be the name of a run"):
        read_study(out)


def test_two_runs_of_one_name_are_refused(out: Path):
    runs = [{"name": "a", "arm": arm, "method": "a", "seed": 0} for arm in "ab"]
    _edit_json(out / "plan.json", runs=runs)
    with pytest.raises(StudyError, match="the same name"):
        read_study(out)


@pytest.mark.parametrize("name", ["plan.json", f"runs/{RUN}/result.json"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_cut_off_json_is_refused(out: Path, name: str, share: float):
    text = (out / name).read_text()
    (out / name).write_text(text[: int(len(text) * share)])
    with pytest.raises(StudyError, match="cut off or not JSON"):
        read_study(out)


def test_csv_cut_off_at_any_byte_is_refused(out: Path):
    path = out / "runs" / RUN / "results.csv"
    text = path.read_text()
    last_lines = range(len(text) - 150, len(text))
    for length in [0, 1, 50, *last_lines]:
        path.write_text(text[:length])
        if text[:length].endswith("\n"):  # a whole number of lines cannot be told from the file
            continue
        with pytest.raises(StudyError):
            read_study(out)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("mode", "random", "mode is 'random'"),
        ("choose", "best", "choose is 'best'"),
        ("draw", "epoch", "draw is 'epoch'"),
        ("kept", "0", "kept is 0"),
        ("kept", "11", "order has 12 blocks but kept is 11"),
        ("kept", "12.0", "unreadable"),
        ("n", "0", "n is 0"),
        ("order", "", "order is empty"),
        ("order", "a,b", "not ids with commas"),
        ("top1", "101", "not percentages"),
        ("top1", "nan", "not percentages"),
        ("top5", "0", "not percentages"),
        ("cross_entropy", "inf", "cross_entropy is inf"),
        ("seed", "9", "seed is 9 here but 0"),
        ("method", "baseline", "method is 'baseline' here"),
    ],
)
def test_impossible_rows_are_refused_with_their_line(
    out: Path, column: str, value: str, message: str
):
    path = out / "runs" / RUN / "results.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rows[2][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(StudyError, match=message) as error:
        read_study(out)
    assert "line 4" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0].replace(",top5", ""), *lines[1:]], "has no column top5"),
        (lambda lines: [lines[0] + ",n", *lines[1:]], "names a column twice"),
        (lambda lines: lines[:1], "has no rows"),
        (lambda lines: [*lines, lines[-1]], "has a score twice"),
        (lambda lines: [*lines, "a,b"], "2 fields, the header 12"),
    ],
)
def test_wrong_csv_is_refused(out: Path, change: Any, message: str):
    path = out / "runs" / RUN / "results.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(StudyError, match=message):
        read_study(out)


def test_missing_csv_of_a_finished_run_is_refused(out: Path):
    (out / "runs" / RUN / "results.csv").unlink()
    with pytest.raises(StudyError, match=r"no results\.csv"):
        read_study(out)


def test_results_import_no_heavy_library():
    heavy = ["torch", "scipy", "matplotlib", "jinja2", "numpy", "pandas"]
    code = (
        "import layershuffle.study.results, layershuffle.study.tables, sys; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_imports_no_torch():
    code = "import layershuffle.study.report, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
            f'{arm},0,arbitrary,{kept},random,0,"{order}",5000,1.0,2.0,4.0,pass'
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
    path = out / "runs" / "run2-layerdrop-seed0" / "results.csv"
    head, *_ = path.read_text().splitlines()
    row = 'layerdrop,0,sequential,3,,0,"0,1,2",5000,44.0,66.0,2.0,pass'
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
