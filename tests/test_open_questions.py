"""docs/open-questions.md agrees with its committed results."""

from __future__ import annotations

import itertools
import re

import open_questions
import pytest
import torch

import layershuffle as ls
from common import DEPTH, FAMILIES, PATCH, SIZE, WIDTH, images
from layershuffle.core.stack import blocks_of
from layershuffle.stats import t_interval
from pages import misplaced_numbers


@pytest.fixture(scope="module")
def page() -> str:
    return open_questions.PAGE.read_text(encoding="utf-8")


def test_tables_are_made_of_the_results(page: str) -> None:
    assert page == open_questions.with_tables(page), "run scripts/open_questions.py"


def test_every_question_has_a_verdict_or_says_that_it_was_not_measured(page: str) -> None:
    rows = re.findall(r"^\| (.*\?.*|.*) \| (.*) \| (.*) \|$", page.partition("\n## ")[0], re.M)
    assert len(rows) > 12
    for question, command, verdict in rows[1:]:
        if command == "none yet":
            assert verdict == "not measured yet", question
        else:
            assert "`" in command or command.startswith("the same"), question
            assert "](" in verdict, question


def test_numbers_in_the_words_stand_in_the_tables_beside_them() -> None:
    # Intervals at 95 %, and the most that boxes overlap.
    assert misplaced_numbers(open_questions.PAGE, {"95"}) == set()


@pytest.mark.parametrize("layout", ["in a row", "spread out"])
@pytest.mark.parametrize("missing", open_questions.MISSING)
def test_every_block_is_missing_once(missing: int, layout: str) -> None:
    sets = open_questions.sets_of(missing, layout)
    assert sorted(block for blocks in sets for block in blocks) == list(range(12))
    gap = 1 if layout == "in a row" else 12 // missing
    assert all(b - a == gap for blocks in sets for a, b in itertools.pairwise(blocks))


def test_the_others_keep_their_order() -> None:
    ascending, *more = open_questions.orders_without((1, 2), arbitrary=False)
    assert not more
    assert ascending.blocks == (0, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    whole = ls.Shuffled().draw(12, seed=0, step=1).blocks
    drawn = open_questions.orders_without((1, 2), arbitrary=True)[1]
    assert drawn.blocks == tuple(block for block in whole if block not in (1, 2))


def test_neighbours_are_compared_in_pairs_over_models() -> None:
    rows = [
        {"arm": "a", "order": "o", "missing": "2", "layout": layout, "seed": str(seed), "top1": top}
        for layout, tops in (("in a row", ("1", "3", "8")), ("spread out", ("2", "4", "10")))
        for seed, top in enumerate(tops)
    ]
    row, spread, gap = open_questions.missing_difference(rows, "a", "o", 2)
    assert (row, spread, gap.points) == pytest.approx((4, 16 / 3, -4 / 3))
    assert (gap.low, gap.high) == t_interval([-1.0, -1.0, -2.0])


@pytest.mark.parametrize(
    ("models", "orders", "wanted"),
    [
        ((3, 4), (1, 2), "several models"),
        ((1, 2), (3, 4), "several orders"),
        ((1, 3), (2, 4), "not told apart"),
    ],
)
def test_several_models_or_orders(models, orders, wanted) -> None:
    assert open_questions.averaged_verdict(models, orders) == wanted


def test_operations_are_those_of_the_blocks_that_run() -> None:
    model, image = ls.add_position(FAMILIES["timm-vit"].wrapped().eval()), images()[:1]

    def count(*blocks: int) -> int:
        order = ls.ExecutionOrder(blocks, DEPTH)
        return open_questions.operations(model, image, order=order, backward=False)

    linear = [m for m in blocks_of(model.backbone)[0].modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(layer.in_features * layer.out_features for layer in linear)
    tokens = (SIZE // PATCH) ** 2 + 1
    # A product is a multiplication and an addition; attention has two of tokens x tokens x width.
    block = 2 * tokens * weights + 2 * 2 * tokens**2 * WIDTH
    assert count(0, 1) - count(0) == block
    assert count(3, 2, 1) - count(0) == 2 * block
