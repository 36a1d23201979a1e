"""Show a run's events: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Listener = Callable[[dict[str, Any]], None]
LOADER_BOUND = 10.0  # percent of the steps' time: below that, more loading would gain little


@contextmanager
def progress_listener() -> Iterator[Listener]:
    """A listener for `layershuffle.training`; a bar with loss, accuracy, scores and time left."""
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        with _bar() as listener:
            yield listener
    else:
        yield _Lines()


class _Clock:
    """Time left, from the steps done since the run started here."""

    def __init__(self) -> None:
        self.steps, self.at, self.begun = 0, 0, time.monotonic()

    def start(self, event: dict[str, Any]) -> None:
        self.steps, self.at, self.begun = event["steps"], event["at"], time.monotonic()

    def left(self, step: int) -> str:
        done = step - self.at
        if done <= 0:
            return "-"
        seconds = round((time.monotonic() - self.begun) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class _Lines:
    """One line per event."""

    def __init__(self) -> None:
        self._clock = _Clock()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "data":
            print(told(event), flush=True)
            return
        text = describe(event)
        if event["kind"] == "start":
            self._clock.start(event)
        if event["kind"] == "log":
            text += f", {self._clock.left(event['step'])} left{loader_bound(event)}"
        if text:
            print(
                f"step {event.get('step', event.get('at'))}/{self._clock.steps}: {text}", flush=True
            )


def told(event: dict[str, Any]) -> str:
    """What the run read, a line each."""
    return "\n".join([event["text"], *(f"note: {note}" for note in event["notes"])])


def describe(event: dict[str, Any]) -> str:
    """The event in words; empty for those that need no line."""
    match event["kind"]:
        case "start":
            return "goes on from a checkpoint" if event["at"] else "starts"
        case "log":
            return f"loss {event['loss']:.4f}, accuracy {event['accuracy']:.1f} %"
        case "scores":
            return (
                f"held-out top-1 {event['eval_sequential_top1']:.1f} % sequential, "
                f"{event['eval_arbitrary_top1']:.1f} % arbitrary"
            )
        case "best":
            return f"best so far (cross-entropy {event['cross_entropy']:.4f}), model saved"
    return ""


def loader_bound(event: dict[str, Any]) -> str:
    """What a "log" event adds where the loader holds the training back; else nothing."""
    if event["waiting"] < LOADER_BOUND:
        return ""
    return f", loader-bound: {event['waiting']:.0f} % of the time waiting for data"


@contextmanager
def _bar() -> Iterator[Listener]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TimeRemainingColumn(),
        TextColumn("{task.fields[training]}"),
        TextColumn("{task.fields[scores]}"),
    )
    with Progress(*columns, transient=False) as progress:
        task = progress.add_task("fit", total=None, training="", scores="")

        def listen(event: dict[str, Any]) -> None:
            if event["kind"] == "data":
                progress.print(told(event), highlight=False, markup=False)
            elif event["kind"] == "start":
                progress.update(task, total=event["steps"], completed=event["at"])
            elif event["kind"] == "log":
                training = f"loss {event['loss']:.3f}, acc {event['accuracy']:.1f} %"
                training += loader_bound(event)
                progress.update(task, completed=event["step"], training=training)
            elif event["kind"] == "scores":
                progress.update(task, scores=_short_scores(event))

        yield listen


def _short_scores(event: dict[str, Any]) -> str:
    sequential, arbitrary = event["eval_sequential_top1"], event["eval_arbitrary_top1"]
    return f"held out: seq {sequential:.1f}, arb {arbitrary:.1f} %"
