"""Blocks side by side in custom hosts: their meaning, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layershuffle as ls
from common import DEPTH, WIDTH, assert_close, images
from contracts import answer
from deaf_models import CUTTING
from layershuffle.core.tensors import state_of
from layershuffle.errors import StackError
from own_models import CHAINS, LOOPS, Block, Own
from refusals import refuses


def labelled() -> list[tuple[Tensor, Tensor]]:
    """A batch."""
    return [(images(3), torch.tensor([0, 1, 4]))]


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


REFUSED = {
    "tuple state": LOOPS["own-tuplestate"].wrapped,
    "backwards": LOOPS["own-backwards"].wrapped,
    "pairs": LOOPS["own-pairs"].wrapped,
    "shorter": lambda: ls.wrap(Shortening().eval(), "blocks"),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=list(REFUSED))
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
