"""docs/science.md says what the committed results of `digits-tied` say."""

from __future__ import annotations

import csv
import re
from itertools import combinations
from pathlib import Path

import formula_page
import pytest
import science_page

from layershuffle.stats import Difference
from pages import loose_numbers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def page() -> str:
    return science_page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scores() -> science_page.Scores:
    return science_page.read_scores()


def test_tables_are_made_of_the_results(page: str, scores: science_page.Scores) -> None:
    assert page == science_page.with_tables(page, scores), "run scripts/science_page.py"
    assert page.count("| **") == len(science_page.QUESTIONS)


def test_every_arm_has_three_models_and_twelve_orders(scores: science_page.Scores) -> None:
    for arm in science_page.ARMS:
        for column in science_page.COLUMNS.values():
            seeds = scores[arm.name, *column]
            assert sorted(seeds) == [0, 1, 2]
            drawn = 1 if column == science_page.ORDERED else 12
            assert all(len(values) == drawn for values in seeds.values())


def test_the_words_name_numbers_of_the_tables(page: str) -> None:
    """Percentages of the verdict and of README stand in the table of accuracies."""
    verdict, _, rest = page.partition("## The study")
    table = rest.partition("<!-- begin: accuracy -->")[2].partition("<!-- end")[0]
    assert len(re.findall(r"\d\d\.\d", verdict)) == 4
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = re.search(r"tie its places:[^)]*\)", readme)
    assert sentence is not None
    for number in re.findall(r"\d\d\.\d", verdict + sentence[0]):
        assert f"| {number} (" in table, number


def test_the_best_column_is_compared(scores: science_page.Scores) -> None:
    """ "At its best" is the column with the highest mean among those with as many places alive."""
    for where, *sides in science_page.QUESTIONS:
        if "at its best" not in where:
            continue
        for arm, column in (sides[:2], sides[2:]):
            rivals = [other for other in science_page.COLUMNS.values() if other[1] == column[1]]
            means = {
                other: science_page.estimate(scores[arm, *other], images=2000).mean
                for other in rivals
            }
            assert max(means, key=lambda other: means[other]) == column


def test_sets_of_three_places_are_counted() -> None:
    blocks = [len({place // 4 for place in kept}) for kept in combinations(range(12), 3)]
    assert {number: blocks.count(number) for number in (3, 2, 1)} == science_page.SETS


def test_the_mean_over_all_sets_is_that_of_each_kind_by_its_number() -> None:
    values = {3: [90.0, 94.0], 2: [60.0], 1: [20.0]}
    assert science_page.over_sets(values) == pytest.approx((64 * 92 + 144 * 60 + 12 * 20) / 220)


def test_places_are_told_by_their_block() -> None:
    values = science_page.by_blocks(science_page.RESULTS, "layershuffle-tied-3")
    assert sum(map(len, values.values())) == 3 * 12
    of_one_block = science_page.by_blocks(science_page.RESULTS, "layershuffle-tied")
    everywhere = [top1 for kind in of_one_block.values() for top1 in kind]
    assert len(set(everywhere)) == 3  # one top-1 per model, whatever is alive


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.1, 2.0, "better"), (-2.0, -0.1, "worse"), (-0.1, 2.0, "not told apart")],
)
def test_the_criterion(low: float, high: float, wanted: str) -> None:
    difference = Difference(points=(low + high) / 2, low=low, high=high, seeds=3)
    assert science_page.verdict(difference) == wanted


# --- images made from formulas ----------------------------------------------------------------


def test_the_table_of_formulas_is_made_of_the_results(page: str) -> None:
    assert page == formula_page.with_tables(page), "run scripts/formula_page.py"
    rows = page.partition("<!-- begin: formula -->")[2].partition("<!-- end")[0].splitlines()
    assert len([row for row in rows if row.startswith("|")]) == 2 + len(formula_page.ARMS)


def test_models_of_formulas_are_scored_alike() -> None:
    scores = science_page.read_scores(formula_page.RESULTS)
    for arm in formula_page.ARMS:
        for name in formula_page.SHOWN:
            (values,) = scores[arm.name, *science_page.COLUMNS[name]].values()
            assert len(values) == (1 if name == "in order" else 6)
    with formula_page.RESULTS.open(encoding="utf-8") as file:
        assert {int(row["n"]) for row in csv.DictReader(file)} == {formula_page.IMAGES}


def test_words_about_formulas_name_numbers_of_their_table(page: str) -> None:
    section = page.partition("## Where capacity counts more")[2].partition("\n## ")[0]
    assert loose_numbers(section) == set()


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(5.1, 6.0, "better"), (1.0, 2.9, "worse"), (2.9, 3.1, "not told apart")],
)
def test_two_models_are_told_apart_where_their_intervals_are(
    low: float, high: float, wanted: str
) -> None:
    sample = formula_page.Interval(mean=(low + high) / 2, low=low, high=high)
    reference = formula_page.Interval(mean=4.0, low=3.0, high=5.0)
    assert formula_page.compared(sample, reference) == wanted
