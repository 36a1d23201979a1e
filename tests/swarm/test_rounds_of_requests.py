"""How blocks run side by side and again: orders, what ran, and what is chosen by a calibration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm.rounds import (
    UNEXPLAINED,
    Cell,
    Rounds,
    Way,
    beside_twins,
    cell_of,
    cell_of_named,
    late_last,
    overlapped,
)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(3), "4,1,0"),
        (Cell(3, passes=2), "4,1,0,4,1,0"),
        (Cell(3, parallel=2), "4,1@0,0@1"),
        (Cell(3, passes=2, parallel=2), "4,1@0,0@1,4,1@3,0@4"),
        (Cell(2, passes=3, parallel=4), "4+1,4+1,4+1"),
    ],
)
def test_orders_without_a_barrier(cell, text):
    """Each pass begins with the newest state, so that no block runs twice on one version."""
    order = overlapped((4, 1, 0, 2, 3), cell, depth=5)
    assert order == ExecutionOrder.parse(text, depth=5)


@pytest.mark.parametrize(
    ("blocks", "parallel", "text"),
    [
        ((0, 1, 2, 3), 2, "0,2@0,1@1,3@2"),
        ((0, 1, 2, 3), 3, "0,2@0,1@1,3@2"),
        ((2, 0, 3, 1), 2, "2,0@0,3@1,1@2"),
        ((0, 1), 4, "0,1"),
    ],
)
def test_places_with_the_same_weights_wait_for_each_other(blocks, parallel, text):
    """Places 0 and 1 share weights, and so do 2 and 3: others go first, or nobody does."""
    cell = Cell(len(blocks), parallel=parallel)
    order = overlapped(blocks, cell, depth=4, tied=(0, 0, 2, 2))
    assert order == ExecutionOrder.parse(text, depth=4)
    assert not beside_twins(order, (0, 0, 2, 2))


@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_places_with_weights_of_their_own_are_as_old_as_may_be(
    blocks, weights, kept, passes, parallel
):
    cell, tied = Cell(kept, passes, parallel), [weights.index(weight) for weight in weights]
    free = overlapped(blocks, cell, depth=6)
    assert free.blocks == tuple(blocks[:kept]) * passes
    assert free == overlapped(blocks, cell, depth=6, tied=range(6))
    apart = overlapped(blocks, cell, depth=6, tied=tied)
    assert not beside_twins(apart, tied)
    assert all(own >= other for (_, own), (_, other) in zip(apart.steps, free.steps, strict=True))
    for begin in range(0, passes * kept, kept):
        assert sorted(apart.blocks[begin : begin + kept]) == sorted(blocks[:kept])


def test_steps_beside_the_same_weights():
    tied = (0, 0, 2, 2)
    for text, beside in [("0,1", False), ("0+1", True), ("0+2,1+3", False), ("0,2@0,1@0", True)]:
        assert beside_twins(ExecutionOrder.parse(text, depth=4), tied) == beside


def test_the_last_block_may_be_late():
    assert late_last((2, 0, 1), 1, depth=3) == ExecutionOrder.parse("2,0,1@1", depth=3)
    assert late_last((2, 0, 1), 2, depth=3) == ExecutionOrder.parse("2,0,1@0", depth=3)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_what_ran_is_what_was_measured(kept, passes, parallel):
    order = overlapped(range(12), Cell(kept, passes, parallel), depth=12)
    # No more blocks can be under way than there are.
    assert cell_of(order.steps) == Cell(kept, passes, min(parallel, kept))


def test_what_ran_counts_late_answers_and_half_passes():
    assert cell_of(ExecutionOrder.parse("0,1,2,3@2", depth=4).steps) == Cell(4, 1, 2)
    assert cell_of(ExecutionOrder.parse("0,1,2,3@0", depth=4).steps) == Cell(4, 1, 2)
    assert cell_of(ExecutionOrder.parse("0,1,0", depth=4).steps) == Cell(2, 1, 1)
    # Block 0 ran three times while block 1 was away: that is no second pass.
    assert cell_of(ExecutionOrder.parse("0,0,0,1", depth=4).steps) == Cell(2, 1, 1)
    # In the second pass: five versions old is more than any number under way explains.
    assert cell_of(ExecutionOrder.parse("0,1,0,1@0", depth=4).steps) == Cell(2, 2, UNEXPLAINED)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("4,1,0", Cell(3)),
        ("4+1,0+2", Cell(4, 1, 2)),
        ("0+1+2,3+4+5", Cell(6, 1, 3)),
        ("4,1@0,0@1", Cell(3, 1, 2)),
        ("4,1,4,1", Cell(2, 2)),
        ("4+1,1+4,4+1", Cell(2, 3, 2)),
        ("4,1,1", None),
        ("4,4,1,1", None),
        ("0,1,0,1@0", Cell(2, 2, UNEXPLAINED)),
    ],
)
def test_named_steps_count_by_the_oldest_state(text, cell):
    assert cell_of_named(ExecutionOrder.parse(text, depth=6)) == cell


def test_ways_by_how_many_blocks_can_be_reached():
    rounds = Rounds({4: Way(3), 2: Way(1, 2)}, max_age=5)
    assert [rounds.way(reached) for reached in (4, 3, 2)] == [Way(3), Way(), Way(1, 2)]
