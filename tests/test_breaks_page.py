"""docs/open-questions.md says what the rows of scripts/breaks.py say, by criteria that are code."""

from __future__ import annotations

import math
import re

import breaks
import breaks_page
import open_questions
import pytest
from trainings import key_of


@pytest.fixture(scope="module")
def page() -> str:
    return breaks_page.PAGE.read_text(encoding="utf-8")


def test_tables_are_made_of_the_results(page: str) -> None:
    assert page == breaks_page.with_tables(page), "run scripts/breaks_page.py"


def test_results_are_those_of_the_planned_runs() -> None:
    rows = open_questions.rows_of("breaks.csv")
    keys = [(row["question"], row["case"], row["arm"], row["seed"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= {key_of(run, breaks.KEY) for stage in breaks.STAGES for run in stage}
    assert breaks.CSV.stat().st_size < 15_000
    tables = {**breaks_page.CONDITIONS, **breaks_page.DATA}
    for question, case, arm, _ in keys:
        assert (question, case) in tables or question == "position" or arm == "base", case


def scores(in_order: float, *any_order: float, independent: float = 400) -> breaks_page.Scores:
    return breaks_page.Scores(
        in_order=in_order, any_order=any_order, independent=independent, guessed=None
    )


def test_an_interval_is_that_of_orders_or_images_whichever_is_wider() -> None:
    # t(0.975, 1) = 12.706; the deviation of 40 and 60 over the root of two is 10.
    orders = breaks_page.interval([40.0, 60.0], 1_000_000)
    assert math.isclose(orders.low, 50 - 127.062, abs_tol=0.01)
    images = breaks_page.interval([50.0, 50.0], 400)
    # Wilson: z^2 = 3.8415 moves both ends towards each other.
    assert math.isclose(images.high - images.low, 100 * 1.96 / math.sqrt(403.84), abs_tol=0.01)
    assert images.mean == orders.mean == 50


@pytest.mark.parametrize(
    ("shuffled", "ordinary", "wanted"),
    [
        ((70, 69, 71), 90, "holds"),
        ((20, 19, 21), 90, "breaks down"),
        ((45, 44, 46), 90, "not told apart"),
        ((1, 1, 1), 2, "nothing learnt"),
    ],
)
def test_shuffling_breaks_down_below_half(shuffled, ordinary, wanted) -> None:
    _, *orders = shuffled
    verdict = breaks_page.broken(
        breaks_page.interval(orders * 4, 400), breaks_page.interval([ordinary], 400)
    )
    assert verdict == wanted


def test_every_pair_of_models_has_to_agree() -> None:
    case = ("data", "few")
    ordinary = {0: scores(90), 1: scores(90)}
    good, bad = scores(80, 70, 71, 72), scores(80, 20, 21, 22)

    def verdict(*shuffled: breaks_page.Scores) -> str:
        models = {(*case, "baseline"): ordinary, (*case, "layershuffle"): dict(enumerate(shuffled))}
        return breaks_page.verdict_on(models, case)

    assert verdict(good) == verdict(good, good) == "holds"
    assert verdict(bad, bad) == "breaks down"
    assert verdict(good, bad) == "not told apart"


def test_parts_are_compared_in_pairs_over_orders() -> None:
    plain, better = scores(0, 10, 20, 30), scores(0, 12, 22, 32)
    assert breaks_page.moved(better, plain) == (2, 2, 2)
    assert breaks_page.moved_verdict({0: better}, {0: plain}) == "better"
    assert breaks_page.moved_verdict({0: plain}, {0: better}) == "worse"
    assert (
        breaks_page.moved_verdict({0: better, 1: plain}, {0: plain, 1: better}) == "not told apart"
    )
    assert breaks_page.moved_verdict({0: plain}, {0: scores(0, 12, 18, 30)}) == "not told apart"


def test_numbers_of_a_table_are_means_over_models() -> None:
    case = {("data", "few"): "few"}
    models = {
        ("data", "few", "baseline"): {0: scores(80, 3, 5), 1: scores(90, 7, 9)},
        ("data", "few", "layershuffle"): {0: scores(70, 60, 62), 1: scores(72, 64, 66)},
    }
    last = breaks_page.break_table(models, case, "data").splitlines()[-1]
    numbers = re.sub(r"\*\*.*", "", last)
    assert numbers == "| few | 2 | 85.0 | 6.0 | 71.0 | 63.0 | 8.0 | 74 % | "
    # A seed without a pair counts nowhere.
    del models["data", "few", "baseline"][1]
    last = breaks_page.break_table(models, case, "data").splitlines()[-1]
    assert last.startswith("| few | 1 | 80.0 | 4.0 | 70.0 | 61.0 | 9.0 | 76 % |")
    assert breaks_page.break_table({}, case, "data") == breaks_page.NOT_MEASURED
    assert breaks_page.position_table({}) == breaks_page.NOT_MEASURED


def test_a_row_of_parts_is_compared_with_none() -> None:
    models = {
        ("position", breaks_page.NO_PARTS, "layershuffle"): {0: scores(40, 10, 20, 30)},
        ("position", "noise", "layershuffle"): {
            0: scores(30, 8, 18, 28),
            1: scores(90, 90, 90, 90),
        },
    }
    first, second = breaks_page.position_table(models).splitlines()[2:]
    assert first == f"| {breaks_page.NO_PARTS} | 1 | 40.0 | 20.0 |  |  |  |"
    assert second == "| noise | 1 | 30.0 | 18.0 | -2.0 | **worse** |  |"
