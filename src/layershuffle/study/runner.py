"""Execute a study's plan: independent tasks in parallel, each in its own process.

A study may be killed at any moment: after a restart, finished tasks are not repeated and the others
resume from their checkpoints. A failed task is reported, the tasks that need it are held back, and
the others continue.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle.errors import Interrupted
from layershuffle.files import locked, write_text
from layershuffle.machine import stop_signals
from layershuffle.settings import DEFAULT_EPOCHS
from layershuffle.study.dry_run import passes_of
from layershuffle.study.plan import (
    FAILURE_FILE,
    RunSpec,
    Task,
    check_plan,
    is_finished,
    write_plan,
)
from layershuffle.study.pool import LOG_FILE, LocalPool, Pool, gpu_count
from layershuffle.study.selection import tasks_for
from layershuffle.study.settings import StudySettings
from layershuffle.study.tasks import RunResult, read_outcome
from layershuffle.study.worker import PROGRESS_FILE

_POLL_SECONDS = 0.5
_TRAINING_COST = 3.0  # per image of a training step: a forward, and a backward of twice the work
_TEST_IMAGES = 5000  # if a merging scores all and no run has finished that knows their number
_EPOCHS_WEIGHT = 1000.0  # per epoch, if the number of steps is unknown before the data


@dataclass(frozen=True)
class TaskState:
    """The state of a task: waiting, running, done, failed or stopped; `detail` is a text.

    `weight`: its share of the study's work, in training steps.
    """

    name: str
    phase: str
    detail: str = ""
    fraction: float = 0.0
    weight: float = 1.0


StudyWatcher = Callable[[list[TaskState], float], None]
"""Called with the state of all tasks and the seconds since the study started."""
MakePool = Callable[[StudySettings, Path], tuple[Pool, int]]
"""Makes the pool that runs the tasks, and says how many run at a time."""


def local_pool(study: StudySettings, out: Path) -> tuple[Pool, int]:
    """Processes on this machine: one per GPU, else one per CPU core with a thread each."""
    gpus = gpu_count()
    limit = study.workers or gpus or len(os.sched_getaffinity(0))
    return LocalPool(out, threads=None if gpus else 1, gpus=gpus), limit


def run_study(
    study: StudySettings,
    out: Path,
    *,
    only: str | None = None,
    workers: int | None = None,
    watch: StudyWatcher,
    make_pool: MakePool = local_pool,
) -> list[str]:
    """Run the unfinished tasks. Returns the names of those that failed or were held back.

    `only` names tables and figures, as in "table1,fig5" (`selection`). Raises `UsageError` if `out`
    holds another study, `StudyError` or `DataError` for a broken result there, `Interrupted` after
    SIGTERM or Ctrl-C with every running run's checkpoint saved.
    """
    tasks = tasks_for(study, only)
    # Before the lock, which creates a file in the directory.
    check_plan(study, out)
    weights = weights_of(tasks, out)
    # Locked before the plan is written, or two processes could start the same tasks.
    with locked(out), stop_signals() as stop:
        write_plan(study, out)
        pool, limit = make_pool(study, out)
        codes = dict[str, int]()
        started = time.monotonic()
        try:
            while not stop.is_set():
                # Tasks that ended are not restarted, or a failing task would loop.
                ready = startable(tasks, out, running=pool.running, ended=codes)
                for task in ready[: max(0, (workers or limit) - len(pool.running))]:
                    pool.start(task)
                if not pool.running:
                    break
                # Files are polled, which works for processes here and on a cluster.
                time.sleep(_POLL_SECONDS)
                ended = pool.reap()
                codes.update(ended)
                if ended:
                    weights = weights_of(tasks, out)
                _say_why(tasks, ended, out)
                states = [
                    _state(task, out, pool.running, codes, weight=weights[task.name])
                    for task in tasks
                ]
                watch(states, time.monotonic() - started)
        finally:
            # Also after an error, so no worker is left behind.
            pool.stop()
        if stop.is_set():
            raise Interrupted(
                "The study was stopped; unfinished runs resume from their last checkpoint",
                place=out,
                hint="run the same command again to continue",
            )
    # By the files, not by exit codes: a task is done if and only if its result exists.
    return [task.name for task in tasks if not is_finished(task, out)]


def startable(
    tasks: Sequence[Task], out: Path, *, running: Collection[str], ended: Collection[str]
) -> list[Task]:
    """Tasks that are neither done, running nor ended, and whose needs are done; in plan order."""
    done = {task.name for task in tasks if is_finished(task, out)}
    return [
        task
        for task in tasks
        if task.name not in done
        and task.name not in running
        and task.name not in ended
        and done.issuperset(task.needs)
    ]


def failure(task: Task, out: Path) -> str:
    """The reason why a task failed: its error message, or the last line of its log."""
    directory = task.directory(out)
    if (directory / FAILURE_FILE).is_file():
        return (directory / FAILURE_FILE).read_text(encoding="utf-8").strip()
    # A worker that the system killed leaves only its log.
    log, lines = directory / LOG_FILE, list[str]()
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"{last.strip()} (whole log: {log})"


def _say_why(tasks: Sequence[Task], ended: Mapping[str, int], out: Path) -> None:
    """Write a failure.txt for tasks that ended without one (killed, out of memory)."""
    for task in tasks:
        code = ended.get(task.name, 0)
        path = task.directory(out) / FAILURE_FILE
        if code not in (0, Interrupted.exit_code) and not path.exists():
            write_text(path, f"It ended with exit code {code}: {failure(task, out)}\n")


def _state(
    task: Task, out: Path, running: Collection[str], codes: Collection[str], *, weight: float
) -> TaskState:
    if is_finished(task, out):
        return TaskState(task.name, "done", fraction=1.0, weight=weight)
    if task.name in running:
        detail, fraction = _progress(task.directory(out) / PROGRESS_FILE)
        return TaskState(task.name, "running", detail, fraction, weight)
    if task.name in codes:
        return TaskState(task.name, "failed", failure(task, out), weight=weight)
    failed = [need for need in task.needs if need in codes]
    detail = f"held back, {failed[0]} failed" if failed else ""
    return TaskState(task.name, "waiting", detail, weight=weight)


def weights_of(tasks: Sequence[Task], out: Path) -> dict[str, float]:
    """The work of each task by its name, in training steps of its arm.

    A task may ask for more test images than there are: a finished run in `out` knows their number.
    Raises `StudyError` or `DataError` for a broken file.
    """
    runs = {task.name: task for task in tasks if isinstance(task, RunSpec)}
    facts = {
        run.settings.data: result.data.model_extra or {}
        for run in runs.values()
        if (result := read_outcome(run, RunResult, out=out).result) is not None
    }
    weights = {}
    for task in tasks:
        settings = runs[task.name if isinstance(task, RunSpec) else task.needs[0]].settings
        if isinstance(task, RunSpec):
            weight = float(settings.steps or _EPOCHS_WEIGHT * (settings.epochs or DEFAULT_EPOCHS))
        else:
            asked = task.options.options.max_images
            available = facts.get(settings.data, {}).get("sizes", {}).get("test")
            images = min((count for count in (asked, available) if count), default=_TEST_IMAGES)
            weight = passes_of(task) * images / (_TRAINING_COST * settings.batch_size)
        weights[task.name] = weight
    return weights


def _progress(path: Path) -> tuple[str, float]:
    """A running task's progress as text, and the share of its work that is done."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # A worker imports torch for some seconds before it writes the file.
        return "starting", 0.0
    if content["phase"] != "training":
        # Scoring has no counter, because it is a small part of a run.
        share = content.get("done", 1) / max(content.get("total", 1), 1)
        return str(content["phase"]), share
    loss = content["loss"]
    detail = f"step {content['step']}/{content['steps']}"
    detail += f", loss {loss:.3f}" if loss is not None else ""
    return detail, content["step"] / max(content["steps"], 1)
