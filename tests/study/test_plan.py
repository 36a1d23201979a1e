"""From a recipe to tasks: runs, mergings, analyses and their work."""

import json
from dataclasses import replace

import pytest
import yaml
from fixture import TINY, facts, run_rows, tell

from layershuffle.cli import main
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.scoring.settings import EvalSettings
from layershuffle.study.plan import check_defaults, check_plan, make_plan, read_plan, write_plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.tasks import count_orders
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
    return make_plan(study)


def names(tasks):
    return [task.name for task in tasks]


def finish(out, task, **changed):
    """Finish a run with facts that are made up."""
    tell(out, task.name, **{**facts(task), **changed}, rows=run_rows(task, 1))


def test_runs_come_seed_by_seed(plan):
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
    ]


def test_settings_of_the_runs(study, plan):
    runs = {run.name: run for run in plan.runs}
    refined = runs["truncated-3-seed0"]
    assert (refined.settings.kept, refined.evaluate.modes) == (3, "sequential")
    assert refined.row == "truncated"
    assert runs["baseline-seed2"].evaluate == study.evaluate


def test_tasks_that_can_start(study, plan, tmp_path):
    write_plan(study, tmp_path)
    last = {"umap-layershuffle-seed0", "merging-baseline"}
    needed = {need for task in plan.tasks if task.name in last for need in task.needs}
    tasks = [task for task in plan.tasks if task.name in last | needed]

    def ready():
        with next_task(tasks, tmp_path) as first:
            return first and first.name

    runs = {run.name: run for run in plan.runs}
    assert ready() == "baseline-seed0"
    finish(tmp_path, runs["baseline-seed0"])
    with next_task(tasks, tmp_path) as first, next_task(tasks, tmp_path) as second:
        assert (first.name, second.name) == ("layershuffle-seed0", "baseline-seed1")
    for name in ("layershuffle-seed0", "baseline-seed1"):
        finish(tmp_path, runs[name])
    with next_task(tasks, tmp_path) as third:
        assert third.name == "baseline-seed2"
        assert ready() == "umap-layershuffle-seed0"  # the merging needs the last baseline
    (directory := tmp_path / "runs" / "umap-layershuffle-seed0").mkdir(exist_ok=True)
    (directory / "failure.txt").write_text("no")
    finish(tmp_path, runs["baseline-seed2"])
    assert ready() == "merging-baseline"
    (directory := tmp_path / "runs" / "merging-baseline").mkdir(exist_ok=True)
    (directory / "failure.txt").write_text("no")
    assert ready() is None


@pytest.mark.parametrize(
    "changed",
    [
        {"evaluate": {"modes": "arbitrary", "resize": "squash"}},
        {"arms": [{"method": "baseline", "evaluate": {"skip_corrupt": True}}]},
        {"arms": [{"method": "baseline", "evaluate": {"classes": "names.txt"}}]},
        {"merging": [{"arms": ["baseline"], "options": {"resize": "crop"}}]},
        {"analyses": [{"name": "norms", "arm": "baseline", "options": {"skip_corrupt": True}}]},
    ],
)
def test_images_are_scored_as_they_were_trained_on(changed):
    """Such a setting had no effect, or failed after the training."""
    with refuses(UsageError):
        make_plan(StudySettings(**{**TINY, "seeds": [0, 1], **changed}))
    fit = {**TINY["fit"], "resize": "squash"}
    run = make_plan(StudySettings(**{**TINY, "fit": fit})).runs[0]
    assert run.evaluate.resize == "squash"


def test_a_seed_is_named_once():
    with refuses(SettingsError):
        StudySettings(**{**TINY, "seeds": [0, 1, 0]})


def test_the_plan_holds_the_recipe_alone(study, tmp_path):
    write_plan(study, tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert set(stored) == {"schema", "recipe"}
    assert read_plan(tmp_path) == study
    (tmp_path / "plan.json").write_text(json.dumps({**stored, "schema": 2}))
    with refuses(UsageError, tmp_path / "plan.json"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other"},
        {"data": "digit-pairs?train=128&validation=32&test=32"},
        {"seeds": [0, 1]},
        {"arms": [*TINY["arms"], {"method": "layerdrop"}]},
        {"arms": [{"method": "baseline"}, {"method": "layershuffle", "fit": {"lr": 0.5}}]},
        {"evaluate": {"modes": "sequential"}},
        {"analyses": [{"name": "norms", "arm": "baseline"}]},
    ],
)
def test_a_directory_keeps_the_recipe_that_it_was_begun_with(changed, tmp_path):
    """Also before the first task is done. How many work at a time is no part of the results."""
    write_plan(StudySettings(**TINY), tmp_path)
    check_plan(StudySettings(**TINY), tmp_path)
    check_plan(StudySettings(**TINY, workers=1), tmp_path)
    with pytest.raises(UsageError) as caught:
        check_plan(StudySettings(**{**TINY, **changed}), tmp_path)
    assert caught.value.place == tmp_path / "plan.json"
    (name,) = changed
    assert f"differs in {name}" in caught.value.cause


@pytest.mark.parametrize("setting", [{"data": "folder:mine"}, {"method": "baseline"}, {"seed": 7}])
def test_the_study_sets_data_method_and_seed_alone(setting):
    """Under `fit` they replaced those of the study, or were dropped, and nothing said so."""
    with refuses(SettingsError):
        StudySettings(**{**TINY, "fit": {**TINY["fit"], **setting}})
    with refuses(SettingsError):
        StudySettings(**{**TINY, "arms": [{"method": "layershuffle", "fit": setting}]})


def test_finished_runs_had_the_defaults_of_today(plan, tmp_path):
    """The seeds of a row would else be models of two trainings."""
    run = plan.runs[0]
    settings = run.settings.resolved()
    check_defaults(plan, {}, place=tmp_path)
    check_defaults(plan, {run.name: {"settings": settings}}, place=tmp_path)
    check_defaults(plan, {run.name: {"settings": {**settings, "of_before": 1}}}, place=tmp_path)
    other = {run.name: {"settings": {**settings, "fixed": [1, 1]}}}
    with refuses(UsageError, tmp_path):
        check_defaults(plan, other, place=tmp_path)
    # Nothing is added to an arm whose runs are all done, and 0.2.0 did not write such values.
    done = {each.name: {"settings": other[run.name]["settings"]} for each in plan.runs}
    check_defaults(plan, done, place=tmp_path)
    before = {run.name: {"settings": {**settings, "branch_scale": None, "fixed": None}}}
    check_defaults(plan, before, place=tmp_path)


def test_work_is_counted(plan):
    """Against counts by hand: runs, a merging, an analysis."""
    sizes = {"train": 6400, "test": 1000}
    run, short = plan.runs[0], plan.runs[3]
    assert (run.steps(sizes), run.scored(sizes)) == (100, 5 * 1000)
    assert run.cost(sizes) == 6 * 100 * 64 + 5 * 1000
    assert run.training_share() == 6 * 100 * 64 / (6 * 100 * 64 + 5 * 5000)
    assert short.scored(sizes) == 1000
    for epochs in (1, 20):  # 100 steps each
        fit = {"batch_size": 64, "epochs": epochs}
        by_epochs = make_plan(StudySettings(**{**RECIPE, "fit": fit})).runs[0]
        assert by_epochs.steps(sizes) == 100 * epochs
    assert plan.mergings[0].scored(sizes) == (7 + 3 * 4 * 5) * 1000
    assert plan.analyses[0].scored(sizes) == 40 * 1000
    assert plan.analyses[0].scored({**sizes, "test": 60}) == 40 * 60
    # Three of three blocks in their order are one order.
    scoring = EvalSettings(modes="kept:3,kept:2", num_orders=5)
    assert count_orders(scoring, 3, fixed=(0, 0)) == 1 + 5
    assert count_orders(scoring, 4, fixed=(1, 1)) == 5 + 1, "two of the blocks are always there"
    assert replace(run, images=20).scored(sizes) == 5 * 20


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "cifar100-paper",
            [
                "  deit-baseline: baseline from hf:facebook/deit-base-patch16-224, seeds 0, 1, 2, ",
                "; 20 x all images, 128 at a time; scored under 21 orders on all test images",
            ],
        ),
        (
            "imagenet-paper",
            [
                "imagenet-paper: 59 runs, 2 mergings, 6 analysis tasks, on folder:data/imagenet",
                "  baseline: baseline, seeds 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11; 1 x all images",
                "  merging-layershuffle: 100 merges of 12 models",
                "  umap-layershuffle-seed0: ",
            ],
        ),
        ("digits-quick", ["digits-quick: 4 runs, on digit-pairs from bundled:digits"]),
    ],
)
def test_recipes_are_planned_with_nothing_at_hand(tmp_path, monkeypatch, capsys, name, lines):
    """Without weights, images and network."""

    def refuse(*_):
        raise AssertionError("a dry run asks no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed
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
