"""Progress of long commands: a live display on a terminal, plain lines elsewhere.

Three kinds of work report progress: one training (`progress_listener`), the tasks of a study
(`study_watcher`), and anything that counts (`shown_progress`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layershuffle.text import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from layershuffle.study.runner import StudyWatcher, TaskState
    from layershuffle.training.loop import Listener

Clock = Callable[[], float]
LOADER_BOUND = 10.0  # percent of the steps' time: below that, more loading would gain little
_LINE_SECONDS, _DRAW_SECONDS = 20.0, 0.5  # between lines in a pipe, and drawings on a terminal
_MOST_ROWS = 20
_COMPLETE = (
    "This run of {steps} steps was complete already, so nothing was trained. To train more, give "
    "its directory as --model and another --out."
)


def _live() -> bool:
    # NO_COLOR requests plain text, but a live display consists of escape sequences.
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Countdown:
    """The speed of some work and the time left, measured since the start of this object.

    The work of an earlier, interrupted command does not count, because it took none of this time.
    """

    def __init__(self, done: float = 0.0, *, clock: Clock = time.monotonic) -> None:
        self._first, self._begun, self._clock = done, clock(), clock

    def speed(self, done: float) -> float:
        """Work done per second, 0 until some is done."""
        # Two calls may fall into one tick of the clock.
        return max(done - self._first, 0.0) / max(self._clock() - self._begun, 1e-9)

    def left(self, done: float, total: float) -> str:
        """The time left, "-" until some work is done."""
        speed = self.speed(done)
        return clock((total - done) / speed) if speed else "-"


def pace_text(per_second: float, unit: str) -> str:
    """A rate such as "1,200 images/s", per minute or per hour if it is small."""
    for seconds, name in ((1, "s"), (60, "min")):
        # A pass of a large model takes seconds, and "0 passes/s" would be useless.
        if per_second * seconds >= 10:
            return f"{per_second * seconds:,.0f} {unit}/{name}"
    return f"{per_second * 3600:,.3g} {unit}/h"


class StageText:
    """The stage of some work as text: "1,250 of 5,000 images, 340 images/s, 0:00:11 left".

    `None` while less than `every` seconds have passed since the last text.
    """

    def __init__(self, *, every: float, clock: Clock) -> None:
        self._every, self._clock = every, clock
        self._next = clock() + every
        self._what = ""
        self._pace = Countdown(clock=clock)

    def at(self, what: str, *, done: float, total: float | None) -> str | None:
        """The text, if it is time for one; arguments as of `Progress`."""
        if what != self._what:
            self._what, self._pace = what, Countdown(done, clock=self._clock)
        if self._clock() < self._next:
            return None
        self._next = self._clock() + self._every
        of_total = "" if total is None else f" of {_number(total)}"
        parts = [f"{_number(done)}{of_total} {what}"]
        if speed := self._pace.speed(done):
            parts.append(pace_text(speed, what))
            if total is not None:
                parts.append(f"{self._pace.left(done, total)} left")
        return ", ".join(parts)


def _number(count: float) -> str:
    """`count` as an integer, or with one decimal if it is fractional and below 100."""
    return f"{count:,.1f}" if count % 1 and count < 100 else f"{count:,.0f}"


@contextmanager
def shown_progress(title: str) -> Iterator[Progress]:
    """A `Progress` on standard error: a bar on a terminal, a line every 20 seconds elsewhere.

    `title` names the work, such as "eval". The bar disappears when the work ends.
    """
    if not _live():
        yield progress_lines(title)
        return
    from rich.console import Console

    with progress_bar(title, Console(stderr=True)) as show:
        yield show


def progress_lines(title: str, *, clock: Clock = time.monotonic) -> Progress:
    """The `Progress` of a pipe: lines on standard error."""
    stage = StageText(every=_LINE_SECONDS, clock=clock)

    def show(what: str, done: float, total: float | None) -> None:
        if text := stage.at(what, done=done, total=total):
            print(f"{title}: {text}", file=sys.stderr, flush=True)

    return show


@contextmanager
def progress_bar(
    title: str, console: Console, *, clock: Clock = time.monotonic
) -> Iterator[Progress]:
    """The `Progress` of a terminal: a bar on `console`, which is removed afterwards."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    # Without markup, because rich would parse brackets in paths as tags.
    title_column = TextColumn("{task.description}", markup=False)
    columns = (title_column, BarColumn(bar_width=12), TextColumn("{task.fields[text]}"))
    stage = StageText(every=_DRAW_SECONDS, clock=clock)
    # Drawn only in calls: a drawing thread would take time from what `bench` measures.
    with Bars(*columns, console=console, transient=True, auto_refresh=False) as bars:
        task = bars.add_task(title, total=None, text="")
        bars.refresh()

        def show(what: str, done: float, total: float | None) -> None:
            if text := stage.at(what, done=done, total=total):
                bars.update(task, completed=done, total=total, text=text, refresh=True)

        yield show


# --- one training ---------------------------------------------------------------------------------


@contextmanager
def progress_listener() -> Iterator[Listener]:
    """A listener for `layershuffle.training`: a bar with loss, accuracy, scores and time left, or a
    line per event."""
    if not _live():
        yield training_lines()
        return
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
                # Without markup, because rich would parse brackets in paths as tags.
                progress.print(_describe_data(event), highlight=False, markup=False)
            elif event["kind"] == "start":
                progress.update(task, total=event["steps"], completed=event["at"])
            elif event["kind"] == "complete":
                progress.print(_COMPLETE.format(**event), highlight=False, markup=False)
            elif event["kind"] in ("step", "log"):
                progress.update(task, completed=event["step"])
                if "loss" in event:
                    progress.update(task, training=_of_training(event))
            elif event["kind"] == "scoring":
                progress.update(task, scores=_of_scoring(event))
            elif event["kind"] == "scores":
                sequential, arbitrary = _top1_of(event)
                scores = f"held out: seq {sequential:.1f}, arb {arbitrary:.1f} %"
                progress.update(task, scores=scores)

        yield listen


def training_lines(*, clock: Clock = time.monotonic) -> Listener:
    """The listener of a pipe: a line per log, score and best model, and at least one every 20
    seconds, unless a single step takes longer."""
    steps, pace, printed = 0, Countdown(clock=clock), clock()

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps, pace, printed
        step = event.get("step", event.get("at"))
        match event["kind"]:
            case "step" if "loss" not in event:
                return
            case "scoring" if clock() - printed < _LINE_SECONDS:
                return
            case "complete":
                print(_COMPLETE.format(**event), flush=True)
                return
            case "data":
                print(_describe_data(event), flush=True)
                return
            case "start":
                steps, pace = event["steps"], Countdown(event["at"], clock=clock)
                text = "continues from a checkpoint" if event["at"] else "starts"
            case "log" | "step":
                text = f"{_of_training(event)}, {pace.left(event['step'], steps)} left"
            case "scoring":
                text = _of_scoring(event)
            case "scores":
                sequential, arbitrary = _top1_of(event)
                text = f"held-out top-1 {sequential:.1f} % sequential, {arbitrary:.1f} % arbitrary"
            case "best":
                text = f"best so far (cross-entropy {event['cross_entropy']:.4f}), model saved"
            case _:
                return
        printed = clock()
        # Flushed, because in a pipe a line would wait for a full buffer.
        print(f"step {step}/{steps}: {text}", flush=True)

    return listen


def _describe_data(event: dict[str, Any]) -> str:
    return "\n".join([event["text"], *(f"note: {note}" for note in event["notes"])])


def _top1_of(event: dict[str, Any]) -> tuple[float, float]:
    return event["eval_sequential_top1"], event["eval_arbitrary_top1"]


def _of_training(event: dict[str, Any]) -> str:
    """The numbers of a "log", or of a "step" with a loss."""
    text = f"loss {event['loss']:.4f}"
    if event["kind"] == "log":
        text += f", accuracy {event['accuracy']:.1f} %"
        if event["waiting"] >= LOADER_BOUND:
            text += f", loader-bound: {event['waiting']:.0f} % of the time waiting for data"
    return text


def _of_scoring(event: dict[str, Any]) -> str:
    return f"{event['images']:,} of {event['total']:,} held-out images scored"


# --- the tasks of a study -------------------------------------------------------------------------


@contextmanager
def study_watcher() -> Iterator[StudyWatcher]:
    """A watcher for `layershuffle.study.runner.run_study`: a live table, or a line per change."""
    if not _live():
        yield _study_lines()
        return
    from rich.live import Live

    pace: Countdown | None = None

    def watch(states: list[TaskState], seconds: float) -> None:
        nonlocal pace
        pace = pace or Countdown(_share_done(states))
        live.update(_study_table(states, seconds, pace=pace))

    # The table goes when the study ends: the report is printed in its place.
    with Live(transient=True) as live:
        yield watch


def _study_lines() -> StudyWatcher:
    phases: dict[str, str] = {}
    pace: Countdown | None = None
    last = 0.0

    def watch(states: list[TaskState], seconds: float) -> None:
        nonlocal last, pace
        pace = pace or Countdown(_share_done(states))
        for state in states:
            if phases.get(state.name, "waiting") != state.phase:
                phases[state.name] = state.phase
                words = ": ".join(word for word in (state.name, state.phase, state.detail) if word)
                print(f"[{clock(seconds)}] {words}", flush=True)
        if seconds - last >= _LINE_SECONDS:
            last = seconds
            running = [f"{s.name} {s.detail}" for s in states if s.phase == "running"]
            line = "; ".join([*running, _time_left(states, pace)])
            print(f"[{clock(seconds)}] {line}", flush=True)

    return watch


def _study_table(states: list[TaskState], seconds: float, *, pace: Countdown) -> Table:
    from rich.table import Table

    unfinished = [state for state in states if state.phase != "done"]
    count = f"{len(states) - len(unfinished)} of {len(states)} done"
    table = Table(
        "task", "state", "", title=f"{clock(seconds)}, {count}, {_time_left(states, pace)}"
    )
    # Those that run or failed come first, since rows beyond the limit are not shown.
    for state in sorted(unfinished, key=lambda state: state.phase == "waiting")[:_MOST_ROWS]:
        table.add_row(state.name, state.phase, state.detail)
    return table


def _time_left(states: list[TaskState], pace: Countdown) -> str:
    left = pace.left(_share_done(states), 1.0)
    return "time left not known yet" if left == "-" else f"about {left} left"


def _share_done(states: list[TaskState]) -> float:
    """How much of the work of all tasks is done; what is done of a study is never undone."""
    return sum(s.fraction * s.weight for s in states) / sum(s.weight for s in states)
