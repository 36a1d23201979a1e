"""Execution orders: parsing, printing, JSON, and invalid ones."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layershuffle.core.orders import ExecutionOrder, order_of, orders_of
from layershuffle.ground.errors import UsageError
from refusals import refuses


@st.composite
def orders(draw: st.DrawFn) -> ExecutionOrder:
    """Orders of any kind: permutations, subsets, with repeats, longer than the depth."""
    depth = draw(st.integers(1, 30))
    blocks = draw(st.lists(st.integers(0, depth - 1), min_size=1, max_size=40))
    return ExecutionOrder(tuple(blocks), depth)


@st.composite
def versioned(draw: st.DrawFn) -> ExecutionOrder:
    """Orders whose steps read any existing version, no block twice on one."""
    depth = draw(st.integers(1, 12))
    steps: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 20))):
        step = (draw(st.integers(0, depth - 1)), draw(st.integers(0, len(steps))))
        steps += [step] * (step not in steps)
    return ExecutionOrder(tuple(b for b, _ in steps), depth, tuple(v for _, v in steps))


@given(versioned())
def test_versions_read_later_are_those_of_a_search(order: ExecutionOrder) -> None:
    wanted = set()
    for version in range(len(order)):
        if any(v == version and k > v for k, (_, v) in enumerate(order.steps)):
            wanted.add(version)
    assert order.read_later == wanted


@pytest.mark.parametrize(
    ("text", "steps", "printed"),
    [
        ("3,0,2", ((3, 0), (0, 1), (2, 2)), "3,0,2"),
        ("3+7+0,5+1", ((3, 0), (7, 0), (0, 0), (5, 3), (1, 3)), "3+7+0,5+1"),
        ("3,7@0,0@0", ((3, 0), (7, 0), (0, 0)), "3+7+0"),
        ("3,7@0,0@1", ((3, 0), (7, 0), (0, 1)), "3,7@0,0@1"),
        ("3@0,7@1", ((3, 0), (7, 1)), "3,7"),
        ("3+7,5@1,5", ((3, 0), (7, 0), (5, 1), (5, 3)), "3,7@0,5@1,5"),
    ],
)
def test_steps_of_a_text(text: str, steps: object, printed: str) -> None:
    order = ExecutionOrder.parse(text, depth=8)
    assert order.steps == steps
    assert str(order) == printed


def test_rounds() -> None:
    order = ExecutionOrder.in_rounds([[3, 7, 0], [5, 1], [3]], 8)
    assert order == ExecutionOrder.parse("3+7+0,5+1,3", depth=8)
    assert order.rounds == ((3, 7, 0), (5, 1), (3,))
    assert order.versions == (0, 0, 0, 3, 3, 5)
    assert order.has_repeats
    assert ExecutionOrder.parse("3,7@0,0@1", depth=8).rounds is None
    assert ExecutionOrder.in_rounds([[1], [0]], 2) == ExecutionOrder((1, 0), 2)
    assert repr(order) == "ExecutionOrder('3+7+0,5+1,3' of 8, 3 missing, repeats)"
    # Ascending, although a set of these two has them the other way round.
    assert ExecutionOrder((0, 1, 2, 4, 5, 6, 7, 8, 10, 11), 12).missing == (3, 9)


@given(orders() | versioned())
def test_round_trips(order: ExecutionOrder) -> None:
    text = str(order)
    assert ExecutionOrder.parse(text, depth=order.depth) == order
    assert ExecutionOrder.parse(f" {text.replace(',', ' , ')}\n", depth=order.depth) == order
    blocks, versions = zip(*order.steps, strict=True)
    assert ExecutionOrder(blocks, order.depth, versions) == order
    assert (order.versions is None) == (versions == tuple(range(len(order))))


@given(orders())
def test_properties_of_an_order(order: ExecutionOrder) -> None:
    run = list(order)
    assert order.has_repeats == any(run.count(block) > 1 for block in run)
    assert order.missing == tuple(b for b in range(order.depth) if b not in run)
    assert len(order) == len(run)
    assert ("repeats" in repr(order)) == order.has_repeats
    assert (f"{len(order.missing)} missing" in repr(order)) == bool(order.missing)


def test_sequential() -> None:
    order = ExecutionOrder.sequential(3)
    assert order.blocks == (0, 1, 2)
    assert str(order) == "0,1,2"
    assert repr(ExecutionOrder((2, 2), 3)) == "ExecutionOrder('2,2' of 3, 2 missing, repeats)"


def test_a_value() -> None:
    """Frozen, hashable, equal by content, the same through copy and pickle."""
    order = ExecutionOrder.parse("3,0,2", depth=4)
    assert len({order, ExecutionOrder((3, 0, 2), 4), ExecutionOrder((3, 0, 2), 5)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.depth = 5  # type: ignore[misc]
    assert copy.deepcopy(order) == order
    assert pickle.loads(pickle.dumps(order)) == order


@pytest.mark.parametrize("blocks", [[2, 0], np.array([2, 0]), torch.tensor([2, 0]), iter((2, 0))])
def test_integers_of_any_library_become_pythons(blocks: Any) -> None:
    order = ExecutionOrder(blocks, 3)
    assert order.blocks == (2, 0)
    assert all(type(block) is int for block in order)
    assert str(order) == "2,0"


def test_order_of() -> None:
    order = ExecutionOrder((1, 0), 2)
    assert order_of(order, 2) is order
    assert order_of([1, 0], 2) == order
    assert orders_of([1, 0], 2) == order
    assert orders_of([[1, 0], "0,1", order], 2) == (order, ExecutionOrder.sequential(2), order)


def _parse(text: str, **options: Any) -> Callable[[], ExecutionOrder]:
    return lambda: ExecutionOrder.parse(text, **{"depth": 4, **options})


BAD = {
    "empty text": _parse(""),
    "blank text": _parse("  \n"),
    "a comma": _parse(","),
    "trailing comma": _parse("1,2,"),
    "word": _parse("1,two"),
    "fraction": _parse("1.0"),
    "underscore": _parse("1_0", depth=12),
    "other digits": _parse("\u0663"),
    "huge number": _parse("9" * 5000),
    "spaces for commas": _parse("1 2"),
    "negative id": _parse("0,-1"),
    "unknown id": _parse("0,4"),
    "no blocks": lambda: ExecutionOrder((), 4),
    "depth 0": lambda: ExecutionOrder((0,), 0),
    "depth text": lambda: ExecutionOrder((0,), "4"),  # type: ignore[arg-type]
    "depth True": lambda: ExecutionOrder((0,), True),
    "sequential 0": lambda: ExecutionOrder.sequential(0),
    "bool id": lambda: ExecutionOrder((False,), 4),
    "float id": lambda: ExecutionOrder((1.0,), 4),  # type: ignore[arg-type]
    "text ids": lambda: ExecutionOrder("10", 4),  # type: ignore[arg-type]
    "other depth": lambda: order_of(ExecutionOrder((0,), 3), 4),
    "float": lambda: ExecutionOrder((0.0,), 2),  # type: ignore[arg-type]
    "true": lambda: ExecutionOrder((True,), 2),
    "nested": lambda: ExecutionOrder(((0,),), 2),  # type: ignore[arg-type]
    "plus alone": _parse("1+"),
    "no version": _parse("1@"),
    "version word": _parse("1@a"),
    "two versions": _parse("1@0@0"),
    "version in a round": _parse("1+2@0"),
    "later version": _parse("1,2@2"),
    "version below 0": _parse("1,2@-1"),
    "twice on a version": _parse("1+1"),
    "few versions": lambda: ExecutionOrder((0, 1), 4, (0,)),
    "bool version": lambda: ExecutionOrder((0,), 4, (False,)),
    "set": lambda: order_of({2, 0, 1}, 3),
    "words": lambda: orders_of(["2", "0", "1"], 3),  # or an order of one block per sample?
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_refused_with_the_reason(make: Callable[[], object]) -> None:
    with refuses(UsageError):
        make()
