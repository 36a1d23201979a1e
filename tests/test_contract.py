"""The promises of the core, over kinds of models and kinds of calls.

A call along an order, along many, or along an order per sample returns what a slow path in plain
torch returns, or it is refused: there is no third case. `contracts.py` has the promises for models
that only pass the state from block to block, as those of the supported libraries do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import contracts
import layershuffle as ls
from common import (
    CLASSES,
    DEPTH,
    FAMILIES,
    LONGER,
    ORDERS,
    PERMUTED,
    PRUNED,
    REPEATED,
    SEQUENTIAL,
    Family,
    assert_close,
    images,
)
from contracts import TOLERANCE, Rebuilt, answer, slow
from layershuffle.core.stack import stack_of
from layershuffle.ground.errors import StackError
from own_models import CHAINS, CUTTING, DEAF, IN_PARTS, LOOPS, SHARED, CachedLater
from refusals import refuses

Check = Callable[[Family], None]
CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for name, check in vars(contracts).items()
    if name.startswith("check_")
}
# What wrapping does to a model: the same whatever its blocks do.
OF_THE_CONTAINER = (
    "state_dict_never_changes",
    "unwrap_restores_the_container",
    "wrap_twice_is_one_wrap",
    "discovery_finds_the_stack",
    "deepcopy_is_wrapped_and_independent",
    "pickle_round_trip_in_memory",
    "parts_stay_out_of_the_backbone",
)
CONTAINERS = ("timm-vit", "timm-xcit", "hf-vit", "hf-siglip", "hf-timm-wrapper", "torchvision-vit")
# The family whose code runs their blocks too: they differ in their tokens or in their head.
AS_OTHERS = {
    "timm-deit": "timm-vit",
    "timm-deit-distilled": "timm-vit",
    "timm-deit-distilled-training": "timm-vit",
    "timm-deit3": "timm-vit",
    "hf-deit-teacher": "hf-deit",
}
# What those before have to show of themselves: the output, its gradients, and an order per sample.
OF_THE_OUTPUT = (
    "order_matters",
    "sequential_is_the_untouched_model",
    "orders_equal_a_rebuilt_model",
    "older_versions_equal_the_slow_path",
    "checkpointing_changes_nothing",
    "intermediate_features_follow_positions",
    "per_sample_orders_equal_one_by_one",
    "per_sample_orders_with_position_parts",
    "an_exit_is_what_the_cut_orders_give",
    "prediction_reads_every_output",
)
# What needs an interface of the libraries.
OF_THE_LIBRARIES = (
    "checkpointing_changes_nothing",
    "checkpointing_really_runs_blocks_twice",
    "checkpointing_with_position_parts",
    "intermediate_features_follow_positions",
    "tap_under_checkpointing",
    "tap_of_per_sample_orders_under_checkpointing",
    "export_of_one_order",
)
CHAIN_CHECKS = [name for name in CHECKS if name not in (*OF_THE_CONTAINER, *OF_THE_LIBRARIES)]
# (backbone, words of checks): why they do not apply.
NOT_FOR = {
    ("own-byforward", "hooks_fire"): "the hooks that the check counts are not called",
    ("own-ofitsclass", "encoding_equals older_versions"): (
        "the slow path of the check has blocks of its own class"
    ),
}


def applies(family: Family, check: str) -> bool:
    """Whether a check of the contract is meant for this backbone."""
    return not any(
        family.name == name and any(word in check for word in words.split())
        for name, words in NOT_FOR
    )


LIBRARY_CASES = [
    (check, family)
    for check in CHECKS
    for family in FAMILIES
    if check not in OF_THE_CONTAINER or family in CONTAINERS
    if check in OF_THE_OUTPUT or family not in AS_OTHERS
]
CHAIN_CASES = [
    (check, family) for check in CHAIN_CHECKS for family in CHAINS if applies(CHAINS[family], check)
]


@pytest.mark.parametrize(("check", "family"), LIBRARY_CASES)
def test_models_of_libraries(check: str, family: str) -> None:
    CHECKS[check](FAMILIES[family])


@pytest.mark.parametrize(("check", "family"), CHAIN_CASES)
def test_chains_of_blocks(check: str, family: str) -> None:
    CHECKS[check](CHAINS[family])


def code_that_runs_blocks(family: Family) -> tuple[object, type]:
    """The function in which the loop over the blocks stands, and the class of the blocks."""
    model = family.plain()
    owner = type(model.get_submodule(family.path.rpartition(".")[0]))
    return getattr(owner, "forward_features", owner.forward), type(family.container(model)[0])


def test_the_suite_is_whole() -> None:
    assert {*OF_THE_CONTAINER, *OF_THE_LIBRARIES, *OF_THE_OUTPUT} <= CHECKS.keys()
    for name, other in AS_OTHERS.items():
        assert code_that_runs_blocks(FAMILIES[name]) == code_that_runs_blocks(FAMILIES[other])
    assert len(CHECKS) >= 25
    libraries = {family.library for family in FAMILIES.values()}
    assert libraries == {"timm", "transformers", "torchvision"}


# --- kinds of calls, over everything that follows an order ----------------------------------------

FOLLOWING = {**CHAINS, **LOOPS, **SHARED}
EQUAL_LENGTHS = (PERMUTED, SEQUENTIAL, (3, 3, 0, 1))
SEVERAL_LENGTHS = (PERMUTED, PRUNED)


def orders_of(several: tuple[tuple[int, ...], ...]) -> list[ls.ExecutionOrder]:
    """Execution orders of the ids."""
    return [ls.ExecutionOrder(order, DEPTH) for order in several]


def one_by_one(model: nn.Module, orders: tuple[tuple[int, ...], ...]) -> Tensor:
    """The logits of every image alone in its order."""
    alone = []
    for image, order in zip(images(len(orders)), orders, strict=True):
        with ls.running(model, order):
            alone.append(answer(model, image[None]))
    return torch.cat(alone)


def tolerance_of(family: Family) -> float:
    """The largest error by other sizes of a batch; a backbone under autocast has bf16."""
    return 0.02 if family.name == "own-casting" else TOLERANCE


def call_one_order(family: Family) -> None:
    """Bit for bit a rebuilt model, whether it learns or not."""
    contracts.check_order_matters(family)
    contracts.check_sequential_is_the_untouched_model(family)
    model = family.wrapped()
    for order in ORDERS.values():
        with ls.running(model, order):
            assert torch.equal(answer(model), answer(Rebuilt(family, order).model))


def call_threads(family: Family) -> None:
    """Orders in several threads do not mix."""
    others = [(0, 1, 3, 2), (1, 0, 2, 3), (3, 2, 1, 0), (3,)]
    contracts.assert_unmixed(family, [PERMUTED, PRUNED, LONGER, SEQUENTIAL, *others])


def call_many_orders(family: Family) -> None:
    """Shared beginnings, subsets and repeats in one evaluation, twice."""
    model = family.wrapped()
    orders = [SEQUENTIAL, PERMUTED, (2, 0), (2, 0, 1), (2, 1, 0, 3), REPEATED, LONGER]
    batches = [(images(3, seed=seed), torch.tensor([0, 1, 4])) for seed in (1, 2)]
    for _ in range(2):
        scores = ls.evaluate(model, batches, orders=orders_of(tuple(orders)))
    for score, order in zip(scores, orders, strict=True):
        rebuilt = Rebuilt(family, order).model
        losses = [nn.functional.cross_entropy(answer(rebuilt, x), y) for x, y in batches]
        assert score.cross_entropy == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def call_hooks(family: Family) -> None:
    """A tap changes nothing, and has one record for each step."""
    model = family.wrapped()
    for order in (SEQUENTIAL, PERMUTED, LONGER):
        with ls.running(model, order):
            silent = answer(model)
            with ls.tap(model) as tap:
                assert torch.equal(answer(model), silent)
        steps = [(record.position, record.block) for record in tap.records]
        assert sorted(steps) == list(enumerate(order))


def call_equal_lengths(family: Family) -> None:
    """An order of one length for each sample; the tap says which block ran on which."""
    model = family.wrapped()
    with ls.running(model, orders_of(EQUAL_LENGTHS)), ls.tap(model) as tap:
        together = answer(model, images(3))
    wanted = one_by_one(model, EQUAL_LENGTHS)
    assert_close(together, wanted, tolerance=tolerance_of(family))
    for position in range(DEPTH):
        rows = {row: r.block for r in tap.records if r.position == position for row in r.rows or ()}
        assert [rows[sample] for sample in range(3)] == [o[position] for o in EQUAL_LENGTHS]


def call_several_lengths(family: Family) -> None:
    """A sample whose order has ended waits for the others."""
    model = family.wrapped()
    with ls.running(model, orders_of(SEVERAL_LENGTHS)), torch.no_grad():
        together = answer(model, images(2))
    wanted = one_by_one(model, SEVERAL_LENGTHS)
    assert_close(together, wanted, tolerance=tolerance_of(family))


def call_exit(family: Family) -> None:
    """The answers at an exit are those of the orders that end there."""
    model = family.wrapped()
    with ls.running(model, orders_of(SEVERAL_LENGTHS), exit_after=1), torch.no_grad():
        output, early = model(images(2))
    tolerance = tolerance_of(family)
    assert_close(output, one_by_one(model, SEVERAL_LENGTHS), tolerance=tolerance)
    assert_close(early, one_by_one(model, ((2,), (3,))), tolerance=tolerance)


def call_older_versions(family: Family) -> None:
    """Rounds, and versions in general, are their recursion in plain torch."""
    model = family.wrapped()
    for text in ("2+0,3+1", "3,0@0,3,1@1"):
        order = ls.ExecutionOrder.parse(text, depth=DEPTH)
        with ls.running(model, order):
            got = answer(model)
        if family.name not in NO_SLOW_PATH:
            wanted = answer(slow(family, order).model)
            assert_close(got, wanted, tolerance=tolerance_of(family))


def call_older_versions_per_sample(family: Family) -> None:
    """Also where two samples of an order stand side by side in the batch."""
    model = family.wrapped()
    texts = ("0+1,3", "0+1,3", "2,0,3", "2,0,3", "3,1+0")
    each = [ls.ExecutionOrder.parse(text, depth=DEPTH) for text in texts]
    batch = images(len(each))
    with ls.running(model, each):
        together = answer(model, batch)
    for row, order in enumerate(each):
        with ls.running(model, order):
            alone = answer(model, batch[row : row + 1])
        assert_close(together[row : row + 1], alone, tolerance=tolerance_of(family))


CALLS: dict[str, Check] = {
    name.removeprefix("call_"): call
    for name, call in dict(vars()).items()
    if name.startswith("call_")
}
# Kind of call -> the backbones for which there is no right answer, and why.
PER_SAMPLE_REFUSED = {
    **dict.fromkeys(IN_PARTS, "a part would be that of another sample's block"),
    "own-scaledbyblocks": "the weight would be that of another sample's block",
    "own-tuplestate": "the second tensor stays in the batch of its block",
    "own-inplacewithpatches": "what a block writes does not reach the other references",
    "own-values": "the values are those of another sample's first block",
    "own-merging": "the list counts the blocks of all samples",
    "own-batchmixing": "the blocks mix samples",
    "own-losing": "a loss of all samples cannot be taken apart",
}
WAITING_REFUSED = {
    **PER_SAMPLE_REFUSED,
    "own-readout": "a waiting state counts in the mean",
    "own-injection": "a waiting state gets the patches again",
    "own-injectioninplace": "a waiting state gets the patches again",
    "own-backwards": "the last position runs first, where a shorter order has no block",
    "own-scaled": "a waiting sample has no size",
    "own-shortening": "a waiting state has more tokens",
}
ROUNDS_REFUSED = {
    **dict.fromkeys(IN_PARTS, "nothing is added where the parts run"),
    "own-readout": "every state counts in the mean",
    "own-gates": "the gate of a position weighs what its block adds",
    "own-bounding": "the state is scaled between the blocks",
    "own-scaledbyblocks": "the state is scaled between the blocks",
    "own-backwards": "the last position runs first, and reads what is not there yet",
    "own-inplacewithpatches": "what a block writes does not reach the other references",
    "own-tuplestate": "the state is no tensor",
    "own-shortening": "a block makes fewer tokens than the newest state has",
    "own-values": "the values are those of the first block",
    "own-merging": "the list counts the blocks before",
}
REFUSED: dict[str, dict[str, str]] = {
    "hooks": dict.fromkeys(IN_PARTS, "nothing stands around a part of a block"),
    "equal_lengths": PER_SAMPLE_REFUSED,
    "several_lengths": WAITING_REFUSED,
    "exit": {
        **WAITING_REFUSED,
        "own-gates": "it weighs the last output, which has more rows",
        "own-inplace": "a block writes into the state that leaves",
    },
    "older_versions": ROUNDS_REFUSED,
    "older_versions_per_sample": {**PER_SAMPLE_REFUSED, **ROUNDS_REFUSED},
}
# The slow path is one module, so that a backbone does once what it else does after every block,
# and one that looks for blocks of its own class finds none.
NO_SLOW_PATH = ("own-injection", "own-injectioninplace", "own-scaled", "own-losing")
NO_SLOW_PATH += ("own-ofitsclass",)
# Their blocks note things in themselves, so that no two threads can run them, wrapped or not.
NOT_FOR_THREADS = ("own-values", "own-merging")


@pytest.mark.parametrize("family", FOLLOWING.values(), ids=list(FOLLOWING))
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_right_or_refused(call: str, family: Family) -> None:
    if call == "threads" and family.name in NOT_FOR_THREADS:
        return
    if family.name in REFUSED.get(call, {}):
        with refuses(StackError):
            CALLS[call](family)
    else:
        CALLS[call](family)


# Blocks that run in parts, share, or write into what later orders would read.
ONE_BY_ONE = {*IN_PARTS, "own-inplace", "own-inplacewithpatches", "own-injectioninplace"}
ONE_BY_ONE |= {"own-backwards", "own-values", "own-merging"}


@pytest.mark.parametrize("family", FOLLOWING.values(), ids=list(FOLLOWING))
def test_it_is_said_once_where_beginnings_are_not_shared(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    """And not at all of one order."""
    model = family.wrapped()
    batches = [(images(6), torch.arange(6) % CLASSES)] * 2
    with caplog.at_level(logging.WARNING, logger="layershuffle"):
        ls.evaluate(model, batches, orders=["3,0,2,1"])
        assert caplog.records == []
        for _ in range(2):
            ls.evaluate(model, batches, orders=["3,0,2,1", "3,0,1,2", "0,1,2,3"])
    said = [record for record in caplog.records if "orders run one by one" in record.message]
    assert len(said) == (family.name in ONE_BY_ONE)


# --- backbones that do not follow an order --------------------------------------------------------


@pytest.mark.parametrize("family", DEAF.values(), ids=list(DEAF))
def test_a_backbone_that_does_not_use_its_stack_is_refused(family: Family) -> None:
    model = family.wrapped()
    batches = [(images(3), torch.tensor([0, 1, 4]))]
    assert torch.equal(answer(model), answer(family.plain()))
    for order in ORDERS.values():
        contexts: list[Callable[[], object]] = [
            lambda order=order: ls.running(model, order),
            lambda order=order: ls.running(model, [ls.ExecutionOrder(order, DEPTH)] * 3),
            lambda: ls.tap(model),
        ]
        for context in contexts:
            with refuses(StackError), context():
                answer(model)
        with refuses(StackError):
            ls.evaluate(model, batches, orders=[ls.ExecutionOrder(order, DEPTH)])
    assert torch.equal(answer(model), answer(family.plain()))
    assert not [m for m in ls.unwrap(model).modules() if m._forward_pre_hooks]


def test_a_list_made_in_the_first_forward_is_refused_in_the_next() -> None:
    """Of an evaluation it is the second batch."""
    model = ls.wrap(CachedLater().eval(), "blocks")
    batches = [(images(3), torch.tensor([0, 1, 4]))] * 2
    with refuses(StackError):
        ls.evaluate(model, batches, orders=["2,0,1"])
    model = ls.wrap(CachedLater().eval(), "blocks")
    first = answer(model)
    for context in (ls.running(model, PERMUTED), ls.tap(model)):
        with refuses(StackError), context:
            answer(model)
    assert torch.equal(answer(model), first)
    with refuses(StackError):
        ls.evaluate(model, batches, orders=["2,0,1"])


def test_looking_at_a_container_does_not_make_its_backbone_follow() -> None:
    model = DEAF["own-children"].wrapped()
    assert len(list(stack_of(model))) == DEPTH
    with ls.running(model, PERMUTED), refuses(StackError):
        answer(model)


# Those that count stop at a position, and the others at the end of their list.
RUN_SHORTER = ("own-zipped", "own-zippedafter")


@pytest.mark.parametrize("family", CUTTING.values(), ids=list(CUTTING))
def test_a_backbone_that_cuts_longer_orders_is_refused(family: Family) -> None:
    model = family.wrapped()
    for order in (PERMUTED, PRUNED) if family.name in RUN_SHORTER else (PERMUTED,):
        with ls.running(model, order):
            assert torch.equal(answer(model), answer(Rebuilt(family, order).model))
    per_sample = [ls.ExecutionOrder(LONGER, DEPTH)] * 3
    for order in (LONGER, "0,1,2,3,3", per_sample):
        with refuses(StackError), ls.running(model, order):
            answer(model)
    if family.name == "own-counting":
        with ls.running(model, PRUNED), refuses(StackError):
            model(images())
        # Entries by their number, in rounds: the same blocks in a loop over the stack.
        other = CHAINS["own-own"].wrapped()
        with ls.running(model, "2+0,3+1"):
            for seed in (7, 8):  # no forward reads the states of the one before
                batch = images(seed=seed)
                with ls.running(other, "2+0,3+1"):
                    wanted = answer(other, batch)
                assert torch.equal(answer(model, batch), wanted)
