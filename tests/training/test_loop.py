"""The training loop: streams over several epochs, fixed batches, checkpoint files."""

import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from runs import NO_DROPOUT, settings
from torch.utils.data import IterableDataset

from layershuffle.core.methods import Method
from layershuffle.data import Split
from layershuffle.errors import DataError, UsageError
from layershuffle.training import fit
from layershuffle.training.checkpoints import latest_checkpoint, load_state
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import prepare
from layershuffle.training.loop import train
from refusals import refuses


class Stream(IterableDataset):
    """The first items of a data set, one after the other, in another direction every epoch."""

    def __init__(self, items):
        self.items, self.epoch = items, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(self.items if self.epoch % 2 == 0 else self.items[::-1])


def streamed(out, *, images=20, **changes):
    """A run on a stream of so many images: dropout is on, and accumulation."""
    job = prepare(settings(accumulate=2, **changes), out, ranks=Ranks())
    dataset = job.data.splits["train"].dataset
    stream = Split(dataset=Stream([dataset[row] for row in range(images)]), size=None)
    return replace(job, data=replace(job.data, splits={**job.data.splits, "train": stream}))


def trained(job, *, stop_after=None):
    """The weights after the steps that are left, or after one of them; and all labels seen."""
    state = load_state(job, latest_checkpoint(job.checkpoints))
    stop, labels = threading.Event(), []
    loss_and_logits = Method.loss_and_logits

    def record(method, model, images, truth, **place):
        labels.append(truth.tolist())
        return loss_and_logits(method, model, images, truth, **place)

    def stop_at(phase, step):
        if phase == "optimizer" and step + 1 == stop_after:
            stop.set()

    with patch.object(Method, "loss_and_logits", record):
        train(
            state,
            tell=lambda kind, **facts: None,
            keep_best=lambda model, value: None,
            stop_asked=stop,
            on_phase=stop_at,
        )
    assert state.step == stop_after or state.step == job.steps
    return state.model.state_dict(), labels


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_stream_resumes_where_it_was(tmp_path, stop_after):
    """Steps of 16 images: an epoch of 20 has two steps, the second one of 4 images."""
    whole, labels = trained(streamed(tmp_path / "whole", steps=5))
    assert [len(batch) for batch in labels] == [8, 8, 4] * 2 + [8, 8]
    assert labels[3] + labels[4] + labels[5] == (labels[0] + labels[1] + labels[2])[::-1]
    _, before = trained(streamed(tmp_path / "run", steps=5), stop_after=stop_after)
    resumed, after = trained(streamed(tmp_path / "run", steps=5))
    assert before + after == labels
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


def test_given_batches_end_the_run(tmp_path):
    job = prepare(settings(model=NO_DROPOUT), tmp_path, ranks=Ranks())
    state, phases = load_state(job, None), []
    pixels, label = job.data.splits["train"].dataset[0]
    batch = (torch.stack([pixels] * 4), torch.tensor([label] * 4))
    train(
        state,
        tell=lambda kind, **facts: None,
        keep_best=lambda model, value: None,
        on_phase=lambda phase, step: phases.append((phase, step)),
        batches=iter([[batch], [batch, batch]]),
    )
    assert phases == [
        ("data", 0), ("forward", 0), ("backward", 0), ("optimizer", 0), ("report", 1),
        ("data", 1), *[("forward", 1), ("backward", 1)] * 2, ("optimizer", 1), ("report", 2),
        ("data", 2),
    ]  # fmt: skip


def test_a_run_goes_on_with_the_options_that_its_method_has_anyway(tmp_path):
    """However they are written: the method is the same."""
    fit(settings(method="anyorder", steps=1), tmp_path)
    fit(settings(method="anyorder", exit_weight=0.3, steps=1), tmp_path)
    with refuses(UsageError):
        fit(settings(method="anyorder", exit_weight=0.4, steps=1), tmp_path)


def test_a_stream_without_images_is_an_error_of_the_data(tmp_path):
    with refuses(DataError):
        trained(streamed(tmp_path, images=0, steps=2))
