"""Run one task of a study in its own process: `python -m layershuffle.study.worker OUT NAME`.

It writes its files and then `result.json`, each atomically: a task is done if and only if its
`result.json` exists. A failure leaves `failure.txt` instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.core.draws import Stream
from layershuffle.errors import Interrupted, LayerShuffleError
from layershuffle.files import write_text
from layershuffle.machine import imports_stay
from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import digest
from layershuffle.study.plan import (
    FAILURE_FILE,
    RESULT_FILE,
    AnalysisSpec,
    MergingSpec,
    RunSpec,
    Task,
    read_study_plan,
    runs_of,
    tasks_of,
)

# The modules that each kind of task needs; no more, because every task starts a process.
_MODULES = {
    RunSpec: ("layershuffle.training", "layershuffle.scoring"),
    MergingSpec: ("layershuffle.merging.scoring",),
    AnalysisSpec: ("layershuffle.analysis",),
}
PROGRESS_FILE = "progress.json"
SCHEMA = 1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SCORING = 1 << 20  # a rank for these draws alone; orders are drawn with small ranks


def main(argv: list[str]) -> int:
    """Run the named task. Returns the exit code: 0, 1, or 143 if stopped with a checkpoint."""
    end_with_parent()
    out, name = Path(argv[0]), argv[1]
    task = next(task for task in tasks_of(read_study_plan(out)) if task.name == name)
    directory = task.directory(out)
    try:
        with imports_stay():
            for module in _MODULES[type(task)]:
                import_module(module)
        execute(task, out)
    except Interrupted as stopped:
        print(stopped, flush=True)
        return stopped.exit_code
    # Other errors write a traceback to the log, of which the runner reports the last line.
    except LayerShuffleError as error:
        write_text(directory / FAILURE_FILE, f"{error}\n")
        return 1
    (directory / PROGRESS_FILE).unlink(missing_ok=True)
    return 0


def execute(task: Task, out: Path) -> None:
    """Run one task and write its results, `result.json` last."""
    directory = task.directory(out)
    (directory / FAILURE_FILE).unlink(missing_ok=True)
    if isinstance(task, RunSpec):
        facts = _train_and_score(task, directory)
    elif isinstance(task, MergingSpec):
        facts = _merge(task, out)
    else:
        facts = _analyse(task, out)
    write_text(directory / RESULT_FILE, json.dumps(facts, indent=2))


def _train_and_score(run: RunSpec, directory: Path) -> dict[str, Any]:
    from layershuffle.results import write_rows
    from layershuffle.scoring import check_modes, evaluate_spec, score_rows
    from layershuffle.training import fit

    check_modes(run.settings, run.evaluate)  # before the training, not after it
    fitted = fit(run.settings, directory / "fit", on_event=_progress_writer(directory))
    started = time.monotonic()
    _write_progress(directory, {"phase": "scoring"})
    settings = run.evaluate.model_copy(
        update={"seed": scoring_seed(run.evaluate.seed, run.settings.seed)}
    )
    evaluation = evaluate_spec(f"dir:{directory / 'fit'}", run.settings.data, settings=settings)
    rows = score_rows(
        evaluation.scores, method=run.arm, seed=run.settings.seed, draw=run.evaluate.draw
    )
    write_rows(directory / "results.csv", rows)
    seconds = round(time.monotonic() - started, 2)
    facts = asdict(fitted)
    # The recipe asks for compiled blocks, so the report must mention eager ones.
    if settings.compile and evaluation.blocks["mode"] == "eager":
        facts["data"]["notes"].append(f"scored in eager mode: {evaluation.blocks['reason']}")
    return {
        **facts,
        "run": run.name,
        "arm": run.arm,
        "eval_seconds": seconds,
        "eval_precision": settings.precision,
        "eval_blocks": evaluation.blocks,
        "eval_seed": settings.seed,
    }


def scoring_seed(seed: int, model: int) -> int:
    """Seed of the orders that a model is scored under.

    It is the same for all arms, which can then be compared order by order. It differs between
    models, so the spread over models includes that over orders, and from the run's own seed, whose
    orders picked the checkpoint.
    """
    return Stream(seed, model, rank=_SCORING).below(1 << 32)


def _needed_runs(task: MergingSpec | AnalysisSpec, out: Path) -> list[RunSpec]:
    return [run for run in runs_of(read_study_plan(out)) if run.name in task.needs]


def _merge(task: MergingSpec, out: Path) -> dict[str, Any]:
    from layershuffle.merging.scoring import score_merging
    from layershuffle.results import write_rows

    directory, started = task.directory(out), time.monotonic()
    donors = _needed_runs(task, out)
    # The donors differ only in their seed.
    first = donors[0]
    method = first.settings.build_method()
    options = task.options.options
    rows, notes = score_merging(
        [f"dir:{run.directory(out) / 'fit'}" for run in donors],
        first.settings.data,
        settings=options,
        # As in the paper, merges run in the order for which their donors were trained.
        mode=method.selects_by,
        names=[run.name for run in donors],
        progress=lambda _, done, total: _write_progress(
            directory, {"phase": "merging", "done": done, "total": total}
        ),
    )
    write_rows(directory / "results.csv", rows, padded=False)
    return {
        **_common_facts(task, options, started=started, precision=options.precision),
        "donors": [run.name for run in donors],
        "mode": method.selects_by,
        "data": first.settings.data,
        "notes": notes,
    }


def _analyse(task: AnalysisSpec, out: Path) -> dict[str, Any]:
    from layershuffle.analysis import run_analysis

    started, directory = time.monotonic(), task.directory(out)
    (run,) = _needed_runs(task, out)
    _write_progress(directory, {"phase": task.options.name, "done": 0, "total": 1})
    options = task.options.options
    run_analysis(
        task.options.name,
        f"dir:{run.directory(out) / 'fit'}",
        data_spec=run.settings.data,
        settings=options,
        out=directory / "files",
    )
    return {
        **_common_facts(task, options, started=started),
        "analysis": task.options.name,
        "model": run.name,
        "data": run.settings.data,
    }


def _common_facts(
    task: MergingSpec | AnalysisSpec,
    options: MergingSettings | AnalysisSettings,
    *,
    started: float,
    precision: str = "fp32",
) -> dict[str, Any]:
    from layershuffle.machine import hardware, versions

    return {
        "schema": SCHEMA,
        "name": task.name,
        "arm": task.arm,
        "options": options.model_dump(mode="json"),
        "settings_hash": digest(options),
        "seed": options.seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - started, 2),
        "hardware": hardware(precision),
        "versions": versions(),
    }


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the study's process dies, so no run is left behind."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            raise SystemExit(Interrupted.exit_code)


def _progress_writer(directory: Path) -> Any:
    steps = 0

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps
        if event["kind"] == "start":
            steps = event["steps"]
        if event["kind"] in ("start", "log"):
            at = event.get("step", event.get("at"))
            loss = event.get("loss")
            progress = {"phase": "training", "step": at, "steps": steps, "loss": loss}
            _write_progress(directory, progress)

    return listen


def _write_progress(directory: Path, progress: dict[str, Any]) -> None:
    # Not flushed to disk, because it is useless after a crash.
    stage = directory / f"{PROGRESS_FILE}.new"
    stage.write_text(json.dumps(progress), encoding="utf-8")
    os.replace(stage, directory / PROGRESS_FILE)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # All results are on disk, and an orderly exit of torch takes another second.
    os._exit(code)
