"""The files of a study: complete, partial, cut off, contradicting the plan."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture import facts, merging_rows, run_of, run_rows, tell, write_merging, write_study

from layershuffle.ground.errors import DataError, LayerShuffleError, UsageError
from layershuffle.ground.rows import ScoreRow, read_rows
from layershuffle.study.paper.report import write_report
from layershuffle.study.store import read_study
from layershuffle.study.tasks import StudyError
from refusals import refuses

RUN = "layershuffle-seed0"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", orders=3)


def done(out: Path) -> list[str]:
    return [task.name for task, _ in read_study(out).runs]


def test_every_row_and_fact_is_read(out: Path):
    study = read_study(out)
    assert [len(result.rows) for _, result in study.runs] == [1 + 7 * 3] * 4
    task, result = study.runs[1]
    assert task.name == RUN
    assert result.rows == tuple(run_rows(task, 3))
    assert result.rows == tuple(
        row for row in read_rows(out / "results.csv", ScoreRow) if row.method == "layershuffle"
    )
    assert result.selected.metric == "holdout cross-entropy, arbitrary orders"
    assert result.data.sizes["test"] == 5000
    assert study.unfinished == {}


def test_a_kept_study_is_the_same_without_its_work(tmp_path: Path):
    """A repository keeps all but runs/, and the report is the same, byte for byte."""
    out = write_study(tmp_path / "study", orders=2, merging=[{"arms": ["layershuffle"]}])
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0]))
    (out / "runs" / RUN / "fit").mkdir(parents=True)
    kept = tmp_path / "kept"
    shutil.copytree(out, kept, ignore=shutil.ignore_patterns("runs"))
    for directory in (out, kept, out):
        write_report(directory)
    for name in ("report.md", "report.html", "figures/figure1.svg", "figures/bars.svg"):
        assert (kept / name).read_bytes() == (out / name).read_bytes(), name


def test_a_task_that_was_killed_before_its_line_is_not_done(out: Path):
    """Its rows may be there already; the next result that is recorded takes them out."""
    path = out / "tasks.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"{RUN}"' not in line))
    assert done(out) == ["baseline-seed0", "layerdrop-seed0", "layershuffle-depth-seed0"]
    task = run_of(out, "baseline-seed0")
    tell(out, task.name, **facts(task), rows=run_rows(task, 3))
    assert "layershuffle" not in {row.method for row in read_rows(out / "results.csv", ScoreRow)}


def edit(out: Path, **fields: Any) -> None:
    """Change facts of `RUN`."""
    path = out / "tasks.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1] |= fields
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_only_a_newline_ends_a_line(out: Path):
    path = out / "tasks.jsonl"
    text = path.read_text()
    path.write_text(text.replace("digits split", "digits\x85\u2028split"), encoding="utf-8")
    assert done(out) == [json.loads(line)["task"] for line in text.splitlines()]


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": "many"},
        {"steps": True},
        {"paper_protocol": 0},
        {"selected": {"step": 1}},
        {"data": {"spec": "x"}},
        {"train_seconds": float("nan")},
    ],
)
def test_wrong_facts_are_refused(out: Path, fields: dict[str, Any]):
    edit(out, **fields)
    with refuses(StudyError, out / "tasks.jsonl"):
        read_study(out)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tasks.jsonl", StudyError),
        ("plan.json", UsageError),
        ("results.csv", DataError),
        ("merging.csv", DataError),
    ],
)
@pytest.mark.parametrize("cut", [2, 9, 100])
def test_files_that_are_cut_off_are_refused(
    tmp_path: Path, name: str, error: type[LayerShuffleError], cut: int
):
    """Also inside the last number, where the rest would be a valid number."""
    out = write_study(tmp_path, orders=2, merging=[{"arms": ["layershuffle"]}])
    write_merging(out, "layershuffle", merging_rows([70.0], [66.0]))
    text = (out / name).read_text()
    (out / name).write_text(text[:-cut])
    with refuses(error, out / name):
        read_study(out)


def test_facts_without_scores_are_refused(out: Path):
    path = out / "results.csv"
    head, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(row for row in rows if not row.startswith("layershuffle,0,")))
    with refuses(StudyError, out):
        read_study(out)


def test_scores_without_facts_are_of_no_finished_run(out: Path):
    """As after a kill between the two files."""
    before = done(out)
    (out / "tasks.jsonl").unlink()
    assert list(read_study(out).unfinished) == before


def test_a_run_that_ends_while_a_study_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its scores are there, or its facts are not."""
    out = write_study(tmp_path / "study", orders=2, undone=[RUN])

    def ends_first(*words: Any, **more: Any) -> Any:
        monkeypatch.undo()
        task = run_of(out, RUN)
        tell(out, RUN, **facts(task), rows=run_rows(task, 2))
        return read_rows(*words, **more)

    monkeypatch.setattr("layershuffle.study.store.read_rows", ends_first)
    assert list(read_study(out).unfinished) == [RUN]
    assert read_study(out).unfinished == {}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("store", ["torch", "scipy", "matplotlib", "markdown_it", "numpy", "pandas"]),
        ("worker", ["torch", "scipy", "matplotlib", "markdown_it", "numpy", "pandas"]),
        ("paper.report", ["torch", "matplotlib", "markdown_it"]),
    ],
)
def test_heavy_libraries_wait_until_they_are_needed(module: str, heavy: list[str]):
    code = (
        f"import layershuffle.study.{module}, sys; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
