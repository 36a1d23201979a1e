"""A study that is killed, restarted, shared or fails ends with the same numbers.

Every process of a task imports for seconds, so tests run as few as possible.
"""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from fixture import TINY as RECIPE
from fixture import done_here, results

import layershuffle as ls
from forked import STARTS, ForkedTeam, studying
from layershuffle.cli import main
from layershuffle.core.methods import PRESETS
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import DataError, Interrupted, LayerShuffleError, UsageError
from layershuffle.ground.rows import ScoreRow, read_rows
from layershuffle.ground.settings import read_recipe
from layershuffle.study.paper.report import write_report
from layershuffle.study.plan import make_plan, read_plan, write_plan
from layershuffle.study.runner import LocalTeam, run_study, task_states, visible_gpus
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_facts, read_failure
from layershuffle.study.worker import attempt, unfinished
from once import once
from pictures import noise
from refusals import refuses
from waiting import wait_for

FOUR_TASKS = {
    **RECIPE,
    "seeds": [0, 1],
    "arms": [{"method": "layershuffle"}],
    "fit": {**RECIPE["fit"], "steps": 30, "eval_every": 5, "checkpoint_every": 3},
    "evaluate": {"modes": "sequential,arbitrary", "num_orders": 2},
    "merging": [{"arms": ["layershuffle"], "options": {"merges": 2, "num_orders": 1}}],
    "analyses": [{"name": "norms", "arm": "layershuffle", "options": {"max_images": 20}}],
}


def watch(states, seconds):
    """A watcher that does nothing."""


@pytest.fixture(scope="module")
def four_tasks(tmp_path_factory):
    """The study, whose donors share a base, as they must."""

    def make(base):
        ls.save(ls.load(RECIPE["model"].replace("depth=4", "depth=2")), base)

    base = once(tmp_path_factory, "base of four tasks", make, room="studies")
    return StudySettings(**{**FOUR_TASKS, "model": f"dir:{base}"})


@pytest.fixture(scope="module")
def calm(tmp_path_factory, four_tasks):
    """That study done by one process, with nobody disturbing it."""
    return once(
        tmp_path_factory, "calm study", lambda out: done_here(four_tasks, out), room="studies"
    )


def numbers(out):
    """Every score of the study, and every table of its analyses."""
    tables = sorted(out.glob("runs/*/files/*.csv"))
    return results(out), {path.relative_to(out): path.read_text() for path in tables}


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[:-1]))


def children_of(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def starts(out):
    """How often each task was started."""
    return Counter(line.split()[0] for line in (out / STARTS).read_text().splitlines())


def test_killed_at_three_random_moments(four_tasks, calm, tmp_path):
    """After kill -9 while training, merging or analysing, no number changes."""
    whole, moments, killed = written(calm), random.Random(0), 0
    out = tmp_path / "rough"
    for part in range(3):
        rough = studying(four_tasks, out)
        rough.start()
        # By what is written: a share of the time would fall elsewhere on a busy machine.
        moment = whole * moments.uniform(part, part + 1) / 4
        wait_for(lambda: written(out) >= moment or not rough.is_alive())  # noqa: B023
        killed += rough.is_alive()
        # The writers first, as when the power goes.
        kill(*(children_of(rough.pid) if rough.is_alive() else ()), rough.pid)
        rough.join()
    assert killed == 3
    last = studying(four_tasks, out)
    last.start()
    last.join()
    assert last.exitcode == 0
    assert len(read_facts(out)) == 2 + 1 + 1
    assert numbers(out) == numbers(calm)


def written(out):
    """The number of files."""
    return sum(len(files) for _, _, files in os.walk(out))


def test_two_commands_share_the_work_and_take_over_from_a_killed_worker(four_tasks, calm, tmp_path):
    """As on two machines with one disk: every task runs once, but for the one that was killed."""
    out = tmp_path / "shared"
    first, second = studying(four_tasks, out), studying(four_tasks, out)
    first.start()
    wait_for((out / "plan.json").exists)
    second.start()
    wait_for(lambda: (out / STARTS).exists() and "loss" in progress(out, "layershuffle-seed0"))
    line = next(text for text in (out / STARTS).read_text().splitlines() if "seed0" in text)
    os.kill(int(line.split()[1]), signal.SIGKILL)
    for command in (first, second):
        command.join()
        assert command.exitcode == 0
    assert starts(out) == {
        "layershuffle-seed0": 2,
        "layershuffle-seed1": 1,
        "merging-layershuffle": 1,
        "norms-layershuffle-seed0": 1,
    }
    assert numbers(out) == numbers(calm)
    for name in ("results.csv", "merging.csv"):
        assert (out / name).read_text() == (calm / name).read_text()


def progress(out, name):
    path = out / "runs" / name / "progress.json"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "arms": [{"method": "layershuffle"}]}))
    return path


def test_the_command_and_its_workers_end_together_and_go_on(recipe, tmp_path, capsys, monkeypatch):
    """kill -9 of the command ends its workers too; started again, it continues."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "layershuffle", "reproduce", str(recipe), "--out", str(out)]
    command = subprocess.Popen(words)
    wait_for(lambda: "loss" in progress(out, "layershuffle-seed0"))
    workers = children_of(command.pid)
    assert workers
    command.kill()
    command.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    monkeypatch.setitem(run_study.__kwdefaults__, "make_team", ForkedTeam)
    assert main(["reproduce", str(recipe), "--out", str(out)]) == 0
    done_here(read_plan(out), tmp_path / "here")
    assert results(out) == results(tmp_path / "here")
    assert "Shuffled, LayerShuffle is right on" in capsys.readouterr().out
    before = (out / "tasks.jsonl").stat().st_mtime_ns
    assert run_study(read_plan(out), out, watch=watch) == []
    assert (out / "tasks.jsonl").stat().st_mtime_ns == before


def test_a_stopped_study_says_so(tmp_path):
    study = StudySettings(**{**RECIPE, "arms": [{"method": "layershuffle"}]})

    def stop(states, seconds):
        os.kill(os.getpid(), signal.SIGTERM)

    with refuses(Interrupted, tmp_path):
        run_study(study, tmp_path, watch=stop, make_team=ForkedTeam)
    assert run_study(study, tmp_path, watch=watch, make_team=ForkedTeam) == []


def test_a_failed_run_holds_back_what_needs_it_and_the_others_go_on(tmp_path):
    arms = [{"method": "baseline"}, {"method": "layershuffle", "fit": {"lr": 1e30}}]
    study = StudySettings(
        **{
            **RECIPE,
            "arms": arms,
            "analyses": [{"name": "norms", "arm": "layershuffle", "options": {"max_images": 20}}],
        }
    )
    failed = run_study(study, tmp_path, watch=watch, make_team=ForkedTeam)
    assert failed == ["layershuffle-seed0", "norms-layershuffle-seed0"]
    states = {state.name: state for state in task_states(make_plan(study).tasks, tmp_path)}
    assert states["baseline-seed0"].phase == "done"
    assert "Loss or weights became" in states["layershuffle-seed0"].detail
    assert states["norms-layershuffle-seed0"].detail == "held back, layershuffle-seed0 failed"


def test_a_task_that_ends_its_processes_is_given_up(tmp_path):
    study = StudySettings(**RECIPE)
    write_plan(study, tmp_path)
    task = make_plan(study).runs[0]
    task.directory(tmp_path).mkdir(parents=True)
    killed = '{"text": "step 1/4", "share": 0.1, "attempt": 3}'
    (task.directory(tmp_path) / "progress.json").write_text(killed)
    attempt(task, tmp_path)
    assert "ended 3 processes without a word" in read_failure(task, tmp_path)
    assert unfinished([task], tmp_path) == []


@pytest.mark.parametrize("error", [DataError, RuntimeError])
def test_a_task_fails_because_of_a_file_whose_name_is_no_utf8(tmp_path, monkeypatch, error):
    def broken(*_, say):
        raise error(f"cannot read image {os.fsdecode(b'caf' + bytes([0xE9]))}.png")

    monkeypatch.setattr("layershuffle.study.worker.record", broken)
    task = make_plan(StudySettings(**RECIPE)).runs[0]
    task.directory(tmp_path).mkdir(parents=True)
    attempt(task, tmp_path)
    assert r"cannot read image caf\udce9.png" in read_failure(task, tmp_path)


def test_a_task_fails_because_of_a_full_disk(tmp_path, monkeypatch):
    def full(*_, say):
        raise OSError(errno.ENOSPC, "No space left on device", "/x/model")

    monkeypatch.setattr("layershuffle.study.worker.record", full)
    task = make_plan(StudySettings(**RECIPE)).runs[0]
    task.directory(tmp_path).mkdir(parents=True)
    attempt(task, tmp_path)
    assert read_failure(task, tmp_path).startswith("The disk is full. Where: /x/model. Next: ")


def test_a_task_is_tried_again_after_a_power_cut(tmp_path):
    """What tells of its progress is not flushed to the disk, so it may be empty."""
    write_plan(StudySettings(**RECIPE), tmp_path)
    run = make_plan(StudySettings(**RECIPE)).runs[0]
    run.directory(tmp_path).mkdir(parents=True)
    (run.directory(tmp_path) / "progress.json").touch()
    assert [state.phase for state in task_states([run], tmp_path)] == ["waiting"]
    attempt(run, tmp_path)
    assert unfinished([run], tmp_path) == []
    assert read_failure(run, tmp_path) == ""


def test_a_worker_that_cannot_start_ends_the_study(tmp_path):
    write_plan(StudySettings(**RECIPE), tmp_path)
    team = LocalTeam(tmp_path, make_plan(StudySettings(**RECIPE)).tasks, 1)
    (tmp_path / "plan.json").write_text("{}")
    try:
        with refuses(LayerShuffleError, tmp_path):
            while team.is_working():
                pass
    finally:
        team.stop()


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("", []), ("-1", []), ("2, GPU-8932f937", ["2", "GPU-8932f937"]), ("1,-1,0", ["1"])],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


def test_another_recipe_is_refused_and_the_study_stays_as_it_was(tmp_path):
    """Results of two recipes in one report would be compared as if they were of one."""
    study = StudySettings(**RECIPE)
    write_plan(study, tmp_path)
    other = StudySettings(**{**RECIPE, "fit": {**RECIPE["fit"], "lr": 0.5}})
    with pytest.raises(UsageError):
        run_study(other, tmp_path, watch=watch)
    assert read_plan(tmp_path) == study
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_study_is_not_continued_with_other_defaults(tmp_path, monkeypatch):
    recipe = {**RECIPE, "arms": [{"method": "anyorder"}], "seeds": [0, 1]}
    study = StudySettings(**recipe)
    write_plan(study, tmp_path)
    run = make_plan(study).runs[0]
    run.directory(tmp_path).mkdir(parents=True)
    attempt(run, tmp_path)
    monkeypatch.setitem(PRESETS["anyorder"][1], "orders_per_batch", 2)
    with refuses(UsageError, tmp_path / "tasks.jsonl"):
        run_study(study, tmp_path, watch=watch)
    assert list(read_facts(tmp_path)) == ["anyorder-seed0"]


# --- the recipe of ImageNet -----------------------------------------------------------------------


def shrunk(place):
    """The recipe on generated images and a small model; its arms, modes and tables stay."""
    for split, count in (("train", 6), ("val", 4)):
        for name in ("ape", "bee", "cat"):
            (directory := place / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                noise(index, size=(20, 20)).save(directory / f"{index}.png")
    size = "num_classes=3&img_size=16&patch_size=8&embed_dim=8&depth=12&num_heads=2&mlp_ratio=2"
    base = ls.load(f"timm:vit_tiny_patch16_224?pretrained=false&{size}")
    ls.save(base, place / "base")
    recipe = read_recipe(asset("recipes", "imagenet-paper.yaml"))
    recipe |= {"model": f"dir:{place / 'base'}", "data": f"folder:{place / 'images'}", "seeds": [0]}
    few = {"steps": 1, "batch_size": 4, "eval_batch_size": 4, "workers": 0, "eval_orders": 1}
    recipe["fit"] |= {**few, "epochs": None}
    # Compilation, meant for GPUs, would take minutes.
    recipe["evaluate"] |= {"num_orders": 2, "batch_size": 6, "compile": False}
    for arm in recipe["arms"]:
        # The twelve seeds are there to be merged; two of them go through the same code.
        arm["seeds"] = [0, 1] if "seeds" in arm else [0]
        arm["fit"] = {k: v for k, v in arm.get("fit", {}).items() if k not in ("epochs", "model")}
    few = {"merges": 3, "num_orders": 1, "batch_size": 6, "replacement": True, "compile": False}
    recipe["merging"][0]["options"] |= few
    for analysis in recipe["analyses"]:
        few = {"max_images": 12, "neighbours": 3, "batch_size": 6}
        analysis |= {"seeds": [0], "options": few}
    return StudySettings(**recipe)


def test_the_imagenet_recipe_end_to_end(tmp_path):
    study, out = shrunk(tmp_path), tmp_path / "out"
    plan = make_plan(study)
    assert (len(plan.runs), len(plan.tasks)) == (7 + 2 * 2, 15)
    done_here(study, out)
    facts = read_facts(out)
    assert all(task.is_done(facts) for task in plan.tasks)
    write_report(out)
    text, rows = (out / "report.md").read_text(), read_rows(out / "results.csv", ScoreRow)
    assert {row.method for row in rows} == {arm.label for arm in study.arms}
    run = facts["baseline-seed0"]
    assert (run["eval_precision"], run["eval_blocks"]["mode"]) == ("bf16", "eager")
    for merging in plan.mergings:
        assert facts[merging.name]["hardware"]["precision"] == "bf16"
    for words in ("Figure 4", "Table 2 and Figure 5", "Paper protocol: the checkpoint was picked"):
        assert words in text
    record = out / "runs/truncated-3-seed0/fit/model/layershuffle.json"
    short = json.loads(record.read_text())
    assert (short["depth"], short["provenance"]["blocks_of_base"]) == (3, "0,6,11")
