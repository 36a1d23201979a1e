"""Reading results of tasks: complete, partial, truncated, foreign, contradicting the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture import merging_rows, write_merging, write_run, write_study

from layershuffle.errors import DataError, UsageError
from layershuffle.results import ScoreRow, read_rows
from layershuffle.study.plan import read_study_plan, runs_of
from layershuffle.study.report import write_report
from layershuffle.study.store import read_study
from layershuffle.study.tasks import StudyError

RUN = "layershuffle-seed0"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", orders=3)


def states(out: Path) -> list[str]:
    return [run.state for run in read_study(out).runs]


def test_every_row_and_fact_is_read(out: Path):
    study = read_study(out)
    assert len(study.rows) == 4 * (1 + 7 * 3)
    assert study.runs[1].task.name == RUN
    result = study.runs[1].result
    assert result is not None
    assert result.rows == read_rows(out / "runs" / RUN / "results.csv", ScoreRow)
    assert result.selected.metric == "holdout cross-entropy, arbitrary orders"
    assert result.paper_protocol is False
    assert result.data.model_dump()["sizes"]["test"] == 5000
    assert states(out) == ["done"] * 4


def test_a_run_with_another_position_form_than_the_plan_has_is_refused(tmp_path: Path):
    """The default once was the sum over blocks; such a run must not pass as one with the mean."""
    arms = {"layershuffle": "layershuffle"}
    more: list[dict[str, Any]] = [{"method": "layershuffle-predict"}]
    out = write_study(tmp_path, arms=arms, more_arms=more, orders=2)
    (task,) = (task for task in runs_of(read_study_plan(out)) if task.arm == "layershuffle-predict")
    task.directory(out).mkdir(parents=True)
    write_run(out, task, [], prediction={"pooling": "class", "loss": "sum", "weight": 1.0})
    with pytest.raises(StudyError, match=r"trained with prediction.init default, prediction"):
        read_study(out)


def test_columns_this_version_does_not_know_are_kept(out: Path):
    path = out / "runs" / RUN / "results.csv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head},seconds", *(f"{line},0.5" for line in lines)]) + "\n")
    write_report(out)
    extra = {
        (row.method, *(row.model_extra or {}).values())
        for row in read_rows(out / "results.csv", ScoreRow)
    }
    assert extra == {
        ("baseline", ""), ("layershuffle", "0.5"), ("layerdrop", ""), ("layershuffle-depth", "")
    }  # fmt: skip


def test_half_done_study(tmp_path: Path):
    out = write_study(
        tmp_path, orders=2, undone=[RUN], failed={"layerdrop-seed0": "The loss became NaN.\n"}
    )
    assert states(out) == ["done", "missing", "failed", "done"]
    study = read_study(out)
    assert study.runs[2].failure == "The loss became NaN."
    assert {row.method for row in study.rows} == {"baseline", "layershuffle-depth"}


def test_a_run_killed_before_its_last_file_is_not_done(out: Path):
    (out / "runs" / RUN / "result.json").unlink()
    path = out / "runs" / RUN / "results.csv"
    path.write_text(path.read_text()[:99])
    assert states(out) == ["done", "missing", "done", "done"]


def test_a_repaired_failure_is_forgotten(out: Path):
    (out / "runs" / RUN / "failure.txt").write_text("old")
    assert states(out)[1] == "done"


def test_directories_without_a_plan_are_named(out: Path):
    (out / "runs" / "stray").mkdir()
    (out / "runs" / ".staged-1").mkdir()
    assert read_study(out).unplanned == ("stray",)


def test_no_study_at_all(tmp_path: Path):
    with pytest.raises(UsageError, match=r"plan\.json.*layershuffle reproduce"):
        read_study(tmp_path)


def test_plans_of_older_versions_are_read(out: Path):
    """They also listed the tasks, which follow from the recipe."""
    _edit_json(out / "plan.json", name="x", runs=[{"name": "../../etc"}], pieces=[{}])
    assert states(out) == ["done"] * 4


def _edit_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 2}, r'"schema" is wrong: Input should be 1.*the version of layershuffle that'),
        ({"steps": "many"}, '"steps" is wrong: Input should be a valid integer'),
        ({"steps": True}, '"steps" is wrong'),
        ({"paper_protocol": 0}, '"paper_protocol" is wrong'),
        ({"run": "other"}, "The result is that of other, layershuffle"),
        ({"seed": 5}, "not what the plan has here"),
        ({"selected": {"step": 1, "metric": "m"}}, r'"selected\.value" is wrong: Field required'),
        ({"data": {"spec": "x"}}, r'"data\.notes" is wrong: Field required'),
        ({"train_seconds": float("nan")}, '"train_seconds" is wrong'),
    ],
)
def test_wrong_result_json_is_refused(out: Path, fields: dict[str, Any], message: str):
    _edit_json(out / "runs" / RUN / "result.json", **fields)
    with pytest.raises(StudyError, match=message) as error:
        read_study(out)
    assert f"{RUN}/result.json" in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_cut_off_json_is_refused(out: Path, share: float):
    for name, kind in ((f"runs/{RUN}/result.json", StudyError), ("plan.json", UsageError)):
        text = (out / name).read_text()
        (out / name).write_text(text[: int(len(text) * share)])
        with pytest.raises(kind, match=r"cut off|no readable study"):
            read_study(out)


def test_scores_of_another_run_are_refused(out: Path):
    other = (out / "runs" / "baseline-seed0" / "results.csv").read_text()
    (out / "runs" / RUN / "results.csv").write_text(other)
    with pytest.raises(StudyError, match=r"holds other scores.*choose a new --out"):
        read_study(out)


def test_missing_and_cut_off_csv_of_a_finished_run_are_refused(out: Path):
    path = out / "runs" / RUN / "results.csv"
    path.write_text(path.read_text()[:-1])
    with pytest.raises(DataError, match=r"cut off.*finished tasks are not repeated"):
        read_study(out)
    path.unlink()
    with pytest.raises(DataError, match=r"no results\.csv"):
        read_study(out)


def test_a_cut_off_merging_is_refused(tmp_path: Path):
    out = write_study(tmp_path, orders=2, merging={"arms": ["layershuffle"]})
    write_merging(out, "layershuffle", merging_rows([70.0], [66.0]))
    (merging,) = read_study(out).mergings
    assert merging.result is not None
    assert [row.top1 for row in merging.result.rows] == [70.0, 66.0, 50.0, 80.0, 79.0]
    path = out / "merging" / "layershuffle" / "results.csv"
    path.write_text("kind,index\nmerge")
    with pytest.raises(DataError, match=r"finished tasks are not repeated"):
        read_study(out)
    path.unlink()
    with pytest.raises(DataError, match=r"no results\.csv"):
        read_study(out)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("store", ["torch", "scipy", "matplotlib", "jinja2", "numpy", "pandas"]),
        ("report", ["torch", "matplotlib", "jinja2"]),
    ],
)
def test_heavy_libraries_wait_until_they_are_needed(module: str, heavy: list[str]):
    code = (
        f"import layershuffle.study.{module}, sys; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
