"""Evaluation modes: their syntax, and the orders that they draw."""

import pytest

from layershuffle.core.policies import Kept, Mode, Sequential, Shuffled, parse_modes
from layershuffle.errors import UsageError
from refusals import refuses


@pytest.mark.parametrize(
    ("text", "mode", "policy", "drawn"),
    [
        ("sequential", Mode(order="sequential"), Sequential(), False),
        ("arbitrary", Mode(order="arbitrary"), Shuffled(), True),
        ("kept:9", Mode(order="sequential", kept=9), Kept(9), True),
        ("kept:9:arbitrary", Mode(order="arbitrary", kept=9), Kept(9, order="arbitrary"), True),
        (
            "kept:6:sequential:spaced",
            Mode(order="sequential", kept=6, choose="spaced"),
            Kept(6, choose="spaced"),
            False,
        ),
        (
            "kept:6:arbitrary:last",
            Mode(order="arbitrary", kept=6, choose="last"),
            Kept(6, order="arbitrary", choose="last"),
            True,
        ),
        (
            "arbitrary:parallel=3",
            Mode(order="arbitrary", parallel=3),
            Shuffled(parallel=(3, 3)),
            True,
        ),
        (
            "sequential:parallel=2",
            Mode(order="sequential", parallel=2),
            Sequential(parallel=(2, 2)),
            False,
        ),
        (
            "kept:6:arbitrary:passes=2",
            Mode(order="arbitrary", kept=6, passes=2),
            Kept(6, order="arbitrary", passes=2),
            True,
        ),
        (
            "kept:6:sequential:last:parallel=2:passes=3",
            Mode(order="sequential", kept=6, choose="last", parallel=2, passes=3),
            Kept(6, choose="last", passes=3, parallel=(2, 2)),
            False,
        ),
    ],
)
def test_mode_texts(text, mode, policy, drawn):
    assert parse_modes(text) == (mode,)
    assert mode.policy() == policy
    assert mode.is_drawn(12) is drawn
    assert mode.draws(7, depth=12) == (7 if drawn else 1)
    assert parse_modes(str(mode)) == (mode,)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("order", ["sequential", "arbitrary"])
@pytest.mark.parametrize("choose", ["random", "spaced", "first", "last"])
def test_a_mode_has_as_many_scores_as_it_has_orders(depth, order, choose):
    """Against all that 60 draws give: every kept count, and all blocks in their order are one."""
    for kept in (None, *range(1, depth + 1)):
        mode = Mode(order=order, kept=kept, choose=choose if kept else "random")
        orders = {mode.policy().draw(depth, seed=0, step=step) for step in range(60)}
        assert mode.is_drawn(depth) is (len(orders) > 1)
        assert mode.draws(7, depth=depth) == (7 if len(orders) > 1 else 1)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("kept:2-4:arbitrary", "kept:4:arbitrary,kept:3:arbitrary,kept:2:arbitrary"),
        ("kept:2-1,sequential", "kept:2,kept:1,sequential"),
        ("kept:1-2:arbitrary:passes=2", "kept:2:arbitrary:passes=2,kept:1:arbitrary:passes=2"),
        ("kept:9-10:sequential:last", "kept:10:sequential:last,kept:9:sequential:last"),
    ],
)
def test_a_range_stands_for_each_of_its_counts(text, expanded):
    assert parse_modes(text) == parse_modes(expanded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shuffled",
        "kept",
        "kept:",
        "kept:-3",
        "kept:9:backwards",
        "kept:9:sequential:best",
        "kept:9:sequential:first:more",
        "kept:2,sequential,sequential",
        "arbitrary,arbitrary:parallel=1",
        "arbitrary:parallel=0",
        "arbitrary:parallel=2:parallel=3",
        "parallel=3",
        "arbitrary:rounds=3",
        "arbitrary:passes=2",
    ],
)
def test_wrong_mode_texts(text):
    with refuses(UsageError):
        parse_modes(text)


def test_a_range_stands_among_other_modes() -> None:
    words = [str(mode) for mode in parse_modes("sequential,kept:1-2:arbitrary,arbitrary")]
    assert words == ["sequential", "kept:2:arbitrary", "kept:1:arbitrary", "arbitrary"]
