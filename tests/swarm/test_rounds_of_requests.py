"""How blocks run side by side and again: orders, what ran, and what is chosen by a calibration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layershuffle.orders import ExecutionOrder
from layershuffle.swarm.rounds import (
    UNEXPLAINED,
    Cell,
    Rounds,
    Way,
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
    assert [rounds.way(reached, enough=4) for reached in (4, 3, 2)] == [Way(3), Way(), Way(1, 2)]
    assert rounds.way(4, enough=2) == Way(1), "two are enough, and run once"
    assert Rounds({2: Way(3, 2)}, once={2: 1}).way(4, enough=2) == Way(1)
    assert not rounds.as_a_queue
    assert not Rounds(once={4: 2}).as_a_queue
    assert Rounds({4: Way()}).as_a_queue
    assert not Rounds(otherwise=Way(2)).as_a_queue
