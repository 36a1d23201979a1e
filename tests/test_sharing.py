"""Blocks that share something beside the state, and backbones that do something between them.

Every score and every sample has to be what a forward of that order alone gives.
"""

from __future__ import annotations

import copy
import gc
import logging
import queue
import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize

import layershuffle as ls
from common import (
    CLASSES,
    DEPTH,
    FAMILIES,
    PERMUTED,
    PRUNED,
    SEQUENTIAL,
    WIDTH,
    Family,
    assert_close,
    images,
)
from contracts import TOLERANCE
from layershuffle.ground.errors import StackError
from own_models import Asked, Block, Own, TrainedWithPatches, TwoEnds
from test_own_models import EQUAL_LENGTHS, one_by_one

ORDERS = ["3,0,2,1", "3,0", "3,0,1,2", "0,1,2,3", "0,1,3,2", "3,1"]
EACH = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]


def own(backbone: type[nn.Module], **arguments: Any) -> Any:
    """A wrapped backbone of one's own."""
    torch.manual_seed(0)
    return ls.wrap(backbone(**arguments), "blocks").eval()


class Values(Own):
    """The values of the first block that runs go to all later ones (arXiv 2410.17897)."""

    class Valued(Block):
        """Adds the first values of this forward."""

        box: dict[str, Tensor]

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) + self.box.setdefault("values", self.channels(x))

    block = Valued

    def run(self, x: Tensor) -> Tensor:
        box: dict[str, Tensor] = {}
        for block in self.blocks:
            block.box = box  # type: ignore[assignment]
            x = block(x)
        return x


class Merging(Own):
    """Blocks note in a list how many tokens they left, and the head weighs by its length."""

    class Noting(Block):
        """Notes its run."""

        notes: list[int]

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            self.notes.append(x.shape[1])
            return super().forward(x) / len(self.notes)

    block = Noting

    def run(self, x: Tensor) -> Tensor:
        notes: list[int] = []
        for block in self.blocks:
            block.notes = notes  # type: ignore[assignment]
            x = block(x)
        return x


class BatchMixing(Own):
    """Blocks subtract the mean over the samples of the batch."""

    class Mixing(Block):
        """Mixes samples."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) - x.mean(0, keepdim=True) / 2

    block = Mixing


CONDITION: ContextVar[float] = ContextVar("condition", default=0.0)


class Conditioned(Own):
    """The backbone sets a condition for its blocks in a context variable."""

    class Reading(Block):
        """Adds the condition."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) + CONDITION.get()

    block = Reading

    def run(self, x: Tensor) -> Tensor:
        before = CONDITION.set(0.25)
        try:
            return super().run(x)
        finally:
            CONDITION.reset(before)


class Casting(Own):
    """The backbone runs its blocks under autocast."""

    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(x)


class Losing(Own):
    """The blocks return a loss beside the state, and the backbone sums them up."""

    class Routed(Block):
        """Returns the state and how large it is."""

        def forward(self, x: Tensor) -> Any:
            """The next state, and a scalar."""
            return super().forward(x), x.square().mean()

    block = Routed

    def run(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return x + total


class TokensFirst(Own):
    """The state has its samples on the second axis."""

    class Turned(Block):
        """Takes and returns tokens first."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    block = Turned

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.transpose(0, 1)).transpose(0, 1)


class Scaled(Own):
    """The blocks take a scale of every sample by keyword, and return a number of every sample."""

    class Scaling(Block):
        """Scales what it adds."""

        def forward(self, x: Tensor, *, scale: Tensor) -> Any:
            """The next state, and its size."""
            out = x + scale * (super().forward(x) - x)
            return out, out.abs().mean((1, 2))

    block = Scaling

    def run(self, x: Tensor) -> Tensor:
        scale, sizes = x.abs().amax((1, 2), keepdim=True), 0.0
        for block in self.blocks:
            x, size = block(x, scale=scale)
            sizes = sizes + size
        return x + sizes[:, None, None]


SHARING = [Values, Merging]
DOING_MORE = [BatchMixing, Conditioned, Casting, Losing]


def alone(model: nn.Module, order: Any, batch: Tensor) -> Tensor:
    """Logits of one order, by a forward of its own."""
    with torch.no_grad(), ls.running(model, order):
        logits: Tensor = model(batch)
    return logits


@pytest.mark.parametrize("backbone", [*SHARING, *DOING_MORE], ids=lambda kind: kind.__name__)
def test_scores_are_those_of_the_order_alone(
    backbone: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch, labels = own(backbone), images(6), torch.arange(6) % CLASSES
    with caplog.at_level(logging.WARNING, logger="layershuffle"):
        for score in ls.evaluate(model, [(batch, labels)] * 2, orders=ORDERS):
            wanted = F.cross_entropy(alone(model, score.order, batch), labels)
            assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)
    assert len(caplog.records) == (backbone in SHARING), "said once"


@pytest.mark.parametrize("backbone", SHARING, ids=lambda kind: kind.__name__)
def test_nothing_is_said_of_one_order(
    backbone: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="layershuffle"):
        ls.evaluate(own(backbone), [(images(6), torch.arange(6) % CLASSES)], orders=ORDERS[:1])
    assert caplog.records == []


@pytest.mark.parametrize("backbone", [*SHARING, BatchMixing, Losing], ids=lambda k: k.__name__)
def test_samples_that_are_not_alone_are_refused(backbone: type[nn.Module]) -> None:
    model = own(backbone)
    with ls.running(model, EACH), pytest.raises(StackError):
        model(images(3))


@pytest.mark.parametrize(
    "backbone", [Conditioned, Casting, TokensFirst, Scaled], ids=lambda kind: kind.__name__
)
def test_samples_get_what_they_get_alone(backbone: type[nn.Module]) -> None:
    model = own(backbone)
    with torch.no_grad(), ls.running(model, EACH):
        together = model(images(3))
    tolerance = 0.02 if backbone is Casting else TOLERANCE
    assert_close(together, one_by_one(model, EQUAL_LENGTHS), tolerance=tolerance)


@pytest.mark.parametrize("backbone", [TokensFirst, Scaled], ids=lambda kind: kind.__name__)
def test_groups_get_what_they_get_alone(backbone: type[nn.Module]) -> None:
    """Two samples of an order side by side in the batch, also with older states."""
    model, batch = own(backbone), images(5)
    texts = ("0+1,3", "0+1,3", "2,0,3", "2,0,3", "3,1+0")
    each = [ls.ExecutionOrder.parse(text, depth=DEPTH) for text in texts]
    with torch.no_grad(), ls.running(model, each):
        together = model(batch)
    wanted = [alone(model, order, batch[row : row + 1]) for row, order in enumerate(each)]
    assert_close(together, torch.cat(wanted), tolerance=TOLERANCE)


def test_a_gate_that_is_trained_later_hides_nothing() -> None:
    """What blocks share is looked for again in every evaluation."""
    model, batch, labels = own(Values), images(3), torch.tensor([0, 1, 2])
    mixes = [block.channels.mix for block in ls.blocks_of(model)]
    trained = [copy.deepcopy(mix.state_dict()) for mix in mixes]
    for mix in mixes:  # the shared values are zero now
        nn.init.zeros_(mix.weight)
        nn.init.zeros_(mix.bias)
    ls.evaluate(model, [(batch, labels)], orders=ORDERS)
    for mix, weights in zip(mixes, trained, strict=True):
        mix.load_state_dict(weights)
    for score in ls.evaluate(model, [(batch, labels)], orders=ORDERS):
        wanted = F.cross_entropy(alone(model, score.order, batch), labels)
        assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)


def test_a_verdict_ends_with_its_model() -> None:
    """Read-outs are built on the same blocks again and again, at the same addresses."""

    class Last(nn.Module):
        def __init__(self, parts: Own) -> None:
            super().__init__()
            self.blocks, self.parts = parts.blocks, [parts]

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0].patches(x).flatten(2).mT
            for block in self.blocks:
                x = block(x)
            return self.parts[0].head(x.mean(1))  # type: ignore[no-any-return]

    class AllStates(Last):
        def forward(self, x: Tensor) -> Tensor:
            x, states = self.parts[0].patches(x).flatten(2).mT, []
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return self.parts[0].head(sum(states).mean(1))  # type: ignore[no-any-return, attr-defined]

    parts, labels = own(Own), torch.tensor([0, 1, 2])
    for kind in (Last, AllStates) * 3:
        model = kind(parts).eval()
        for score in ls.evaluate(model, [(images(3), labels)], orders=ORDERS[:3]):
            wanted = F.cross_entropy(alone(model, score.order, images(3)), labels)
            assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)
        del model
        gc.collect()


def test_observers_see_the_images_and_nothing_else() -> None:
    """Ranges of quantisation are those of the forward alone: trials put them back."""

    class Observed(Own):
        class Quantised(Block):
            def __init__(self) -> None:
                super().__init__()
                self.quantise = FakeQuantize()

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(self.quantise(x))

        block = Quantised

    model, x = own(Observed), torch.randn(2, 16, WIDTH)
    twin = copy.deepcopy(ls.unwrap(copy.deepcopy(model)))
    with torch.no_grad():
        with ls.running(model, EACH), pytest.raises(StackError):
            model(images(3))
        with ls.running(model, "2+0"):
            model.run(x)
        for block in (2, 0):
            twin.blocks[block](x)
    ranges = zip(model.named_buffers(), twin.buffers(), strict=True)
    assert [name for (name, ours), theirs in ranges if not torch.equal(ours, theirs)] == []


def test_beit_can_be_trained_after_evaluate() -> None:
    """It keeps its relative positions from forward to forward."""
    model = FAMILIES["timm-beit"].wrapped()
    labels = torch.tensor([0, 1, 2])
    ls.evaluate(model, [(images(3), labels)], modes="sequential,arbitrary", num_orders=2)
    model.train()
    with ls.running(model, PERMUTED):
        F.cross_entropy(model(images(3)), labels).backward()
    assert all(p.grad is not None for p in ls.blocks_of(model)[0].parameters())


def test_slices_can_be_called_under_an_order() -> None:
    """As those of an nn.Sequential."""

    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[2:](self.blocks[:2](x) * self.scale)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = ls.wrap(Registers().eval())
    x = torch.randn(2, 16, WIDTH)
    blocks = ls.blocks_of(model)
    with torch.no_grad(), ls.running(model, "3,2,1,0"):
        wanted = blocks[0](blocks[1](blocks[2](blocks[3](x)) * model.scale))
        assert torch.equal(model(x), wanted)


def test_as_many_tokens_as_samples() -> None:
    """The samples are found by batches of two sizes, not by equal numbers."""

    class Positions(Own):
        class Shifted(Block):
            def forward(self, x: Tensor, shift: Any = 0.0) -> Tensor:
                return super().forward(x + shift)

        block = Shifted

        def run(self, x: Tensor) -> Tensor:
            shift = torch.linspace(0, 1, x.shape[1])[:, None]  # [tokens, 1]
            for block in self.blocks:
                x = block(x, shift)
            return x

    model = own(Positions)
    orders = (EQUAL_LENGTHS * 6)[:16]  # as many samples as tokens
    with torch.no_grad(), ls.running(model, [ls.ExecutionOrder(o, DEPTH) for o in orders]):
        together = model(images(16))
    assert_close(together, one_by_one(model, orders), tolerance=TOLERANCE)


# --- the trial ------------------------------------------------------------------------------------


def test_the_trial_is_made_in_the_mode_of_the_call() -> None:
    """A step that the backbone takes in training alone comes once per block; statistics stay."""
    model = own(TrainedWithPatches)
    with torch.no_grad(), ls.running(model, EACH):
        model(images(3))
        model.train()(images(3))
        assert model.norm_of_patches.training
        assert model.norm_of_patches.num_batches_tracked == 1
        model.norm_of_patches.eval()
        together = model(images(3))
    assert_close(together, one_by_one(model, EQUAL_LENGTHS), tolerance=TOLERANCE)
    uneven = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED)]
    with ls.running(model.eval(), uneven):
        model(images(2))
        with pytest.raises(StackError):
            model.train()(images(2))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_orders_of_several_lengths_in_training(family: Family) -> None:
    """The libraries' loops do nothing between the blocks in training either."""
    model = family.wrapped().train()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED, SEQUENTIAL)]
    with torch.no_grad(), ls.running(model, orders):
        model(images(3))


def test_flags_of_a_call_have_a_trial_of_their_own() -> None:
    model = own(Asked)
    for every in (False, True, False):
        with torch.no_grad(), ls.running(model, EACH):
            together = model(images(3), every=every)
        for row, order in enumerate(EACH):
            with torch.no_grad(), ls.running(model, order):
                single = model(images(3)[row : row + 1], every=every)
            assert_close(together[row : row + 1], single, tolerance=TOLERANCE)


def test_an_error_before_the_blocks_is_the_callers() -> None:
    model = own(Own)
    with ls.running(model, EACH), pytest.raises(RuntimeError, match="to have 3 channels"):
        model(images(3)[:, :2])
    with ls.running(model, EACH):
        model(images(3))


def test_a_trial_waits_for_that_of_another_thread() -> None:
    """Two at a time would take each other's modes for those to come back to."""
    model = own(TrainedWithPatches).train()
    # Not a list, which the trial would put back.
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    begun = threading.Event()

    def run() -> None:
        with torch.no_grad(), ls.running(model, EACH):
            model(images(3))

    def once(*_: object) -> None:
        if not begun.is_set():
            begun.set()
            thread = threading.Thread(target=run)
            threads.put(thread)
            thread.start()

    model.patches.register_forward_hook(once)
    run()
    threads.get().join()
    assert all(module.training for module in model.modules())


def test_the_last_block_may_be_asked_for_from_behind() -> None:
    model = own(TwoEnds)
    for order in (PERMUTED, PRUNED, (0, 2, 2, 1, 3, 0)):
        alone(model, order, images(3))
