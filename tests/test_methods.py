"""Methods: presets and their options, the orders that they draw, and the losses that train them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, HEADS, PATCH, SIZE, WIDTH, images
from layershuffle.core import losses
from layershuffle.core.methods import METHOD_OPTIONS, PRESETS, Method
from layershuffle.core.policies import Kept, LayerDrop, OrderPolicy, Sequential, Shuffled
from layershuffle.core.stack import blocks_of, stack_of
from layershuffle.core.tying import places_tied, share_weights
from layershuffle.ground.errors import StackError, UsageError
from layershuffle.training.settings import FitSettings

FAMILY = FAMILIES["timm-vit"]
BATCH = 6
LABELS = torch.arange(BATCH) % CLASSES


@pytest.mark.parametrize(
    ("name", "policy", "selects_by", "more"),
    [
        ("anyorder", Shuffled(sequential_every=4, fixed=(1, 1)), "arbitrary",
         {"orders_per_batch": 4, "sequential_every": 4, "exit_weight": 0.3,
          "self_distillation": 0.3, "branch_scale": 0.1, "fixed": (1, 1)}),
        ("baseline", Sequential(), "sequential", {}),
        ("layershuffle", Shuffled(), "arbitrary", {}),
        ("layershuffle-position", Shuffled(), "arbitrary", {"position": "encode"}),
        ("layershuffle-predict", Shuffled(), "arbitrary", {"position": "predict"}),
        ("layerdrop", LayerDrop(0.2), "sequential", {"block_drop": 0.2}),
        ("truncated", Sequential(), "sequential", {"kept": 3}),
    ],
)  # fmt: skip
def test_presets(name: str, policy: OrderPolicy, selects_by: str, more: dict[str, Any]) -> None:
    method = Method(name, kept=more.get("kept"))
    assert method.policy == policy
    assert method.selects_by == selects_by
    plain = dict.fromkeys(METHOD_OPTIONS) | {
        "orders_per_batch": 1,
        "branch_scale": 1,
        "position": "none",
        "fixed": (0, 0),
    }
    assert method.options == plain | more


def test_anyorder_is_the_default() -> None:
    assert len(PRESETS) == 7, "all are tested above"
    assert ls.Method() == Method("anyorder")
    assert FitSettings(model="m", data="d").build_method() == Method("anyorder")


def test_the_options_of_a_method_are_settings_of_fit() -> None:
    for option in dataclasses.fields(Method):
        assert option.name == "name" or option.name in FitSettings.model_fields
    for name in (*METHOD_OPTIONS, "encoding", "prediction"):
        assert FitSettings.model_fields[name].description, f"{name} has no docstring in Method"
    assert FitSettings.model_fields["block_drop"].description == (
        "Probability with which a block is left out (layerdrop: 0.2; the others: none is left out)."
    )
    options: dict[str, Any] = {
        "orders_per_batch": 2, "sequential_every": 3, "exit_weight": 0.5,
        "self_distillation": 0.2, "branch_scale": 0.5, "min_kept": 2,
        "max_parallel": 3, "fixed": (1, 0), "distinct": 2, "position": "encode", "kept": 4,
        "choose": "last",
    }  # fmt: skip
    method = FitSettings(method="layershuffle", model="m", data="d", seed=9, **options)
    assert method.build_method() == Method("layershuffle", seed=9, **options)


@pytest.mark.parametrize(("name", "kind"), [("baseline", Sequential), ("layershuffle", Shuffled)])
def test_options_reach_the_policy(name: str, kind: Any) -> None:
    rounds = {"parallel": (1, 3), "sequential_every": 5}
    options = {"max_parallel": 3, "sequential_every": 5}
    assert Method(name, min_kept=2, **options).policy == kind(kept=(2, None), **rounds)
    dropping = LayerDrop(0.3, **rounds) if kind is Sequential else Shuffled(drop=0.3, **rounds)
    assert Method(name, block_drop=0.3, **options).policy == dropping
    assert Method(name, max_parallel=3).policy == kind(parallel=(1, 3))


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "did you mean 'layershuffle'": ("layershufle", {}),
    "one of anyorder": ("zzz", {}),
    "both say how many": ("layerdrop", {"min_kept": 2}),
    "--kept 6": ("truncated", {}),
    "how many of them": ("baseline", {"choose": "first"}),
    "sequential one already": ("baseline", {"sequential_every": 4}),
    "at least 2": ("layershuffle", {"sequential_every": 1}),
    "in [0, 1)": ("layerdrop", {"block_drop": 1.0}),
    "exit_weight must be above 0": ("anyorder", {"exit_weight": 0.0}),
    "self_distillation must be above 0": ("anyorder", {"self_distillation": -0.3}),
    "branch_scale must be a number above 0, got 0.0": ("anyorder", {"branch_scale": 0.0}),
    "is a start for drawn orders": ("layerdrop", {"branch_scale": 0.1}),
    "branch_scale must be a number above 0, got nan": ("anyorder", {"branch_scale": math.nan}),
    "orders_per_batch must be a whole number from 1, got 0": ("anyorder", {"orders_per_batch": 0}),
    "max_parallel must be a whole number from 1, got 2.5": ("anyorder", {"max_parallel": 2.5}),
    "one of none, encode, predict, got 'encoding'": ("anyorder", {"position": "encoding"}),
    "more than the 3 blocks": ("truncated", {"kept": 3, "distinct": 4}),
    "of which 2 keep their place": ("truncated", {"kept": 4, "distinct": 3, "fixed": (1, 1)}),
    "min_kept=1 is too few": ("anyorder", {"min_kept": 1, "fixed": (1, 1)}),
    "kept=3 is too few": ("truncated", {"kept": 3, "fixed": [1, 1]}),
    "two numbers of blocks from 0, got (1,)": ("anyorder", {"fixed": (1,)}),
    "two numbers of blocks from 0, got (-1, 1)": ("anyorder", {"fixed": (-1, 1)}),
}


@pytest.mark.parametrize("phrase", BAD)
def test_refused_with_the_reason(phrase: str) -> None:
    name, options = BAD[phrase]
    with pytest.raises(UsageError) as caught:
        Method(name, **options)
    assert phrase in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("anyorder", {"min_kept": 2}),
        ("truncated", {"kept": 4, "fixed": (1, 1)}),
        ("truncated", {"kept": 3, "distinct": 3}),
        ("truncated", {"kept": 4, "distinct": 2, "fixed": (1, 1)}),
        ("layershuffle", {"kept": 3, "min_kept": 3}),
    ],
)
def test_numbers_of_blocks_that_just_fit(name: str, options: dict[str, Any]) -> None:
    depth = options.get("kept", 4)
    (order,) = Method(name, **{"orders_per_batch": 1, **options}).orders(depth, step=1)
    assert len(order) == depth or "min_kept" in options
    assert set(order.blocks) <= {*range(depth)}


# --- orders and exits -----------------------------------------------------------------------------

PLACES = {"step": st.integers(0, 999), "micro_batch": st.integers(0, 7), "rank": st.integers(0, 3)}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.integers(1, 6), st.integers(0, 99), st.fixed_dictionaries(PLACES))
def test_every_group_of_every_forward_has_a_draw_of_its_own(
    groups: int, seed: int, place: dict[str, int]
) -> None:
    method = Method("layershuffle", orders_per_batch=groups, seed=seed)
    first = place["micro_batch"] * groups
    numbers = range(first, first + groups)
    name = {"seed": seed, "step": place["step"], "rank": place["rank"]}
    wanted = tuple(Shuffled().draw(12, micro_batch=number, **name) for number in numbers)
    assert method.orders(12, **place) == wanted
    assert method.orders(12, **place) == wanted, "a pure function"


def test_exits_are_uniform_and_leave_something_to_run() -> None:
    method = Method("layershuffle", exit_weight=0.3, seed=3)
    orders = method.orders(12, step=0)
    drawn = [method.exit_after(orders, step=step) for step in range(11_000)]
    counts = [drawn.count(steps) for steps in range(1, 12)]
    assert sum(counts) == len(drawn)
    # Chi-square with 10 degrees of freedom: 29.6 once in a thousand seeds.
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 29.6
    again = [method.exit_after(orders, step=step, micro_batch=1) for step in range(1_000)]
    assert 0.05 < sum(map(int.__eq__, drawn, again)) / 1000 < 0.15
    # Not drawn from the words that shuffled the blocks, nor the same in every process.
    first = [method.orders(12, step=step)[0].blocks[0] for step in range(11_000)]
    pairs = Counter(zip(first, drawn, strict=True))
    expected = 11_000 / 12 / 11
    squares = [
        (pairs[block, steps] - expected) ** 2 / expected
        for block in range(12)
        for steps in range(1, 12)
    ]
    assert sum(squares) < 185  # 131 degrees of freedom: less once in a thousand seeds
    own = [method.exit_after(orders, step=step, rank=1) for step in range(1_000)]
    assert 0.05 < sum(map(int.__eq__, drawn, own)) / 1000 < 0.15
    # The longest order of a batch decides, and nothing is left to run after a single block.
    short = [ls.ExecutionOrder((3, 1, 2), 12), ls.ExecutionOrder((3,), 12)]
    assert {method.exit_after(short, step=step) for step in range(99)} == {1, 2}
    assert method.exit_after([ls.ExecutionOrder((3,), 12)], step=0) == 1
    assert Method("layershuffle").exit_after(orders, step=0) is None
    taught = Method("layershuffle", self_distillation=0.1, seed=3)
    assert [taught.exit_after(orders, step=step) for step in range(99)] == drawn[:99]


# --- losses ---------------------------------------------------------------------------------------


def slow_loss(method: Method, model: nn.Module, *, step: int, smoothing: float = 0.0) -> Tensor:
    """Each group alone, its exit in a forward of its own, the position guesses beside it."""
    x = images(BATCH)
    orders = method.orders(DEPTH, step=step)
    exit_after = method.exit_after(orders, step=step)
    total = torch.zeros(())
    for group, order in enumerate(orders):
        own, truth = x[group :: len(orders)], LABELS[group :: len(orders)]
        with ls.running(model, order):
            if method.position == "predict":
                with model.guessing() as guesses:
                    final = model(own)
                loss = guesses.loss()
            else:
                final, loss = model(own), torch.zeros(())
        loss = loss + F.cross_entropy(final, truth, label_smoothing=smoothing)
        if exit_after is not None:
            with ls.running(model, order.beginning(exit_after, last=method.fixed[1])):
                early = model(own)
            taught = F.cross_entropy(early, truth, label_smoothing=smoothing)
            loss = loss + (method.exit_weight or 0.0) * taught
            own_answer = final.detach().softmax(1)
            gap = own_answer * (own_answer.log() - early.softmax(1).log())
            loss = loss + (method.self_distillation or 0.0) * gap.sum(1).mean()
        total = total + loss * len(own) / BATCH
    return total


METHODS = [
    Method("anyorder"),
    Method("anyorder", max_parallel=2, block_drop=0.5, seed=1),
    Method("anyorder", fixed=(0, 0)),
    Method("anyorder", fixed=(0, 0), max_parallel=3, block_drop=0.3),
    Method("anyorder", fixed=(0, 0), position="predict", min_kept=2),
    Method("layershuffle-position", exit_weight=0.5),
    Method("layerdrop", orders_per_batch=3, sequential_every=2),
    Method("baseline", min_kept=1, max_parallel=2, exit_weight=1.0),
    Method("layershuffle", orders_per_batch=2, self_distillation=0.7),
    Method("anyorder", fixed=(0, 2), position="predict", min_kept=2),
    Method("layershuffle-position", fixed=(1, 1), exit_weight=0.5),
    Method("layerdrop", fixed=(2, 0), orders_per_batch=3, sequential_every=2, exit_weight=0.5),
]


def both_losses(method: Method, **options: Any) -> tuple[tuple[float, Any], tuple[float, Any]]:
    """Value and gradients of the method's loss and of the slow one, in one model."""
    model = method.prepare(FAMILY.wrapped(), images(1))
    results = []
    for loss in (
        method.loss(model, images(BATCH), LABELS, step=3, **options),
        slow_loss(method, model, step=3, smoothing=0.1 if options else 0.0),
    ):
        model.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.item(), grads))
    return results[0], results[1]


def assert_equal_losses(fast: tuple[float, Any], slow: tuple[float, Any]) -> None:
    assert fast[0] == pytest.approx(slow[0], rel=1e-5)
    assert fast[1].keys() == slow[1].keys()
    for name, gradient in fast[1].items():
        torch.testing.assert_close(gradient, slow[1][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_loss_is_that_of_its_groups_alone(method: Method) -> None:
    assert_equal_losses(*both_losses(method))


def test_the_criterion_is_the_users() -> None:
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert_equal_losses(*both_losses(Method("anyorder"), criterion=smoothed))


def test_logits_come_with_the_loss_in_the_order_of_the_images() -> None:
    method = Method("anyorder", seed=2)
    model = method.prepare(FAMILY.wrapped(), images(1))
    orders = method.orders(DEPTH, step=5)
    loss, logits = method.loss_and_logits(model, images(BATCH), LABELS, orders=orders, step=5)
    assert loss.item() == method.loss(model, images(BATCH), LABELS, step=5).item()
    for row in range(BATCH):
        order = orders[row % len(orders)]  # row i is in group i mod G
        with ls.running(model, order), torch.no_grad():
            alone = model(images(BATCH)[row : row + 1])[0]
        torch.testing.assert_close(logits[row].detach(), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_model_without_orders_per_sample_trains_group_by_group(
    method: Method, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(
        model: nn.Module, order: Any, *, exit_after: int | None = None, logits: Any = None
    ) -> AbstractContextManager[Any]:
        if exit_after is not None or not isinstance(order, ls.ExecutionOrder):
            raise StackError("This model mixes the samples of a batch")
        del logits
        return ls.running(model, order)

    monkeypatch.setattr(losses, "running", refusing)
    assert_equal_losses(*both_losses(method))
    is_mixed = method.orders_per_batch > 1 or method.exit_weight is not None
    assert caplog.text.count("one after the other") == is_mixed
    assert ("mixes the samples" in caplog.text) is is_mixed
    model = method.prepare(FAMILY.wrapped(), images(1))
    method.loss(model, images(BATCH), LABELS, step=0)
    caplog.clear()
    method.loss(model, images(BATCH), LABELS, step=1)
    assert not caplog.text, "said once"


def test_a_model_without_the_parts_of_a_method_is_refused() -> None:
    for options in ({"distinct": 2}, {"position": "encode"}, {"position": "predict"}):
        method, model = Method("layershuffle", **options), FAMILY.wrapped()
        with pytest.raises(UsageError) as caught:
            method.loss(model, images(BATCH), LABELS, step=0)
        assert "method.prepare(model, images)" in str(caught.value)
        method.loss(method.prepare(model), images(BATCH), LABELS, step=0)
    with pytest.raises(UsageError) as caught:
        Method("truncated", kept=2).prepare(FAMILY.wrapped())
    assert 'truncate(model, "0,3")' in str(caught.value)
    positioned = Method("layershuffle-position").prepare(FAMILY.wrapped())
    assert Method("layershuffle-position").prepare(positioned) is positioned
    with pytest.raises(UsageError):
        Method("layershuffle").prepare(positioned)


def test_tied_models_are_tied_in_place() -> None:
    model = Method("layershuffle", distinct=2).prepare(FAMILY.wrapped())
    assert places_tied(blocks_of(model)) == (0, 0, 2, 2)
    assert share_weights(blocks_of(model))
    assert not share_weights(blocks_of(ls.wrap(FAMILY.plain())))
    assert places_tied(blocks_of(ls.tie(FAMILY.plain(), distinct=1))) == (0,) * DEPTH


# --- every option with every other ----------------------------------------------------------------

CHOICES: dict[str, list[Any]] = {
    "orders_per_batch": [1, 2, 4],
    "sequential_every": [None, 2, 4],
    "exit_weight": [None, 0.3],
    "self_distillation": [None, 0.3],
    "branch_scale": [None, None, 0.1, 1],
    "block_drop": [None, None, 0.4],
    "min_kept": [None, None, 1, 3],
    "max_parallel": [None, None, 1, 3],
    "fixed": [None, None, (1, 1), (0, 2), (2, 0)],
    "distinct": [None, None, 1, 3],
    "position": [None, "none", "encode", "predict"],
    "kept": [None, None, None, 2, 4],
    "choose": [None, None, None, "last", "spaced"],
}


def combinations(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Methods with random options, the same at every run."""
    draw = random.Random(39)
    for _ in range(count):
        options = {name: draw.choice(values) for name, values in CHOICES.items()}
        yield draw.choice(list(PRESETS)), options


def excluded(name: str, given: dict[str, Any]) -> bool:
    """Whether the options exclude each other, by the rules as the pages state them."""
    order, own = PRESETS[name]
    options = {key: own.get(key) if value is None else value for key, value in given.items()}
    kept, shuffled = options["kept"], order == "arbitrary"
    ends = sum(options["fixed"] or ())
    part = [options[key] for key in ("block_drop", "min_kept")]
    plain = part == [None, None] and options["max_parallel"] is None
    return (
        None not in part
        or (name == "truncated" and kept is None)
        or (options["choose"] is not None and kept is None)
        or (kept is not None and (options["min_kept"] or 0) > kept)
        or (
            kept is not None
            and options["distinct"] is not None
            and options["distinct"] + ends > kept
        )
        or (kept is not None and ends >= kept)
        or (options["min_kept"] is not None and ends > options["min_kept"])
        or (not shuffled and plain and options["sequential_every"] is not None)
        or (not shuffled and options["branch_scale"] not in (None, 1))
    )


def test_two_hundred_combinations_train_or_say_why_not() -> None:
    """Three steps of each in a loop of its own: the loss is finite and every step moves weights."""
    refused = 0
    for name, options in combinations(200):
        if excluded(name, options):
            with pytest.raises(UsageError) as caught:
                Method(name, **options)
            assert caught.value.hint
            refused += 1
            continue
        method = Method(name, **options)
        model = FAMILY.wrapped()
        if (method.distinct or 0) + sum(method.fixed) > DEPTH:
            with pytest.raises(UsageError):
                method.prepare(model, images(1))
            continue
        if method.blocks is not None and method.kept != DEPTH:
            model = shortened(model, method.blocks)
        model = method.prepare(model, images(1)).train()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            loss = method.loss(model, images(4, seed=step), LABELS[:4], step=step)
            assert torch.isfinite(loss), (name, options)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert any(moved), (name, options)
    assert 40 < refused < 160, "both outcomes are common"


def shortened(model: nn.Module, blocks: Kept) -> nn.Module:
    """A fresh model of some of the blocks, as `fit` makes it."""
    chosen = [blocks_of(model)[block] for block in blocks.draw(DEPTH, step=0)]
    plain = FAMILY.plain()
    setattr(plain, FAMILY.path, nn.Sequential(*chosen))
    return ls.wrap(plain)


# --- ends that keep their place -------------------------------------------------------------------


def bare_model(depth: int) -> nn.Module:
    """A plain model of timm with random weights."""
    torch.manual_seed(depth)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=depth,
        num_heads=HEADS, num_classes=CLASSES,
    )  # fmt: skip


def bare_logits(model: nn.Module, x: Tensor, order: list[int]) -> Tensor:
    """The logits of a plain model of timm, block after block by hand."""
    state = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    for block in order:
        state = model.blocks[block](state)
    return model.forward_head(model.norm(state))


@pytest.mark.parametrize("fixed", [(1, 1), (2, 1), (0, 1), (1, 0)])
def test_ends_train_as_in_a_loop_by_hand(fixed: tuple[int, int]) -> None:
    """Against bare blocks: the ends stay, the others are drawn, an exit passes through the last."""
    first, last = fixed
    depth, groups = 6, 4
    method = Method("anyorder", fixed=fixed, branch_scale=1, seed=5)
    model, bare = method.prepare(bare_model(depth)), bare_model(depth)
    x = images(BATCH)
    for step in range(3):
        loss = method.loss(model, x, LABELS, step=step)
        orders = [[*order] for order in method.orders(depth, step=step)]
        exit_after = method.exit_after(method.orders(depth, step=step), step=step)
        assert exit_after is not None
        assert first < exit_after < depth - last
        final, early = torch.zeros(BATCH, CLASSES), torch.zeros(BATCH, CLASSES)
        for group, order in enumerate(orders):
            assert order[:first] == [*range(first)]
            assert order[depth - last :] == [*range(depth - last, depth)]
            final[group::groups] = bare_logits(bare, x[group::groups], order)
            through = order[:exit_after] + order[depth - last :]
            early[group::groups] = bare_logits(bare, x[group::groups], through)
        gap = F.kl_div(early.log_softmax(1), final.detach().softmax(1), reduction="batchmean")
        slow = F.cross_entropy(final, LABELS) + 0.3 * F.cross_entropy(early, LABELS) + 0.3 * gap
        torch.testing.assert_close(loss, slow, rtol=1e-6, atol=1e-6)
        model.zero_grad()
        bare.zero_grad()
        loss.backward()
        slow.backward()
        for parameter, other in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_exits_lie_between_the_ends() -> None:
    method = Method("anyorder", fixed=(2, 1), seed=3)
    orders = method.orders(12, step=0)
    drawn = Counter(method.exit_after(orders, step=step) for step in range(8_000))
    assert sorted(drawn) == [*range(3, 11)], "one drawn block has run, and one has not"
    # Chi-square with 7 degrees of freedom: 24.3 once in a thousand seeds.
    assert sum((count - 1000) ** 2 / 1000 for count in drawn.values()) < 24.3
    assert method.exit_after([ls.ExecutionOrder((0, 1, 11), 12)], step=0) == 3


def test_an_exit_passes_through_the_last_blocks() -> None:
    """Orders of several lengths: what ended before the exit answers with its end."""
    model = FAMILY.wrapped()
    stack_of(model).fixed = (1, 1)
    orders = [ls.ExecutionOrder(blocks, DEPTH) for blocks in ((0, 2, 1, 3), (0, 1, 3), (0, 3))]
    x = images(3)
    with torch.no_grad(), ls.running(model, orders, exit_after=1):
        final, early = model(x)
    cut = [(0, 3), (0, 3), (0, 3)]
    for row, (whole, through) in enumerate(zip(orders, cut, strict=True)):
        for answer, blocks in ((final, whole.blocks), (early, through)):
            with torch.no_grad(), ls.running(model, blocks):
                alone = model(x[row : row + 1])[0]
            torch.testing.assert_close(answer[row], alone, rtol=1e-5, atol=1e-6)
    rounds = ls.ExecutionOrder.in_rounds([(0,), (2, 1), (3,)], DEPTH)
    with torch.no_grad(), ls.running(model, rounds, exit_after=2):
        _, early = model(x)
    with torch.no_grad(), ls.running(model, "0,2,3"):
        torch.testing.assert_close(early, model(x), rtol=1e-5, atol=1e-6)


def test_the_ends_of_a_tied_model_are_their_own() -> None:
    method = Method("anyorder", distinct=1)
    model = method.prepare(FAMILY.wrapped(), images(1))
    assert places_tied(blocks_of(model)) == (0, 1, 1, 3)
    method.loss(model, images(BATCH), LABELS, step=0)


def test_a_model_with_other_ends_is_refused() -> None:
    model = Method("anyorder").prepare(FAMILY.wrapped(), images(1))
    method = Method("layershuffle")
    with pytest.raises(UsageError) as caught:
        method.loss(model, images(BATCH), LABELS, step=0)
    assert "method.prepare(model, images)" in str(caught.value)
    method.loss(method.prepare(model), images(BATCH), LABELS, step=0)
    with pytest.raises(UsageError):
        Method("anyorder", fixed=(2, 2)).prepare(model)
