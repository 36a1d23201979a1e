"""Batches that do not fit in (simulated) memory: the suggested batch and settings."""

import pytest
import torch
from runs import NO_DROPOUT, settings
from torch import nn

from layershuffle.errors import TrainingError
from layershuffle.training import fit


@pytest.fixture
def room_for(monkeypatch):
    """A function that makes linear layers run out of memory for more than `images` images."""
    forward = nn.Linear.forward

    def room(images, *, training=True):
        def limited(self, state):
            if len(state) > images and torch.is_grad_enabled() is training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, state)

        monkeypatch.setattr(nn.Linear, "forward", limited)

    return room


def refusal(out, **changes):
    with pytest.raises(TrainingError) as caught:
        fit(settings(**{"model": NO_DROPOUT, "steps": 3, **changes}), out)
    return str(caught.value)


@pytest.mark.parametrize(
    ("room", "changes", "cause", "hint"),
    [
        (15, {}, "16 images does not fit", "--accumulate 2 (as many images"),
        (3, {"batch_size": 48, "accumulate": 2}, "is 3", "--accumulate 16 (as many images"),
        (5, {"batch_size": 20, "activation_checkpointing": True}, "is 5.", "--accumulate 4 (as"),
        (7, {"method": "layershuffle-predict", "orders_per_batch": 2}, "is 4", "--accumulate 4"),
    ],
)
def test_what_fits_and_what_helps(tmp_path, room_for, room, changes, cause, hint):
    room_for(room)
    text = refusal(tmp_path, **changes)
    assert cause in text
    assert hint in text
    assert "a smaller --batch-size" in text
    assert ("--activation-checkpointing" in text) is not changes.get("activation_checkpointing")


def test_the_accumulation_that_is_named_trains(tmp_path, room_for):
    room_for(5)
    text = refusal(tmp_path / "one", batch_size=24)
    assert "halving it, is 3. Next: --accumulate 8 (" in text
    fit(settings(model=NO_DROPOUT, steps=2, batch_size=24, accumulate=8), tmp_path / "two")


def test_nothing_fits(tmp_path, room_for):
    room_for(0)
    text = refusal(tmp_path)
    assert "halving" not in text
    assert "--activation-checkpointing" in text


def test_scoring_that_does_not_fit(tmp_path, room_for):
    room_for(20, training=False)
    text = refusal(tmp_path)
    assert "Scoring needs more than the memory of the device (CUDA out of memory)" in text
    assert "--eval-batch-size" in text
