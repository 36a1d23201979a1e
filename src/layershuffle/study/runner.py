"""Run a study: keep workers on its open tasks, and show how far all of them are.

The same command may run on many machines that share the directory: their workers take tasks from
one list (`study.worker`). It may be killed at any moment: started again, it does not repeat
finished tasks, and trainings continue from their checkpoints; scores, mergings and analyses that
had not ended start again. A failed task is reported, the tasks that need it are held back, the
others run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from layershuffle.ground.errors import Interrupted, LayerShuffleError
from layershuffle.ground.machine import cores, stop_signals
from layershuffle.study.plan import check_defaults, check_plan, make_plan, write_plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import TASKS_FILE, read_facts, read_failure, writing
from layershuffle.study.tasks import ASSUMED_SIZES, AnyTask
from layershuffle.study.worker import PROGRESS_FILE, try_again, unfinished

STOP_SECONDS = 60.0  # longer than any step, after which a stopped run saves a checkpoint
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class TaskState:
    """The state of a task: waiting, running, done or failed; `detail` is a text.

    `weight`: its share of the study's work.
    """

    name: str
    phase: str
    detail: str = ""
    fraction: float = 0.0
    weight: float = 1.0


StudyWatcher = Callable[[list[TaskState], float], None]
"""Called with the state of all tasks and the seconds since the study started."""


class Team(Protocol):
    """Workers of one study."""

    def is_working(self) -> bool:
        """Whether any of them works or waits. While tasks are open, who ended is replaced."""

    def stop(self) -> None:
        """Let them save checkpoints and end."""


MakeTeam = Callable[[Path, Sequence[AnyTask], int | None], Team]
"""Starts workers in a directory on tasks, so many or as many as there is room for."""


@dataclass
class LocalTeam:
    """Processes of this machine: one per GPU, else one per CPU core with a thread each.

    `tasks`: those of the plan in `out`. `count`: how many processes there are at most.
    """

    out: Path
    tasks: Sequence[AnyTask]
    count: int | None = None
    processes: list[subprocess.Popen[bytes] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpus = visible_gpus()
        # One per GPU, else one per CPU core.
        count = self.count or len(self.gpus) or cores()
        self.processes = [None] * min(count, len(self.tasks))
        # It closes when this process ends in whatever way, and then the workers end.
        self.alive = os.pipe()

    def is_working(self) -> bool:
        """Whether any of them works or waits. While tasks are open, who ended is replaced."""
        for place, process in enumerate(self.processes):
            code = None if process is None else process.poll()
            if code is not None and code > 0 and code != Interrupted.exit_code:
                raise LayerShuffleError(
                    f"A worker ended with exit code {code}",
                    place=self.out,
                    hint="its error stands above, or at the end of the log.txt of its task",
                )
            if process is None or code is not None:
                is_needed = bool(unfinished(self.tasks, self.out))
                self.processes[place] = self._start(place) if is_needed else None
        return any(self.processes)

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        """A new worker, on the GPU of this place if there are GPUs."""
        environment = dict(os.environ)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[place % len(self.gpus)]
        else:
            # By the environment, which OpenMP reads before any of our code runs.
            environment["OMP_NUM_THREADS"] = "1"
        return subprocess.Popen(
            # This interpreter, not the `python` of the shell.
            [sys.executable, "-m", "layershuffle.study.worker", str(self.out)],
            stdin=self.alive[0],
            stdout=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C reaches only this process, which passes it on as SIGTERM.
            start_new_session=True,
        )

    def stop(self) -> None:
        """Send SIGTERM to all, wait for their checkpoints, and kill those that do not end."""
        left = [process for process in self.processes if process is not None]
        for process in left:
            process.send_signal(signal.SIGTERM)
        # One deadline for all: they save their checkpoints at the same time.
        deadline = time.monotonic() + STOP_SECONDS
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for end in self.alive:
            os.close(end)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = []
        for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            # CUDA, too, ignores what follows a number that no GPU has.
            if not name.strip() or name.strip().startswith("-"):
                break
            gpus.append(name.strip())
        return gpus
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    gpus = []
    for line in listing.stdout.splitlines():
        if line.startswith("GPU "):
            gpus.append(str(len(gpus)))
    return gpus


def run_study(
    study: StudySettings,
    out: Path,
    *,
    workers: int | None = None,
    watch: StudyWatcher,
    make_team: MakeTeam = LocalTeam,
) -> list[str]:
    """Run the unfinished tasks. Returns the names of those that failed or were held back.

    Raises `UsageError` if `out` holds another study, `StudyError` or `DataError` for a broken file
    there, `Interrupted` after SIGTERM or Ctrl-C with the checkpoint of every run saved.
    """
    check_plan(study, out)  # before the lock, which makes a file
    plan = make_plan(study)
    tasks = plan.tasks
    with writing(out):
        check_plan(study, out)  # another process may have begun a study meanwhile
        check_defaults(plan, read_facts(out), place=out / TASKS_FILE)
        try_again(tasks, out)
        write_plan(study, out)
    with stop_signals() as stop:
        team = make_team(out, tasks, workers or study.workers)
        started = time.monotonic()
        try:
            while not stop.is_set() and team.is_working():
                time.sleep(_POLL_SECONDS)
                watch(task_states(tasks, out), time.monotonic() - started)
        finally:
            # Also after an error, so no worker is left behind.
            team.stop()
        if stop.is_set():
            raise Interrupted(
                "The study was stopped; unfinished runs resume from their last checkpoint",
                place=out,
                hint="run the same command again to continue",
            )
    facts = read_facts(out)
    return [task.name for task in tasks if not task.is_done(facts)]


def task_states(tasks: Sequence[AnyTask], out: Path) -> list[TaskState]:
    """The state of every task, whichever machine works on it."""
    facts = read_facts(out)
    sizes = {**ASSUMED_SIZES, **known_sizes(facts)}
    failures: dict[str, str] = {}
    for task in tasks:
        if not task.is_done(facts):
            failures[task.name] = read_failure(task, out)
    states = []
    for task in tasks:
        weight = task.cost(sizes)
        failed_needs = [need for need in task.needs if failures.get(need)]
        if task.is_done(facts):
            state = TaskState(task.name, "done", fraction=1.0, weight=weight)
        elif failures[task.name]:
            state = TaskState(task.name, "failed", failures[task.name], weight=weight)
        elif failed_needs:
            detail = f"held back, {failed_needs[0]} failed"
            state = TaskState(task.name, "waiting", detail, weight=weight)
        else:
            state = _open_state(task, out, weight=weight)
        states.append(state)
    return states


def _open_state(task: AnyTask, out: Path, *, weight: float) -> TaskState:
    """The state of a task that waits for a worker, or has one that writes down how far it is."""
    try:
        progress = json.loads((task.directory(out) / PROGRESS_FILE).read_bytes())
    except (FileNotFoundError, ValueError):  # a power cut may leave it empty
        return TaskState(task.name, "waiting", weight=weight)
    return TaskState(task.name, "running", progress["text"], progress["share"], weight)


def known_sizes(facts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The numbers of images by split that a finished run has found; empty before the first."""
    for result in facts.values():
        data = result.get("data")
        if isinstance(data, dict) and data.get("sizes"):
            sizes = {}
            for split, count in data["sizes"].items():
                if count is not None:
                    sizes[split] = count
            return sizes
    return {}
