"""docs/open-questions.md agrees with the rows of scripts/breaks.py."""

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
    assert breaks.CSV.stat().st_size < 18_000
    tables = {**breaks_page.CONDITIONS, **breaks_page.DATA}
    for question, case, arm, _ in keys:
        assert (question, case) in tables or question == "position" or arm == "base", case


def scores(in_order: float, *any_order: float, independent: float = 400) -> breaks_page.ModelScores:
    return breaks_page.ModelScores(
        in_order=in_order, any_order=any_order, independent=independent, guessed=None
    )


def test_an_interval_is_that_of_orders_or_images_whichever_is_wider() -> None:
    # t(0.975, 1) = 12.706; the deviation of 49 and 51 over the root of two is 1.
    orders = breaks_page.interval([49.0, 51.0], 1_000_000)
    assert math.isclose(orders.low, 50 - 12.706, abs_tol=0.001)
    wide = breaks_page.interval([40.0, 60.0], 1_000_000)
    assert (wide.low, wide.high) == (0.0, 100.0)
    images = breaks_page.interval([50.0, 50.0], 400)
    # Wilson: z^2 = 3.8415 moves both ends towards each other.
    assert math.isclose(images.high - images.low, 100 * 1.96 / math.sqrt(403.84), abs_tol=0.01)
    assert images.mean == orders.mean == 50


@pytest.mark.parametrize(
    ("orders", "ordinary", "wanted"),
    [
        ((69, 71), 90, "holds"),
        ((19, 21), 90, "breaks down"),
        ((44, 46), 90, "not told apart"),
        ((1, 1), 2, "nothing learnt"),
    ],
)
def test_shuffling_breaks_down_below_half(orders, ordinary, wanted) -> None:
    verdict = breaks_page.broken_in_pair(scores(ordinary), scores(80, *orders * 4))
    assert verdict == wanted


def test_every_one_of_few_pairs_of_models_has_to_agree() -> None:
    ordinary = {0: scores(90), 1: scores(90)}
    good, bad = scores(80, 70, 71, 72), scores(80, 20, 21, 22)

    def verdict(*shuffled: breaks_page.ModelScores) -> str:
        return breaks_page.broken(ordinary, dict(enumerate(shuffled)))

    assert verdict(good) == verdict(good, good) == "holds in each pair"
    assert verdict(bad, bad) == "breaks down in each pair"
    assert verdict(good, bad) == "not told apart"
    chance = {0: scores(1), 1: scores(1)}
    assert breaks_page.broken(chance, {0: good, 1: bad}) == "nothing learnt"


@pytest.mark.parametrize(
    ("any_orders", "points", "wanted"),
    [
        # Half of 62 is 31, so that the gaps are 1, 2 and 3: t(0.975, 2) = 4.3027 times a deviation
        # of 1 over the root of 3 is 2.4841 to either side.
        ((32, 33, 34), 2, "not told apart"),
        ((33, 34, 35), 3, "holds"),
        ((29, 28, 27), -3, "breaks down"),
    ],
)
def test_three_pairs_of_models_are_judged_over_their_seeds(any_orders, points, wanted) -> None:
    ordinary = dict.fromkeys(range(3), scores(62, independent=20))
    # No pair alone is told apart on so few images.
    shuffled = {
        seed: scores(80, value, value, independent=20) for seed, value in enumerate(any_orders)
    }
    pairs = {breaks_page.broken_in_pair(ordinary[0], each) for each in shuffled.values()}
    assert pairs == {"not told apart"}
    gap = breaks_page.above_half(ordinary, shuffled)
    assert gap.points == points
    assert math.isclose(gap.high - gap.points, 2.4841, abs_tol=1e-3)
    assert breaks_page.broken(ordinary, shuffled) == wanted
    # A seed without an ordinary model counts nowhere.
    assert breaks_page.above_half(ordinary, {**shuffled, 3: scores(99, 99)}) == gap
    chance = dict.fromkeys(range(3), scores(1))
    assert breaks_page.broken(chance, shuffled) == "nothing learnt"


def test_few_pairs_of_parts_are_compared_over_orders() -> None:
    plain, better = scores(0, 10, 20, 30), scores(0, 12, 22.1, 31.9)
    assert breaks_page.moved({0: better}, {0: plain}) == ("+2.0", "better in each pair")
    assert breaks_page.moved({0: plain}, {0: better}) == ("-2.0", "worse in each pair")
    mixed = breaks_page.moved({0: better, 1: plain}, {0: plain, 1: better})
    assert mixed == ("+0.0", "not told apart")
    # Of the gaps 0, 2 and 0 the interval has zero in it, and equal gaps have none.
    assert breaks_page.moved_in_pair(scores(0, 10, 22, 30), plain) == "not told apart"
    assert breaks_page.moved_in_pair(scores(0, 12, 22, 32), plain) == "not told apart"


def test_three_pairs_of_parts_are_compared_over_seeds() -> None:
    plain = dict.fromkeys(range(3), scores(0, 10, 20, 30))
    # Over orders every pair is told apart; over seeds the gaps 1, 2 and 3 are not.
    better = {seed: scores(0, 11 + seed, 21.1 + seed, 30.9 + seed) for seed in range(3)}
    assert all(breaks_page.moved_in_pair(better[s], plain[s]) == "better" for s in range(3))
    assert breaks_page.moved(better, plain) == ("+2.0 (-0.5 to +4.5)", "not told apart")
    steady = {seed: scores(0, 12, 22, 32 + seed / 100) for seed in range(3)}
    assert breaks_page.moved(steady, plain) == ("+2.0 (+2.0 to +2.0)", "better")


def test_tied_blocks_are_judged_in_order_and_in_any_order() -> None:
    def models(
        ordered: tuple[int, ...], free: tuple[int, ...]
    ) -> dict[int, breaks_page.ModelScores]:
        return {seed: scores(ordered[seed], free[seed], free[seed]) for seed in range(3)}

    table = breaks_page.tied_table(
        {
            ("data", "200 pairs", "layershuffle"): models((60, 60, 60), (50, 50, 50)),
            ("data", "200 pairs", breaks.TIED): models((57, 56, 55), (51, 52, 53)),
        }
    )
    assert table.splitlines()[-1] == (
        "| 200 pairs of all digits | 3 | 60.0 | 50.0 | 56.0 | 52.0 "
        "| -4.0 (-6.5 to -1.5) **worse** | +2.0 (-0.5 to +4.5) **not told apart** |"
    )


def test_a_soup_is_judged_by_its_draws(monkeypatch) -> None:
    rows = [
        {"members": members, "forwards": str(forwards), "top1": str(top1)}
        for members, tops in (
            ("0", {1: 80, 2: 90, 3: 91, 6: 92}),
            ("0*1", dict.fromkeys((1, 2, 3), 79)),
        )
        for forwards, top1 in tops.items()
    ]
    rows += [{"members": "0*1", "forwards": "6", "top1": top1} for top1 in ("81", "92")]
    rows.append({"members": "0+1", "forwards": "1", "top1": "0"})  # several models do not count
    monkeypatch.setattr(breaks_page, "rows_of", lambda _: rows)
    one, *_, six = breaks_page.soup_table().splitlines()[2:]
    assert one == "| 1 | **worse** | **worse** |"
    assert six == "| 6 | **not told apart** | **better** |"


def test_comparisons_are_counted(monkeypatch) -> None:
    rows = [{"independent": "410.2"}, {"independent": "807.7"}]
    monkeypatch.setattr(breaks_page, "rows_of", lambda _: rows)
    table = "| **holds** | **not told apart** |\n| **nothing learnt** | **better in each pair** |\n"
    words = breaks_page.chance_words(f"**better**\n{table * 10}")
    assert "make 30 comparisons" in words
    assert "about 2 would\n" in words
    assert "count as 410 to 808 independent" in words


def test_numbers_of_a_table_are_means_over_models() -> None:
    case = {("data", "few"): "few"}
    models = {
        ("data", "few", "baseline"): {0: scores(80, 3, 5), 1: scores(90, 7, 9)},
        ("data", "few", "layershuffle"): {0: scores(70, 60, 62), 1: scores(72, 64, 66)},
    }
    last = breaks_page.break_table(models, case, "data").splitlines()[-1]
    numbers = re.sub(r"\*\*.*", "", last)
    assert numbers == "| few | 2 | 85.0 | 6.0 | 71.0 | 63.0 | 8.0 | 74 % |  | "
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
            0: scores(30, 8, 18.1, 27.9),
            1: scores(90, 90, 90, 90),
        },
    }
    first, second = breaks_page.position_table(models).splitlines()[2:]
    assert first == f"| {breaks_page.NO_PARTS} | 1 | 40.0 | 20.0 |  |  |  |"
    assert second == "| noise | 1 | 30.0 | 18.0 | -2.0 | **worse in each pair** |  |"
