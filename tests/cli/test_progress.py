"""Displayed speed and remaining time of work, in virtual time."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

import layershuffle as ls
from common import FAMILIES, images
from layershuffle.cli.progress import (
    pace_text,
    progress_bar,
    progress_lines,
    study_watcher,
    training_lines,
)
from layershuffle.study.runner import TaskState
from layershuffle.text import Progress


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (1234.4, "1,234 passes/s"),
        (10.0, "10 passes/s"),
        (9.0, "540 passes/min"),
        (0.4, "24 passes/min"),
        (0.16, "576 passes/h"),
        (1 / 7200, "0.5 passes/h"),
    ],
)
def test_slow_work_has_a_pace_too(per_second: float, text: str) -> None:
    """A pass of a large model takes seconds, so "0 passes/s" would be useless."""
    assert pace_text(per_second, "passes") == text


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, show: Progress, what: str, *, each: float, numbers: range) -> None:
        """Show the numbers one after the other, with `each` seconds of work between them."""
        for number in numbers:
            show(what, number, numbers.stop - 1)
            self.now += each


def test_a_pipe_gets_a_line_every_twenty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    show = progress_lines("eval", clock=clock)
    clock.work(show, "images", each=0.5, numbers=range(121))
    # Seconds 20, 40 and 60 of images at 2 per second, and no line for what is shorter.
    assert capsys.readouterr().err.splitlines() == [
        "eval: 40 of 120 images, 120 images/min, 0:00:40 left",
        "eval: 80 of 120 images, 120 images/min, 0:00:20 left",
        "eval: 120 of 120 images, 120 images/min, 0:00:00 left",
    ]


def test_a_training_with_slow_steps_gets_a_line_every_twenty_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    listen = training_lines(clock=clock)
    listen({"kind": "start", "steps": 100, "at": 0})
    for step in range(1, 13):
        clock.now += 5.0
        log = {"accuracy": 50.0, "waiting": 0.0} if step == 6 else {}
        loss = {"loss": 1.0} if step in (4, 6, 10) else {}
        listen({"kind": "log" if log else "step", "step": step, **log, **loss})
    for scored in range(100, 1000, 100):
        clock.now += 5.0
        listen({"kind": "scoring", "step": 12, "images": scored, "total": 5000})
    assert capsys.readouterr().out.splitlines() == [
        "step 0/100: starts",
        "step 4/100: loss 1.0000, 0:08:00 left",
        "step 6/100: loss 1.0000, accuracy 50.0 %, 0:07:50 left",
        "step 10/100: loss 1.0000, 0:07:30 left",
        "step 12/100: 200 of 5,000 held-out images scored",
        "step 12/100: 600 of 5,000 held-out images scored",
    ]


def test_a_run_that_was_complete_says_that_nothing_was_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training_lines()({"kind": "complete", "steps": 8})
    assert capsys.readouterr().out.startswith(
        "This run of 8 steps was complete already, so nothing was trained. To train more, "
    )


def test_a_new_stage_is_counted_from_its_own_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    show = progress_lines("merge", clock=clock)
    clock.work(show, "images", each=1.0, numbers=range(1000, 1010))
    # What an earlier command did is not counted: 20 in 10 seconds, not 500.
    clock.work(show, "probes", each=0.5, numbers=range(480, 601))
    assert capsys.readouterr().err.splitlines()[:2] == [
        "merge: 500 of 600 probes, 120 probes/min, 0:00:50 left",
        "merge: 540 of 600 probes, 120 probes/min, 0:00:30 left",
    ]


def test_streams_and_parts_of_passes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    show = progress_lines("merge", clock=clock)
    show("images", 0, None)
    clock.now = 20.0
    show("images", 250_000, None)
    show("passes", 0.0, 12)
    clock.now = 40.0
    show("passes", 2.5, 12)
    assert capsys.readouterr().err.splitlines() == [
        "merge: 250,000 images, 12,500 images/s",
        "merge: 2.5 of 12 passes, 450 passes/h, 0:01:16 left",
    ]


def test_a_terminal_gets_a_bar_that_disappears_at_the_end() -> None:
    clock = Clock()
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=90, color_system=None)
    with progress_bar("analyze [norms]", console, clock=clock) as show:
        clock.work(show, "images", each=0.25, numbers=range(41))
    text = screen.getvalue()
    assert "analyze [norms]" in text
    assert "10 of 40 images, 240 images/min, 0:00:08 left" in text
    assert "11 of 40 images" not in text, "drawn twice a second, not at every call"
    assert text.endswith("\x1b[2K"), "the line is erased"


def test_between_two_tasks_a_study_tells_the_time_alone(capsys) -> None:
    with study_watcher() as watch:
        watch([TaskState("a", "waiting")], 25.0)
    assert capsys.readouterr().out == "[0:00:25] time left not known yet\n"


def test_scores_report_the_images_that_all_orders_have_run() -> None:
    model = FAMILIES["timm-vit"].wrapped()
    batches = [
        (images(3), torch.zeros(3, dtype=torch.int64)),
        (images(2), torch.zeros(2, dtype=torch.int64)),
    ]
    seen: list[int] = []
    ls.evaluate(model, batches, modes="arbitrary", num_orders=3, on_images=seen.append)
    assert seen[-1] == 5
    assert seen == sorted(set(seen))
