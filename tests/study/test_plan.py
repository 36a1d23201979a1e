"""From a recipe to tasks: runs, the budget curve, merging, analyses, and what each needs."""

import contextlib
import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from fixture import TINY

import layershuffle as ls
from layershuffle.compiling import BlockCompiler
from layershuffle.errors import UsageError
from layershuffle.study import probe
from layershuffle.study.artefacts import ARTEFACTS, tasks_for
from layershuffle.study.dry_run import block_runs, forecast, orders_of, plan_text, task_seconds
from layershuffle.study.plan import (
    AnalysisSpec,
    MergingSpec,
    plan_json,
    runs_of,
    tasks_of,
    write_plan,
)
from layershuffle.study.runner import startable
from layershuffle.study.settings import StudySettings
from layershuffle.study.speed import Speed

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


def test_what_the_others_need(study):
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
    with pytest.raises(UsageError, match="did you mean table1"):
        tasks_for(study, "tabel1")
    with pytest.raises(UsageError, match="plans nothing for cka"):
        tasks_for(study, "cka")
    assert names(tasks_for(study, None)) == names(tasks_of(study))
    every = {
        n for name in ARTEFACTS if name not in _NOT_HERE for n in names(tasks_for(study, name))
    }
    assert every == set(names(tasks_of(study)))


_NOT_HERE = ("norms", "attention", "attribution", "leave-one-out", "cka")


def test_what_can_start(study, tmp_path):
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


def test_the_plan_as_json(study):
    stored = plan_json(study)
    assert stored["runs"][-1]["part"] == "budget"
    assert stored["pieces"][0] == {
        "name": "merging-baseline",
        "kind": "merging",
        "arm": "baseline",
        "directory": "merging/baseline",
    }


def test_the_plan_in_words(study):
    text = plan_text(study, tasks_of(study))
    assert "10 runs, 4 mergings and analyses" in text
    assert "baseline: baseline, seeds 0, 1, 2; 100 steps of 64" in text
    assert "merging-baseline: 7 merges of 3 models" in text


def test_time_adds_up(study):
    """Against a sum by hand: one run, one merging."""
    speed = Speed(
        step=0.5, image_block=1e-3, parameter_bytes=4, depth=12, train_images=6400, test_images=1000
    )
    run = next(run for run in runs_of(study) if run.name == "baseline-seed0")
    # sequential 12; two arbitrary orders of 12, whose first 6 blocks are the pruned orders.
    executions = block_runs(run.evaluate, 12)
    assert executions == 3 * 12
    assert orders_of(run.evaluate) == 5
    assert task_seconds(run, speed) == pytest.approx(8 + 100 * 0.5 + 36 * 1.0)
    short = next(run for run in runs_of(study) if run.name == "truncated-3-seed0")
    assert task_seconds(short, speed) == pytest.approx(8 + 100 * 0.5 / 4 + 3 * 1.0)
    for epochs in (1, 20):  # 100 steps each
        fit = {"batch_size": 64, "epochs": epochs}
        by_epochs = runs_of(StudySettings(**{**RECIPE, "fit": fit, "budget": None}))[0]
        assert task_seconds(by_epochs, speed) == pytest.approx(8 + epochs * 50.0 + 36 * 1.0)
    merging = next(task for task in tasks_of(study) if isinstance(task, MergingSpec))
    assert task_seconds(merging, speed) == pytest.approx(8 + (7 + 3 * 4 * 5) * 12 * 1.0)


def test_finished_scores_of_another_precision_are_refused(study, tmp_path):
    """Studies from before there was a choice were scored in fp32, and go on."""
    write_plan(study, tmp_path)
    directory = tmp_path / "runs" / "baseline-seed0"
    directory.mkdir(parents=True)
    (directory / "result.json").write_text("{}")
    path = tmp_path / "plan.json"
    old = json.loads(path.read_text())
    for settings in (old["recipe"]["evaluate"], old["recipe"]["merging"]["options"]):
        del settings["precision"], settings["compile"]
    path.write_text(json.dumps(old))
    write_plan(study, tmp_path)
    changed = {**RECIPE, "evaluate": {**RECIPE["evaluate"], "precision": "bf16"}}
    with pytest.raises(
        UsageError, match=r"settings \(evaluate\), finished already: baseline-seed0"
    ):
        write_plan(StudySettings(**changed), tmp_path)


@pytest.mark.parametrize(("precision", "norms"), [("bf16", "float32"), ("bf16-pure", "bfloat16")])
def test_the_probe_computes_as_the_tasks_will(tmp_path, monkeypatch, precision, norms):
    """Training under autocast or in pure bf16, scores in bf16 with compiled blocks, the analysis in
    fp32. A training step is timed once, whatever is scored how."""
    torch._dynamo.reset()
    eager = functools.partial(BlockCompiler, backend="eager")
    monkeypatch.setattr(sys.modules["layershuffle.evaluation"], "BlockCompiler", eager)
    trained, scored = set(), set()

    def training_step(model, *arguments, found=probe._training_step):
        assert not trained
        norm = ls.blocks_of(model)[0].norm1
        seen = norm.register_forward_hook(lambda *call: trained.add(call[-1].dtype))
        with contextlib.closing(SimpleNamespace(close=seen.remove)):
            return found(model, *arguments)

    def evaluate(model, *arguments, found=probe.evaluate, **settings):
        compiled = {block._compiled_call_impl is not None for block in ls.blocks_of(model)}
        scored.add((next(model.parameters()).dtype, *compiled))
        return found(model, *arguments, **settings)

    monkeypatch.setattr(probe, "_training_step", training_step)
    monkeypatch.setattr(probe, "evaluate", evaluate)
    study = StudySettings(
        **{
            **TINY,
            "fit": {**TINY["fit"], "precision": precision},
            "evaluate": {**TINY["evaluate"], "precision": "bf16", "compile": True},
            "analyses": [{"name": "umap", "arm": "baseline"}],
        }
    )
    found = forecast(study, tasks_of(study), out=tmp_path, workers=1)
    assert trained == {getattr(torch, norms)}
    assert scored == {(torch.bfloat16, True), (torch.float32, False)}
    assert "in evaluation in bf16, compiled; " in found.probe
    assert "in evaluation in fp32 (" in found.probe
    model = ls.load(TINY["model"])
    assert found.bytes_left == 2 * sum(p.nbytes for p in model.parameters())
