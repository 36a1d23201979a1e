"""Displayed speed and remaining time of work, in virtual time."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import layershuffle as ls
from common import FAMILIES, images
from layershuffle.cli.progress import (
    LOADER_BOUND,
    pace_text,
    shown_progress,
    study_watcher,
    training_listener,
)
from layershuffle.ground.text import Progress
from layershuffle.study.runner import TaskState


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (1234.4, "1,234 passes/s"),
        (10.0, "10 passes/s"),
        (9.0, "540 passes/min"),
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


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_pipe_gets_a_line_every_twenty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with shown_progress("eval", clock=clock) as show:
        clock.work(show, "images", each=0.5, numbers=range(121))
        # Seconds 20, 40 and 60 of images at 2 per second.
        assert lines(capsys) == [
            "eval: 40 of 120 images, 120 images/min, 0:00:40 left",
            "eval: 80 of 120 images, 120 images/min, 0:00:20 left",
            "eval: 120 of 120 images, 120 images/min, 0:00:00 left",
        ]
        # What an earlier command did is not counted: 78 in 19.5 seconds, not 558.
        clock.work(show, "probes", each=0.25, numbers=range(480, 601))
        assert lines(capsys) == ["eval: 558 of 600 probes, 240 probes/min, 0:00:10 left"]


def test_a_training_shows_its_loss_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with shown_progress("fit", clock=clock) as show:
        listen = training_listener(show)
        listen({"kind": "start", "steps": 100, "at": 0})
        for step in range(1, 13):
            clock.now += 5.0
            log = {"loss": 1.0, "accuracy": 50.0, "waiting": LOADER_BOUND} if step == 6 else {}
            listen({"kind": "log" if log else "step", "step": step, **log})
        for scored in range(100, 1000, 100):
            clock.now += 5.0
            listen({"kind": "scoring", "step": 12, "images": scored, "total": 5000})
        scores = {"eval_sequential_top1": 90.0, "eval_arbitrary_top1": 80.0}
        listen({"kind": "scores", "step": 12, **scores})
        listen({"kind": "best", "step": 12, "cross_entropy": 0.5})
        listen({"kind": "complete", "steps": 100})
    loss = "loss 1.0000, accuracy 50.0 %, loader-bound: 10 % of the time waiting for data"
    assert lines(capsys)[:-1] == [
        "step 0/100: starts",
        "fit: 4 of 100 steps, 12 steps/min, 0:08:00 left",
        f"fit: 8 of 100 steps, 12 steps/min, 0:07:40 left, {loss}",
        f"fit: 12 of 100 steps, 12 steps/min, 0:07:20 left, {loss}",
        f"fit: 400 of 5,000 held-out images, 20 held-out images/s, 0:03:50 left, {loss}",
        f"fit: 800 of 5,000 held-out images, 20 held-out images/s, 0:03:30 left, {loss}",
        f"step 12/100: {loss}, held-out top-1 90.0 % sequential, 80.0 % arbitrary",
        "step 12/100: best so far (cross-entropy 0.5000), model saved",
    ]


def test_a_study_tells_what_begins_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with study_watcher() as watch:
        watch([TaskState("a", "waiting"), TaskState("b", "running")], 1.0)
        watch([TaskState("a", "failed", "out of memory"), TaskState("b", "done")], 3661.0)
    assert lines(capsys) == [
        "[0:00:01] b: running",
        "[1:01:01] a: failed: out of memory",
        "[1:01:01] b: done",
    ]


def test_a_terminal_gets_a_bar_that_disappears_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, screen = Clock(), io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": "90"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with shown_progress("analyze [norms]", clock=clock) as show:
        clock.work(show, "images", each=0.25, numbers=range(41))
        show.say("[a line]")
    text = screen.getvalue()
    assert "analyze [norms]" in text
    assert "10 of 40 images, 240 images/min, 0:00:08 left" in text
    assert "11 of 40 images" not in text, "drawn twice a second, not at every call"
    assert "[a line]" in text
    assert text.endswith("\x1b[2K"), "the line is erased"


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
