"""A run that keeps its features, against the same loss by hand, image by image."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from runs import NO_DROPOUT, settings
from torch import Tensor, nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ViTConfig,
    ViTForImageClassification,
)

import layershuffle as ls
from layershuffle.ground.errors import Interrupted, UsageError
from layershuffle.models import blank_images
from layershuffle.training import fit
from layershuffle.training.features import KeptFeatures, classifier_path
from refusals import refuses

WEIGHT = 3.0
HF = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16}


def features_along(model: nn.Module, images: Tensor, order: ls.ExecutionOrder) -> Tensor:
    """What the head reads after the blocks of an order."""
    with ls.running(model, order, fixed=(0, 0)):
        features: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
    return features


def test_the_loss_is_that_of_every_image_by_itself() -> None:
    method = ls.Method("anyorder", orders_per_batch=2, sequential_every=None, branch_scale=0.5)
    torch.manual_seed(0)
    untouched = ls.load(NO_DROPOUT)
    model = method.prepare(copy.deepcopy(untouched), blank_images(untouched, 1))
    images = torch.randn(6, *blank_images(untouched, 1).shape[1:])
    labels = torch.arange(6)
    kept = KeptFeatures(untouched, model=model, weight=WEIGHT)
    with kept.asked_for(images) as criteria:
        loss = method.loss(model, images, labels, step=1, criterion=criteria)
    orders = method.orders(4, step=1)
    exit_after = method.exit_after(orders, step=1)
    assert exit_after is not None
    assert len(set(orders)) == 2
    before = features_along(untouched, images, ls.ExecutionOrder.sequential(4))
    wanted = 0.0
    for row in range(6):
        order = orders[row % 2]
        terms = []
        logits = []
        for path in (order, order.beginning(exit_after, last=1)):
            features = features_along(model, images[row : row + 1], path)
            logits.append(model.get_submodule("head")(features))
            nearness = F.cosine_similarity(features, before[row : row + 1]).item()
            right = F.cross_entropy(logits[-1], labels[row : row + 1]).item()
            terms.append(right + WEIGHT * (1 - nearness))
        early, final = logits[1].log_softmax(-1), logits[0].log_softmax(-1)
        divergence = (final.exp() * (final - early)).sum().item()
        wanted += (terms[0] + 0.3 * terms[1] + 0.3 * divergence) / 6
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_features_stay_nearer_to_what_they_were(tmp_path: Path) -> None:
    before = ls.load(NO_DROPOUT, seed=5).eval()
    images = torch.randn(16, *blank_images(before, 1).shape[1:])
    order = ls.ExecutionOrder.sequential(4)
    wanted = features_along(before, images, order)
    nearness = []
    for weight in (None, 100.0):
        run = tmp_path / str(weight)
        fit(settings(model=NO_DROPOUT, method="baseline", keep_features=weight), run)
        after = features_along(ls.load(run).eval(), images, order)
        nearness.append(F.cosine_similarity(after, wanted).mean().item())
    assert nearness[0] < nearness[1]


def test_a_model_with_position_parts_keeps_its_features(tmp_path: Path) -> None:
    fit(settings(method="layershuffle-position", steps=1), tmp_path / "first")
    again = settings(
        model=f"dir:{tmp_path / 'first'}",
        method="layershuffle-position",
        keep_features=WEIGHT,
        steps=2,
    )
    assert fit(again, tmp_path / "second").steps == 2


def test_a_run_goes_on_with_the_features_that_it_began_with(tmp_path: Path) -> None:
    fit(settings(steps=1), tmp_path / "base")
    run = settings(model=f"dir:{tmp_path / 'base'}", keep_features=WEIGHT)

    def stop(event: dict[str, object]) -> None:
        if event["kind"] == "log" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(run, tmp_path / "run", on_event=stop)
    shutil.rmtree(tmp_path / "base")
    fit(settings(steps=2), tmp_path / "base")
    with pytest.raises(UsageError, match="other weights than when the run began"):
        fit(run, tmp_path / "run")


def test_models_whose_classifier_is_found() -> None:
    assert classifier_path(ls.load(NO_DROPOUT)) == "head"
    assert classifier_path(ls.wrap(ViTForImageClassification(ViTConfig(**HF)))) == "classifier"
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2)
    teacher = DeiTForImageClassificationWithTeacher(DeiTConfig(**HF))
    for model in (distilled, teacher):
        with refuses(UsageError, "--keep-features"):
            classifier_path(ls.wrap(model.eval()))
