"""Accuracy and classes in the card of a checkpoint, and warnings about few images."""

from __future__ import annotations

import re

import pytest
import yaml
from runs import settings

import layershuffle as ls
from layershuffle.data import DataOptions, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.models import image_view
from layershuffle.training import fit


@pytest.mark.parametrize(("held_out", "warned"), [(32, True), (120, False)])
def test_few_images_that_select_the_checkpoint_are_reported(tmp_path, held_out, warned):
    data = f"digit-pairs?train=32&validation={held_out}&test=8"
    run = settings(data=data, steps=2, eval_every=1)
    result = fit(run, tmp_path / "run")
    notes = [note for note in result.data["notes"] if "pick the checkpoint" in note]
    assert bool(notes) == warned
    assert all(f"only {held_out} images (holdout)" in note for note in notes)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    top1 = result.selected["top1"]
    (record,) = re.findall("```yaml\n(.*?)```", card, re.DOTALL)
    assert yaml.safe_load(record)["selected"] == result.selected
    assert "# vit_tiny_patch16_224, layershuffle\n" in card
    assert "100, in the order of the logits: 00, 01, " in card
    # The numbers are those that the saved model has on the same images.
    data = open_data(run.data, image_view(ls.load(str(tmp_path / "run"))), options=DataOptions())
    batches = DeviceBatches(
        data.splits["holdout"], data.finish, batch_size=50, device="cpu", processes=0
    )
    for mode, percent in top1.items():
        scores = ls.evaluate(
            ls.load(str(tmp_path / "run")), batches, modes=mode, num_orders=run.eval_orders,
            seed=run.seed,
        )  # fmt: skip
        assert percent == pytest.approx(sum(score.top1 for score in scores) / len(scores))


def test_steps_beyond_the_data_and_a_warmup_as_long_as_the_run_are_said(tmp_path):
    data = "digit-pairs?train=32&validation=120&test=8"
    few = settings(data=data, steps=2, batch_size=64, warmup=2, lr=1e-3)
    assert fit(few, tmp_path / "few").data["notes"][-2:] == [
        "every step has all 32 training images: --batch-size 64 is more than there are",
        "the learning rate never reaches 0.001: --warmup 2 is as long as the run of 2 steps, or "
        "longer",
    ]
    enough = settings(data=data, steps=2, batch_size=32, warmup=1)
    assert not any(
        "--batch" in note or "--warm" in note
        for note in fit(enough, tmp_path / "enough").data["notes"]
    )
