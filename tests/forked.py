"""Forked processes that have all imports, and a team of them for the tasks of a study.

New Python processes would spend seven seconds each on importing torch and other libraries.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from layershuffle.ground.errors import Interrupted
from layershuffle.study.runner import run_study
from layershuffle.study.settings import StudySettings
from layershuffle.study.tasks import AnyTask
from layershuffle.study.worker import attempt, next_task, unfinished

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "layershuffle.training.run",
        "layershuffle.scoring.evaluate_spec",
        "layershuffle.merging.scoring",
        "layershuffle.analysis.norms",
        "layershuffle.data.digits",
        "layershuffle.data.folder",
        # What a training imports late.
        "transformers.modeling_utils",
        "matplotlib.backends.backend_svg",
        __name__,
    ]
)
TASKS = 2  # side by side
STARTS = "starts.txt"


class ForkedTeam:
    """`layershuffle.study.runner.LocalTeam`, of forked processes.

    `STARTS` in the study's directory has a line for every start of a task.
    """

    context: BaseContext = SERVER

    def __init__(self, out: Path, tasks: Sequence[AnyTask], count: int | None) -> None:
        self._out, self._tasks = out, tasks
        self._processes: list[BaseProcess | None] = [None] * (count or TASKS)

    def is_working(self) -> bool:
        for place, process in enumerate(self._processes):
            if process is None or process.exitcode is not None:
                is_needed = bool(unfinished(self._tasks, self._out))
                self._processes[place] = self._start() if is_needed else None
        return any(self._processes)

    def _start(self) -> BaseProcess:
        process = self.context.Process(target=_work, args=(self._out, self._tasks))
        process.start()
        return process

    def stop(self) -> None:
        for process in filter(None, self._processes):
            process.terminate()
        for process in filter(None, self._processes):
            process.join()


class TeamOfOwnForks(ForkedTeam):
    """Of a process that is forked itself and has no threads: a server of its own would import all
    again."""

    context = multiprocessing.get_context("fork")


def studying(study: StudySettings, out: Path) -> BaseProcess:
    """A process, not started yet, that runs a study with its tasks in forked processes."""
    return SERVER.Process(target=_study, args=(study, out))


def _study(study: StudySettings, out: Path) -> None:
    gc.freeze()  # see conftest.py
    watch = lambda states, seconds: None  # noqa: E731
    raise SystemExit(bool(run_study(study, out, watch=watch, make_team=TeamOfOwnForks)))


def _work(out: Path, tasks: Sequence[AnyTask]) -> None:
    gc.freeze()
    with next_task(tasks, out) as task:
        if task is not None:
            with (out / STARTS).open("a") as starts:
                starts.write(f"{task.name} {os.getpid()}\n")
            log = (task.directory(out) / "log.txt").open("a")
            with log, redirect_stdout(log), redirect_stderr(log):
                try:
                    attempt(task, out)
                except Interrupted as stopped:
                    raise SystemExit(stopped.exit_code) from None
