"""`examples/method.py` is the method itself: its losses and its table are those of the library."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import method
import pytest
import torch
import yaml
from torch import nn

import layershuffle as ls
from layershuffle.ground.bundled import asset

LOSSES = 10


class _EnoughSteps(Exception):
    """Ends a run from one of its events."""


def losses_of_fit(out: Path, *, seed: int) -> list[float]:
    """The first losses of a run as the recipe digits-paper has it, as long as the file's own."""
    recipe = yaml.safe_load(asset("recipes", "digits-paper.yaml").read_text(encoding="utf-8"))
    settings = recipe["fit"] | {
        "model": recipe["model"],
        "data": recipe["data"],
        "method": "anyorder",
        "steps": method.STEPS,
        "log_every": 1,
        "device": "cpu",
        "threads": 1,
        "seed": seed,
    }
    losses: list[float] = []

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "log":
            losses.append(event["loss"])
            if len(losses) == LOSSES:
                raise _EnoughSteps

    with pytest.raises(_EnoughSteps):
        ls.fit(out=out, on_event=listen, **settings)
    return losses


@pytest.mark.parametrize("seed", [0, 1])
def test_its_losses_are_those_of_fit_bit_for_bit(tmp_path: Path, seed: int) -> None:
    own = list(islice(method.train(method.pretrained(), seed=seed), LOSSES))
    # The rate of the first step is 0: the others show the optimiser, its schedule and the clipping.
    assert len(set(own)) == LOSSES
    assert own == losses_of_fit(tmp_path / "run", seed=seed)


def models() -> tuple[nn.Module, nn.Module]:
    """The file's pretrained model and one that runs in any order, as timm loads them."""
    shuffled = method.pretrained()
    shuffled.load_state_dict(ls.load("bundled:digits-swarm").state_dict())
    return method.pretrained(), shuffled


def test_its_table_is_that_of_evaluate() -> None:
    images, labels = method.digits("test", 60)
    modes = "sequential,arbitrary,kept:9:arbitrary,kept:6:arbitrary,kept:3:arbitrary"
    for model in models():
        row = method.scores(model, images, labels, num_orders=3)
        scores = ls.evaluate(
            ls.wrap(model), [(images, labels)], modes=modes, num_orders=3, fixed=(1, 1)
        )
        of_modes = defaultdict(list)
        for score in scores:
            of_modes[score.label].append(score.top1)
        assert row == pytest.approx([mean(values) for values in of_modes.values()], rel=1e-12)


def test_its_merge_is_that_of_the_library() -> None:
    third = method.merged(*models()).state_dict()
    group = ls.MergeGroup([ls.wrap(model) for model in models()], mixed=True)
    theirs = group.merge(ls.MergePlan((0, 1) * 6)).state_dict()
    assert third.keys() == theirs.keys()
    assert [name for name in third if not torch.equal(third[name], theirs[name])] == []
