"""docs/science.md agrees with the committed results of `digits-tied`."""

from __future__ import annotations

import csv
import re
from itertools import combinations
from pathlib import Path

import formula_page
import pytest
import science_page

from layershuffle.stats import Difference
from pages import misplaced_numbers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def page() -> str:
    return science_page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scores() -> science_page.Scores:
    return science_page.read_scores()


def test_tables_are_made_of_the_results(page: str, scores: science_page.Scores) -> None:
    assert page == science_page.with_tables(page, scores), "run scripts/science_page.py"
    verdicts = page.partition("<!-- begin: verdicts -->")[2].partition("<!-- end")[0]
    assert verdicts.count("| **") == len(science_page.QUESTIONS)
    rounds = page.partition("<!-- begin: side by side -->")[2].partition("<!-- end")[0]
    count = len(science_page.QUESTIONS) + rounds.count("** |")
    assert f"ask of {count} differences" in page


def test_every_arm_has_three_models_and_twelve_orders(scores: science_page.Scores) -> None:
    for arm in science_page.ARMS:
        for column in science_page.COLUMNS.values():
            seeds = scores[arm.name, *column]
            assert sorted(seeds) == [0, 1, 2]
            drawn = 1 if column == science_page.ORDERED else 12
            assert all(len(values) == drawn for values in seeds.values())


def test_numbers_in_the_words_stand_in_the_tables_beside_them() -> None:
    elsewhere = {"59": "costs in docs/open-questions.md", "2.1": "two bases in docs/log.md"}
    assert misplaced_numbers(science_page.PAGE, elsewhere) == set()


def test_the_verdict_names_the_cells_that_decide_it(page: str, scores: science_page.Scores) -> None:
    def cell(arm: str, column: str) -> str:
        of_seeds = scores[arm, *science_page.COLUMNS[column]]
        return f"{science_page.estimate(of_seeds, images=2000).mean:.1f}"

    words = " ".join(page.partition("## The study")[0].split())
    three, twelve = (cell(arm, "any order") for arm in ("layershuffle-tied-3", "layershuffle"))
    assert f"twelve different ones ({three} against {twelve} %," in words
    assert f"alive ({cell('layershuffle-tied', '3 alive, 4 times')} %)" in words
    assert f"study reaches {cell('layershuffle-depth', '3 alive, twice')} %." in words


def test_readme_says_in_one_sentence_when_to_tie() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (sentence,) = re.findall(
        r"- If you choose and train the model, ([^.]*docs/science.md[^.]*)\.", readme
    )
    for word in ("share three blocks", "weights are given", "in order", "side by side", "narrow"):
        assert word in sentence


def test_arms_in_rounds_are_compared_in_pairs() -> None:
    plain = {("layershuffle", 1): {0: [90.0], 1: [80.0]}, ("layershuffle", 2): {0: [88.0]}}
    tied = {("layershuffle-tied-3", 1): {0: [91.0, 93.0], 1: [82.0, 82.02]}}
    table = science_page.rounds_table(plain | tied).splitlines()
    assert table[-1].startswith("| tied, three blocks | 87.0, +2.0 (+1.9 to +2.1) **better** |")
    assert len(table) == 4


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


def test_models_of_formulas_ran_the_same_orders() -> None:
    """So that two models can be compared in pairs over them."""
    orders: dict[tuple[str, str, str], set[tuple[str, ...]]] = {}
    for path in (formula_page.RESULTS, formula_page.SIZES_RESULTS):
        of_arm: dict[tuple[str, ...], list[str]] = {}
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = (row["mode"], row["kept"], row["passes"], row["method"])
                of_arm.setdefault(key, []).append(row["order"])
        for (*mode, _), drawn in of_arm.items():
            orders.setdefault(tuple(mode), set()).add(tuple(drawn))
    assert {mode: len(drawn) for mode, drawn in orders.items()} == dict.fromkeys(orders, 1)


def test_orders_are_compared_in_pairs() -> None:
    gap = formula_page.difference([50.0, 71.0, 90.0], [48.0, 70.0, 87.0])
    assert (gap.points, gap.low) == (pytest.approx(2), pytest.approx(2 - 4.303 / 3**0.5, abs=1e-3))


def test_one_order_is_compared_over_images() -> None:
    """Newcombe 1998, table II: 56 of 70 less 48 of 80 have the interval 0.0524 to 0.3339."""
    whole = [formula_page.interval([100 * r / n], n) for r, n in ((56, 70), (48, 80))]
    gap = formula_page.between(*whole)
    assert (gap.points, gap.low, gap.high) == pytest.approx((20, 5.24, 33.39), abs=0.01)
