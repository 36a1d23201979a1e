"""Groups of a batch, each in an order of its own: the slow path is each group alone."""

import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from runs import NO_DROPOUT, assert_same_weights, losses, settings, weights

import layershuffle as ls
from layershuffle.data import DataOptions, open_data
from layershuffle.errors import Interrupted, SettingsError
from layershuffle.models import image_view
from layershuffle.training import fit
from layershuffle.training.loop import EpochSampler, Event
from layershuffle.training.order_schedule import OrderSchedule, orders_by_row

SHUFFLED = OrderSchedule(policy=ls.Shuffled(), depth=12, seed=3)
GROUPED = OrderSchedule(policy=ls.Shuffled(), depth=12, seed=3, per_batch=4)


def test_one_order_per_batch_is_drawn_as_before():
    for step, micro_batch in [(0, 0), (7, 2)]:
        expected = ls.Shuffled().draw(12, seed=3, step=step, micro_batch=micro_batch)
        assert SHUFFLED.draw(step=step, micro_batch=micro_batch) == (expected,)


def test_every_group_of_every_forward_has_a_draw_of_its_own():
    drawn = [order for micro in range(3) for order in GROUPED.draw(step=5, micro_batch=micro)]
    assert drawn == [ls.Shuffled().draw(12, seed=3, step=5, micro_batch=k) for k in range(12)]
    assert len(set(drawn)) == 12


@pytest.mark.parametrize("images", [1, 3, 4, 640, 641])
def test_every_sample_is_in_one_group(images):
    orders = OrderSchedule(policy=ls.Shuffled(), depth=12, seed=3, per_batch=4).draw(
        step=0, micro_batch=0
    )
    rows = orders_by_row(orders, images)
    assert len(rows) == images
    sizes = [rows.count(order) for order in orders]
    assert sum(sizes) == images
    assert max(sizes) - min(sizes) <= 1


def test_parts_of_a_batch_have_the_groups_of_the_whole():
    orders = OrderSchedule(policy=ls.Shuffled(), depth=12, seed=3, per_batch=4).draw(
        step=0, micro_batch=0
    )
    assert orders_by_row(orders, 16) == orders_by_row(orders, 8) * 2


def test_exits_are_uniform_and_leave_something_to_run():
    schedule = OrderSchedule(policy=ls.Shuffled(), depth=12, seed=3, exits=True)
    orders = schedule.draw(step=0, micro_batch=0)
    drawn = [schedule.exit_after(orders, step=step, micro_batch=0) for step in range(11_000)]
    counts = [drawn.count(steps) for steps in range(1, 12)]
    assert sum(counts) == len(drawn)
    # Chi-square with 10 degrees of freedom: 29.6 once in a thousand seeds.
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 29.6
    again = [schedule.exit_after(orders, step=step, micro_batch=1) for step in range(1_000)]
    assert 0.05 < sum(map(int.__eq__, drawn, again)) / 1000 < 0.15
    # Not drawn from the words that shuffled the blocks, nor the same in every process.
    first = [schedule.draw(step=step, micro_batch=0)[0].blocks[0] for step in range(11_000)]
    pairs = Counter(zip(first, drawn, strict=True))
    expected = 11_000 / 12 / 11
    squares = [
        (pairs[block, steps] - expected) ** 2 / expected
        for block in range(12)
        for steps in range(1, 12)
    ]
    assert sum(squares) < 185  # 131 degrees of freedom: less once in a thousand seeds
    other = replace(schedule, rank=1)
    own = [other.exit_after(orders, step=step, micro_batch=0) for step in range(1_000)]
    assert 0.05 < sum(map(int.__eq__, drawn, own)) / 1000 < 0.15
    # The longest order of a batch decides, and nothing is left to run after a single block.
    short = [ls.ExecutionOrder((3, 1, 2), 12), ls.ExecutionOrder((3,), 12)]
    assert {schedule.exit_after(short, step=step, micro_batch=0) for step in range(99)} == {1, 2}
    single = [ls.ExecutionOrder((3,), 12)]
    assert schedule.exit_after(single, step=0, micro_batch=0) == 1
    assert SHUFFLED.exit_after(orders, step=0, micro_batch=0) is None


ARMS = {
    "shuffled": {},
    "drop": {"drop": 0.5},
    "depth": {"method": "layershuffle-depth", "min_blocks": 1},
    "predict": {"method": "layershuffle-predict", "prediction": {"loss": "mean"}},
    "position": {"method": "layershuffle-position"},
    "exit": {"method": "layershuffle-exit"},
    "exits of one order, checkpointed": {
        "method": "layershuffle-exit",
        "exit_weight": 2.0,
        "orders_per_batch": 1,
        "activation_checkpointing": True,
    },
    "exits of rounds": {"method": "layershuffle-parallel", "exit_weight": 0.5},
    "exits of positions": {"method": "layershuffle-predict", "exit_weight": 0.5},
}


@pytest.mark.parametrize("name", ARMS)
def test_groups_train_the_mean_over_groups_alone(tmp_path, name):
    """Two micro-batches of ten images in three groups (4, 3 and 3), written out."""
    run = settings(**{
        "model": NO_DROPOUT, "batch_size": 20, "accumulate": 2, "orders_per_batch": 3, "steps": 3,
        "eval_every": 3, "warmup": 0, "schedule": "constant", **ARMS[name],
    })  # fmt: skip
    events: list[Event] = []
    fit(run, tmp_path / "run", listeners=[events.append])
    expected_losses, expected = by_hand(run)
    assert losses(events) == pytest.approx(expected_losses, rel=1e-5)
    assert_same_weights(weights(tmp_path / "run"), expected, tolerance=2e-6)


def by_hand(run):
    method = run.find_method()
    host = ls.load(run.model, seed=run.seed)
    data = open_data(run.data, image_view(host), options=DataOptions(seed=run.seed))
    model = ls.add_position(
        host,
        encoding=run.encoding if method.encoding else None,
        prediction=run.prediction if method.prediction else None,
        seed=run.seed,
    ).train()
    train = data.splits["train"].dataset
    rows = list(EpochSampler(train, run.seed))
    adam = torch.optim.Adam(model.parameters(), lr=run.lr, eps=1e-6)
    totals = []
    for step in range(3):
        total = 0.0
        for micro in range(2):
            start = 20 * step + 10 * micro
            items = [train[row] for row in rows[start : start + 10]]
            pixels = data.finish(torch.stack([pixels for pixels, _ in items]))
            labels = torch.tensor([int(label) for _, label in items])
            groups = run.orders_per_batch
            orders = [
                method.policy.draw(4, seed=run.seed, step=step, micro_batch=groups * micro + group)
                for group in range(groups)
            ]
            schedule = OrderSchedule(
                policy=method.policy, depth=4, seed=run.seed, per_batch=groups, exits=True
            )
            exit_after = schedule.exit_after(orders, step=step, micro_batch=micro)
            for group, order in enumerate(orders):
                images, truth = pixels[group::groups], labels[group::groups]
                loss = group_loss(model, images, truth, order)
                if method.exit_weight is not None:
                    with ls.running(model, cut(order, exit_after)):
                        loss = loss + method.exit_weight * F.cross_entropy(model(images), truth)
                loss = loss * len(truth) / 10 / 2
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        totals.append(total)
    parts = {k: v for k, v in model.state_dict().items() if not k.startswith("backbone.")}
    return totals, {**model.backbone.state_dict(), **parts}


def cut(order, steps):
    versions = None if order.versions is None else order.versions[:steps]
    return ls.ExecutionOrder(order.blocks[:steps], order.depth, versions)


def group_loss(model, pixels, labels, order):
    with ls.running(model, order):
        if model.prediction is None:
            return F.cross_entropy(model(pixels), labels)
        with model.guessing() as guesses:
            return F.cross_entropy(model(pixels), labels) + guesses.loss()


def test_killed_and_resumed(tmp_path):
    run = settings(orders_per_batch=4, accumulate=2, activation_checkpointing=True)
    fit(run, tmp_path / "whole")

    def stop(event):
        if event["kind"] == "log" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="Stopped at step 4"):
        fit(run, tmp_path / "stopped", listeners=[stop])
    fit(run, tmp_path / "stopped")
    assert_same_weights(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


def test_more_groups_than_images():
    with pytest.raises(SettingsError, match="orders_per_batch=9 is more than the 8 images"):
        settings(batch_size=16, accumulate=2, orders_per_batch=9)


def test_settings_of_older_versions_are_at_their_defaults(tmp_path):
    """A run directory from before a setting existed goes on, or is finished, as it was."""
    fit(settings(steps=1), tmp_path)
    path = tmp_path / "settings.yaml"
    hidden = ("orders_per_batch", "compile", "parallel", "rank_orders")
    old = [line for line in path.read_text().splitlines() if line.split(":")[0] not in hidden]
    path.write_text("\n".join(old) + "\n")
    assert fit(settings(steps=1), tmp_path).steps == 1
