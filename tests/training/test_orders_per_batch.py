"""Groups of a batch, each in an order of its own: the slow path is each group alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from runs import NO_DROPOUT, assert_same_weights, losses, settings, weights

import layershuffle as ls
from layershuffle.data import DataOptions, open_data
from layershuffle.ground.errors import SettingsError
from layershuffle.models import blank_images, image_view
from layershuffle.training import fit
from layershuffle.training.loop import Event, epoch_rows
from refusals import refuses

ARMS: dict[str, dict[str, object]] = {
    "shuffled": {},
    "anyorder": {"method": "anyorder"},
    "scheduled": {"orders_per_batch": 1, "schedule": "cosine", "warmup": 1},
    "layerdrop with whole orders": {
        "method": "layerdrop",
        "sequential_every": 2,
        "max_parallel": 2,
    },
    "drop": {"block_drop": 0.5},
    "depth": {"min_kept": 1},
    "predict": {"method": "layershuffle-predict", "prediction": {"loss": "mean"}},
    "position": {"method": "layershuffle-position"},
    "exit": {"exit_weight": 0.3},
    "exits of one order, checkpointed": {
        "exit_weight": 2.0,
        "orders_per_batch": 1,
        "activation_checkpointing": True,
    },
    "exits of rounds": {"max_parallel": 4, "exit_weight": 0.5},
    "everything": {
        "method": "anyorder",
        "block_drop": 0.3,
        "max_parallel": 2,
        "distinct": 2,
        "position": "predict",
    },
    "whole orders of a random part": {"method": "baseline", "min_kept": 1, "sequential_every": 3},
    "exits of positions": {"method": "layershuffle-predict", "exit_weight": 0.5},
    # The last forward has one image: its order has one step, the exit comes after the second one.
    "rest": {
        "method": "anyorder",
        "block_drop": 0.5,
        "data": "digit-pairs?train=51&validation=32&test=32",
        "seed": 7,
    },
}


@pytest.mark.parametrize("name", ARMS)
def test_groups_train_the_mean_over_groups_alone(tmp_path, name):
    """Two micro-batches of ten images in three groups (4, 3 and 3), written out."""
    run = settings(**{
        "model": NO_DROPOUT, "batch_size": 20, "accumulate": 2, "orders_per_batch": 3, "steps": 3,
        "eval_every": 3, "warmup": 0, "schedule": "constant", **ARMS[name],
    })  # fmt: skip
    events: list[Event] = []
    fit(run, tmp_path / "run", on_event=events.append)
    expected_losses, expected = by_hand(run)
    assert losses(events) == pytest.approx(expected_losses, rel=1e-5)
    assert_same_weights(weights(tmp_path / "run"), expected, tolerance=2e-6)


def by_hand(run):
    method = run.build_method()
    host = ls.load(run.model, seed=run.seed)
    data = open_data(run.data, image_view(host), options=DataOptions(seed=run.seed))
    model = method.prepare(host, blank_images(host, 1)).train()
    train = data.splits["train"].dataset
    rows = epoch_rows(len(train), seed=run.seed, epoch=0)
    adam = torch.optim.Adam(model.parameters(), lr=run.lr, eps=1e-6)
    totals = []
    for step in range(3):
        total, turn = 0.0, torch.pi * (step - run.warmup) / (run.steps - run.warmup)
        if run.schedule == "cosine":
            share = step / run.warmup if step < run.warmup else (1 + math.cos(turn)) / 2
            adam.param_groups[0]["lr"] = run.lr * share
        batch = rows[20 * step : 20 * (step + 1)]
        for micro in range(2):
            items = [train[row] for row in batch[10 * micro : 10 * (micro + 1)]]
            pixels = data.finish(torch.stack([pixels for pixels, _ in items]))
            labels = torch.tensor([int(label) for _, label in items])
            groups = method.orders_per_batch
            orders = [
                method.policy.draw(4, seed=run.seed, step=step, micro_batch=groups * micro + group)
                for group in range(groups)
            ]
            exit_after = method.exit_after(orders, step=step, micro_batch=micro)
            for group, order in enumerate(orders[: len(items)]):
                images, truth = pixels[group::groups], labels[group::groups]
                loss, final = group_loss(model, images, truth, order)
                if exit_after is not None:
                    with ls.running(model, order.beginning(exit_after, last=method.fixed[1])):
                        early = model(images)
                    loss = loss + (method.exit_weight or 0.0) * F.cross_entropy(early, truth)
                    own = F.cross_entropy(early, final.softmax(1)) - F.cross_entropy(
                        final, final.softmax(1)
                    )
                    loss = loss + (method.self_distillation or 0.0) * own
                loss = loss * len(truth) / len(batch)
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        totals.append(total)
    parts = {k: v for k, v in model.state_dict().items() if not k.startswith("backbone.")}
    return totals, {**host.state_dict(), **(parts if model is not host else {})}


def group_loss(model, pixels, labels, order):
    with ls.running(model, order):
        if getattr(model, "prediction", None) is None:
            logits, guessed = model(pixels), 0.0
        else:
            with model.guessing() as guesses:
                logits = model(pixels)
            guessed = guesses.loss()
    return F.cross_entropy(logits, labels) + guessed, logits.detach()


def test_more_groups_than_images():
    with refuses(SettingsError):
        settings(batch_size=16, accumulate=2, orders_per_batch=9)
