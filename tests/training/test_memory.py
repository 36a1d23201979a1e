"""Batches that do not fit in (simulated) memory: the suggested batch and settings."""

import pytest
import torch
from runs import NO_DROPOUT, settings
from torch import nn

from layershuffle.errors import TrainingError
from layershuffle.training import fit
from refusals import refuses


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


@pytest.mark.parametrize(
    ("room", "changes", "words"),
    [
        (15, {}, ["16 images does not fit", "--accumulate 2 (as many images"]),
        (3, {"batch_size": 48, "accumulate": 2}, ["is 3", "--accumulate 16 (as many images"]),
        (5, {"batch_size": 20, "activation_checkpointing": True}, ["is 5.", "--accumulate 4 (as"]),
        (7, {"method": "layershuffle-predict", "orders_per_batch": 2}, ["is 4", "--accumulate 4"]),
        (0, {}, ["--activation-checkpointing"]),
    ],
)
def test_what_fits_and_what_helps(tmp_path, room_for, room, changes, words):
    room_for(room)
    with pytest.raises(TrainingError) as caught:
        fit(settings(**{"model": NO_DROPOUT, "steps": 3, **changes}), tmp_path / "one")
    text = str(caught.value)
    assert [word for word in (*words, "a smaller --batch-size") if word not in text] == []
    assert ("--activation-checkpointing" in text) is not changes.get("activation_checkpointing")
    assert ("halving" in text) == (room > 0)
    if room == 5:
        fit(
            settings(**{"model": NO_DROPOUT, "steps": 2, **changes, "accumulate": 4}),
            tmp_path / "two",
        )


def test_scoring_that_does_not_fit(tmp_path, room_for):
    room_for(20, training=False)
    with refuses(TrainingError):
        fit(settings(model=NO_DROPOUT, steps=3), tmp_path)
