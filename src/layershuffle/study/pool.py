"""Run tasks in processes of this machine (`ray_pool`: on a cluster)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from layershuffle.files import explained
from layershuffle.study.plan import FAILURE_FILE, Task
from layershuffle.study.worker import PROGRESS_FILE

LOG_FILE = "log.txt"
STOP_SECONDS = 60.0  # longer than any step, after which a stopped run saves a checkpoint


class Pool(Protocol):
    """The interface between the runner and the processes of tasks."""

    @property
    def running(self) -> Collection[str]:
        """Names of the running tasks."""

    def start(self, task: Task) -> None:
        """Start a task, which writes its files below the study's directory."""

    def reap(self) -> dict[str, int]:
        """Exit codes of the tasks that ended since the last call."""

    def stop(self) -> None:
        """Let all tasks save a checkpoint and end, and kill those that do not."""


@dataclass
class LocalPool:
    """Processes of one study, each with `threads` CPU threads, spread over the GPUs."""

    out: Path
    threads: int | None
    gpus: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    gpu_of: dict[str, int] = field(default_factory=dict)

    @property
    def running(self) -> Collection[str]:
        """Names of the running tasks."""
        return self.processes.keys()

    def start(self, task: Task) -> None:
        """Start `task` in its own process, with its output in its `log.txt`."""
        directory = fresh_directory(task, self.out)
        gpu = self._least_used_gpu()
        if gpu is not None:
            self.gpu_of[task.name] = gpu
        log = directory / LOG_FILE
        # In its own session, so Ctrl-C reaches only this process, which passes it on as SIGTERM.
        self.processes[task.name] = start_worker(
            self.out, task.name, log=log, threads=self.threads, gpu=gpu, own_session=True
        )

    def _least_used_gpu(self) -> int | None:
        busy = [self.gpu_of[name] for name in self.processes if name in self.gpu_of]
        # There may be more tasks than GPUs (`--workers`); they are spread evenly.
        return min(range(self.gpus), key=busy.count, default=None)

    def reap(self) -> dict[str, int]:
        """Exit codes of the processes that ended since the last call."""
        ended = {name: process.poll() for name, process in self.processes.items()}
        codes = {name: code for name, code in ended.items() if code is not None}
        for name in codes:
            del self.processes[name]
        return codes

    def stop(self) -> None:
        """Send SIGTERM to all, wait for their checkpoints, and kill those that do not end."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        # One deadline for all: they save their checkpoints at the same time.
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()


def fresh_directory(task: Task, out: Path) -> Path:
    """The task's directory, without the failure and progress files of an earlier attempt."""
    directory = task.directory(out)
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for stale in (FAILURE_FILE, PROGRESS_FILE):
            (directory / stale).unlink(missing_ok=True)
    return directory


def start_worker(
    out: Path,
    name: str,
    *,
    log: Path,
    threads: int | None,
    gpu: int | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that runs the task `name` of the study in `out` and appends to `log`."""
    # Appended, because the log of a resumed run includes the time before the interruption.
    with explained(log.parent), log.open("ab") as file:
        return subprocess.Popen(
            # This interpreter, not the `python` of the shell.
            [sys.executable, "-m", "layershuffle.study.worker", str(out), name],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(threads, gpu),
            start_new_session=own_session,
        )


def gpu_count() -> int:
    """The number of GPUs that this process may use, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(_visible_gpus())
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name for name in names if name.strip()]


def _environment(threads: int | None, gpu: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        # By the environment, which OpenMP reads before any of our code runs.
        environment["OMP_NUM_THREADS"] = str(threads)
    if gpu is not None:
        visible = _visible_gpus()
        # If only some GPUs are visible, they have these names, not numbers from 0.
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
    return environment
