"""The promises of the core: one function per promise, which takes a family of models.

`tests/test_contract.py` runs them over the supported libraries and over models as users write them.
The yardstick of an order is a *physically rebuilt* model: a copy of the untouched backbone whose
container holds the blocks of the order, and nothing of ours. That of older versions of the state is
the recursion of `core.orders` in plain torch, as a single module in the container. All else
(checkpointing, threads, an order per sample, exits) is compared with one forward per order.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

import layershuffle as ls
from common import (
    DEPTH,
    LONGER,
    ORDERS,
    PERMUTED,
    PRUNED,
    REPEATED,
    SEQUENTIAL,
    Family,
    assert_close,
    assert_same_gradients,
    gradients,
    images,
    logits_of,
    same,
    score,
)
from layershuffle.core.hooks import Step, TapRecord
from layershuffle.core.orders import order_of
from layershuffle.core.stack import BlockStack, recomputing
from layershuffle.ground.errors import UsageError
from refusals import refuses

Gradients = dict[str, Tensor | None]

TEXTS = {
    "rounds": "2+0,3+1",
    "a round of two": "3+1",
    "two rounds of one block": "1+3,1",
    "general": "3,0@0,3,1@1",
    "longer than the depth": "2+0+1,3+2,0@1",
}
VERSIONED = {name: ls.ExecutionOrder.parse(text, depth=DEPTH) for name, text in TEXTS.items()}
# Position parts know as many positions as there are blocks.
SHORT = [order for order in VERSIONED.values() if len(order) <= DEPTH]
ORDINARY = ls.ExecutionOrder(PERMUTED, DEPTH)

ENCODING = ls.EncodingForm()
PREDICTION = ls.PredictionForm(pooling="mean")


# --- the reference --------------------------------------------------------------------------------


class Rebuilt:
    """A copy of the untouched backbone whose plain container holds the blocks of `order`."""

    def __init__(self, family: Family, order: Sequence[int]) -> None:
        self.model = family.plain()
        container = family.container(self.model)
        self.blocks = dict(container.named_children())
        self.path, self.sequential = family.path, type(container) is nn.Sequential
        self.set_order(order)

    def set_order(self, order: Sequence[int]) -> None:
        """Put the blocks of `order` into the container."""
        blocks = list(self.blocks.values())
        self.install([blocks[block] for block in order])

    def install(self, blocks: list[nn.Module]) -> None:
        """Replace the container of the model."""
        owner, _, name = self.path.rpartition(".")
        container = nn.Sequential(*blocks) if self.sequential else nn.ModuleList(blocks)
        setattr(self.model.get_submodule(owner), name, container)

    def gradients(self) -> Gradients:
        """Gradients under the parameter names of the untouched backbone."""
        outside = {
            name: gradient
            for name, gradient in gradients(self.model).items()
            if not name.startswith(self.path + ".")
        }
        inside = {
            f"{self.path}.{key}.{name}": gradient
            for key, block in self.blocks.items()
            for name, gradient in gradients(block).items()
        }
        return outside | inside


class SlowPath(nn.Module):
    """The blocks of an order as one module: state[k+1] = state[k] + block(state[v]) - state[v].

    `parts`: a model whose position parts go around the blocks.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], order: ls.ExecutionOrder, *, parts: Any = None
    ) -> None:
        super().__init__()
        self.blocks, self.order, self.parts = nn.ModuleList(blocks), order, parts
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The state after all steps; `losses` are those of the position prediction."""
        states, self.losses = [x], []
        for position, (block, version) in enumerate(self.order.steps):
            read = states[version]
            given = read.clone()  # blocks may write into their input
            if self.parts is not None:
                given = self.parts.encoding.before(read, Step(position, block))
            result = self.blocks[block](given, *args, **kwargs)
            out = result[0] if isinstance(result, tuple) else result
            if self.parts is not None:
                guess = self.parts.prediction(out, block)
                truth = torch.full((len(out),), position)
                self.losses.append(nn.functional.cross_entropy(guess, truth))
            states.append(out if version == position else states[-1] + (out - read))
        return (states[-1],) if isinstance(result, tuple) else states[-1]


def slow(family: Family, order: ls.ExecutionOrder, *, parts: Any = None) -> Rebuilt:
    """The untouched backbone with the slow path in place of its blocks."""
    rebuilt = Rebuilt(family, SEQUENTIAL)
    rebuilt.install([SlowPath(list(rebuilt.blocks.values()), order, parts=parts)])
    return rebuilt


def call(model: nn.Module, batch: Tensor | None = None) -> Any:
    """The model's own output. Random jitter in training (DINOv3's RoPE) is the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return model(images() if batch is None else batch)


@torch.no_grad()
def answer(model: nn.Module, batch: Tensor | None = None) -> Tensor:
    """The model's logits, without a graph."""
    return logits_of(call(model, batch))


def step(model: nn.Module) -> Tensor:
    """Logits of one forward, after the backward pass of `score`."""
    output = call(model)
    score(output).backward()
    return logits_of(output).detach()


@contextmanager
def hooked(blocks: Sequence[nn.Module]) -> Iterator[list[tuple[int, Tensor]]]:
    """Collect (block id, output) of every run of a block, by PyTorch's own forward hooks."""
    seen: list[tuple[int, Tensor]] = []

    def hook(_module: nn.Module, _args: Any, output: Any, *, index: int) -> None:
        seen.append((index, output[0] if isinstance(output, tuple) else output))

    handles = [
        block.register_forward_hook(partial(hook, index=index))
        for index, block in enumerate(blocks)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# --- nothing changes until an order is set --------------------------------------------------------


def check_order_matters(family: Family) -> None:
    """Otherwise every check below would pass without testing anything."""
    model = family.wrapped()
    plain = answer(model)
    for name, order in ORDERS.items():
        with ls.running(model, order):
            assert (answer(model) - plain).abs().max() > 1e-3, name


def check_sequential_is_the_untouched_model(family: Family) -> None:
    for mode in (True, False):
        plain, model = family.plain().train(mode), family.wrapped().train(mode)
        wanted = answer(plain)
        assert torch.equal(answer(model), wanted)
        with ls.running(model, ls.ExecutionOrder.sequential(DEPTH)):
            assert torch.equal(answer(model), wanted)
        assert torch.equal(answer(model), wanted)


# --- an order is a rebuilt model ------------------------------------------------------------------


def check_orders_equal_a_rebuilt_model(family: Family) -> None:
    for order in ORDERS.values():
        rebuilt, model = Rebuilt(family, order), family.wrapped().train()
        wanted = step(rebuilt.model.train())
        with ls.running(model, order):
            got = step(model)
        assert torch.equal(got, wanted), f"outputs differ for {order}"
        assert_same_gradients(gradients(model), rebuilt.gradients())


def check_older_versions_equal_the_slow_path(family: Family) -> None:
    for name, order in VERSIONED.items():
        rebuilt, model = slow(family, order), family.wrapped().train()
        wanted = step(rebuilt.model.train())
        with ls.running(model, order):
            got = step(model)
        assert torch.equal(got, wanted), f"outputs differ for {name}"
        # Sums over the readers of a state come in another order in the backward pass.
        assert_close_gradients(gradients(model), rebuilt.gradients(), tolerance=GRADIENT_TOLERANCE)
        # Sequential steps give another result, or nothing was tested.
        with ls.running(model, order.blocks), torch.no_grad():
            assert (logits_of(call(model)) - wanted).abs().max() > 1e-3, name


def check_many_orders_are_those_one_by_one(family: Family) -> None:
    """Bit-equal, although orders of other versions share beginnings."""
    model, batch = family.wrapped(), images()
    rounds = ("2+0,3", "2+0,3+1", "2+0+3", "2,0,3@1,1@0", "2+0,2+0", "2+0,3")
    texts = ("2,0,3", *rounds, "0,1,2,3", "2,0,3,1", "2,0", "1", "2,0,0,3,3", "2", "2,0")
    orders = [ls.ExecutionOrder.parse(text, depth=DEPTH) for text in texts]
    with torch.no_grad():
        together = dict(ls.forward_many(model, batch, orders))
        assert sorted(together) == list(range(len(orders)))
        for index, order in enumerate(orders):
            with ls.running(model, order):
                assert same(together[index], logits_of(model(batch))), texts[index]


# --- gradient checkpointing -----------------------------------------------------------------------


def checkpointing(model: nn.Module, *, family: Family) -> nn.Module:
    """`model` with the library's own gradient checkpointing; torchvision has none: its stack's."""
    if family.library == "timm":
        model.set_grad_checkpointing(True)
    elif family.library == "transformers":
        # Renamed in 5.23; the old name warns there.
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)()
    else:
        stack = family.container(model)
        stack.forward = partial(checkpoint, stack.forward, use_reentrant=False)
    return model


def first_leaf(block: nn.Module) -> nn.Module:
    """The first layer that a block runs, which every replay reaches."""
    leaves = [m for m in block.modules() if not list(m.children())]
    return next(leaf for leaf in leaves if list(leaf.parameters()))


def check_checkpointing_changes_nothing(family: Family) -> None:
    """Neither the library's own, nor ours block by block, nor for an order per sample."""
    each = [ls.ExecutionOrder(blocks, DEPTH) for blocks in (PERMUTED, PRUNED, REPEATED)]
    versioned = [VERSIONED["general"], VERSIONED["longer than the depth"]]
    for order in (PRUNED, LONGER, *versioned, each, [*SHORT[:2], ORDINARY]):
        several = order if isinstance(order, list) else [order]
        is_exact = not any(getattr(own, "versions", None) for own in several)
        plain, other, ours = (family.wrapped().train() for _ in range(3))
        with ls.running(plain, order):
            wanted = step(plain)
        with ls.running(checkpointing(other, family=family), order):
            assert torch.equal(step(other), wanted)
        with ls.running(ours, order), recomputing(ours):
            assert torch.equal(step(ours), wanted)
        for model in (other, ours):
            if is_exact:
                assert_same_gradients(gradients(model), gradients(plain))
            else:
                # Sums over the readers of a state come in another order in the backward pass.
                assert_close_gradients(
                    gradients(model), gradients(plain), tolerance=GRADIENT_TOLERANCE
                )


def check_checkpointing_really_runs_blocks_twice(family: Family) -> None:
    model = checkpointing(family.wrapped(), family=family).train()
    leaves = [first_leaf(block) for block in ls.blocks_of(model)]
    with hooked(leaves) as seen, ls.running(model, PERMUTED):
        step(model)
    forward, backward = [i for i, _ in seen[:DEPTH]], [i for i, _ in seen[DEPTH:]]
    assert forward == list(PERMUTED)
    assert sorted(backward) == list(SEQUENTIAL)


def check_checkpointing_with_position_parts(family: Family) -> None:
    """With both parts, outputs, loss and gradients are those without checkpointing."""
    for order in (PERMUTED, PRUNED, REPEATED):
        plain, loss = _positioned_step(family, order, checkpointed=False)
        other, other_loss = _positioned_step(family, order, checkpointed=True)
        assert torch.equal(loss, other_loss)
        assert_same_gradients(gradients(other), gradients(plain))
        used = [p.grad is not None for p in other.encoding.projections.parameters()]
        assert sum(used) == 2 * len(set(order))


def _positioned_step(
    family: Family, order: Sequence[int], *, checkpointed: bool
) -> tuple[nn.Module, Tensor]:
    model = positioned(family.wrapped()).train()
    run = model
    if checkpointed and family.library == "torchvision":
        # No switch of its own: the whole forward is checkpointed.
        run = partial(checkpoint, model, use_reentrant=False)
    elif checkpointed:
        checkpointing(model.backbone, family=family)
    with ls.running(model, order), model.guessing() as guesses:
        output = call(run)
        loss = score(output) + guesses.loss()
        loss.backward()
    assert [(g.step.position, g.step.block) for g in guesses.items] == list(enumerate(order))
    return model, loss.detach()


# --- the model stays the library's ----------------------------------------------------------------


def check_state_dict_never_changes(family: Family) -> None:
    plain = family.plain()
    model = ls.wrap(copy.deepcopy(plain))
    _assert_same_state(model, plain)
    with ls.running(model, PRUNED), ls.tap(model):
        answer(model)
        _assert_same_state(model, plain)
    _assert_same_state(ls.unwrap(model), plain)


def _assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    got, wanted = model.state_dict(), plain.state_dict()
    assert list(got) == list(wanted)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    names = [[name for name, _ in m.named_parameters()] for m in (model, plain)]
    assert names[0] == names[1]
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


def check_unwrap_restores_the_container(family: Family) -> None:
    plain, model = family.plain(), family.wrapped()
    container = family.container(model)
    assert type(container) is BlockStack
    assert ls.unwrap(model) is model
    assert family.container(model) is container
    assert type(container) is type(family.container(plain))
    assert vars(container).keys() == vars(family.container(plain)).keys()
    assert torch.equal(answer(model), answer(plain))
    assert ls.unwrap(model) is model


def check_wrap_twice_is_one_wrap(family: Family) -> None:
    model = family.wrapped()
    before = [id(module) for module in model.modules()]
    assert ls.wrap(model) is model
    assert ls.wrap(model, blocks=family.path) is model
    assert [id(module) for module in model.modules()] == before
    ls.unwrap(model)
    assert type(family.container(model)) in (nn.Sequential, nn.ModuleList)


def check_discovery_finds_the_stack(family: Family) -> None:
    model = family.wrapped()
    assert ls.depth_of(model) == DEPTH
    children = list(family.container(family.plain()).named_children())
    with ls.running(model, PRUNED):
        assert ls.depth_of(model) == DEPTH
        assert len(ls.blocks_of(model)) == len(children) == DEPTH
        assert list(ls.blocks_of(model)) == list(family.container(model).children())
    explicit = ls.wrap(family.plain(), blocks=family.path)
    assert type(family.container(explicit)) is BlockStack


# --- hooks and intermediate features --------------------------------------------------------------


def check_hooks_fire_once_per_run_of_the_right_block(family: Family) -> None:
    model = family.wrapped()
    for order in (SEQUENTIAL, *ORDERS.values()):
        with hooked(ls.blocks_of(model)) as seen, ls.running(model, order):
            answer(model)
        assert [index for index, _ in seen] == list(order)


def check_intermediate_features_follow_positions(family: Family) -> None:
    """Features from the library are by position, as those of a rebuilt model."""
    for order in (SEQUENTIAL, PERMUTED, PRUNED, LONGER):
        rebuilt, model = Rebuilt(family, order).model, family.wrapped()
        wanted = _features(family, rebuilt, len(order))
        with ls.running(model, order):
            got = _features(family, model, len(order))
        assert len(got) == len(wanted) > 1
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), order
    _check_features_of_rounds(family)


def _check_features_of_rounds(family: Family) -> None:
    """The states after steps where the library's loop records them; refused where hooks would."""
    model, order = family.wrapped(), VERSIONED["rounds"]
    if family.library == "transformers":
        with ls.running(model, order), refuses(UsageError):
            model(images(), output_hidden_states=True)
    elif family.library == "timm":
        with torch.no_grad(), ls.running(model, order):
            states = model.forward_intermediates(images(), intermediates_only=True)
        blocks, versions = zip(*order.steps, strict=True)
        for count in range(1, DEPTH + 1):
            begun = ls.ExecutionOrder(blocks[:count], DEPTH, versions[:count])
            with torch.no_grad(), ls.running(model, begun):
                last = model.forward_intermediates(images(), intermediates_only=True)[-1]
            assert torch.equal(last, states[count - 1])


@torch.no_grad()
def _features(family: Family, model: nn.Module, positions: int) -> list[Tensor]:
    if family.library == "timm":
        everything = model.forward_intermediates(images(), intermediates_only=True)
        some = model.forward_intermediates(images(), indices=[0, positions - 1], norm=True)
        early = model.forward_intermediates(images(), indices=[0, 1], stop_early=True)[1]
        return [*everything, some[0], *some[1], *early]
    if family.library == "transformers":
        return list(model(images(), output_hidden_states=True).hidden_states)
    # torchvision traces the model: one graph per order, the sum over tokens of two depths.
    names = ["encoder.layers", "encoder.ln"]
    return list(create_feature_extractor(model, names)(images()).values())


# --- copies ---------------------------------------------------------------------------------------


def check_deepcopy_is_wrapped_and_independent(family: Family) -> None:
    _assert_independent_copy(family, copy.deepcopy)


def check_pickle_round_trip_in_memory(family: Family) -> None:
    _assert_independent_copy(family, lambda model: pickle.loads(pickle.dumps(model)))


def _assert_independent_copy(family: Family, make: Callable[[nn.Module], nn.Module]) -> None:
    model = family.wrapped()
    plain = answer(model)
    with ls.running(model, PERMUTED):
        twin = make(model)
        permuted = answer(model)
        assert torch.equal(answer(twin), plain), "the order belongs to the original alone"
    assert type(family.container(twin)) is BlockStack
    with ls.running(twin, PERMUTED):
        assert torch.equal(answer(twin), permuted)
        assert torch.equal(answer(model), plain)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(answer(model), plain)
    assert type(family.container(ls.unwrap(twin))) is type(family.container(family.plain()))


# --- threads --------------------------------------------------------------------------------------

THREADS, ITERATIONS = 8, 6


def check_threads_never_mix_orders(family: Family) -> None:
    some = list(permutations(range(DEPTH)))[3::5][:2]
    assert_unmixed(family, [*some, PRUNED, LONGER, *list(TEXTS.values())[:3], "2+0+3+1"])


def assert_unmixed(family: Family, orders: Sequence[Sequence[int] | str]) -> None:
    """As many threads as orders, each with its own, get what they get one after the other."""
    model = family.wrapped()
    serial = [_answer_along(model, order) for order in orders]
    assert all((a - b).abs().max() > 1e-4 for i, a in enumerate(serial) for b in serial[:i])
    barrier = threading.Barrier(THREADS)

    def work(index: int) -> int:
        barrier.wait()
        wrong = 0
        for _ in range(ITERATIONS):
            wrong += not torch.equal(_answer_along(model, orders[index]), serial[index])
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            wrong = list(pool.map(work, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert wrong == [0] * THREADS


@torch.no_grad()
def _answer_along(model: nn.Module, order: Sequence[int] | str) -> Tensor:
    with ls.running(model, order):
        return logits_of(model(images()))


# --- an order for every sample --------------------------------------------------------------------

# One batched matrix product sums in another order than several small ones: 1e-5 is about ten times
# the largest difference seen, on logits of size 1 to 5.
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4  # gradients reach 20 to 50 here
MIXED = (PERMUTED, PRUNED, SEQUENTIAL, REPEATED, (2,))


def check_per_sample_orders_equal_one_by_one(family: Family) -> None:
    mixed = (*MIXED, LONGER, *VERSIONED.values(), VERSIONED["rounds"])
    assert_one_by_one(family, mixed, lambda model: model)


def check_per_sample_orders_with_position_parts(family: Family) -> None:
    assert_one_by_one(family, (*MIXED, *SHORT), positioned)


def assert_one_by_one(
    family: Family, ids: Sequence[Any], prepare: Callable[[nn.Module], nn.Module]
) -> None:
    orders = [order_of(order, DEPTH) for order in ids]
    batch = images(len(orders))
    model, single = prepare(family.wrapped()), prepare(family.wrapped())
    with ls.running(model, orders):
        together = call(model, batch)
    score(together).backward()
    alone = []
    for row, order in enumerate(orders):
        with ls.running(single, order):
            output = logits_of(call(single, _alone(family, batch, row)))[:1]
        score(output).backward()
        alone.append(output.detach())
    assert_close(logits_of(together).detach(), torch.cat(alone), tolerance=TOLERANCE)
    assert_close_gradients(gradients(model), gradients(single), tolerance=GRADIENT_TOLERANCE)


def _alone(family: Family, batch: Tensor, row: int) -> Tensor:
    # XCiT's stem (BatchNorm in eval mode) gets wrong gradients from torch 2.15 on CPUs for a batch
    # of one: the untouched model's differ from finite differences. So there the sample runs twice.
    return batch[[row] * (2 if family.name == "timm-xcit" else 1)]


def assert_close_gradients(got: Gradients, wanted: Gradients, *, tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        other = wanted[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            scale = float(other.abs().max()) + 1.0
            assert_close(gradient, other, tolerance=tolerance * scale)


def check_an_exit_is_what_the_cut_orders_give(family: Family) -> None:
    """Outputs and gradients of orders of several lengths, some of which end before the exit."""
    orders = [order_of(order, DEPTH) for order in (*MIXED, LONGER)]
    cut = [ls.ExecutionOrder(order.blocks[:2], DEPTH) for order in orders]
    batch = images(len(orders))
    model, single = family.wrapped(), family.wrapped()
    with ls.running(model, orders, exit_after=2):
        together = torch.cat(call(model, batch))
    score(together).backward()
    outputs = []
    for several in (orders, cut):
        with ls.running(single, several):
            output = logits_of(call(single, batch))
        score(output).backward()
        outputs.append(output.detach())
    assert_close(logits_of(together).detach(), torch.cat(outputs), tolerance=TOLERANCE)
    assert_close_gradients(gradients(model), gradients(single), tolerance=GRADIENT_TOLERANCE)


# --- the tap --------------------------------------------------------------------------------------


def check_tap_records_what_hooks_see(family: Family) -> None:
    model = family.wrapped()
    for order in (SEQUENTIAL, *ORDERS.values(), VERSIONED["general"]):
        with ls.running(model, order):
            silent = answer(model)
            with hooked(ls.blocks_of(model)) as seen, ls.tap(model) as tap:
                assert torch.equal(answer(model), silent)
        _assert_records(tap.records, seen, order)
        with ls.running(model, order):
            answer(model)
        _assert_records(tap.records, seen, order)


def _assert_records(
    records: Sequence[TapRecord], seen: Sequence[tuple[int, Tensor]], order: Iterable[int]
) -> None:
    assert [(r.position, r.block) for r in records] == list(enumerate(order))
    assert all(r.rows is None for r in records)
    assert all(torch.equal(r.tensor, s) for r, (_, s) in zip(records, seen, strict=True))


def check_tap_keeps_the_last_forward_only(family: Family) -> None:
    model = family.wrapped()
    for order in (PERMUTED, (2,)):
        with ls.running(model, order), ls.tap(model) as tap:
            answer(model, images(seed=1))
            first = tap.records[-1].tensor
            answer(model, images(seed=2))
        assert [r.block for r in tap.records] == list(order)
        assert not torch.equal(tap.records[-1].tensor, first)


def check_tap_under_checkpointing(family: Family) -> None:
    model = checkpointing(family.wrapped(), family=family).train()
    for order in (PERMUTED, REPEATED, (2,)):
        plain = family.wrapped().train()
        with ls.running(plain, order), ls.tap(plain) as wanted:
            call(plain)
        with ls.running(model, order), ls.tap(model) as tap:
            output = call(model)
            _assert_taps(tap.records, wanted.records)
            score(output).backward()
        _assert_taps(tap.records, wanted.records)


def _assert_taps(got: Sequence[TapRecord], wanted: Sequence[TapRecord]) -> None:
    assert [(r.position, r.block, r.rows) for r in got] == [
        (r.position, r.block, r.rows) for r in wanted
    ]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(got, wanted, strict=True))


def check_tap_of_per_sample_orders(family: Family) -> None:
    """Every sample's outputs by position are those of the sample alone; replays record nothing."""
    ids = (PERMUTED, PRUNED, (2,))
    orders = [ls.ExecutionOrder(blocks, DEPTH) for blocks in ids]
    model = family.wrapped()
    with ls.running(model, orders), ls.tap(model) as tap:
        answer(model)
        first = tap.records
        answer(model)
    _assert_taps(tap.records, first)
    for row, order in enumerate(ids):
        mine = [(r, r.rows.index(row)) for r in tap.records if r.rows and row in r.rows]
        with ls.running(model, order), ls.tap(model) as alone:
            answer(model, images()[row : row + 1])
        assert [(r.position, r.block) for r, _ in mine] == list(enumerate(order))
        for (record, place), single in zip(mine, alone.records, strict=True):
            assert_close(record.tensor[place], single.tensor[0], tolerance=TOLERANCE * 10)


def check_tap_of_per_sample_orders_under_checkpointing(family: Family) -> None:
    orders = [ls.ExecutionOrder(blocks, DEPTH) for blocks in (PERMUTED, PRUNED, (2,))]
    model = checkpointing(family.wrapped(), family=family).train()
    with ls.running(model, orders), ls.tap(model) as tap:
        output = call(model)
        before = tap.records
        score(output).backward()
    assert len(before) == 2 + 2 + 1 + 1  # groups of samples at positions 0, 1, 2, 3
    _assert_taps(tap.records, before)


# --- position parts on every family ---------------------------------------------------------------


def positioned(model: nn.Module) -> Any:
    """`model` with position encoding and prediction of the paper's form (mean pooling)."""
    return ls.add_position(model, encoding=ENCODING, prediction=PREDICTION, seed=5)


class SlowEncoding(nn.Module):
    """The slow path of the encoding: one block with its position, by the paper's formula."""

    def __init__(self, block: nn.Module, position: int, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.block, self.position, self.weights = block, position, weights

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's output for z + GELU(Linear(LayerNorm([z; e])))."""
        w = self.weights
        rows = [
            torch.stack([torch.cat([token, w["table"][self.position]]) for token in sample])
            for sample in x
        ]
        both = torch.stack(rows)
        centred = both - both.mean(-1, keepdim=True)
        spread = (centred**2).mean(-1, keepdim=True) + 1e-5
        normed = centred / spread.sqrt() * w["norm.weight"] + w["norm.bias"]
        linear = normed @ w["weight"].T + w["bias"]
        gelu = linear * 0.5 * (1.0 + torch.erf(linear / 2**0.5))
        return self.block(x + gelu, *args, **kwargs)


def encoding_weights(encoding: nn.Module, block: int) -> dict[str, Tensor]:
    """The parameters of one block, under the names of the slow path."""
    norm, projection = encoding.norms[block], encoding.projections[block]
    table = encoding.table if encoding.table.dim() == 2 else encoding.table[block]
    return {
        "table": table,
        "norm.weight": norm.weight,
        "norm.bias": norm.bias,
        "weight": projection.weight,
        "bias": projection.bias,
    }


def check_encoding_equals_the_slow_path(family: Family) -> None:
    for order in (SEQUENTIAL, PERMUTED, PRUNED, REPEATED):
        rebuilt, model = Rebuilt(family, order), positioned(family.wrapped())
        twin = copy.deepcopy(model.encoding)
        container = family.container(rebuilt.model)
        blocks = [
            SlowEncoding(block, position, encoding_weights(twin, order[position]))
            for position, block in enumerate(container)
        ]
        rebuilt.install(blocks)
        wanted = step(rebuilt.model)
        with ls.running(model, order):
            got = step(model)
        assert_close(got, wanted, tolerance=TOLERANCE)
        assert_close_gradients(
            gradients(model.encoding), gradients(twin), tolerance=GRADIENT_TOLERANCE
        )
        assert_close_gradients(
            gradients(model.backbone), rebuilt.gradients(), tolerance=GRADIENT_TOLERANCE
        )


def check_position_parts_of_older_versions(family: Family) -> None:
    """The position of a step is its index, whichever state it reads."""
    for order in SHORT:
        model, twin = (positioned(family.wrapped()) for _ in range(2))
        rebuilt = slow(family, order, parts=twin)
        output = call(rebuilt.model)
        (path,) = family.container(rebuilt.model)
        loss = PREDICTION.weight * torch.stack(path.losses).mean()
        (score(output) + loss).backward()
        with ls.running(model, order), model.guessing() as guesses:
            got = call(model)
            (score(got) + guesses.loss()).backward()
        assert_close(logits_of(got), logits_of(output), tolerance=TOLERANCE)
        assert_close(guesses.loss(), loss, tolerance=TOLERANCE)
        for part in ("encoding", "prediction"):
            assert_close_gradients(
                gradients(getattr(model, part)),
                gradients(getattr(twin, part)),
                tolerance=GRADIENT_TOLERANCE,
            )


def check_prediction_reads_every_output(family: Family) -> None:
    """Logits from the blocks' outputs as hooks see them; the model's own output unchanged."""
    model = ls.add_position(family.wrapped(), prediction=PREDICTION)
    with ls.running(model, REPEATED), torch.no_grad():
        plain = answer(model)
        with hooked(ls.blocks_of(model)) as seen, model.guessing() as guesses:
            assert torch.equal(answer(model), plain)
    for guess, (block, output) in zip(guesses.items, seen, strict=True):
        wanted = model.prediction.classifiers[block](
            model.prediction.norms[block](output.mean(dim=1))
        )
        assert guess.step.block == block
        assert torch.equal(guess.logits, wanted)


def check_parts_stay_out_of_the_backbone(family: Family) -> None:
    plain = family.plain()
    model = positioned(ls.wrap(copy.deepcopy(plain)))
    _assert_same_state(model.backbone, plain)
    with torch.no_grad():
        assert torch.equal(logits_of(call(model.backbone)), answer(plain))


# --- export ---------------------------------------------------------------------------------------


def check_export_of_one_order(family: Family) -> None:
    """`torch.export` inside `running` freezes the order; the program needs no context."""
    model = family.wrapped()
    with ls.running(model, PERMUTED):
        wanted = answer(model)
        # Not strict, as newer releases of torch have it unless told otherwise.
        program = torch.export.export(model, (images(),), strict=False)
    assert_close(logits_of(program.module()(images())), wanted, tolerance=1e-6)
