"""Execute a study's plan: independent runs side by side, each in a process of its own.

Killed at any moment and started again, finished runs are not repeated and the others go on from
their checkpoints. A run that fails is reported and the rest goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from layershuffle.errors import Interrupted
from layershuffle.files import explained, locked
from layershuffle.settings import StudySettings
from layershuffle.study.plan import RunSpec, runs_of, write_plan
from layershuffle.study.worker import FAILURE_FILE, PROGRESS_FILE, RESULT_FILE

_POLL_SECONDS = 0.5
_STOP_SECONDS = 60.0  # a stopped run saves a checkpoint after its step; longer than any step here
_LOG_FILE = "log.txt"


@dataclass(frozen=True)
class RunState:
    """Where a run stands: waiting, running, done, failed or stopped; `detail` for people."""

    name: str
    phase: str
    detail: str = ""
    fraction: float = 0.0


Watcher = Callable[[list[RunState], float], None]
"""Called with the state of all runs and the seconds since the study started."""


@dataclass
class _Pool:
    """The processes of one study."""

    out: Path
    threads: int | None
    gpus: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    gpu_of: dict[str, int] = field(default_factory=dict)

    def start(self, run: RunSpec) -> None:
        directory = run.directory(self.out)
        gpu = self._least_used_gpu()
        if gpu is not None:
            self.gpu_of[run.name] = gpu
        with explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stale in (FAILURE_FILE, PROGRESS_FILE):
                (directory / stale).unlink(missing_ok=True)
            log = (directory / _LOG_FILE).open("ab")
        with log:
            self.running[run.name] = subprocess.Popen(
                [sys.executable, "-m", "layershuffle.study.worker", str(self.out), run.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.threads, gpu),
                start_new_session=True,  # Ctrl-C reaches us alone; we pass it on as SIGTERM
            )

    def _least_used_gpu(self) -> int | None:
        busy = [self.gpu_of[name] for name in self.running if name in self.gpu_of]
        return min(range(self.gpus), key=busy.count, default=None)

    def reap(self) -> dict[str, int]:
        """Exit codes of the processes that ended since the last call."""
        ended = {name: p.poll() for name, p in self.running.items()}
        codes = {name: code for name, code in ended.items() if code is not None}
        for name in codes:
            del self.running[name]
        return codes

    def stop(self) -> None:
        """SIGTERM to all, wait for their checkpoints, SIGKILL to those that do not end."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def run_study(
    study: StudySettings, out: Path, *, workers: int | None = None, watch: Watcher
) -> list[str]:
    """Run what is not finished; returns the names of the runs that failed.

    Raises `UsageError` if `out` holds another study, `Interrupted` after SIGTERM or Ctrl-C with
    every running run's checkpoint saved.
    """
    with locked(out), _stopping() as stopping:
        write_plan(study, out)
        runs = runs_of(study)
        gpus = _gpu_count()
        pool = _Pool(out, threads=None if gpus else 1, gpus=gpus)
        limit = workers or study.workers or gpus or len(os.sched_getaffinity(0))
        waiting = [run for run in runs if not _is_finished(run, out)]
        started, codes = time.monotonic(), dict[str, int]()
        try:
            while (waiting or pool.running) and not stopping():
                while waiting and len(pool.running) < limit:
                    pool.start(waiting.pop(0))
                time.sleep(_POLL_SECONDS)
                codes.update(pool.reap())
                watch([_state(run, pool, codes) for run in runs], time.monotonic() - started)
        finally:
            pool.stop()
        if stopping():
            raise Interrupted(
                "The study was stopped; running runs saved a checkpoint",
                place=out,
                hint="the same command goes on",
            )
    return [run.name for run in runs if not _is_finished(run, out)]


def _state(run: RunSpec, pool: _Pool, codes: dict[str, int]) -> RunState:
    out = pool.out
    if _is_finished(run, out):
        return RunState(run.name, "done", fraction=1.0)
    if run.name in pool.running:
        return _running_state(run, out)
    if run.name in codes:
        return RunState(run.name, "failed", failure(run, out))
    return RunState(run.name, "waiting")


def _running_state(run: RunSpec, out: Path) -> RunState:
    progress = _read_progress(run.directory(out) / PROGRESS_FILE)
    if not progress:
        return RunState(run.name, "running", "starting")
    if progress["phase"] == "scoring":
        return RunState(run.name, "running", "scoring", 1.0)
    loss = progress["loss"]
    detail = f"step {progress['step']}/{progress['steps']}"
    detail += f", loss {loss:.3f}" if loss is not None else ""
    return RunState(run.name, "running", detail, progress["step"] / max(progress["steps"], 1))


def failure(run: RunSpec, out: Path) -> str:
    """Why a run failed: its paragraph, or the last line of its log."""
    directory = run.directory(out)
    if (directory / FAILURE_FILE).is_file():
        return (directory / FAILURE_FILE).read_text(encoding="utf-8").strip()
    lines = (directory / _LOG_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"{last.strip()} (whole log: {directory / _LOG_FILE})"


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content


def _is_finished(run: RunSpec, out: Path) -> bool:
    return (run.directory(out) / RESULT_FILE).is_file()


def _environment(threads: int | None, gpu: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    return environment


def _gpu_count() -> int:
    """GPUs, without importing torch into the process that only watches."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return 0
    return len(listing.stdout.splitlines())


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
