"""timm's parts of a training, each against a closed form: rates of layers, frozen weights, smoothed
and mixed labels, optimisers and stochastic depth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from runs import MODEL, NO_DROPOUT, assert_same_weights, settings, weights
from timm.optim import param_groups_layer_decay
from transformers import ViTConfig, ViTForImageClassification

import layershuffle as ls
from layershuffle.data import DataOptions, open_data
from layershuffle.ground.errors import UsageError
from layershuffle.models import image_view
from layershuffle.training import fit
from layershuffle.training.loop import epoch_rows
from layershuffle.training.mixing import mixed
from layershuffle.training.optimizer import freeze, layer_numbers, make_optimizer
from refusals import refuses

EVERYTHING = {
    "method": "anyorder",
    "opt": "lamb",
    "smoothing": 0.1,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.2,
    "layer_decay": 0.75,
    "freeze": ["patch_embed", "blocks.[0-1]"],
    "block_drop": 0.2,
    "branch_scale": 0.5,
    "accumulate": 2,
    # Every epoch ends with a forward of five images, of which timm mixes four.
    "data": "digit-pairs?train=21&validation=32&test=8",
}


def rates(model: torch.nn.Module, **changes: Any) -> dict[str, float]:
    """The learning rate of every weight that trains, as a share of the peak."""
    run = settings(lr=1.0, **changes)
    rate = {}
    for group in make_optimizer(model, run).param_groups:
        for weight in group["params"]:
            rate[id(weight)] = group["lr"]
    return {n: rate[id(w)] for n, w in model.named_parameters() if w.requires_grad}


def test_rates_of_layers() -> None:
    """0.75 to the power of the layers that follow, 0 for the head: as timm's, but for the last
    norm, which timm counts to the last block."""
    model = ls.load(NO_DROPOUT)
    ours = rates(model, layer_decay=0.75)
    assert ours["pos_embed"] == ours["patch_embed.proj.weight"] == pytest.approx(0.75**5)
    for block in range(4):
        assert ours[f"blocks.{block}.mlp.fc1.weight"] == pytest.approx(0.75 ** (4 - block))
    assert ours["norm.weight"] == ours["head.bias"] == 1.0
    assert set(rates(model).values()) == {1.0}
    names = {id(weight): name for name, weight in model.named_parameters()}
    for group in param_groups_layer_decay(model, layer_decay=0.75):
        for weight in group["params"]:
            name = names[id(weight)]
            if not name.startswith("norm."):
                assert ours[name] == pytest.approx(group["lr_scale"]), name


def test_rates_of_other_models() -> None:
    """Of transformers, whose blocks have other names; and of a model with position parts, whose
    parts behind the blocks are new and learn as fast as the head."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16}
    theirs = ls.wrap(ViTForImageClassification(ViTConfig(**sizes, intermediate_size=8)))
    for name, layer in layer_numbers(theirs).items():
        block = re.search(r"\.(\d+)\.", name)
        if block is not None:
            assert layer == 1 + int(block[1]), name
        else:
            assert layer == (0 if "embeddings" in name else 4), name
    plain = timm.create_model("test_vit", num_classes=3)
    positioned = ls.Method("layershuffle-position").prepare(ls.wrap(plain))
    layers = layer_numbers(positioned)
    depth = len(plain.blocks)
    for name, layer in layers.items():
        if ".blocks." in name:
            assert layer == 1 + int(name.split(".blocks.")[1].split(".")[0]), name
    assert {layers[n] for n in layers if "head" in n} == {depth + 1}


def test_blocks_with_shared_weights_have_the_rate_of_the_first() -> None:
    model = ls.tie(ls.load(NO_DROPOUT), distinct=1)
    ours = rates(model, layer_decay=0.5)
    assert ours["blocks.0.mlp.fc1.weight"] == pytest.approx(0.5**4)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["cls_token", "patch_embed"], ["cls_token", "patch_embed.proj.weight"]),
        (["blocks.[0-1]"], ["blocks.0.norm1.bias", "blocks.1.mlp.fc1.weight"]),
        (["*.norm?"], ["blocks.0.norm1.bias", "blocks.3.norm2.weight"]),
    ],
)
def test_frozen_weights_stay(tmp_path: Path, patterns: list[str], frozen: list[str]) -> None:
    run = settings(model=NO_DROPOUT, freeze=patterns, weight_decay=0.1, method="anyorder")
    fit(run, tmp_path / "run")
    begun = ls.load(NO_DROPOUT, seed=5).state_dict()
    ended = weights(tmp_path / "run")
    still = {name for name, weight in ended.items() if torch.equal(weight, begun[name])}
    assert set(frozen) <= still
    assert "blocks.2.mlp.fc1.weight" not in still
    assert "head.weight" not in still


def test_nothing_to_freeze_and_nothing_left() -> None:
    model = ls.load(NO_DROPOUT)
    with refuses(UsageError):
        freeze(model, ["block.0"])
    with refuses(UsageError):
        freeze(model, ["*"])


def batch(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(images, 1, 12, 20, generator=generator)
    return pixels, torch.arange(images) % 10


PLACE = {"classes": 10, "step": 3, "micro_batch": 1, "rank": 0}


def test_smoothed_labels_have_the_loss_of_torch() -> None:
    images, labels = batch(6)
    same, targets = mixed(images.clone(), labels, settings=settings(smoothing=0.2), **PLACE)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2)
    assert torch.equal(same, images)
    assert F.cross_entropy(logits, targets) == pytest.approx(float(expected), rel=1e-6)


def test_mixup_is_a_mean_of_two_images_and_of_their_labels() -> None:
    """With the share that timm drew from numpy; the last image of an odd batch stays."""
    images, labels = batch(5)
    state = np.random.get_state()[1].copy()
    blend, targets = mixed(images.clone(), labels, settings=settings(mixup=0.8), **PLACE)
    assert np.array_equal(np.random.get_state()[1], state)
    share = float(targets[0, 0])
    assert 0 < share < 1
    partners = [3, 2, 1, 0]
    expected = share * images[:4] + (1 - share) * images[partners]
    assert torch.allclose(blend[:4], expected, atol=1e-6)
    assert torch.equal(blend[4], images[4])
    one_hot = F.one_hot(labels, 10).float()
    soft = share * one_hot[:4] + (1 - share) * one_hot[partners]
    assert torch.allclose(targets, torch.cat((soft, one_hot[4:])), atol=1e-6)


def test_cutmix_labels_are_shares_of_the_area() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 12, 20).clone()
    labels = torch.arange(4)
    blend, targets = mixed(images, labels, settings=settings(cutmix=1.0), **PLACE)
    own = (blend[0] == 0).float().mean()
    assert 0 < own < 1
    assert float(targets[0, 0]) == pytest.approx(float(own))
    assert float(targets[0, 3]) == pytest.approx(1 - float(own))


def test_what_is_mixed_is_a_function_of_the_place() -> None:
    images, labels = batch(6)
    run = settings(mixup=0.8, cutmix=1.0)
    first, _ = mixed(images.clone(), labels, settings=run, **PLACE)
    again, _ = mixed(images.clone(), labels, settings=run, **PLACE)
    assert torch.equal(first, again)
    for change in ({"step": 4}, {"micro_batch": 0}, {"rank": 1}):
        other, _ = mixed(images.clone(), labels, settings=run, **{**PLACE, **change})
        assert not torch.equal(first, other), change


def first_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch of a run, read image by image."""
    options = DataOptions(holdout=0.05, augment=False, skip_corrupt=False, seed=5)
    data = open_data(settings().data, image_view(ls.load(NO_DROPOUT)), options=options)
    train = data.splits["train"]
    rows = epoch_rows(train.size, seed=5, epoch=0)[:16]
    pixels = torch.stack([torch.as_tensor(train.dataset[row][0]) for row in rows])
    labels = torch.tensor([int(train.dataset[row][1]) for row in rows])
    return data.finish(pixels), labels


def test_sgd_takes_the_step_of_its_formula(tmp_path: Path) -> None:
    """timm's momentum is Nesterov's 0.9, whose first step is 1.9 times the gradient."""
    run = {"model": NO_DROPOUT, "steps": 1, "warmup": 0, "schedule": "constant", "clip": None}
    fit(settings(**run, method="baseline", opt="sgd", lr=0.1), tmp_path / "run")
    model = ls.load(NO_DROPOUT, seed=5)
    images, labels = first_batch()
    F.cross_entropy(model(images), labels).backward()
    expected = {n: w - 0.19 * w.grad for n, w in model.named_parameters() if w.grad is not None}
    ended = weights(tmp_path / "run")
    for name, weight in expected.items():
        assert torch.allclose(ended[name], weight, atol=1e-6), name


def test_a_run_begins_with_scaled_branches(tmp_path: Path) -> None:
    run = settings(model=NO_DROPOUT, method="anyorder", branch_scale=0.5, steps=1, lr=1e-9)
    fit(run, tmp_path / "run")
    begun = ls.load(NO_DROPOUT, seed=5).state_dict()
    for name, weight in weights(tmp_path / "run").items():
        drawn = name.startswith(("blocks.1.", "blocks.2."))
        is_last = ".attn.proj." in name or ".mlp.fc2." in name
        factor = 0.5 if drawn and is_last else 1.0
        torch.testing.assert_close(weight, begun[name] * factor, rtol=0, atol=1e-8)


def test_drop_path_is_the_argument_of_timm(tmp_path: Path) -> None:
    run = {"steps": 2, "method": "anyorder"}
    fit(settings(**run, drop_path=0.3), tmp_path / "option")
    fit(settings(**run, model=f"{MODEL}&drop_path_rate=0.3"), tmp_path / "spec")
    assert_same_weights(weights(tmp_path / "option"), weights(tmp_path / "spec"))
    with refuses(UsageError):
        fit(settings(**run, model="bundled:digits", drop_path=0.3), tmp_path / "other")


@pytest.mark.parametrize("name", ["adamx", "kron", "adahessian", "bnbadam", "lookahead_adam"])
def test_optimisers_that_are_not_there_or_cannot_resume(tmp_path: Path, name: str) -> None:
    with refuses(UsageError):
        fit(settings(opt=name), tmp_path / "run")


class Stopped(Exception):
    """The run is given up at a step."""


def test_all_of_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "log" and event["step"] == 5:
            raise Stopped

    fit(settings(**EVERYTHING), tmp_path / "whole")
    with pytest.raises(Stopped):
        fit(settings(**EVERYTHING), tmp_path / "resumed", on_event=listen)
    fit(settings(**EVERYTHING), tmp_path / "resumed")
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))
