"""The share of time spent waiting for data, by a clock set by hand and in a real run."""

import sys

import pytest

from layershuffle.data.digits import DigitPairs
from layershuffle.settings import FitSettings
from layershuffle.training import fit

LOOP = sys.modules["layershuffle.training.loop"]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(out, monkeypatch, *, reading, scoring, **changes):
    """Events and result of a run with steps of 3 seconds, by a clock set by hand."""
    clock = Clock()

    def taking(seconds, method):
        def slowly(*args, **kwargs):
            clock.now += seconds
            return method(*args, **kwargs)

        return slowly

    def steps_take_time(phase, step):
        clock.now += 3 if phase == "optimizer" else 0

    items = taking(reading, DigitPairs.__getitems__)
    monkeypatch.setattr(DigitPairs, "__getitems__", items)
    monkeypatch.setattr(LOOP, "evaluate", taking(scoring, LOOP.evaluate))
    monkeypatch.setattr(LOOP, "_clock", clock)
    model = (
        "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
        "&patch_size=4&embed_dim=32&depth=2&num_heads=2&mlp_ratio=2"
    )
    settings = FitSettings(
        method="baseline", model=model, data="digit-pairs?train=40&validation=8&test=8", steps=8,
        **{"batch_size": 4, "eval_every": 3, "log_every": 4, **changes},
    )  # fmt: skip
    events = []
    result = fit(settings, out, on_event=events.append, on_phase=steps_take_time)
    return events, result


def shares(out, monkeypatch, *, reading, scoring):
    events, _ = run(out, monkeypatch, reading=reading, scoring=scoring)
    return [event["waiting"] for event in events if event["kind"] == "log"]


def test_a_run_tells_how_long_it_waited(tmp_path, monkeypatch):
    """Batches are read ahead, so four are read in the first three steps; logs: 3, 4, 6 and 8."""
    waiting = shares(tmp_path, monkeypatch, reading=1, scoring=500)
    expected = [100 * read / (read + 3 * steps) for read, steps in ((4, 3), (1, 1), (2, 2), (2, 2))]
    assert waiting == pytest.approx(expected)


def test_data_in_memory_are_not_waited_for(tmp_path, monkeypatch):
    assert shares(tmp_path, monkeypatch, reading=0, scoring=500) == [0] * 4


def test_images_per_second_are_those_of_the_steps_alone(tmp_path, monkeypatch):
    """Epochs of 40 images in batches of 16, 16 and 8: 112 images in 8 steps of 3 seconds."""
    _, result = run(tmp_path, monkeypatch, reading=0, scoring=500, batch_size=16, log_every=3)
    assert result.images_per_second == round(112 / 24, 1)
