"""From a recipe to tasks: runs, the budget curve, mergings, analyses, their work and their time."""

import json
from dataclasses import replace

import pytest
import yaml
from fixture import TINY, facts, run_rows, tell

from layershuffle.cli import main
from layershuffle.errors import UsageError
from layershuffle.settings import EvalSettings
from layershuffle.study.dry_run import forecast_text
from layershuffle.study.paper.selection import artefacts_of, select
from layershuffle.study.plan import check_plan, plan_of, read_plan, write_plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_facts
from layershuffle.study.tasks import orders_of
from layershuffle.study.worker import next_task
from refusals import refuses

RECIPE = {
    "name": "paper",
    "model": "bundled:digits",
    "data": "digit-pairs",
    "seeds": [0, 1],
    "arms": [
        {"method": "baseline", "seeds": [0, 1, 2]},
        {"method": "layershuffle"},
        {"method": "layershuffle-predict"},
        {
            "method": "truncated",
            "name": "truncated-3",
            "fit": {"kept": 3},
            "evaluate": {"modes": "sequential"},
        },
    ],
    "fit": {"steps": 100, "batch_size": 64, "eval_every": 50},
    "evaluate": {"modes": "sequential,arbitrary,kept:6:arbitrary", "num_orders": 2},
    "budget": [{"arms": ["layershuffle"], "steps": [40], "seeds": [1]}],
    "merging": [{"arms": ["baseline"], "options": {"merges": 7}}],
    "analyses": [
        {"name": "umap", "arm": "layershuffle"},
        {"name": "position", "arm": "layershuffle-predict", "seeds": [0, 1]},
    ],
}


@pytest.fixture
def study():
    return StudySettings(**RECIPE)


@pytest.fixture
def plan(study):
    return plan_of(study)


def names(tasks):
    return [task.name for task in tasks]


def finish(out, task, **changed):
    """Finish a run with facts that are made up."""
    tell(out, task.name, **{**facts(task), **changed}, rows=run_rows(task, 1))


def test_runs_seed_by_seed_then_the_budget_curve(plan):
    assert names(plan.runs) == [
        "baseline-seed0",
        "layershuffle-seed0",
        "layershuffle-predict-seed0",
        "truncated-3-seed0",
        "baseline-seed1",
        "layershuffle-seed1",
        "layershuffle-predict-seed1",
        "truncated-3-seed1",
        "baseline-seed2",
        "layershuffle-40-steps-seed1",
    ]


def test_settings_of_the_runs(study, plan):
    runs = {run.name: run for run in plan.runs}
    short = runs["layershuffle-40-steps-seed1"]
    assert (short.part, short.settings.steps, short.settings.eval_every) == ("budget", 40, 10)
    assert (short.curve, short.row) == ("layershuffle", "layershuffle-40-steps")
    assert short.evaluate.modes == "sequential,arbitrary"
    refined = runs["truncated-3-seed0"]
    assert (refined.settings.kept, refined.evaluate.modes) == (3, "sequential")
    assert (refined.row, refined.curve) == ("truncated", "truncated-3")
    assert runs["baseline-seed2"].evaluate == study.evaluate


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("fig4", ["layershuffle-seed0", "umap-layershuffle-seed0"]),
        ("table2", ["baseline-seed0", "baseline-seed1", "baseline-seed2", "merging-baseline"]),
        ("budget", ["layershuffle-seed0", "layershuffle-seed1", "layershuffle-40-steps-seed1"]),
        ("fig4,position", ["layershuffle-seed0", "layershuffle-predict-seed0",
          "layershuffle-predict-seed1", "umap-layershuffle-seed0",
          "position-layershuffle-predict-seed0", "position-layershuffle-predict-seed1"]),
    ],
)  # fmt: skip
def test_only_takes_what_is_needed(study, only, expected):
    assert names(select(study, only).tasks) == expected


def test_only_knows_every_task_and_refuses_what_is_not_there(study, plan):
    with refuses(UsageError):
        select(study, "tabel1")
    with refuses(UsageError):
        select(study, "cka")
    assert select(study, None) == plan
    assert set().union(*artefacts_of(study, plan).values()) == set(names(plan.tasks))
    assert not any("predict" in name for name in names(select(study, "fig1b").tasks))
    assert not any("truncated" in name for name in names(select(study, "table1").tasks))


def test_tasks_that_can_start(study, tmp_path):
    write_plan(study, tmp_path)
    tasks = select(study, "fig4,table2").tasks

    def ready():
        with next_task(tasks, tmp_path) as first:
            return first and first.name

    runs = {run.name: run for run in plan_of(study).runs}
    assert ready() == "baseline-seed0"
    finish(tmp_path, runs["baseline-seed0"])
    with next_task(tasks, tmp_path) as first, next_task(tasks, tmp_path) as second:
        assert (first.name, second.name) == ("layershuffle-seed0", "baseline-seed1")
    for name in ("layershuffle-seed0", "baseline-seed1"):
        finish(tmp_path, runs[name])
    with next_task(tasks, tmp_path) as last:
        assert last.name == "baseline-seed2"
        assert ready() == "umap-layershuffle-seed0"  # the merging needs the last baseline
    (directory := tmp_path / "runs" / "umap-layershuffle-seed0").mkdir(exist_ok=True)
    (directory / "failure.txt").write_text("no")
    finish(tmp_path, runs["baseline-seed2"])
    assert ready() == "merging-baseline"
    (directory := tmp_path / "runs" / "merging-baseline").mkdir(exist_ok=True)
    (directory / "failure.txt").write_text("no")
    assert ready() is None


def test_the_plan_holds_the_recipe_alone(study, tmp_path):
    write_plan(study, tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert set(stored) == {"schema", "code_version", "recipe"}
    assert read_plan(tmp_path) == study
    (tmp_path / "plan.json").write_text(json.dumps({**stored, "schema": 2}))
    with refuses(UsageError, tmp_path / "plan.json"):
        read_plan(tmp_path)


def test_changes_of_a_study_that_are_allowed(tmp_path):
    """Unfinished tasks may change and new ones may be added; finished ones must stay."""
    norms = {"name": "norms", "arm": "baseline"}
    recipe = {**TINY, "analyses": [norms]}
    write_plan(StudySettings(**recipe), tmp_path)
    plan = plan_of(StudySettings(**recipe))
    finish(tmp_path, plan.runs[0])
    tell(tmp_path, plan.analyses[0].name, title="Norms", facts={})

    def check(**changed):
        found = read_facts(tmp_path)
        check_plan(StudySettings(**{**recipe, **changed}), tmp_path, facts=found)

    check(workers=1)
    for seeds in ([0], [0, 1]):
        check(seeds=[0, 1], analyses=[{**norms, "seeds": seeds}])
    with refuses(UsageError, tmp_path / "plan.json"):
        check(analyses=[{**norms, "options": {"max_images": 9}}])
    check(seeds=[0, 1], arms=[*TINY["arms"], {"method": "layerdrop"}])
    check(arms=[{"method": "baseline"}, {"method": "layershuffle", "fit": {"lr": 0.5}}])
    for changed in ({"seeds": [1]}, {"evaluate": {"modes": "sequential"}}, {"name": "other"}):
        with refuses(UsageError, tmp_path / "plan.json"):
            check(**changed)


def test_work_is_counted(plan):
    """Against counts by hand: runs, a merging, an analysis."""
    sizes = {"train": 6400, "test": 1000}
    run, short = plan.runs[0], plan.runs[3]
    assert (run.steps({}), run.scored({}), run.scored(sizes)) == (100, None, 5 * 1000)
    assert run.cost(sizes) == 6 * 100 * 64 + 5 * 1000
    assert run.training_share() == 6 * 100 * 64 / (6 * 100 * 64 + 5 * 5000)
    assert short.scored(sizes) == 1000
    for epochs in (1, 20):  # 100 steps each
        fit = {"batch_size": 64, "epochs": epochs}
        by_epochs = plan_of(StudySettings(**{**RECIPE, "fit": fit, "budget": []})).runs[0]
        assert (by_epochs.steps({}), by_epochs.steps(sizes)) == (None, 100 * epochs)
    assert plan.mergings[0].scored(sizes) == (7 + 3 * 4 * 5) * 1000
    assert plan.analyses[0].scored(sizes) == 40 * 1000
    assert plan.analyses[0].scored({"test": 60}) == 40 * 60
    # Three of three blocks in their order are one order.
    scoring = EvalSettings(modes="kept:3,kept:2", num_orders=5)
    assert orders_of(scoring, 3, fixed=(0, 0)) == 1 + 5
    assert orders_of(scoring, 4, fixed=(1, 1)) == 5 + 1, "two of the blocks are always there"
    assert replace(run, images=20).scored(sizes) == 5 * 20


def test_time_comes_from_finished_tasks_of_the_same_kind(tmp_path):
    """With one of two equal runs done, the other takes as long."""
    options = {"name": "norms", "options": {"max_images": 20}}
    analyses = [{**options, "arm": arm} for arm in ("baseline", "layershuffle")]
    study = StudySettings(**TINY, analyses=analyses)
    plan = plan_of(study)
    write_plan(study, tmp_path)
    before = forecast_text(plan, tmp_path, workers=2)
    assert before == (
        "Left: 4 of 4 tasks: 8 training steps, 1,600 images scored, once per order, 10 passes "
        "over all test images\n"
        "Time: not known until a task has finished; then this command tells it"
    )
    sizes = {"data": {"spec": "s", "notes": [], "classes": 2, "sizes": {"train": 64, "test": 32}}}
    finish(tmp_path, plan.runs[0], train_seconds=20.0, eval_seconds=4.0, **sizes)
    assert forecast_text(plan, tmp_path, workers=2) == (
        "Left: 3 of 4 tasks: 4 training steps, 1,760 images scored, once per order\n"
        "Time: about 0:00:24 with 2 side by side (0:00:24 of work), and of 2 tasks not known yet"
    )
    tell(tmp_path, plan.analyses[0].name, title="Norms", facts={}, seconds=30.0)
    assert "Time: about 0:00:54 with 1 side by side" in forecast_text(plan, tmp_path, workers=1)
    # A run of 24 seconds and an analysis of 30 are left.
    assert "Time: about 0:00:30 with 2 side by side" in forecast_text(plan, tmp_path, workers=16)
    finish(tmp_path, plan.runs[1])
    tell(tmp_path, plan.analyses[1].name, title="Norms", facts={}, seconds=30.0)
    assert forecast_text(plan, tmp_path, workers=1) == "All of 4 tasks are finished"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("cifar100-paper", f"{5 * (2 + (5 + 4) * 20)} epochs of training"),
        # 12 baselines for an epoch; 12 models, and seven arms of five, for 20.
        ("imagenet-paper", f"{12 + (12 + 7 * 5) * 20} epochs of training"),
        ("formula-cpu", "16,000 training steps"),
    ],
)
def test_recipes_are_planned_with_nothing_at_hand(tmp_path, monkeypatch, capsys, name, work):
    """Without weights, images and network."""

    def refuse(*_):
        raise AssertionError("a dry run asks no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--dry-run"]) == 0
    assert f"{work}, " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_no_cluster_at_the_address(tmp_path, capsys):
    pytest.importorskip("ray")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    for address in ("127.0.0.1:1", "nowhere"):
        words = ["reproduce", str(recipe), "--out", str(tmp_path / "out"), "--ray", address]
        assert main(words) == 2
        assert f"No Ray cluster answers at '{address}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
