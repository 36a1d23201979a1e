"""Progress of long commands: a live display on a terminal, plain lines elsewhere.

Three things report progress: one training (`progress_listener`), the tasks of a study
(`study_watcher`), and anything that counts (`Counter`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from layershuffle.study.runner import TaskState

Listener = Callable[[dict[str, Any]], None]
Watcher = Callable[[list["TaskState"], float], None]
LOADER_BOUND = 10.0  # percent of the steps' time: below that, more loading would gain little
_STUDY_LINE_SECONDS, _COUNTER_LINE_SECONDS = 20.0, 10.0
_MOST_ROWS = 20


def _live() -> bool:
    # NO_COLOR asks for plain text, and a live display is made of escape sequences.
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Countdown:
    """The speed of some work and the time left, from what was done since it was started here.

    What an earlier, interrupted command did is not counted: it took none of this one's time.
    """

    def __init__(self, done: float = 0.0) -> None:
        self._first, self._begun = done, time.monotonic()

    def speed(self, done: float) -> float:
        """Work done per second, 0 until some is done."""
        # Two calls may fall into one tick of the clock.
        return max(done - self._first, 0.0) / max(time.monotonic() - self._begun, 1e-9)

    def left(self, done: float, total: float) -> str:
        """The time left, "-" until some work is done."""
        speed = self.speed(done)
        return clock((total - done) / speed) if speed else "-"


def pace_text(per_second: float, unit: str) -> str:
    """As in "1,200 images/s"; per minute or hour where that takes two digits or more."""
    for seconds, name in ((1, "s"), (60, "min")):
        # A pass of a large model takes seconds: "0 passes/s" would say nothing.
        if per_second * seconds >= 10:
            return f"{per_second * seconds:,.0f} {unit}/{name}"
    return f"{per_second * 3600:,.3g} {unit}/h"


class Counter:
    """Shows how many are done, how fast, and the time left, on standard error.

    Called with the numbers done and in all; the first call says what was done before. A terminal
    gets one line that is written over, a file a line every 10 seconds.
    """

    def __init__(self, what: str, *, unit: str = "images") -> None:
        self._what, self._unit = what, unit
        self._pace: Countdown | None = None
        self._next_line = time.monotonic() + _COUNTER_LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        # Not in __init__: only the first call says what an earlier command has done.
        if self._pace is None:
            self._pace = Countdown(done)
        # NO_COLOR does not matter here: the line that is written over has no colours.
        live, now = sys.stderr.isatty(), time.monotonic()
        if not live and now < self._next_line:
            return
        self._next_line = now + _COUNTER_LINE_SECONDS
        # "\r\033[K" goes back to the start of the line and erases it.
        line = f"{done:,}/{total:,} {self._what}"
        if speed := self._pace.speed(done):
            line += f", {pace_text(speed, self._unit)}, {self._pace.left(done, total)} left"
        end = "" if live and done < total else "\n"
        print(f"\r\033[K{line}" if live else line, end=end, file=sys.stderr, flush=True)


# --- one training ---------------------------------------------------------------------------------


@contextmanager
def progress_listener() -> Iterator[Listener]:
    """A listener for `layershuffle.training`: a bar with loss, accuracy, scores and time left, or a
    line per event."""
    if not _live():
        yield _training_lines()
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
                # Without markup: rich would take brackets in paths for tags of its own.
                progress.print(_describe_data(event), highlight=False, markup=False)
            elif event["kind"] == "start":
                progress.update(task, total=event["steps"], completed=event["at"])
            elif event["kind"] == "log":
                training = f"loss {event['loss']:.3f}, acc {event['accuracy']:.1f} %"
                training += loader_bound(event)
                progress.update(task, completed=event["step"], training=training)
            elif event["kind"] == "scores":
                sequential, arbitrary = _top1_of(event)
                scores = f"held out: seq {sequential:.1f}, arb {arbitrary:.1f} %"
                progress.update(task, scores=scores)

        yield listen


def _training_lines() -> Listener:
    steps, pace = 0, Countdown()

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps, pace
        step = event.get("step", event.get("at"))
        match event["kind"]:
            case "data":
                print(_describe_data(event), flush=True)
                return
            case "start":
                steps, pace = event["steps"], Countdown(event["at"])
                text = "continues from a checkpoint" if event["at"] else "starts"
            case "log":
                text = (
                    f"loss {event['loss']:.4f}, accuracy {event['accuracy']:.1f} %, "
                    f"{pace.left(event['step'], steps)} left{loader_bound(event)}"
                )
            case "scores":
                sequential, arbitrary = _top1_of(event)
                text = f"held-out top-1 {sequential:.1f} % sequential, {arbitrary:.1f} % arbitrary"
            case "best":
                text = f"best so far (cross-entropy {event['cross_entropy']:.4f}), model saved"
            case _:
                return
        # Flushed, because in a pipe a line would wait for a full buffer.
        print(f"step {step}/{steps}: {text}", flush=True)

    return listen


def _describe_data(event: dict[str, Any]) -> str:
    return "\n".join([event["text"], *(f"note: {note}" for note in event["notes"])])


def _top1_of(event: dict[str, Any]) -> tuple[float, float]:
    return event["eval_sequential_top1"], event["eval_arbitrary_top1"]


def loader_bound(event: dict[str, Any]) -> str:
    """What a "log" event adds where the loader slows the training down; else nothing."""
    if event["waiting"] < LOADER_BOUND:
        return ""
    return f", loader-bound: {event['waiting']:.0f} % of the time waiting for data"


# --- the tasks of a study -------------------------------------------------------------------------


@contextmanager
def study_watcher() -> Iterator[Watcher]:
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


def _study_lines() -> Watcher:
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
        if seconds - last >= _STUDY_LINE_SECONDS:
            last = seconds
            running = [f"{s.name} {s.detail}" for s in states if s.phase == "running"]
            time_left = _time_left(states, pace)
            print(f"[{clock(seconds)}] {'; '.join(running)}; {time_left}", flush=True)

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
