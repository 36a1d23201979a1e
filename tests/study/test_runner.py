"""A study that is killed, restarted or fails ends with the same runs.

Every process of a task imports for seconds, so tests run as few as possible.
"""

import contextlib
import csv
import io
import os
import random
import re
import signal
from pathlib import Path

import pytest
import yaml
from fixture import TINY as RECIPE
from fixture import results

import layershuffle as ls
from forked import SERVER, ForkedPool, studying
from layershuffle.cli import main
from layershuffle.errors import Interrupted, UsageError
from layershuffle.study.plan import read_study_plan, runs_of, tasks_of, write_plan
from layershuffle.study.runner import failure, run_study
from layershuffle.study.settings import StudySettings
from layershuffle.study.worker import execute
from once import once
from waiting import wait_for

ONE_ARM = {**RECIPE, "arms": [{"method": "layershuffle"}]}


def watch(states, seconds):
    """A watcher that does nothing."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, recipe):
    """The study as the command line runs it, once for all pytest workers."""

    def make(out):
        assert main(["reproduce", str(recipe), "--out", str(out)]) == 0

    return once(tmp_path_factory, "undisturbed study", make, room="studies")


def of_one_run(scores):
    """The results that `ONE_ARM` must have, from those of both arms."""
    return {name: text for name, text in scores.items() if name == "layershuffle-seed0"}


def test_every_run_is_scored(undisturbed):
    scores = results(undisturbed)
    assert sorted(scores) == ["baseline-seed0", "layershuffle-seed0"]
    for text in scores.values():
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [(row["mode"], row["kept"]) for row in rows] == [
            ("sequential", "4"),
            *[("arbitrary", "4")] * 2,
            *[("arbitrary", "2")] * 2,
        ]
        assert {row["n"] for row in rows} == {"32"}
    assert (undisturbed / "report.html").is_file()
    assert "baseline" in (undisturbed / "table.md").read_text()


def test_finished_runs_are_not_repeated(undisturbed, capsys):
    before = {p: p.stat().st_mtime_ns for p in undisturbed.glob("runs/*/result.json")}
    assert run_study(read_study_plan(undisturbed), undisturbed, watch=watch) == []
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_killed_and_restarted(undisturbed, tmp_path):
    """After kill -9 in the middle of a run, its runs end too, and results do not change."""
    out = tmp_path / "out"
    study = studying(StudySettings(**ONE_ARM), out)
    study.start()
    progress = out / "runs" / "layershuffle-seed0" / "progress.json"
    wait_for(progress.exists)
    workers = children_of(study.pid)
    study.kill()
    study.join()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert run_study(read_study_plan(out), out, watch=watch, make_pool=forked) == []
    assert results(out) == of_one_run(results(undisturbed))


FOUR_TASKS = {
    **RECIPE,
    "seeds": [0, 1],
    "arms": [{"method": "layershuffle"}],
    "fit": {**RECIPE["fit"], "steps": 30, "eval_every": 5, "checkpoint_every": 3},
    "evaluate": {"modes": "sequential,arbitrary", "num_orders": 2},
    "merging": {"arms": ["layershuffle"], "options": {"merges": 2, "num_orders": 1}},
    "analyses": [{"name": "norms", "arm": "layershuffle", "options": {"max_images": 20}}],
}


def test_killed_at_three_random_moments(tmp_path):
    """After kill -9 while training, merging or analysing, no number changes.

    With forked processes, because most kills would otherwise hit imports.
    """
    base = tmp_path / "base"  # donors must share theirs
    ls.save(ls.load(RECIPE["model"].replace("depth=4", "depth=2")), base)
    study = StudySettings(**{**FOUR_TASKS, "model": f"dir:{base}"})
    calm = studying(study, tmp_path / "calm")
    calm.start()
    calm.join()
    assert calm.exitcode == 0
    whole = written(tmp_path / "calm")
    moments = random.Random(0)
    killed = 0
    for part in range(3):
        rough = studying(study, tmp_path / "rough")
        rough.start()
        # By what is written: a share of the time would fall elsewhere on a busy machine.
        moment = whole * moments.uniform(part, part + 1) / 4
        wait_for(lambda: written(tmp_path / "rough") >= moment or not rough.is_alive())  # noqa: B023
        workers = children_of(rough.pid) if rough.is_alive() else []
        killed += rough.is_alive()
        for pid in (*workers, rough.pid):  # the writers first, as when the power goes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        rough.join()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # noqa: B023
    assert killed == 3
    last = studying(study, tmp_path / "rough")
    last.start()
    last.join()
    assert last.exitcode == 0
    rough_numbers, wanted = (numbers(tmp_path / name) for name in ("rough", "calm"))
    assert len(wanted) == 2 + 1 + 1
    assert rough_numbers == wanted


def written(out):
    """The number of files."""
    return sum(len(files) for _, _, files in os.walk(out))


def numbers(out):
    """Every CSV of the study's tasks."""
    patterns = ("runs/*/results.csv", "merging/*/results.csv", "analysis/*/files/*.csv")
    paths = [path for pattern in patterns for path in out.glob(pattern)]
    return {
        path.relative_to(out).as_posix(): path.read_text().replace(str(out), "OUT")
        for path in sorted(paths)
    }


def forked(study, out):
    """In place of `local_pool`."""
    return ForkedPool(out, SERVER), 1


def test_stopped_and_restarted(undisturbed, tmp_path):
    out, study = tmp_path / "out", StudySettings(**ONE_ARM)

    def stop_once(states, seconds):
        # At the first sight of the tasks, wherever the run is by then: nothing here waits for it.
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="run the same command again"):
        run_study(study, out, watch=stop_once, make_pool=forked)
    assert run_study(study, out, watch=watch, make_pool=forked) == []
    assert results(out) == of_one_run(results(undisturbed))


def test_a_failing_run_is_reported_and_the_others_continue(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("layershuffle.study.runner.local_pool", forked)
    arms = [{"method": "baseline", "fit": {"lr": 1e38, "clip": None}}, {"method": "layershuffle"}]
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "arms": arms}))
    out = tmp_path / "out"
    assert main(["reproduce", str(path), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "1 of the tasks failed: baseline-seed0" in captured.err
    assert sorted(results(out)) == ["layershuffle-seed0"]
    run = runs_of(read_study_plan(out))[0]
    assert "Loss or weights became" in failure(run, out)
    assert "baseline" in (out / "report.md").read_text()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(UsageError, match="holds no study"):
        run_study(StudySettings(**RECIPE), tmp_path, watch=watch)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_study_in_the_directory(tmp_path):
    write_plan(StudySettings(**RECIPE), tmp_path)
    with pytest.raises(UsageError, match="another --out"):
        write_plan(StudySettings(**{**RECIPE, "name": "other"}), tmp_path)


def test_changes_of_a_study_that_are_allowed(tmp_path):
    """Unfinished tasks may change and new ones may be added; finished ones must stay."""
    write_plan(StudySettings(**RECIPE), tmp_path)
    write_plan(StudySettings(**RECIPE, workers=1), tmp_path)
    evaluate = {"modes": "sequential"}
    other = {**RECIPE, "evaluate": evaluate}
    write_plan(StudySettings(**other, workers=1), tmp_path)
    assert read_study_plan(tmp_path).evaluate.modes == "sequential"
    result = tmp_path / "runs" / "baseline-seed0" / "result.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    with pytest.raises(
        UsageError, match=r"\(evaluate, workers\), finished already: baseline-seed0"
    ):
        write_plan(StudySettings(**RECIPE), tmp_path)
    with pytest.raises(UsageError, match=r"\(seeds\), finished already: baseline-seed0"):
        write_plan(StudySettings(**{**other, "seeds": [1]}, workers=1), tmp_path)
    arms = [*RECIPE["arms"], {"method": "layerdrop"}]
    grown = StudySettings(**{**other, "seeds": [0, 1], "arms": arms})
    write_plan(grown, tmp_path)
    assert read_study_plan(tmp_path) == grown


def test_modes_are_checked_before_the_training(tmp_path):
    (task,) = tasks_of(StudySettings(**{**ONE_ARM, "evaluate": {"modes": "kept:9"}}))
    with pytest.raises(UsageError, match="Cannot keep 9 blocks of a model with 4"):
        execute(task, tmp_path)
    assert not (task.directory(tmp_path) / "fit").exists()


def test_dry_run_prints_and_does_nothing(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["reproduce", str(recipe), "--out", str(out), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 runs" in text
    assert "scored under 5 orders" in text
    assert "Work: 8 training steps, and" in text
    assert "Time: not known until a run has finished" in text
    assert re.search(r"Disk: [\d.]+ kB of models at the end", text)
    assert not out.exists()


def test_plans_are_data(tmp_path):
    study = StudySettings(**{**RECIPE, "seeds": [0, 1]})
    write_plan(study, tmp_path)
    assert read_study_plan(tmp_path) == study
    assert [run.name for run in runs_of(read_study_plan(tmp_path))] == [
        "baseline-seed0",
        "layershuffle-seed0",
        "baseline-seed1",
        "layershuffle-seed1",
    ]


def children_of(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
