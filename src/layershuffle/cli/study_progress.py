"""Show a study's runs: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from layershuffle.study.runner import RunState

Watcher = Callable[[list["RunState"], float], None]
_LINE_SECONDS = 20.0


@contextmanager
def study_watcher() -> Iterator[Watcher]:
    """A watcher for `layershuffle.study.runner.run_study`."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ:
        yield _lines()
        return
    from rich.live import Live

    with Live(transient=True) as live:
        yield lambda states, seconds: live.update(_table(states, seconds))


def _lines() -> Watcher:
    phases: dict[str, str] = {}
    last = 0.0

    def watch(states: list[RunState], seconds: float) -> None:
        nonlocal last
        for state in states:
            if phases.get(state.name, "waiting") != state.phase:
                phases[state.name] = state.phase
                words = ": ".join(word for word in (state.name, state.phase, state.detail) if word)
                print(f"[{clock(seconds)}] {words}", flush=True)
        if seconds - last >= _LINE_SECONDS:
            last = seconds
            running = [f"{s.name} {s.detail}" for s in states if s.phase == "running"]
            print(f"[{clock(seconds)}] {'; '.join(running)}; {left(states, seconds)}", flush=True)

    return watch


def _table(states: list[RunState], seconds: float) -> Table:
    from rich.table import Table

    table = Table("run", "state", "", title=f"{clock(seconds)}, {left(states, seconds)}")
    for state in states:
        table.add_row(state.name, state.phase, state.detail)
    return table


def left(states: list[RunState], seconds: float) -> str:
    """Time left, by the share of all training that is done since the study (re)started."""
    done = sum(state.fraction for state in states) / len(states)
    if done < 0.02:
        return "time left not known yet"
    return f"about {clock(seconds * (1 - done) / done)} left"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
