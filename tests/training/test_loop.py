"""The training loop: several epochs, fixed batches, checkpoint files."""

import threading
from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from runs import settings
from torch.utils.data import Subset

from layershuffle.core.methods import Method
from layershuffle.data import Split
from layershuffle.errors import UsageError
from layershuffle.training import fit
from layershuffle.training.checkpoints import latest_checkpoint, load_state
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import prepare
from layershuffle.training.loop import train
from refusals import refuses


def few_images(out, **changes):
    """A run on 20 images: dropout is on, and accumulation."""
    job = prepare(settings(accumulate=2, **changes), out, ranks=Ranks())
    few = Split(dataset=Subset(job.data.splits["train"].dataset, range(20)))
    return replace(job, data=replace(job.data, splits={**job.data.splits, "train": few}))


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
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path, stop_after):
    """Steps of 16 images: an epoch of 20 has two steps, the second one of 4 images."""
    whole, labels = trained(few_images(tmp_path / "whole", steps=5))
    assert [len(batch) for batch in labels] == [8, 8, 4] * 2 + [8, 8]
    assert sorted(chain(*labels[3:6])) == sorted(chain(*labels[:3]))
    assert labels[3:6] != labels[:3]
    _, before = trained(few_images(tmp_path / "run", steps=5), stop_after=stop_after)
    resumed, after = trained(few_images(tmp_path / "run", steps=5))
    assert before + after == labels
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


def test_a_run_goes_on_with_the_options_that_its_method_has_anyway(tmp_path):
    """However they are written: the method is the same."""
    fit(settings(method="anyorder", steps=1), tmp_path)
    fit(settings(method="anyorder", self_distillation=0.3, steps=1), tmp_path)
    with refuses(UsageError):
        fit(settings(method="anyorder", exit_weight=0.4, steps=1), tmp_path)
