"""One process that does one task of a study: `python -m layershuffle.study.worker OUT`.

It claims a task by a lock in the shared directory OUT, so any number of these processes, on any
number of machines, share the work: none starts a task that another one has. The lock goes with its
process, and then somebody else continues the task from its checkpoint. `study.runner` starts it
with a pipe as its input, and it ends where the pipe does: with the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from layershuffle.ground.errors import Interrupted, LayerShuffleError, of_the_machine
from layershuffle.ground.files import explained, write_text
from layershuffle.ground.machine import collector_paused
from layershuffle.ground.text import one_line
from layershuffle.study.plan import make_plan, read_plan
from layershuffle.study.store import FAILURE_FILE, read_facts, record
from layershuffle.study.tasks import AnyTask, Task

LOG_FILE = "log.txt"
PROGRESS_FILE = "progress.json"
CLAIM_FILE = "claim.lock"
_MOST_ATTEMPTS = 3  # a task that needs too much memory would end one process after another
_POLL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Do one task of the study in the directory `argv[0]`, or none if all are done.

    Returns the exit code: 0, also if the task failed, or 143 if it was stopped with a checkpoint.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = Path(argv[0])
    with next_task(make_plan(read_plan(out)).tasks, out) as task:
        if task is None:
            return 0
        with (task.directory(out) / LOG_FILE).open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        try:
            attempt(task, out)
        except Interrupted as stopped:
            print(stopped, flush=True)
            return stopped.exit_code
    return 0


def unfinished(tasks: Collection[AnyTask], out: Path) -> list[AnyTask]:
    """The tasks that are neither done nor failed, nor need one that failed."""
    facts = read_facts(out)
    failed = set()
    for task in tasks:
        if (task.directory(out) / FAILURE_FILE).exists():
            failed.add(task.name)
    left = []
    for task in tasks:
        if not task.is_done(facts) and failed.isdisjoint([task.name, *task.needs]):
            left.append(task)
    return left


@contextmanager
def next_task(tasks: Collection[AnyTask], out: Path) -> Iterator[AnyTask | None]:
    """The first task that can start and that nobody else has, claimed for this process.

    It waits while all of them are claimed or need others. `None`: nothing is left to do.
    """
    while left := unfinished(tasks, out):
        waiting = {task.name for task in left}
        for task in left:
            if waiting.isdisjoint(task.needs):
                with claimed(task, out) as is_mine:
                    # Somebody may have finished it since `left` was read.
                    if is_mine and unfinished([task], out):
                        yield task
                        return
        time.sleep(_POLL_SECONDS)
    yield None


@contextmanager
def claimed(task: Task[Any], out: Path) -> Iterator[bool]:
    """Whether no other process had the task, which nobody else gets meanwhile."""
    directory = task.directory(out)
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / CLAIM_FILE)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
    try:
        yield True
    finally:
        lock.release()


def attempt(task: AnyTask, out: Path) -> None:
    """Do a claimed task and record its result, or write down why it failed.

    Raises `Interrupted` after SIGTERM with a checkpoint saved.
    """
    directory = task.directory(out)
    progress = directory / PROGRESS_FILE
    count = 0
    with suppress(FileNotFoundError, ValueError):  # a power cut may leave it empty
        # Left behind by a process that was killed.
        count = json.loads(progress.read_text(encoding="utf-8")).get("attempt", 0)
    if count == _MOST_ATTEMPTS:
        cause = f"It ended {count} processes without a word"
        write_text(directory / FAILURE_FILE, f"{cause} (whole log: {directory / LOG_FILE})\n")
        return

    def say(text: str, share: float) -> None:
        # Not flushed to disk, because it is useless after a crash.
        stage = directory / f"{PROGRESS_FILE}.new"
        facts = {"text": text, "share": share, "attempt": count + 1}
        stage.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(stage, progress)

    say("starting", 0.0)
    try:
        with collector_paused():
            import layershuffle.scoring.evaluate_spec  # noqa: F401

            # To look through what was imported takes the collector half a second each time.
            gc.freeze()
        atexit.register(gc.unfreeze)  # at the end libraries complain of what nobody collected
        record(task, out, say=say)
    except Interrupted:
        raise
    except LayerShuffleError as error:
        write_text(directory / FAILURE_FILE, f"{error}\n")
    except Exception as error:  # noqa: BLE001 - one task has failed, others go on
        traceback.print_exc()
        text = of_the_machine(error) or f"{type(error).__name__}: {one_line(error)}"
        where = f"(whole log: {directory / LOG_FILE})"
        write_text(directory / FAILURE_FILE, f"{text} {where}\n")
    finally:
        progress.unlink(missing_ok=True)


def try_again(tasks: Collection[Task[Any]], out: Path) -> None:
    """Forget that tasks failed, except for those that another process has."""
    for task in tasks:
        directory = task.directory(out)
        if not directory.exists():
            continue
        with claimed(task, out) as is_mine:
            if is_mine:
                (directory / FAILURE_FILE).unlink(missing_ok=True)
                (directory / PROGRESS_FILE).unlink(missing_ok=True)


def _end_with_parent() -> None:
    """Stop this process, with a checkpoint, when the one ends that started it."""
    # This pipe closes when the process dies that started this one.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
