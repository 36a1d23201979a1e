"""The kept form of a study gives the same report as the study."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from fixture import merging_rows, write_merging, write_study

from layershuffle.errors import DataError, UsageError
from layershuffle.study.plan import read_study_plan, write_plan
from layershuffle.study.report import write_report
from layershuffle.study.store import completed, read_study, write_kept
from layershuffle.study.tasks import StudyError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = write_study(
        tmp_path_factory.mktemp("whole"),
        seeds=(0, 1),
        orders=3,
        undone=["layerdrop-seed1"],
        merging={"arms": ["layershuffle"]},
        analyses=[{"name": "umap", "arm": "layershuffle"}, {"name": "cka", "arm": "baseline"}],
    )
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    directory = out / "analysis" / "umap-layershuffle-seed0"
    (directory / "files").mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps({"schema": 1, "seconds": 3.0}))
    facts = {"blocks": 12, "tokens": {"mean": {"purity": 0.5, "chance": 0.2, "by_block": [1, 2]}}}
    summary = {"title": "UMAP", "paragraph": "It says, so.", "facts": facts, "files": ["a.svg"]}
    (directory / "files" / "summary.json").write_text(json.dumps(summary))
    (directory / "files" / "a.svg").write_text("<svg/>")
    write_report(out)
    return out


@pytest.fixture(scope="module")
def kept_once(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept")
    write_kept(read_study(whole), out, plan=(whole / "plan.json").read_text())
    write_report(out)
    return out


@pytest.fixture
def kept(kept_once: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(kept_once, tmp_path, dirs_exist_ok=True)


def without_pictures(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line and not line.startswith("![")]


def test_the_report_is_the_same(whole: Path, kept: Path):
    for name in ("results.csv", "table.md", "claims.md"):
        assert (kept / name).read_text() == (whole / name).read_text(), name
    assert without_pictures(kept / "report.md") == without_pictures(whole / "report.md")
    assert "A block's output depends on its position" in (kept / "claims.md").read_text()
    names = re.findall(r"\]\((.*?)\)", (kept / "report.md").read_text())
    assert sorted(names) == ["figure1.png", "figure5.png"]
    assert all((kept / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert not list(kept.glob("*.svg"))


def test_a_run_is_a_line_and_what_all_share_stands_once(whole: Path, kept: Path):
    lines = (kept / "runs.json").read_text().splitlines()
    runs = [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"run"')]
    assert [run["run"] for run in runs] == [o.task.name for o in read_study(whole).runs if o.result]
    stored = json.loads((kept / "runs.json").read_text())
    assert stored["shared"]["settings"]["lr"] == 0.001
    methods = [stored["arms"][run["arm"]]["method"] for run in runs]
    assert methods == [result.method for result in read_study(whole).results]
    lines = [*runs, *stored["arms"].values()]
    assert all("lr" not in line.get("settings", {}) and "versions" not in line for line in lines)
    assert not any("method" in run for run in runs)
    assert read_study(kept).results == read_study(whole).results


def test_runs_that_were_kept_before_arms_had_lines_are_read(whole: Path, kept: Path):
    results = read_study(whole).results
    runs = [
        result.model_dump(mode="json", exclude={"rows", "schema_version"}) for result in results
    ]
    shared = {"versions": runs[0]["versions"], "settings": {"lr": 0.001}}
    for run in runs:
        assert (run.pop("versions"), run["settings"].pop("lr")) == (shared["versions"], 0.001)
    (kept / "runs.json").write_text(json.dumps({"schema": 1, "shared": shared, "runs": runs}))
    assert read_study(kept).results == results


def test_fields_that_this_version_does_not_know_are_kept(whole: Path, tmp_path: Path):
    """The rank count and the compiler's report have no use here; later versions have more."""
    copied = tmp_path / "copied"
    shutil.copytree(whole, copied)
    path = copied / "runs" / "baseline-seed1" / "result.json"
    fields = json.loads(path.read_text()) | {"processes": 2, "compile": {"mode": "eager"}}
    fields["selected"]["orders"] = 4
    path.write_text(json.dumps(fields))
    study = read_study(copied)
    write_kept(study, tmp_path / "kept", plan=(copied / "plan.json").read_text())
    stored = json.loads((tmp_path / "kept" / "runs.json").read_text())["runs"]
    (run,) = (run for run in stored if run["run"] == "baseline-seed1")
    assert (run["processes"], run["compile"], run["selected"]["orders"]) == (
        2, {"mode": "eager"}, 4,
    )  # fmt: skip
    assert read_study(tmp_path / "kept").results == study.results


@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "100.5"])
def test_impossible_scores_of_merges_are_refused(whole: Path, kept: Path, tmp_path: Path, value):
    """In both forms of a study."""
    copied = tmp_path / "copied"
    shutil.copytree(whole, copied)
    for study in (copied, kept):
        (path,) = [*study.glob("merging/*/results.csv"), *study.glob("merging.csv")]
        text = path.read_text()
        assert ",66.0," in text
        path.write_text(text.replace(",66.0,", f",{value},"))
        with pytest.raises(DataError, match="top1"):
            read_study(study)


def test_kept_results_are_not_trained_into(kept: Path):
    with pytest.raises(UsageError, match=r"kept results of a study.*another --out"):
        write_plan(read_study_plan(kept), kept)


@pytest.mark.parametrize("cut", [2, 3, 30])
@pytest.mark.parametrize("name", ["runs.json", "merging.csv", "analysis.csv"])
def test_cut_off_files_are_refused(kept: Path, name: str, cut: int):
    """Also inside the last number, where the rest would be a valid number."""
    text = (kept / name).read_text()
    (kept / name).write_text(text[: len(text) - cut])
    with pytest.raises((StudyError, DataError), match=r"cut off|cannot be read"):
        read_study(kept)


def test_scores_without_a_run_and_runs_without_scores_are_refused(kept: Path):
    """`layershuffle report` would otherwise write results.csv again without those rows."""
    text = (kept / "results.csv").read_text()
    header, *rows = text.splitlines(keepends=True)
    lost = [row for row in rows if not row.startswith("layershuffle,0,")]
    assert len(lost) < len(rows)
    (kept / "results.csv").write_text(header + "".join(lost))
    with pytest.raises(StudyError, match="do not belong together: layershuffle seed 0"):
        read_study(kept)
    (kept / "results.csv").write_text(text)
    stored = json.loads((kept / "runs.json").read_text())
    stored["runs"] = [run for run in stored["runs"] if run["run"] != "layershuffle-seed0"]
    (kept / "runs.json").write_text(json.dumps(stored))
    with pytest.raises(StudyError, match="do not belong together: layershuffle seed 0"):
        read_study(kept)


def test_a_report_never_empties_scores_whose_runs_are_gone(whole: Path, tmp_path: Path):
    """As in docs/results/digits-quick, which keeps its scores and table alone."""
    for name in ("plan.json", "results.csv"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    with pytest.raises(StudyError, match="neither the runs that gave them"):
        write_report(tmp_path)
    assert (tmp_path / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()


def test_a_study_that_has_grown_takes_what_was_kept_of_the_same_tasks(kept: Path, tmp_path: Path):
    """Run again elsewhere without its baselines, and with another learning rate for LayerDrop."""
    again = write_study(
        tmp_path / "again",
        arms={"layershuffle": "layershuffle"},
        seeds=(0, 1),
        orders=3,
        more_arms=[
            {"method": "baseline", "name": "baseline"},
            {"method": "layerdrop", "name": "layerdrop", "fit": {"lr": 0.5}},
        ],
        merging={"arms": ["layershuffle", "baseline"]},
        analyses=[{"name": "umap", "arm": "layershuffle"}],
    )
    old, new = read_study(kept), read_study(again)
    grown = completed(new, by=old)
    states = {outcome.task.name: outcome.state for outcome in grown.outcomes}
    assert states == {
        "layershuffle-seed0": "done", "layershuffle-seed1": "done",
        "baseline-seed0": "done", "baseline-seed1": "done",
        "layerdrop-seed0": "missing", "layerdrop-seed1": "missing",
        "merging-layershuffle": "done", "merging-baseline": "missing",
        "umap-layershuffle-seed0": "done",
    }  # fmt: skip
    rows = {(row.method, row.seed): row.top1 for row in grown.rows}
    assert rows.keys() == {(arm, seed) for arm in ("layershuffle", "baseline") for seed in (0, 1)}
    kept_rows = {(row.method, row.seed): row.top1 for row in old.rows}
    assert rows["baseline", 1] == kept_rows["baseline", 1]


def test_mergings_with_and_without_effective_images_are_kept_together(tmp_path: Path):
    """Older merges, scored before images had groups, can be kept with later ones."""
    out = write_study(tmp_path / "study", orders=2, merging={"arms": ["baseline", "layershuffle"]})
    old = merging_rows([70.0, 74.0], [66.0])
    new = [row.model_copy(update={"top1_n": 343, "top5_n": 400}) for row in old]
    write_merging(out, "baseline", old)
    write_merging(out, "layershuffle", new)
    kept = tmp_path / "kept"
    kept.mkdir()
    write_kept(read_study(out), kept, plan=(out / "plan.json").read_text())
    rows = {m.task.arm: m.result.rows for m in read_study(kept).mergings if m.result}
    assert rows == {"baseline": tuple(old), "layershuffle": tuple(new)}
