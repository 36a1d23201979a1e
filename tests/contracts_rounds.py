"""The contract of orders whose steps read older versions of the state, for all families.

The yardstick is the slow path: a copy of the untouched host whose container holds a single module,
which computes the recursion of `core.orders` in plain torch, every state kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import layershuffle as ls
from common import (
    DEPTH,
    PERMUTED,
    SEQUENTIAL,
    Family,
    assert_close,
    gradients,
    images,
    logits_of,
    same,
    score,
)
from contracts import (
    GRADIENT_TOLERANCE,
    PREDICTION,
    TOLERANCE,
    Rebuilt,
    answer,
    assert_close_gradients,
    assert_one_by_one,
    assert_unmixed,
    call,
    checkpointing,
    hooked,
    positioned,
    step,
)
from layershuffle.core.forwards import forward_many
from layershuffle.core.hooks import Step
from layershuffle.core.stack import recomputing
from layershuffle.ground.errors import UsageError
from refusals import refuses

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


class SlowPath(nn.Module):
    """The blocks of an order as one module: state[k+1] = state[k] + block(state[v]) - state[v]."""

    def __init__(
        self, blocks: Sequence[nn.Module], order: ls.ExecutionOrder, parts: Any = None
    ) -> None:
        super().__init__()
        self.blocks, self.order, self.parts = nn.ModuleList(blocks), order, parts
        self.losses: list[Tensor] = []

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The state after all steps; `losses` are those of the position prediction."""
        states, self.losses = [state], []
        for position, (block, version) in enumerate(self.order.steps):
            read = given = states[version]
            if self.parts is not None:
                given = self.parts.encoding.before(read, Step(position, block))
            out = self.blocks[block](given, *args, **kwargs)
            if self.parts is not None:
                guess = self.parts.prediction(out, block)
                truth = torch.full((len(out),), position)
                self.losses.append(nn.functional.cross_entropy(guess, truth))
            states.append(out if version == position else states[-1] + (out - read))
        return states[-1]


def slow(family: Family, order: ls.ExecutionOrder, parts: Any = None) -> tuple[Rebuilt, SlowPath]:
    """The untouched host with the slow path in place of its blocks."""
    rebuilt = Rebuilt(family, SEQUENTIAL)
    path = SlowPath(list(rebuilt.blocks.values()), order, parts)
    rebuilt.install([path])
    return rebuilt, path


def check_versions_equal_the_slow_path(family: Family) -> None:
    for name, order in VERSIONED.items():
        rebuilt, model = slow(family, order)[0], family.wrapped().train()
        wanted = step(rebuilt.model.train())
        with ls.running(model, order):
            got = step(model)
        assert torch.equal(got, wanted), f"outputs differ for {name}"
        # Sums over the readers of a state come in another order in the backward pass.
        assert_close_gradients(gradients(model), rebuilt.gradients(), tolerance=GRADIENT_TOLERANCE)
        # Sequential steps give another result, or nothing was tested.
        with ls.running(model, order.blocks), torch.no_grad():
            assert (logits_of(call(model)) - wanted).abs().max() > 1e-3, name


def check_versions_under_checkpointing(family: Family) -> None:
    """Block by block by the host, and by us: the same numbers as without."""
    for order in VERSIONED.values():
        plain, other, ours = (family.wrapped().train() for _ in range(3))
        with ls.running(plain, order):
            wanted = step(plain)
        with ls.running(checkpointing(other, family=family), order):
            assert torch.equal(step(other), wanted)
        with ls.running(ours, order), recomputing(ours):
            assert torch.equal(step(ours), wanted)
        for model in (other, ours):
            assert_close_gradients(gradients(model), gradients(plain), tolerance=GRADIENT_TOLERANCE)


def check_versions_with_position_parts(family: Family) -> None:
    """The position of a step is its index, whichever state it reads."""
    for order in SHORT:
        model, twin = (positioned(family.wrapped()) for _ in range(2))
        rebuilt, path = slow(family, order, twin)
        output = call(rebuilt.model)
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


def check_versions_per_sample(family: Family) -> None:
    mixed = (*VERSIONED.values(), ORDINARY, VERSIONED["rounds"])
    assert_one_by_one(family, mixed, lambda model: model)


def check_versions_per_sample_with_position_parts(family: Family) -> None:
    assert_one_by_one(family, (*SHORT, ORDINARY), positioned)


def check_versions_per_sample_under_checkpointing(family: Family) -> None:
    orders = [*SHORT[:2], ORDINARY]
    plain, other = family.wrapped().train(), family.wrapped().train()
    with ls.running(plain, orders):
        wanted = step(plain)
    with ls.running(checkpointing(other, family=family), orders):
        assert torch.equal(step(other), wanted)
    assert_close_gradients(gradients(other), gradients(plain), tolerance=GRADIENT_TOLERANCE)


def check_versions_of_many_orders(family: Family) -> None:
    """Bit-equal to one by one, although orders of other versions share beginnings."""
    model, batch = family.wrapped(), images()
    rounds = ("2+0,3", "2+0,3+1", "2+0+3", "2,0,3@1,1@0", "2+0,2+0", "2+0,3")
    texts = ("2,0,3", *rounds, "0,1,2,3", "2,0,3,1", "2,0", "1", "2,0,0,3,3", "2", "2,0")
    orders = [ls.ExecutionOrder.parse(text, depth=DEPTH) for text in texts]
    with torch.no_grad():
        together = dict(forward_many(model, batch, orders))
        assert sorted(together) == list(range(len(orders)))
        for index, order in enumerate(orders):
            with ls.running(model, order):
                assert same(together[index], logits_of(model(batch))), texts[index]


def check_versions_in_threads(family: Family) -> None:
    orders = [*TEXTS.values(), "2,0,3,1", "2+0+3+1", "1+3+0"]
    assert_unmixed(family, orders)


def check_versions_tap(family: Family) -> None:
    """A record per step: what its block returned."""
    model, order = family.wrapped(), VERSIONED["general"]
    with ls.running(model, order), hooked(ls.blocks_of(model)) as seen, ls.tap(model) as tap:
        answer(model)
    assert [(r.position, r.block) for r in tap.records] == list(enumerate(order))
    assert all(same(r.tensor, s) for r, (_, s) in zip(tap.records, seen, strict=True))


def check_versions_intermediate_features(family: Family) -> None:
    """The states after steps where the host's loop records them; refused where hooks would."""
    model, order = family.wrapped(), VERSIONED["rounds"]
    if family.library == "transformers":
        read = partial(model, images(), output_hidden_states=True)
        with ls.running(model, order), refuses(UsageError):
            read()
        with ls.running(model, ORDINARY):
            assert read().hidden_states
    elif family.library == "timm":
        features = partial(model.forward_intermediates, images(), intermediates_only=True)
        with torch.no_grad(), ls.running(model, order):
            states = features()
        blocks, versions = zip(*order.steps, strict=True)
        for count in range(1, DEPTH + 1):
            begun = ls.ExecutionOrder(blocks[:count], DEPTH, versions[:count])
            with torch.no_grad(), ls.running(model, begun):
                assert torch.equal(features()[-1], states[count - 1])
