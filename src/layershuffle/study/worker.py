"""One run of a study in a process of its own: `python -m layershuffle.study.worker OUT NAME`.

It leaves `results.csv` and `result.json`, both whole or absent, the latter last: a run is finished
if and only if its `result.json` is there. A failure leaves `failure.txt` instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layershuffle.errors import Interrupted, LayerShuffleError
from layershuffle.files import write_text
from layershuffle.settings import StudySettings
from layershuffle.study.plan import RunSpec, read_plan, runs_of

RESULT_FILE = "result.json"
FAILURE_FILE = "failure.txt"
PROGRESS_FILE = "progress.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> int:
    """Run the named run; exit code 0, 1, or 143 when stopped with a checkpoint saved."""
    end_with_parent()
    out, name = Path(argv[0]), argv[1]
    study = read_plan(out)
    run = next(run for run in runs_of(study) if run.name == name)
    directory = run.directory(out)
    try:
        execute(run, study, directory=directory)
    except Interrupted as stopped:
        print(stopped, flush=True)
        return stopped.exit_code
    except LayerShuffleError as error:
        write_text(directory / FAILURE_FILE, f"{error}\n")
        return 1
    return 0


def execute(run: RunSpec, study: StudySettings, *, directory: Path) -> None:
    """Train, score, and write the results of one run."""
    from layershuffle.scoring import check_modes, score_model, scores_csv
    from layershuffle.training import fit

    (directory / FAILURE_FILE).unlink(missing_ok=True)
    check_modes(run.settings.model, study.evaluate)  # before the training, not after it
    fitted = fit(run.settings, directory / "fit", listeners=[_progress_writer(directory)])
    started = time.monotonic()
    write_text(directory / PROGRESS_FILE, json.dumps({"phase": "scoring"}))
    scoring = score_model(
        f"dir:{directory / 'fit'}",
        run.settings.data,
        settings=study.evaluate.model_copy(update=_as_trained(run)),
    )
    rows = scores_csv(scoring, method=run.arm, seed=run.settings.seed, draw=study.evaluate.draw)
    write_text(directory / "results.csv", rows)
    facts: dict[str, Any] = {**asdict(fitted), "run": run.name, "arm": run.arm}
    facts["eval_seconds"] = round(time.monotonic() - started, 2)
    write_text(directory / RESULT_FILE, json.dumps(facts, indent=2))
    (directory / PROGRESS_FILE).unlink()


def _as_trained(run: RunSpec) -> dict[str, Any]:
    """The images are scored as they were prepared for training."""
    return {name: getattr(run.settings, name) for name in ("resize", "skip_corrupt", "streaming")}


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the study's process dies, so that no run is left behind."""
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
            progress = {"phase": "training", "step": at, "steps": steps, "loss": event.get("loss")}
            # Not flushed to disk as results are: it is worth nothing after a crash.
            stage = directory / f"{PROGRESS_FILE}.new"
            stage.write_text(json.dumps(progress), encoding="utf-8")
            os.replace(stage, directory / PROGRESS_FILE)

    return listen


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
