"""scripts/changed_training.py: its orders, losses and trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import breaks
import changed_training
import pytest
import torch
import torch.nn.functional as F

import layershuffle as ls
from layershuffle.data.digits import DigitPairs

SEEDS = (0, 1, 2)
RUNS = {name: changed_training.training(name, seed=0) for name in changed_training.NAMES}
ORDER = ls.Shuffled().draw(12, seed=5, step=5)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    data = DigitPairs("train", 8)
    return breaks.finish(data.canvases), data.labels


def lengths(name: str, *, seed: int = 0, budget: int = 500) -> list[int]:
    """How many blocks each step runs."""
    run = changed_training.training(name, seed=seed, budget=budget)
    return [len(changed_training.order_of(run, step)) for step in range(run.steps)]


@pytest.mark.parametrize("name", [changed_training.RAMP, changed_training.LAST_THIRD])
@pytest.mark.parametrize("budget", [500, 2_000])
def test_changes_with_fewer_blocks_per_step_run_as_many(name: str, budget: int) -> None:
    for seed in SEEDS:
        run_blocks = sum(lengths(name, seed=seed, budget=budget))
        assert run_blocks == pytest.approx(budget * 12, rel=0.01)


def test_more_blocks_are_left_out_later() -> None:
    ramp = [count for seed in SEEDS for count in lengths(changed_training.RAMP, seed=seed)[:100]]
    late = [count for seed in SEEDS for count in lengths(changed_training.RAMP, seed=seed)[-100:]]
    # Shares of 0 to 0.036 and of 0.164 to 0.2.
    assert sum(ramp) / len(ramp) == pytest.approx(12 * (1 - 0.018), abs=0.15)
    assert sum(late) / len(late) == pytest.approx(12 * (1 - 0.182), abs=0.3)
    third = lengths(changed_training.LAST_THIRD)
    assert set(third[:380]) == {12}
    assert (min(third[381:]), max(third[381:])) == (3, 12)


def test_orders_are_those_of_plain_training_where_nothing_is_changed() -> None:
    plain = RUNS[changed_training.PLAIN]
    orders = [changed_training.order_of(plain, step) for step in range(500)]
    assert orders == [ls.Shuffled().draw(12, seed=0, step=step) for step in range(500)]
    late = [changed_training.order_of(RUNS[changed_training.RADIUS], s) for s in range(50, 500)]
    assert late == orders[50:]
    run = RUNS[changed_training.LAST_THIRD]
    assert [changed_training.order_of(run, step) for step in range(380)] == orders[:380]


@pytest.mark.parametrize("name", [changed_training.ROUNDS, changed_training.TIED_ROUNDS])
def test_rounds_are_of_up_to_four_blocks(name: str) -> None:
    policy = ls.Shuffled(parallel=(1, 4))
    orders = [changed_training.order_of(RUNS[name], step) for step in range(50)]
    assert orders == [policy.draw(12, seed=0, step=step) for step in range(50)]


def test_no_radius_is_the_sequential_order() -> None:
    assert list(changed_training.nearby(0.0, seed=1, step=1)) == list(range(12))


@pytest.mark.parametrize("radius", [3.0, 6.0])
def test_blocks_far_apart_keep_their_sequence(radius: float) -> None:
    longest = 0
    for step in range(200):
        order = list(changed_training.nearby(radius, seed=1, step=step))
        swapped = [a - b for at, a in enumerate(order) for b in order[at + 1 :] if a > b]
        longest = max(longest, *swapped, 0)
    assert radius - 1 <= longest <= radius


def test_the_exit_loss_is_that_of_the_shortened_order(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    images, labels = batch
    model = ls.load("bundled:digits").eval()
    position = int(torch.randint(11, (), generator=torch.Generator().manual_seed(7)))
    loss = changed_training.with_exit(
        model, images, labels, ORDER, generator=torch.Generator().manual_seed(7)
    )
    losses = []
    for length in (12, position + 1):
        with ls.running(model, ls.ExecutionOrder(list(ORDER)[:length], 12)):
            losses.append(F.cross_entropy(model(images), labels))
    torch.testing.assert_close(loss, losses[0] + 0.3 * losses[1])
    run = RUNS[changed_training.EXIT]
    plain, with_exit = (
        changed_training.loss_of(model, images, labels, run=each, step=0)
        for each in (RUNS[changed_training.PLAIN], run)
    )
    assert with_exit > plain


def test_the_drawn_order_learns_from_the_sequential_one(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    images, labels = batch
    model = ls.load("bundled:digits").eval()
    ordered = model(images[:4])
    with ls.running(model, changed_training.order_of(RUNS[changed_training.BOTH], 3)):
        drawn = model(images[:4])
    truth, teacher = labels[:4], ordered.detach().softmax(1)
    divergence = (teacher * (teacher.log() - drawn.log_softmax(1))).sum(1).mean()
    without = (F.cross_entropy(ordered, truth) + F.cross_entropy(drawn, truth)) / 2
    names = (changed_training.BOTH, changed_training.DISTILLED)
    for name, expected in zip(names, (without, without + divergence), strict=True):
        loss = changed_training.loss_of(model, images, labels, run=RUNS[name], step=3)
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss, model.head.bias)
        (wanted,) = torch.autograd.grad(expected, model.head.bias, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_products_change_nothing_at_first_and_every_place_has_its_own(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    images, _ = batch
    plain, model = (
        changed_training.tied(ls.load("bundled:digits"), rank=rank).eval() for rank in (0, 4)
    )
    with torch.no_grad(), ls.running(model, ORDER), ls.running(plain, ORDER):
        assert torch.equal(model(images), plain(images))
    weights = [sum(weight.numel() for weight in each.parameters()) for each in (plain, model)]
    # Per place: in and out of qkv, proj and both layers of the perceptron, times the rank.
    assert weights[1] - weights[0] == 12 * 4 * ((64 + 192) + (64 + 64) + (64 + 128) + (128 + 64))
    last = ls.blocks_of(model)[11].attn.qkv
    with torch.no_grad():
        last.up.weight.fill_(0.1)
        assert not torch.equal(model(images), plain(images))
        torch.testing.assert_close(
            last(torch.ones(64)), last.linear(torch.ones(64)) + 0.1 * last.down.weight.sum() / 4
        )


def short(name: str) -> changed_training.ChangedRun:
    return replace(RUNS[name], steps=3, warmup=1)


def test_plain_training_is_that_of_the_other_scripts(tmp_path: Path) -> None:
    run = breaks.BreakRun(
        question="", case="", arm="layershuffle", seed=0, start="bundled", steps=3, warmup=1,
        pairs=128,
    )  # fmt: skip
    expected = breaks.train(run, tmp_path)[0].state_dict()
    weights = changed_training.train(short(changed_training.PLAIN), pairs=128).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_averaged_weights_lie_between_those_of_the_steps() -> None:
    last = changed_training.train(short(changed_training.PLAIN), pairs=128).state_dict()
    average = changed_training.train(short(changed_training.AVERAGED), pairs=128).state_dict()
    first = ls.load("bundled:digits", seed=0).state_dict()
    way = (last["head.weight"] - first["head.weight"]).norm()
    assert 0 < (average["head.weight"] - first["head.weight"]).norm() < way
    for count, decay in ((0, 0.1), (8, 0.5), (10_000, 0.982)):
        average = changed_training.averaged(torch.ones(2), torch.zeros(2), count)
        torch.testing.assert_close(average, torch.full((2,), decay))


def test_a_tied_model_is_tied_after_training() -> None:
    rank = "one tied block, rank 4 per place"
    for name in (changed_training.TIED, changed_training.TIED_ROUNDS, rank):
        blocks = ls.blocks_of(changed_training.train(short(name), pairs=128))
        tied = [block.norm1.weight for block in blocks]
        assert all(weight is tied[0] for weight in tied)
    products = [block.attn.qkv.up.weight for block in blocks]
    assert all(weight.abs().max() > 0 for weight in products)
    assert not torch.equal(products[0], products[1])
