"""From a recipe to tasks: runs, the budget curve, merging, analyses, and their dependencies."""

import json
from dataclasses import replace

import pytest
from fixture import TINY, run_rows, write_run

import layershuffle as ls
from layershuffle.bundled import asset
from layershuffle.cli import main
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.settings import EvalSettings, read_recipe
from layershuffle.study.dry_run import (
    StudySubject,
    Work,
    architecture,
    block_runs,
    forecast,
    forecast_text,
    open_subject,
    open_subjects,
    orders_of,
    plan_text,
    work_of,
)
from layershuffle.study.plan import (
    AnalysisSpec,
    MergingSpec,
    read_study_plan,
    runs_of,
    tasks_of,
    write_plan,
)
from layershuffle.study.runner import startable, weights_of
from layershuffle.study.selection import ARTEFACTS, tasks_for
from layershuffle.study.settings import StudySettings

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
    "budget": {"arms": ["layershuffle"], "steps": [40], "seeds": [1]},
    "merging": {"arms": ["baseline"], "options": {"merges": 7}},
    "analyses": [
        {"name": "umap", "arm": "layershuffle"},
        {"name": "position", "arm": "layershuffle-predict", "seeds": [0, 1]},
    ],
}


@pytest.fixture
def study():
    return StudySettings(**RECIPE)


def names(tasks):
    return [task.name for task in tasks]


def test_runs_seed_by_seed_then_the_budget_curve(study):
    assert names(runs_of(study)) == [
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


def test_settings_of_the_runs(study):
    runs = {run.name: run for run in runs_of(study)}
    short = runs["layershuffle-40-steps-seed1"]
    assert (short.part, short.settings.steps, short.settings.eval_every) == ("budget", 40, 10)
    assert short.evaluate.modes == "sequential,arbitrary"
    assert short.evaluate.num_orders == 2
    assert runs["truncated-3-seed0"].settings.kept == 3
    assert runs["truncated-3-seed0"].evaluate.modes == "sequential"
    assert runs["baseline-seed2"].evaluate == study.evaluate


def test_dependencies_of_other_tasks(study):
    merging, umap, *positions = (t for t in tasks_of(study) if t.needs)
    assert isinstance(merging, MergingSpec)
    assert merging.needs == ("baseline-seed0", "baseline-seed1", "baseline-seed2")
    assert isinstance(umap, AnalysisSpec)
    assert umap.needs == ("layershuffle-seed0",)
    assert names(positions) == [
        "position-layershuffle-predict-seed0",
        "position-layershuffle-predict-seed1",
    ]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("fig4", ["layershuffle-seed0", "umap-layershuffle-seed0"]),
        ("table2", ["baseline-seed0", "baseline-seed1", "baseline-seed2", "merging-baseline"]),
        ("budget", ["layershuffle-seed0", "layershuffle-seed1", "layershuffle-40-steps-seed1"]),
        ("fig1b", ["truncated-3-seed0", "truncated-3-seed1"]),
        ("table1,fig4", ["layershuffle-predict-seed1", "umap-layershuffle-seed0"]),
    ],
)
def test_only_takes_what_is_needed(study, only, expected):
    chosen = names(tasks_for(study, only))
    assert set(expected) <= set(chosen)
    if only in ("fig4", "table2", "budget"):
        assert chosen == expected
    assert not any("predict" in name for name in names(tasks_for(study, "fig1b")))
    assert not any("truncated" in name for name in names(tasks_for(study, "table1")))


def test_only_refuses_what_is_not_there(study):
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        tasks_for(study, "tabel1")
    with pytest.raises(UsageError, match="plans nothing for cka"):
        tasks_for(study, "cka")
    assert names(tasks_for(study, None)) == names(tasks_of(study))
    every = {
        n for name in ARTEFACTS if name not in _NOT_HERE for n in names(tasks_for(study, name))
    }
    assert every == set(names(tasks_of(study)))


_NOT_HERE = ("norms", "attention", "attribution", "leave-one-out", "cka")


def test_tasks_that_can_start(study, tmp_path):
    tasks = tasks_for(study, "fig4,table2")

    def finish(name):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "result.json").write_text("{}")

    def ready(running=(), ended=()):
        return names(startable(tasks, tmp_path, running=running, ended=ended))

    runs = ["baseline-seed0", "layershuffle-seed0", "baseline-seed1", "baseline-seed2"]
    assert ready() == runs
    assert ready(running=["baseline-seed0"]) == runs[1:]
    finish("layershuffle-seed0")
    assert ready() == [runs[0], *runs[2:], "umap-layershuffle-seed0"]
    assert ready(ended=["umap-layershuffle-seed0"]) == [runs[0], *runs[2:]]
    for name in ("baseline-seed0", "baseline-seed1", "baseline-seed2"):
        assert "merging-baseline" not in ready()
        finish(name)
    assert "merging-baseline" in ready()
    assert ready(ended=["merging-baseline", "umap-layershuffle-seed0"]) == []


def test_the_plan_holds_the_recipe_alone(study, tmp_path):
    write_plan(study, tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert set(stored) == {"schema", "code_version", "recipe"}
    assert read_study_plan(tmp_path) == study
    (tmp_path / "plan.json").write_text(json.dumps({**stored, "schema": 2}))
    with pytest.raises(UsageError, match="schema 2, this version reads 1"):
        read_study_plan(tmp_path)


def test_a_study_that_was_killed_as_it_wrote_its_plan_begins(study, tmp_path):
    (tmp_path / ".staged-77-plan.json").write_text('{"sch')
    write_plan(study, tmp_path)
    assert read_study_plan(tmp_path) == study
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_another_spelling_of_the_same_modes_continues(study, tmp_path):
    write_plan(StudySettings(**{**RECIPE, "evaluate": {"modes": "kept:2,kept:1"}}), tmp_path)
    directory = tmp_path / "runs" / "baseline-seed0"
    directory.mkdir(parents=True)
    (directory / "result.json").write_text("{}")
    write_plan(StudySettings(**{**RECIPE, "evaluate": {"modes": "kept:1-2"}}), tmp_path)
    with pytest.raises(UsageError, match="finished already: baseline-seed0"):
        write_plan(StudySettings(**{**RECIPE, "evaluate": {"modes": "kept:1-3"}}), tmp_path)


def test_the_plan_in_words(study):
    tasks = tasks_of(study)
    text = plan_text(study, tasks, subjects=dict.fromkeys([t.name for t in tasks], SUBJECT))
    assert "10 runs, 1 merging, 3 analyses" in text
    assert "baseline: baseline, seeds 0, 1, 2; 100 steps of 64" in text
    assert "merging-baseline: 7 merges of 3 models" in text


SUBJECT = StudySubject(depth=12, parameter_bytes=4, train_images=6400, test_images=1000)


def test_work_is_counted(study):
    """Against counts by hand: runs, a merging, an analysis."""
    run = next(run for run in runs_of(study) if run.name == "baseline-seed0")
    # sequential 12; two arbitrary orders of 12, whose first 6 blocks are the pruned orders.
    assert block_runs(run.evaluate, 12) == 3 * 12
    assert orders_of(run.evaluate, 12) == 5
    # All twelve blocks in their order are one order, not five.
    assert orders_of(EvalSettings(modes="kept:12,kept:11", num_orders=5), 12) == 1 + 5
    assert work_of(run, SUBJECT) == Work(steps=100, trained=100 * 64, block_runs=36 * 1000)
    short = next(run for run in runs_of(study) if run.name == "truncated-3-seed0")
    assert work_of(short, SUBJECT) == Work(steps=100, trained=100 * 16, block_runs=3 * 1000)
    for epochs in (1, 20):  # 100 steps each
        fit = {"batch_size": 64, "epochs": epochs}
        by_epochs = runs_of(StudySettings(**{**RECIPE, "fit": fit, "budget": None}))[0]
        assert work_of(by_epochs, SUBJECT).steps == 100 * epochs
    merging, umap = (task for task in tasks_of(study) if task.name in (
        "merging-baseline", "umap-layershuffle-seed0"))  # fmt: skip
    assert work_of(merging, SUBJECT).block_runs == (7 + 3 * 4 * 5) * 12 * 1000
    assert work_of(umap, SUBJECT).block_runs == 40 * 12 * umap.options.options.max_images
    few = replace(SUBJECT, test_images=60)
    assert work_of(umap, few).block_runs == 40 * 12 * 60


def test_time_comes_from_finished_runs(tmp_path):
    """With one of two equal runs done, the other takes as long, plus the start of a process."""
    study = StudySettings(**TINY)
    done, left = runs_of(study)
    write_plan(study, tmp_path)

    def predict():
        tasks = tasks_of(study)
        return forecast(study, tasks, subjects=open_subjects(tasks), out=tmp_path, workers=2)

    before = predict()
    assert (before.seconds, before.measured, before.work.steps) == (None, 0, 8)
    assert "Time: not known until a run has finished" in forecast_text(before, tmp_path)
    done.directory(tmp_path).mkdir(parents=True)
    write_run(tmp_path, done, run_rows(done, 1, "pass"))
    path = done.directory(tmp_path) / "result.json"
    result = json.loads(path.read_text()) | {"train_seconds": 20.0, "eval_seconds": 4.0}
    path.write_text(json.dumps(result))
    after = predict()
    assert after.work.steps == left.settings.steps
    assert after.seconds == pytest.approx(20 + 4 + 8)
    assert "Time: about 16 s with 2 side by side (32 s of work), from 1 finished run" in (
        forecast_text(after, tmp_path)
    )
    model = ls.load(TINY["model"])
    assert before.bytes_left == after.bytes_left == 2 * sum(p.nbytes for p in model.parameters())


def test_the_time_of_an_analysis_comes_from_a_finished_one_of_its_kind(tmp_path):
    options = {"name": "norms", "options": {"max_images": 20}}
    arms = ("baseline", "layershuffle")
    study = StudySettings(**TINY, analyses=[{**options, "arm": arm} for arm in arms])
    write_plan(study, tmp_path)
    tasks = tasks_of(study)

    def seconds():
        subjects = open_subjects(tasks)
        return forecast(study, tasks, subjects=subjects, out=tmp_path, workers=1).seconds

    for run in runs_of(study):
        run.directory(tmp_path).mkdir(parents=True)
        write_run(tmp_path, run, run_rows(run, 1, "pass"))
        path = run.directory(tmp_path) / "result.json"
        result = json.loads(path.read_text()) | {"train_seconds": 20.0, "eval_seconds": 4.0}
        path.write_text(json.dumps(result))
    scored = block_runs(study.evaluate, 4) * 32  # block runs in those 4 seconds
    assert seconds() == pytest.approx(2 * (8 + 40 * 4 * 20 * 4 / scored))
    files = tasks[-1].directory(tmp_path) / "files"
    files.mkdir(parents=True)
    (files / "summary.json").write_text('{"title": "Norms", "facts": {}}')
    (files.parent / "result.json").write_text('{"seconds": 30.0}')
    assert seconds() == pytest.approx(8 + 30)


def test_what_is_done_of_a_study_is_counted_in_training_steps(study, tmp_path):
    weights = weights_of(tasks_of(study), tmp_path)
    assert (weights["baseline-seed0"], weights["layershuffle-40-steps-seed1"]) == (100, 40)
    # A step runs 64 images forwards and backwards.
    assert weights["umap-layershuffle-seed0"] == pytest.approx(40 * 1000 / (3 * 64))
    # 5,000 images, because the data are not opened.
    assert weights["merging-baseline"] == pytest.approx((7 + 3 * 4 * 5) * 5000 / (3 * 64))


def test_a_finished_run_tells_how_many_images_the_other_tasks_have(study, tmp_path):
    run = runs_of(study)[0]
    run.directory(tmp_path).mkdir(parents=True)
    write_run(tmp_path, run, run_rows(run, 1, "pass"))
    path = run.directory(tmp_path) / "result.json"
    result = json.loads(path.read_text())
    result["data"]["sizes"]["test"] = 300
    path.write_text(json.dumps(result))
    weights = weights_of(tasks_of(study), tmp_path)
    assert weights["umap-layershuffle-seed0"] == pytest.approx(40 * 300 / (3 * 64))
    assert weights["merging-baseline"] == pytest.approx((7 + 3 * 4 * 5) * 300 / (3 * 64))
    assert weights[run.name] == 100


@pytest.mark.parametrize(
    ("name", "steps", "counted"),
    [
        # 47,500 images stay of 50,000: 372 batches of 128. Two models, five seeds; one arm each of
        # one epoch, and five and four of 20.
        ("cifar100-paper", 5 * 372 * (2 + (5 + 4) * 20), "CIFAR-100, 50,000 images and 10,000"),
        # The paper's protocol holds nothing out: 2,002 batches of 640. 12 baselines for an epoch;
        # 12 models, and seven arms of five, for 20.
        ("imagenet-paper", 2002 * (12 + (12 + 7 * 5) * 20), "ImageNet-1k, 1,281,167 images and"),
    ],
)
def test_the_large_recipes_are_planned_with_nothing_at_hand(
    tmp_path, monkeypatch, capsys, name, steps, counted
):
    """Without weights, images and network, work is estimated, and the plan says so."""

    def refuse(*_):
        raise AssertionError("a dry run asks no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    recipe = asset("recipes", f"{name}.yaml")
    assert main(["reproduce", str(recipe), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"Work: {steps:,} training steps, and " in text
    model = "Estimated: hf:google/vit-base-patch16-224 is not on this machine: depth and size are"
    assert f"{model} those of timm's vit_base_patch16_224" in text
    assert f"; counted as {counted}" in text
    # 20 or 5 orders of each drawn mode, and the sequential one.
    assert f"seeds 0, 1, 2, 3, 4; 20 epochs of {128 if '100' in counted else 640} images" in text


@pytest.mark.parametrize(
    ("name", "steps", "images", "runs"),
    [
        # Per order of all blocks 12 runs, of 9, 6 and 3 blocks 18 together, of 6 blocks twice and
        # of 3 four times 24; test images and orders.
        ("formula-cpu", 8 * 2000, "64", 8 * 2000 * (12 + 6 * (12 + 2 * 18 + 24))),
        ("formula-gpu", 8 * 2000, "512", 8 * 6000 * (12 + 10 * (12 + 2 * 18 + 24))),
    ],
)
def test_a_recipe_is_planned_before_the_model_that_it_refines_is_there(
    tmp_path, monkeypatch, capsys, name, steps, images, runs
):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"Work: {steps:,} training steps, and " in text
    assert f"2,000 steps of {images} images" in text
    assert f"dir:runs/{name}-base is not on this machine: depth and size are those of its" in text
    with pytest.raises(ModelFileError, match=f"layershuffle pretrain {name}-base --out runs/"):
        ls.load(f"dir:runs/{name}-base")
    with pytest.raises(ModelFileError, match="check the path"):
        ls.load(f"dir:runs/{name}")
    # Base and study have to have seen the same classes, and no test image.
    base = read_recipe(asset("recipes", f"{name}-base.yaml"))
    assert base["data"] == read_recipe(asset("recipes", f"{name}.yaml"))["data"]
    most = int(text.split("training steps, and ")[1].split()[0].replace(",", ""))
    assert most <= runs  # orders that begin alike share work


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        ("bundled:digits", "bundled:digits"),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224?pretrained=false"),
        (
            "timm:vit_tiny_patch16_224?depth=4&pretrained=true&img_size=12,20",
            "timm:vit_tiny_patch16_224?depth=4&img_size=12,20&pretrained=false",
        ),
        ("torchvision:vit_b_16?weights=DEFAULT", "torchvision:vit_b_16?pretrained=false"),
        ("hf:/no/such/vit_base_patch16_224", "hf:/no/such/vit_base_patch16_224?pretrained=false"),
        ("hf:somebody/of-no-known-name", "hf:somebody/of-no-known-name?pretrained=false"),
    ],
)
def test_the_architecture_of_a_spec_without_its_weights(model, plain):
    """An exact spec is built exactly, without a note about an estimate."""
    assert architecture(model) == (plain, ())


def test_a_configuration_in_the_cache_of_the_hub_is_built(tmp_path, monkeypatch):
    """The cache is that of `hf download`, without weights."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert architecture("hf:a/b?revision=main") == (f"hf:{snapshot}?pretrained=false", ())


def test_data_that_nobody_knows_leave_the_work_unknown(tmp_path):
    """Only the model's sizes are known; runs with a number of steps count if images are given."""
    study = StudySettings(**{**TINY, "data": "folder:nowhere", "fit": {"epochs": 1}})
    tasks = tasks_of(study)
    expected = forecast(study, tasks, subjects=open_subjects(tasks), out=tmp_path, workers=1)
    text = forecast_text(expected, tmp_path)
    assert expected.work is None
    assert "Work: not known, because the number of images is not" in text
    assert "Estimated: folder:nowhere cannot be opened: The data folder does not exist; " in text
    assert expected.bytes_left == 2 * sum(p.nbytes for p in ls.load(TINY["model"]).parameters())
    counted = {**TINY, "data": "folder:nowhere", "evaluate": {"max_images": 9}}
    assert all(
        work_of(task, open_subject(task.settings)) for task in tasks_of(StudySettings(**counted))
    )


def test_finished_scores_of_another_precision_are_refused(study, tmp_path):
    """Older studies, without a choice, were scored in fp32 and continue."""
    write_plan(study, tmp_path)
    directory = tmp_path / "runs" / "baseline-seed0"
    directory.mkdir(parents=True)
    (directory / "result.json").write_text("{}")
    path = tmp_path / "plan.json"
    old = json.loads(path.read_text())
    for settings in (old["recipe"]["evaluate"], old["recipe"]["merging"][0]["options"]):
        del settings["precision"], settings["compile"]
    path.write_text(json.dumps(old))
    write_plan(study, tmp_path)
    changed = {**RECIPE, "evaluate": {**RECIPE["evaluate"], "precision": "bf16"}}
    with pytest.raises(
        UsageError, match=r"settings \(evaluate\), finished already: baseline-seed0"
    ):
        write_plan(StudySettings(**changed), tmp_path)
