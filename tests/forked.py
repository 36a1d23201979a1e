"""Forked processes that have all imports, and a pool of them for the tasks of a study.

New Python processes would spend seven seconds each on importing torch and other libraries.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from layershuffle.study import worker
from layershuffle.study.plan import Task
from layershuffle.study.pool import LOG_FILE, fresh_directory
from layershuffle.study.runner import run_study
from layershuffle.study.settings import StudySettings

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "layershuffle.training",
        "layershuffle.scoring",
        "layershuffle.data.digits",
        "layershuffle.data.folder",
        # What a training imports late.
        "transformers.modeling_utils",
        __name__,
    ]
)
TASKS = 2  # side by side


class ForkedPool:
    """`layershuffle.study.pool.LocalPool`, of forked processes."""

    def __init__(self, out: Path, context: BaseContext) -> None:
        self._out, self._context = out, context
        self._processes: dict[str, BaseProcess] = {}

    @property
    def running(self) -> Collection[str]:
        return self._processes.keys()

    def start(self, task: Task) -> None:
        log = fresh_directory(task, self._out) / LOG_FILE
        process = self._context.Process(target=_work, args=(self._out, task.name, log))
        process.start()
        self._processes[task.name] = process

    def reap(self) -> dict[str, int]:
        ended = {n: p.exitcode for n, p in self._processes.items() if p.exitcode is not None}
        for name in ended:
            del self._processes[name]
        return ended

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join()
        self._processes.clear()


def studying(study: StudySettings, out: Path) -> BaseProcess:
    """A process, not started yet, that runs a study with its tasks in forked processes."""
    return SERVER.Process(target=_study, args=(study, out))


def _study(study: StudySettings, out: Path) -> None:
    def pool(study: StudySettings, out: Path) -> tuple[ForkedPool, int]:
        return ForkedPool(out, multiprocessing.get_context("fork")), TASKS

    failed = run_study(study, out, watch=lambda states, seconds: None, make_pool=pool)
    raise SystemExit(bool(failed))


def _work(out: Path, name: str, log: Path) -> None:
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        code = worker.main([os.fspath(out), name])
    raise SystemExit(code)
