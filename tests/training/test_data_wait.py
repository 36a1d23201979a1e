"""The share of time spent waiting for data, by a clock set by hand in a real run."""

import sys

import pytest
from runs import settings

from layershuffle.data.digits import DigitPairs
from layershuffle.training import fit

LOOP = sys.modules["layershuffle.training.loop"]


@pytest.mark.parametrize("reading", [0, 1])
def test_a_run_tells_how_long_it_waited(tmp_path, monkeypatch, reading):
    """Steps of 3 seconds, and as long as a batch takes to be read."""
    now, events = [100.0], []

    def taking(seconds, method):
        def slowly(*args, **kwargs):
            now[0] += seconds
            return method(*args, **kwargs)

        return slowly

    def steps_take_time(phase, step):
        now[0] += 3 if phase == "optimizer" else 0

    items = taking(reading, DigitPairs.__getitems__)
    monkeypatch.setattr(DigitPairs, "__getitems__", items)
    monkeypatch.setattr(LOOP, "evaluate", taking(500, LOOP.evaluate))
    monkeypatch.setattr(LOOP, "_clock", lambda: now[0])
    run = settings(
        data="digit-pairs?train=40&validation=8&test=8", batch_size=4, eval_every=3, log_every=4,
        checkpoint_every=8,
    )  # fmt: skip
    result = fit(run, tmp_path, on_event=events.append, on_phase=steps_take_time)
    waiting = [event["waiting"] for event in events if event["kind"] == "log"]
    assert waiting == pytest.approx([100 * reading / (reading + 3)] * 4)  # at 3, 4, 6 and 8
    # Of the steps alone.
    assert reading or result.images_per_second == round(4 / 3, 1)
