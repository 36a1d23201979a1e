"""Custom hosts: the contract where it applies, and a clear refusal elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    LONGER,
    ORDERS,
    PERMUTED,
    PRUNED,
    REPEATED,
    SEQUENTIAL,
    WIDTH,
    Family,
    assert_close,
    images,
)
from contracts import TOLERANCE, Rebuilt, answer
from layershuffle.core.stack import recomputing, stack_of
from layershuffle.core.tensors import state_of
from layershuffle.ground.errors import StackError, UsageError
from own_models import (
    CHAINS,
    CUTTING,
    DEAF,
    IN_PARTS,
    LOOPS,
    Block,
    CachedLater,
    Masked,
    Own,
    Zipped,
    ZippedAfter,
)
from refusals import refuses
from test_contracts import CHECKS

EQUAL_LENGTHS = (PERMUTED, SEQUENTIAL, (3, 3, 0, 1))
# Checks that need an interface of the host libraries.
NO_SUCH_THING = {
    "intermediate_features_follow_positions": "timm, transformers and torchvision offer features",
    "checkpointing_equals_a_rebuilt_model": "the switch is the libraries' own",
    "checkpointing_really_runs_blocks_twice": "as above",
    "checkpointing_with_position_parts": "as above",
    "per_sample_orders_under_checkpointing": "as above",
    "tap_under_checkpointing": "as above",
    "versions_under_checkpointing": "as above",
    "versions_per_sample_under_checkpointing": "as above",
    "versions_intermediate_features": "as for features above",
}
CHAIN_CHECKS = {name: check for name, check in CHECKS.items() if name not in NO_SUCH_THING}
# The rest of the contract needs orders of several lengths in a batch (refused below), or something
# put around blocks that are lists of parts.
LOOP_CHECKS = {
    name: check
    for name, check in CHAIN_CHECKS.items()
    if not name.startswith(("per_sample", "wrong_number", "encoding", "prediction", "zero", "tap"))
    and not name.startswith(("versions", "an_exit"))
    and name != "hooks_fire_once_per_run_of_the_right_block"
}
# Why no order can be given per sample.
REFUSED_PER_SAMPLE = (
    *IN_PARTS,
    "own-scaledbyblocks",
    "own-tuplestate",
    # What a block writes does not reach the backbone's other references to the state.
    "own-inplacewithpatches",
)
PER_SAMPLE = {name: host for name, host in LOOPS.items() if name not in REFUSED_PER_SAMPLE}


# (host, words of checks): why they do not apply.
NOT_FOR = {
    ("own-inplace", "rebuilt gradient per_sample_orders encoding parts_stay"): (
        "autograd refuses writing into what it saved, with or without an order"
    ),
    ("own-inplace", "tap hooks reads_every_output"): "the next block writes over what they saw",
    ("own-named", "encoding_equals versions_equal versions_with"): (
        "the slow path of the check takes the state without a name"
    ),
    ("own-byforward", "hooks_fire"): "the hooks that the check counts are not called",
    ("own-ofitsclass", "encoding_equals versions_equal versions_with"): (
        "the slow path of the check has blocks of its own class"
    ),
    ("own-tuples", "versions"): "its slow path takes tensors; see blocks side by side",
    **{(name, "state_dict_never"): "it taps the blocks, refused below" for name in IN_PARTS},
}


def applies(family: Family, check: str) -> bool:
    """Whether a check of the contract is meant for this host."""
    return not any(
        family.name.startswith(name) and any(word in check for word in words.split())
        for name, words in NOT_FOR
    )


@pytest.mark.parametrize("family", CHAINS.values(), ids=list(CHAINS))
@pytest.mark.parametrize("check", CHAIN_CHECKS)
def test_contract_of_chains(check: str, family: Family) -> None:
    if applies(family, check):
        CHAIN_CHECKS[check](family)


@pytest.mark.parametrize("family", LOOPS.values(), ids=list(LOOPS))
@pytest.mark.parametrize("check", LOOP_CHECKS)
def test_contract_of_loops(check: str, family: Family) -> None:
    if applies(family, check):
        LOOP_CHECKS[check](family)


# --- many orders at once --------------------------------------------------------------------------


def labelled() -> list[tuple[Tensor, Tensor]]:
    """Two batches."""
    return [(images(3, seed=seed), torch.tensor([0, 1, 4])) for seed in (1, 2)]


def slow_loss(family: Family, order: tuple[int, ...]) -> float:
    """The mean cross-entropy of a rebuilt model."""
    model = Rebuilt(family, order).model
    losses = [
        nn.functional.cross_entropy(answer(model, batch), labels) for batch, labels in labelled()
    ]
    return float(torch.stack(losses).mean())


# Blocks run in parts, or write into what later orders would share.
NOT_SHARED = {*IN_PARTS, "own-inplace", "own-inplacewithpatches", "own-injectioninplace"}
NOT_SHARED |= {"own-backwards"}  # it runs the ends first


@pytest.mark.parametrize("family", [*CHAINS.values(), *LOOPS.values()], ids=lambda f: f.name)
def test_scores_are_those_of_rebuilt_models(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared beginnings, subsets and repeats; it is said once where nothing can be shared."""
    model = family.wrapped()
    orders = [SEQUENTIAL, PERMUTED, (2, 0), (2, 0, 1), (2, 1, 0, 3), REPEATED, LONGER]
    with caplog.at_level(logging.WARNING, logger="layershuffle"):
        for _ in range(2):
            scores = ls.evaluate(
                model, labelled(), orders=[ls.ExecutionOrder(order, DEPTH) for order in orders]
            )
    for score, order in zip(scores, orders, strict=True):
        assert score.cross_entropy == pytest.approx(slow_loss(family, order), rel=1e-5), order
    warnings = [record for record in caplog.records if "orders run one by one" in record.message]
    assert len(warnings) == (family.name in NOT_SHARED)


# --- an order per sample --------------------------------------------------------------------------


def one_by_one(model: nn.Module, orders: tuple[tuple[int, ...], ...]) -> Tensor:
    """The logits of every image alone in its order."""
    alone = []
    for image, order in zip(images(len(orders)), orders, strict=True):
        with ls.running(model, order):
            alone.append(answer(model, image[None]))
    return torch.cat(alone)


@pytest.mark.parametrize("family", [*CHAINS.values(), *PER_SAMPLE.values()], ids=lambda f: f.name)
def test_orders_of_one_length_per_sample(family: Family) -> None:
    model = family.wrapped()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    with ls.running(model, orders), ls.tap(model) as tap:
        together = answer(model, images(3))
    assert_close(together, one_by_one(model, EQUAL_LENGTHS), tolerance=TOLERANCE)
    for position in range(DEPTH):
        rows = {row: r.block for r in tap.records if r.position == position for row in r.rows or ()}
        assert [rows[sample] for sample in range(3)] == [o[position] for o in EQUAL_LENGTHS]


# What these do after a block shows in a sample that waits for the others.
WAITING_SHOWS = (
    "own-readout",
    "own-injection",
    "own-injectioninplace",
    "own-backwards",
    "own-inplace",
)


@pytest.mark.parametrize("family", PER_SAMPLE.values(), ids=lambda f: f.name)
def test_orders_of_several_lengths_per_sample(family: Family) -> None:
    """Refused, or what every sample gets alone; the same for an exit."""
    model = family.wrapped()
    lengths = (PERMUTED, PRUNED)
    orders = [ls.ExecutionOrder(order, DEPTH) for order in lengths]
    if family.name in WAITING_SHOWS:
        for exit_after in (None, 1):
            # Autograd itself refuses blocks that write into a part of the state.
            refused = (RuntimeError, StackError) if family.name == "own-inplace" else StackError
            with ls.running(model, orders, exit_after=exit_after), pytest.raises(refused):
                model(images(2))
        return
    with ls.running(model, orders):
        assert_close(answer(model, images(2)), one_by_one(model, lengths), tolerance=TOLERANCE)
    if family.name == "own-gates":  # it weighs the output of the last block, with its more rows
        with ls.running(model, orders, exit_after=1), pytest.raises(StackError):
            model(images(2))
        return
    with ls.running(model, orders, exit_after=1), torch.no_grad():
        _, early = model(images(2))
    assert_close(early, one_by_one(model, ((2,), (3,))), tolerance=TOLERANCE)


def test_the_trial_leaves_no_trace() -> None:
    """It changes no modes, is seen by no hook, and draws nothing that others would have drawn."""
    model = CHAINS["own-own"].wrapped().train()
    model.norm.eval()
    heads: list[tuple[bool, float]] = []
    model.head.register_forward_hook(
        lambda *_: heads.append((model.training, float(torch.rand(()))))
    )
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    before = torch.get_rng_state()
    drawn = torch.rand(2).tolist()
    torch.set_rng_state(before)
    for _ in range(2):
        with ls.running(model, orders):
            model(images(3))
    assert [training for training, _ in heads] == [True] * 2
    assert [number for _, number in heads] == drawn
    assert (model.training, model.norm.training, model.head.training) == (True, False, True)


# --- blocks in parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_blocks_cannot_have_something_around_them(name: str) -> None:
    model = LOOPS[name].wrapped()
    with refuses(StackError), ls.tap(model):
        model(images(3))


@pytest.mark.parametrize("name", REFUSED_PER_SAMPLE)
def test_orders_per_sample_that_would_be_wrong_are_refused(name: str) -> None:
    """Otherwise the part, the weight or the second tensor could be that of another sample."""
    model = LOOPS[name].wrapped()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    with ls.running(model, orders), refuses(StackError):
        model(images(3))


def test_a_host_may_look_at_its_blocks() -> None:
    """It may read numbers and submodules, and call nn.Module's methods."""
    model = CHAINS["own-own"].wrapped()
    stack = stack_of(model)
    with ls.tap(model):
        assert stack[1].tokens.norm.normalized_shape == (WIDTH,)
        assert stack[1].tokens.norm.weight is ls.blocks_of(model)[1].tokens.norm.weight
        assert len(list(stack[1].parameters())) == 8
        assert isinstance(stack[1], type(ls.blocks_of(model)[1]))


def test_a_host_that_runs_from_behind_is_recorded_whole() -> None:
    """Position 0 comes last, and begins no new forward."""
    model = LOOPS["own-backwards"].wrapped()
    with ls.tap(model) as tap, ls.running(model, PERMUTED):
        for _ in range(2):
            model(images())
    assert [record.block for record in tap.records] == [*reversed(PERMUTED)]
    assert [record.position for record in tap.records] == [3, 2, 1, 0]


# --- orders that a host does not follow -----------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("family", DEAF.values(), ids=list(DEAF))
def test_a_host_that_does_not_ask_its_stack_is_refused(
    family: Family, order: tuple[int, ...]
) -> None:
    model = family.wrapped()
    assert torch.equal(answer(model), answer(family.plain()))
    contexts: list[Callable[[], object]] = [
        lambda: ls.running(model, order),
        lambda: ls.running(model, [ls.ExecutionOrder(order, DEPTH)] * 3),
        lambda: ls.tap(model),
    ]
    for context in contexts:
        with refuses(StackError), context():
            answer(model)
    with refuses(StackError):
        ls.evaluate(model, labelled(), orders=[ls.ExecutionOrder(order, DEPTH)])
    assert torch.equal(answer(model), answer(family.plain()))
    assert not [m for m in ls.unwrap(model).modules() if m._forward_pre_hooks]


def test_a_list_made_in_the_first_forward_is_refused_in_the_next() -> None:
    model = ls.wrap(CachedLater().eval(), "blocks")
    first = answer(model)
    for context in (ls.running(model, PERMUTED), ls.tap(model)):
        with refuses(StackError), context:
            answer(model)
    assert torch.equal(answer(model), first)
    with refuses(StackError):
        ls.evaluate(model, labelled(), orders=["2,0,1"])


def test_a_trial_hands_nothing_out_for_later() -> None:
    """Entries that were kept would run another order."""
    model = ls.wrap(CachedLater().eval(), "blocks")
    with refuses(StackError):
        ls.evaluate(model, labelled(), orders=["2,0,1"])


def test_looking_at_a_container_does_not_make_its_host_follow() -> None:
    model = DEAF["own-children"].wrapped()
    assert len(list(stack_of(model))) == DEPTH
    with ls.running(model, PERMUTED), refuses(StackError):
        answer(model)


@pytest.mark.parametrize("family", CUTTING.values(), ids=list(CUTTING))
def test_a_host_that_cuts_longer_orders_is_refused(family: Family) -> None:
    model = family.wrapped()
    with ls.running(model, PERMUTED):
        assert torch.equal(answer(model), answer(Rebuilt(family, PERMUTED).model))
    with refuses(StackError), ls.running(model, LONGER):
        answer(model)
    with refuses(StackError), ls.running(model, "0,1,2,3,3"):
        answer(model)
    per_sample = [ls.ExecutionOrder(LONGER, DEPTH)] * 3
    with refuses(StackError), ls.running(model, per_sample):
        answer(model)


@pytest.mark.parametrize("host", [Zipped, ZippedAfter])
def test_a_host_with_a_list_beside_its_blocks_runs_shorter_orders(host: type[nn.Module]) -> None:
    family = next(f for f in CUTTING.values() if f.make is host)
    model = family.wrapped()
    with ls.running(model, PRUNED):
        assert torch.equal(answer(model), answer(Rebuilt(family, PRUNED).model))


def test_a_host_that_counts_cannot_run_shorter_orders() -> None:
    model = CUTTING["own-counting"].wrapped()
    with ls.running(model, PRUNED), refuses(StackError):
        model(images())


def test_looking_at_blocks_is_not_running_them() -> None:
    model = CHAINS["own-own"].wrapped()
    stack = stack_of(model)
    with ls.running(model, PERMUTED):
        assert stack[0] is ls.blocks_of(model)[2]
        assert len(stack) == DEPTH
        assert next(iter(stack)) is stack[0]
    with ls.running(model, LONGER):
        assert len(stack[:2]) == 2
    with pytest.raises(ZeroDivisionError), ls.running(model, LONGER):
        assert [stack[0], stack[1]][1 // 0]


# --- arguments beside the state -------------------------------------------------------------------


EACH = [ls.ExecutionOrder(order, 2) for order in ((0, 1), (1, 0), (0, 0))]


def assert_masked(model: nn.Module, *arguments: Tensor) -> None:
    """Every sample gets what it gets alone with its part of the arguments."""
    with ls.running(model, EACH), torch.no_grad():
        together = model(*arguments)
    for row, order in enumerate(EACH):
        with ls.running(model, order), torch.no_grad():
            alone = model(*(argument[row : row + 1] for argument in arguments))
        assert_close(together[row : row + 1], alone, tolerance=1e-6)


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 1), (3, 1, 1)])
def test_arguments_with_a_part_per_sample_are_cut(shape: tuple[int, ...]) -> None:
    assert_masked(ls.wrap(Masked()), torch.ones(3, 5, 4), torch.rand(shape))


def test_a_mask_across_samples_is_refused() -> None:
    """[samples, 1, width] times [samples, width] pairs every sample with every mask."""
    model = ls.wrap(Masked())
    with ls.running(model, EACH), refuses(StackError):
        model(torch.ones(3, 1, 4), torch.ones(3, 4))


class MaybeMasked(Masked):
    """Has its mask as an option."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """States."""
        for block in self.blocks:
            x = block(x, 1 if mask is None else mask)
        return x


def test_a_mask_that_only_the_second_call_has_is_cut() -> None:
    model = ls.wrap(MaybeMasked())
    assert_masked(model, torch.ones(3, 5, 4))
    assert_masked(model, torch.ones(3, 5, 4), torch.rand(3, 5, 4))


@pytest.mark.parametrize("by", ["argument", "config"])
def test_hidden_states_of_groups_are_refused(by: str) -> None:
    """transformers collects the output of every block run, here of some samples only."""
    model = FAMILIES["hf-vit"].wrapped()
    asked = {"output_hidden_states": True} if by == "argument" else {}
    model.config.output_hidden_states = by == "config"
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    for run in (model, model.vit):
        if run is model or asked:
            with (
                ls.running(model, each),
                refuses(UsageError),
            ):
                run(images(3), **asked)


def test_another_method_under_an_order_per_sample_is_refused() -> None:
    """Whether its blocks mix samples is tried in calls of the model alone."""
    model = FAMILIES["timm-vit"].wrapped()
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    with torch.no_grad(), refuses(StackError), ls.running(model, each):
        model.forward_intermediates(images(3), intermediates_only=True)


def test_batch_norm_inside_blocks_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = FAMILIES["timm-xcit"].wrapped()
    caplog.clear()
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    for training, messages in ((False, 0), (True, 1), (True, 1)):
        model.train(training)
        with recomputing(model), ls.running(model, each):
            model(images(3))
        assert len(caplog.records) == messages
    assert "BatchNorm layers in training mode: each batch counts twice" in caplog.text


def test_training_without_an_order_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the backbone cuts a part from its blocks, at every call."""
    model = FAMILIES["timm-vit"].wrapped().train()
    for _ in range(2):
        model.forward_intermediates(images(3), indices=[0], stop_early=True)
        model(images(3))
    assert caplog.text.count("in training mode without an execution order") == 1


# --- blocks side by side --------------------------------------------------------------------------


class PostNorm(Block):
    """Normalises the sum, so the block does not add to its state."""

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        return nn.functional.layer_norm(super().forward(x), (WIDTH,))


class PostNormed(Own):
    """Blocks that do not add to their state."""

    block = PostNorm


class Shortening(Own):
    """Blocks that return fewer tokens than they get."""

    class Shorter(Block):
        """Leaves the last token out."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return x[:, :-1] + self.channels(x[:, :-1])

    block = Shorter


NO_ROUNDS = {
    "tuple state": LOOPS["own-tuplestate"].wrapped,
    "backwards": LOOPS["own-backwards"].wrapped,
    "pairs": LOOPS["own-pairs"].wrapped,
    "shorter": lambda: ls.wrap(Shortening().eval(), "blocks"),
}


@pytest.mark.parametrize("make", NO_ROUNDS.values(), ids=list(NO_ROUNDS))
def test_blocks_side_by_side_are_refused_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model = make()
    with refuses(StackError), ls.running(model, "0+1,2+3"):
        answer(model)
    ls.evaluate(model, labelled(), orders=["0,1,2,3"])


# Blocks that return tuples, write into their input, or do not add to their state; a backbone that
# asks for its blocks by number.
DEFINED: dict[str, Callable[[], Any]] = {
    "tuples": CHAINS["own-tuples"].wrapped,
    "in place": LOOPS["own-inplace"].wrapped,
    "post-norm": lambda: ls.wrap(PostNormed().eval()),
    "index": CUTTING["own-counting"].wrapped,
}


@pytest.mark.parametrize("make", DEFINED.values(), ids=list(DEFINED))
def test_blocks_side_by_side_follow_their_definition(make: Callable[[], Any]) -> None:
    model = make()
    blocks = ls.blocks_of(model)

    def changed(block: int, x: Tensor) -> Tensor:
        return state_of(blocks[block](x.clone())) - x

    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = x + changed(2, x)
        both = first + changed(0, x)
        third = both + changed(3, both)
        wanted = third + changed(1, both)
        with ls.running(model, "2+0,3+1"):
            assert_close(model.run(x.clone()), wanted, tolerance=1e-5)


def test_a_gate_weighs_what_a_block_adds() -> None:
    """A host's own step between blocks, on the residual of an older state."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    model = LOOPS["own-gates"].wrapped()
    blocks, gates = ls.blocks_of(model), model.gates.detach()
    with torch.no_grad():
        first = x + gates[0] * (blocks[2](x) - x)
        second = first + gates[1] * (blocks[0](x) - x)
        with ls.running(model, "2+0"):
            assert_close(model.run(x), second, tolerance=1e-5)


def test_an_older_state_per_sample_in_a_backbone_that_does_more() -> None:
    model = LOOPS["own-injection"].wrapped()
    each = [ls.ExecutionOrder.parse(text, depth=DEPTH) for text in ("0+1", "2,3", "0+2")]
    with ls.running(model, each), torch.no_grad():
        together = model(images(3))
    for row, order in enumerate(each):
        with ls.running(model, order), torch.no_grad():
            alone = model(images(3)[row : row + 1])
        assert_close(together[row : row + 1], alone, tolerance=1e-5)


def test_a_host_may_write_into_the_state_between_its_blocks() -> None:
    """Writing into a tensor that older versions were read from does not change them."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    in_place, plain = LOOPS["own-injectioninplace"].wrapped(), LOOPS["own-injection"].wrapped()
    plain.load_state_dict(in_place.state_dict())
    for order in ("2,0+3,1", "2,0,3@1,1@1"):
        with torch.no_grad(), ls.running(in_place, order), ls.running(plain, order):
            assert_close(in_place.run(x.clone()), plain.run(x.clone()), tolerance=1e-5)
