"""`history.csv` and the curves of a run: no step twice and none missing, whatever happens."""

import itertools
import os
import signal

import pytest
from runs import settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from layershuffle.errors import Interrupted, UsageError
from layershuffle.training import fit
from layershuffle.training.history import COLUMNS, SCORES, History, read_history
from refusals import refuses


def test_every_fit_leaves_its_history_and_a_page_with_the_curves(tmp_path):
    events = []
    fit(settings(log_every=3, checkpoint_every=4), tmp_path, on_event=events.append)
    rows = read_history(tmp_path / "history.csv")
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert [set(COLUMNS) - set(row) for row in rows] == [set(SCORES), set(), set(SCORES), set()]
    told = [event for event in events if event["kind"] in ("log", "scores", "history")]
    for row in rows:
        here = [event for event in told if event["step"] == row["step"]]
        expected = {
            k: v for event in here for k, v in event.items() if k not in ("kind", "waiting")
        }
        assert row == expected, "to the last digit"
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 1
    assert "held out, arbitrary order" in page


def test_losses_are_means_over_all_steps_since_the_row_before(tmp_path):
    fit(settings(), tmp_path / "every")
    fit(settings(log_every=3, checkpoint_every=4), tmp_path / "some")
    every = [row["loss"] for row in read_history(tmp_path / "every" / "history.csv")]
    some = read_history(tmp_path / "some" / "history.csv")
    steps = [0, *(int(row["step"]) for row in some)]
    means = [sum(every[a:b]) / (b - a) for a, b in itertools.pairwise(steps)]
    assert [row["loss"] for row in some] == pytest.approx(means, rel=1e-6)


def test_a_stopped_run_has_a_row_at_its_checkpoint(tmp_path):
    def ask_to_stop(event):
        if event["kind"] == "log" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run = settings(log_every=3, checkpoint_every=8)
    with refuses(Interrupted):
        fit(run, tmp_path, on_event=ask_to_stop)
    fit(run, tmp_path)
    rows = read_history(tmp_path / "history.csv")
    assert [row["step"] for row in rows] == [3, 4, 6, 8]


def test_rows_after_the_checkpoint_and_half_a_line_are_written_anew(tmp_path):
    path = tmp_path / "history.csv"
    history = History(path)
    history.begin(at=0)
    for step in (1, 2, 3):
        history.add({"step": step, "loss": step / 7})
    whole = path.read_bytes()
    path.write_bytes(whole + b"4,0.57")
    history.begin(at=2)
    history.add({"step": 3, "loss": 3 / 7})
    assert path.read_bytes() == whole


def test_slow_steps_tell_their_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("layershuffle.training.loop._LOSS_SECONDS", 0.0)
    events, logs = [], []
    fit(settings(log_every=8, eval_every=8), tmp_path / "few", on_event=events.append)
    fit(settings(eval_every=8), tmp_path / "all", on_event=logs.append)
    (*told,) = [e["loss"] for e in events if e["kind"] == "step"]
    losses = [e["loss"] for e in logs if e["kind"] == "log"]
    assert told[0] == pytest.approx(losses[0])
    assert len(told) == 4, "a checkpoint every second step logs, too"


def test_trackers_of_accelerate_get_every_row(tmp_path):
    fit(settings(log_with="tensorboard"), tmp_path)
    curves = EventAccumulator(str(tmp_path / "logs" / "layershuffle"))
    curves.Reload()
    for row in read_history(tmp_path / "history.csv"):
        (loss,) = [e.value for e in curves.Scalars("loss") if e.step == row["step"]]
        assert loss == pytest.approx(row["loss"])
    assert len(curves.Scalars(SCORES[0])) == 2


def test_a_tracker_that_is_not_installed_is_refused_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("layershuffle.training.job.find_spec", lambda name: None)
    empty = tmp_path / "empty"
    empty.mkdir()
    for out in (empty, tmp_path / "new"):
        with refuses(UsageError):
            fit(settings(log_with="wandb"), out)
    assert [*tmp_path.rglob("*")] == [empty]
