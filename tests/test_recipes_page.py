"""docs/recipes.md says what the committed results of `digits-recipes` say."""

from __future__ import annotations

import re

import pytest
import recipes_page

from layershuffle.stats import Difference
from pages import loose_numbers


@pytest.fixture(scope="module")
def page() -> str:
    return recipes_page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scores() -> recipes_page.Scores:
    return recipes_page.read_scores()


def test_tables_are_made_of_the_results(page: str, scores: recipes_page.Scores) -> None:
    assert page == recipes_page.with_tables(page, scores), "run scripts/recipes_page.py"
    marks = re.findall(r"<!-- begin: (.*) -->", page)
    budgets = [f"accuracy {steps}" for steps in recipes_page.BUDGETS]
    goals = [goal.name for goal in recipes_page.GOALS]
    changes = [f"changes {budget}" for budget in recipes_page.changed_training.BUDGETS]
    assert sorted(marks) == sorted([*budgets, *goals, *changes, "costs", "exits", "tied"])


def test_every_arm_is_trained_at_the_smallest_budget_with_three_seeds(
    scores: recipes_page.Scores,
) -> None:
    for arm in recipes_page.ARMS:
        for column in (recipes_page.ORDERED, recipes_page.ANY):
            seeds = scores[arm.name, recipes_page.BUDGETS[0], column]
            assert sorted(seeds) == [0, 1, 2], (arm.name, column)
            drawn = 1 if column == recipes_page.ORDERED else 6
            assert all(len(values) == drawn for values in seeds.values())


def test_both_studies_train_and_score_alike() -> None:
    """Only orders differ between an arm and plain LayerShuffle of the same seed and budget."""
    plain, rivals = (
        [run.task for run in recipes_page.read_study(recipes_page.KEPT / study).runs]
        for study in recipes_page.STUDIES
    )
    reference = next(task for task in plain if task.name == "layershuffle-seed0").settings
    orders = {"method", "steps", "seed", "eval_every", "checkpoint_every", "distinct"}
    orders |= {"orders_per_batch", "sequential_every", "exit_weight"}
    for task in rivals:
        assert task.settings.model_dump(exclude=orders) == reference.model_dump(exclude=orders)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-1.0, 3.0, "reached"), (-1.1, 3.0, "not decided"), (-4.0, -1.1, "missed")],
)
def test_a_goal_is_reached_or_missed_by_the_whole_interval(
    low: float, high: float, verdict: str
) -> None:
    difference = Difference(points=(low + high) / 2, low=low, high=high, seeds=3)
    assert recipes_page.reached(difference, within=1.0) == verdict


def test_every_change_is_trained_with_its_seeds() -> None:
    rows = recipes_page.rows_of("changed-training.csv")
    trained = [(row["arm"], int(row["budget"]), row["seed"]) for row in rows]
    budgets = recipes_page.changed_training.BUDGETS
    assert sorted(trained) == sorted(
        (name, budget, str(seed))
        for budget, names in budgets.items()
        for name in names
        for seed in recipes_page.changed_training.seeds_of(name, budget)
    )


def test_a_gap_is_the_mean_of_pairs() -> None:
    a, b = ("a", 1, recipes_page.ANY), ("b", 1, recipes_page.ANY)
    scores = {a: {0: [1.0, 3.0], 1: [5.0, 5.0], 9: [50.0]}, b: {0: [1.0], 1: [2.0]}}
    difference = recipes_page.gap(scores, a, b)
    assert (difference.points, difference.seeds) == (2.0, 2)  # 2 - 1 and 5 - 2


def test_every_number_in_the_words_stands_in_a_table(page: str) -> None:
    assert loose_numbers(page) == set()
