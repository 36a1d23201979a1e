"""Show a study's runs: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from layershuffle.study.runner import TaskState

Watcher = Callable[[list["TaskState"], float], None]
_LINE_SECONDS = 20.0
_MOST_ROWS = 20


@contextmanager
def study_watcher() -> Iterator[Watcher]:
    """A watcher for `layershuffle.study.runner.run_study`."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ:
        yield _lines()
        return
    from rich.live import Live

    before: list[float] = []

    def watch(states: list[TaskState], seconds: float) -> None:
        before.append(share_done(states))
        live.update(_table(states, seconds, before=before[0]))

    with Live(transient=True) as live:
        yield watch


def _lines() -> Watcher:
    phases: dict[str, str] = {}
    before: list[float] = []
    last = 0.0

    def watch(states: list[TaskState], seconds: float) -> None:
        nonlocal last
        before.append(share_done(states))
        for state in states:
            if phases.get(state.name, "waiting") != state.phase:
                phases[state.name] = state.phase
                words = ": ".join(word for word in (state.name, state.phase, state.detail) if word)
                print(f"[{clock(seconds)}] {words}", flush=True)
        if seconds - last >= _LINE_SECONDS:
            last = seconds
            running = [f"{s.name} {s.detail}" for s in states if s.phase == "running"]
            rest = left(states, seconds, before=before[0])
            print(f"[{clock(seconds)}] {'; '.join(running)}; {rest}", flush=True)

    return watch


def _table(states: list[TaskState], seconds: float, *, before: float) -> Table:
    from rich.table import Table

    shown = [state for state in states if state.phase != "done"]
    words = f"{len(states) - len(shown)} of {len(states)} done"
    title = f"{clock(seconds)}, {words}, {left(states, seconds, before=before)}"
    table = Table("task", "state", "", title=title)
    for state in sorted(shown, key=lambda one: one.phase == "waiting")[:_MOST_ROWS]:
        table.add_row(state.name, state.phase, state.detail)
    return table


def left(states: list[TaskState], seconds: float, *, before: float) -> str:
    """Time left, from the share of the work done since the study was (re)started at `before`."""
    done = share_done(states)
    if done - before < 0.01:
        return "time left not known yet"
    return f"about {clock(seconds * (1 - done) / (done - before))} left"


def share_done(states: list[TaskState]) -> float:
    """How much of all tasks' work is done."""
    return sum(s.fraction * s.weight for s in states) / sum(s.weight for s in states)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    hours, rest = divmod(int(seconds), 3600)
    minutes = f"{rest // 60}:{rest % 60:02}"
    return f"{hours}:{minutes:0>5}" if hours else minutes
