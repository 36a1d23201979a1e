"""Progress on standard error: a bar on a terminal, a line every 20 seconds elsewhere.

What counts calls `shown_progress` alone. A training (`training_listener`) and the tasks of a study
(`study_watcher`) also say what has happened, each in a line above the bar.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from layershuffle.ground.text import clock

if TYPE_CHECKING:
    from layershuffle.study.runner import StudyWatcher, TaskState
    from layershuffle.training.loop import Listener

Clock = Callable[[], float]
LOADER_BOUND = 10.0  # percent of the steps' time: below that, more loading would gain little
_LINE_SECONDS = 20.0  # between two lines in a pipe
_DRAW_SECONDS = 0.5  # between two drawings on a terminal
_COMPLETE = (
    "This run of {steps} steps was complete already, so nothing was trained. To train more, give "
    "its directory as --model and another --out."
)


def pace_text(per_second: float, unit: str) -> str:
    """A rate such as "1,200 images/s", per minute or per hour if it is small."""
    for seconds, name in ((1, "s"), (60, "min")):
        # A pass of a large model takes seconds, and "0 passes/s" would be useless.
        if per_second * seconds >= 10:
            return f"{per_second * seconds:,.0f} {unit}/{name}"
    return f"{per_second * 3600:,.3g} {unit}/h"


class Shown:
    """A `Progress` that shows "1,250 of 5,000 images, 340 images/s, 0:00:11 left".

    It draws at most once in `every` seconds; `say` prints a line at once. Speeds are measured since
    the first call about a unit: the work of an earlier, interrupted command took none of this time.
    """

    def __init__(
        self,
        draw: Callable[[str, float, float], object],
        say: Callable[[str], object],
        *,
        every: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._draw = draw
        self.say = say
        self._every = every
        self._clock = clock
        self._due = clock() + every
        # By unit: the first number and its time, and the last number.
        self._stages: dict[str, tuple[float, float, float]] = {}

    def __call__(self, what: str, done: float, total: float, note: str = "") -> None:
        """Show the work and a note, if it is time to; the other arguments are of `Progress`."""
        now = self._clock()
        first, begun, last = self._stages.get(what, (done, now, done))
        if done < last:  # the same unit is counted again
            first = done
            begun = now
        self._stages[what] = first, begun, done
        if now < self._due:
            return
        self._due = now + self._every
        parts = [f"{_number(done)} of {_number(total)} {what}"]
        # Two calls may fall into one tick of the clock.
        if speed := (done - first) / max(now - begun, 1e-9):
            parts += [pace_text(speed, what), f"{clock((total - done) / speed)} left"]
        if note:
            parts.append(note)
        self._draw(", ".join(parts), done, total)


def _number(count: float) -> str:
    """`count` as an integer, or with one decimal if it is fractional and below 100."""
    return f"{count:,.1f}" if count % 1 and count < 100 else f"{count:,.0f}"


@contextmanager
def shown_progress(title: str, *, clock: Clock = time.monotonic) -> Iterator[Shown]:
    """The progress of some work; `title` names it, such as "eval". The bar goes when it ends."""
    # NO_COLOR requests plain text, but a bar consists of escape sequences.
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ:
        say = partial(print, file=sys.stderr, flush=True)
        yield Shown(lambda text, *_: say(f"{title}: {text}"), say, every=_LINE_SECONDS, clock=clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    # Without markup, because rich would parse brackets in paths as tags.
    title_column = TextColumn("{task.description}", markup=False)
    columns = (title_column, BarColumn(bar_width=12), TextColumn("{task.fields[text]}"))
    # Drawn only in calls: a drawing thread would take time from what is measured.
    with Bars(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        task = bars.add_task(title, total=None, text="")
        bars.refresh()

        def draw(text: str, done: float, total: float) -> None:
            bars.update(task, completed=done, total=total, text=text, refresh=True)

        say = partial(bars.print, highlight=False, markup=False)
        yield Shown(draw, say, every=_DRAW_SECONDS, clock=clock)


def training_listener(shown: Shown) -> Listener:
    """A listener for the events of a training.

    `shown` gets steps and held-out images, each with the last loss, and a line for what is scored
    or saved.
    """
    steps = 0
    note = ""

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps, note
        match event["kind"]:
            case "data":
                lines = [event["text"]]
                for remark in event["notes"]:
                    lines.append(f"note: {remark}")
                shown.say("\n".join(lines))
            case "complete":
                shown.say(_COMPLETE.format(**event))
            case "start":
                steps = event["steps"]
                text = "continues from a checkpoint" if event["at"] else "starts"
                shown.say(f"step {event['at']}/{steps}: {text}")
                shown("steps", event["at"], steps)
            case "step" | "log":
                note = _losses(event) or note
                shown("steps", event["step"], steps, note)
            case "scoring":
                shown("held-out images", event["images"], event["total"], note)
            case "scores":
                sequential = event["eval_sequential_top1"]
                arbitrary = event["eval_arbitrary_top1"]
                shown.say(
                    f"step {event['step']}/{steps}: {note}{', ' if note else ''}held-out top-1 "
                    f"{sequential:.1f} % sequential, {arbitrary:.1f} % arbitrary"
                )
            case "best":
                shown.say(
                    f"step {event['step']}/{steps}: best so far (cross-entropy "
                    f"{event['cross_entropy']:.4f}), model saved"
                )

    return listen


def _losses(event: dict[str, Any]) -> str:
    """The numbers of a "log", or of a "step" that has a loss."""
    text = f"loss {event['loss']:.4f}" if "loss" in event else ""
    if event["kind"] == "log":
        text += f", accuracy {event['accuracy']:.1f} %"
        if event["waiting"] >= LOADER_BOUND:
            text += f", loader-bound: {event['waiting']:.0f} % of the time waiting for data"
    return text


@contextmanager
def study_watcher() -> Iterator[StudyWatcher]:
    """A watcher for `layershuffle.study.runner.run_study`.

    It shows the share of the work with the tasks that run, and a line for every task that begins or
    ends.
    """
    phases: dict[str, str] = {}

    def watch(states: list[TaskState], seconds: float) -> None:
        running: list[str] = []
        for state in states:
            if phases.get(state.name, "waiting") != state.phase:
                phases[state.name] = state.phase
                words = ": ".join(filter(None, (state.name, state.phase, state.detail)))
                shown.say(f"[{clock(seconds)}] {words}")
            if state.phase == "running":
                running.append(f"{state.name} {state.detail}")
        done = sum(s.fraction * s.weight for s in states) / sum(s.weight for s in states)
        shown("percent", 100 * done, 100, "; ".join(running))

    with shown_progress("study") as shown:
        yield watch
