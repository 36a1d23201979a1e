"""docs/recipes.md agrees with the committed results of `digits-recipes`."""

from __future__ import annotations

import re

import fresh_pairs
import pytest
import recipes_page
import torch

from layershuffle.data.digits import DigitPairs
from layershuffle.stats import Difference
from pages import misplaced_numbers


@pytest.fixture(scope="module")
def page() -> str:
    return recipes_page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scores() -> recipes_page.RecipeScores:
    return recipes_page.read_scores()


def test_tables_are_made_of_the_results(page: str, scores: recipes_page.RecipeScores) -> None:
    assert page == recipes_page.with_tables(page, scores), "run scripts/recipes_page.py"
    marks = re.findall(r"<!-- begin: (.*) -->", page)
    budgets = [f"accuracy {steps}" for steps in recipes_page.BUDGETS]
    goals = [goal.name for goal in recipes_page.GOALS]
    changes = [f"changes {budget}" for budget in recipes_page.changed_training.BUDGETS]
    others = ["chance", "costs", "exits", "fresh", "fresh verdicts", "goals", "rates"]
    others += ["steps", "tied"]
    assert sorted(marks) == sorted([*budgets, *goals, *changes, *others])


def test_every_arm_is_trained_at_the_smallest_budget_with_three_seeds(
    scores: recipes_page.RecipeScores,
) -> None:
    # digits-tied has fewer steps of these arms.
    numbers = ("", "-2", "-3", "-4", "-6")
    long = {f"layershuffle-tied{number}" for number in numbers}
    for arm in recipes_page.ARMS:
        # Rates were searched for 2,000 steps.
        budget = 2_000 if "-lr" in arm.name else recipes_page.BUDGETS[-1 if arm.name in long else 0]
        for column in (recipes_page.ORDERED, recipes_page.ANY):
            seeds = scores[arm.name, budget, column]
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
        changed = orders | ({"lr"} if "-lr" in task.arm else set())
        assert task.settings.model_dump(exclude=changed) == reference.model_dump(exclude=changed)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-1.0, 3.0, "reached"), (-1.1, 3.0, "not decided"), (-4.0, -1.1, "missed")],
)
def test_a_goal_is_reached_or_missed_by_the_whole_interval(
    low: float, high: float, verdict: str
) -> None:
    difference = Difference(points=(low + high) / 2, low=low, high=high, seeds=3)
    assert recipes_page.reached(difference, within=1.0) == verdict


@pytest.mark.parametrize("budget", recipes_page.changed_training.BUDGETS)
def test_every_change_is_trained_with_the_first_seeds(budget: int) -> None:
    trained = recipes_page.read_changes(budget)
    assert set(trained) <= set(recipes_page.changed_training.BUDGETS[budget])
    for name, columns in trained.items():
        for seeds in columns.values():
            assert sorted(seeds) == list(range(len(seeds))), name


def test_a_gap_is_the_mean_of_pairs() -> None:
    a, b = ("a", 1, recipes_page.ANY), ("b", 1, recipes_page.ANY)
    scores = {a: {0: [1.0, 3.0], 1: [5.0, 5.0], 9: [50.0]}, b: {0: [1.0], 1: [2.0]}}
    difference = recipes_page.gap(scores, a, b)
    assert (difference.points, difference.seeds) == (2.0, 2)  # 2 - 1 and 5 - 2


def test_an_arm_that_is_not_trained_at_a_budget_has_no_row(
    scores: recipes_page.RecipeScores,
) -> None:
    exits = [pair for pair in recipes_page.TIED_PAIRS if pair[0].endswith("-exit")]
    without = {cell: seeds for cell, seeds in scores.items() if cell[1] == 500}
    table = recipes_page.pairs_table(without, exits, head="h", columns=["in order", "9 alive"])
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["500", "500"]


def test_one_model_has_no_verdict(page: str) -> None:
    assert "(one model) **" not in page


def test_the_exit_loss_beside_what_leaves_blocks_out(page: str) -> None:
    """With six alive, after 2,000 steps: the words of "Other changes of LayerShuffle"."""
    changed, scores = recipes_page.changed_training, recipes_page.read_changes(2_000)
    exits, ramp, third = (
        scores[name]["6 alive"] for name in (changed.EXIT, changed.RAMP, changed.LAST_THIRD)
    )
    assert recipes_page.judged(recipes_page.compare(exits, ramp)).endswith("**better**")
    gain = recipes_page.judged(recipes_page.compare(exits, third))
    assert gain == "+2.5 (-0.3 to +5.2) **not told apart**"
    assert "2.5 points, -0.3 to +5.2)" in " ".join(page.split())


def test_the_page_counts_its_own_verdicts(page: str) -> None:
    count = sum(page.count(f"**{word}** |") for word in ("better", "worse", "not told apart"))
    assert f"ask of {count} differences" in page
    assert f"about {count / 20:.0f} would" in page


def test_arms_with_more_seeds_are_judged_by_the_first_ones_too(
    scores: recipes_page.RecipeScores,
) -> None:
    """Five pairs of seeds beside ordinary training, and the three that all arms have."""
    arm = f"{recipes_page.TIED}-exit"
    sample, reference = (
        scores[name, 8000, recipes_page.ORDERED] for name in (arm, recipes_page.BASELINE)
    )
    table = recipes_page.verdict_table(scores, recipes_page.GOALS[1])
    lines = [line for line in table.splitlines() if line.startswith("| exit loss, three tied")]
    for line, seeds in zip(lines, (range(5), range(3)), strict=True):
        points = [sample[seed][0] - reference[seed][0] for seed in seeds]
        assert f"| {sum(points) / len(points):+.1f} (" in line
    assert [reference[seed][0] for seed in range(5)] == [97.4, 96.7, 97.1, 94.1, 96.75]


def test_the_goals_in_the_words_are_those_of_the_table(page: str) -> None:
    """The bullet "Goals": twelve blocks and three, on the pairs that chose and on fresh ones."""
    table = page.partition("<!-- begin: goals -->")[2].partition("<!-- end")[0].strip()
    rows = [line.split(" | ")[2:] for line in table.splitlines()[2:]]
    twelve, twelve_fresh, three, three_fresh = (
        [re.findall(r"\*\*(.*)\*\*", cell)[:1] for cell in column]
        for column in zip(*rows, strict=True)
    )
    assert twelve == [["missed"], ["reached"], ["not decided"], ["not decided"], ["reached"]]
    assert three == [["not decided"], ["not decided"], ["not decided"], ["reached"], ["reached"]]
    assert twelve_fresh == [[], ["not decided"], ["not decided"], ["missed"], ["reached"]]
    assert three_fresh == [[], ["not decided"], ["not decided"], ["reached"], ["reached"]]
    words = " ".join(page.partition("<!-- begin: chance")[0].split())
    assert "the same recipe reach two each on the pairs that chose them" in words
    assert "On fresh pairs three tied blocks reach the same two. Twelve reach one there" in words


def test_fresh_pairs_are_behind_all_that_chose() -> None:
    labels = torch.cat([labels for _, labels in fresh_pairs.fresh_batches()])
    assert labels.equal(DigitPairs("test", 8_000).labels[5_000:])


@pytest.mark.parametrize(
    ("sample", "reference", "mode", "cell", "words"),
    [
        ("TWELVE", "ORDINARY", "in order", "+0.1 (-1.1 to +1.3) **not told apart**",
         "in order not told apart from ordinary training (+0.1, -1.1 to +1.3)"),
        ("TWELVE", "PLAIN", "any order", "+0.7 (+0.2 to +1.3) **better**",
         "0.7 points better in any order than LayerShuffle (+0.2 to +1.3)"),
        ("THREE", "TWELVE", "in order", "-1.7 (-2.6 to -0.7) **worse**",
         "1.7 points behind them in order"),
        ("THREE", "TWELVE", "any order", "-0.3 (-1.8 to +1.2) **not told apart**",
         "not told apart in any order"),
        ("THREE", "TWELVE", "6 alive", "+3.0 (+1.3 to +4.6) **better**",
         "3.0 points ahead with six places alive"),
        ("THREE", "PLAIN", "any order", "+0.4 (-0.7 to +1.5) **not told apart**",
         "three tied blocks are not told apart from LayerShuffle (+0.4, -0.7 to +1.5)"),
    ],
)  # fmt: skip
def test_the_words_about_fresh_pairs_are_those_of_the_scores(
    page: str, sample: str, reference: str, mode: str, cell: str, words: str
) -> None:
    cells = [(getattr(fresh_pairs, arm), mode) for arm in (sample, reference)]
    difference = recipes_page.gap(fresh_pairs.read_scores(), *cells)
    assert recipes_page.judged(difference) == cell
    assert words in " ".join(page.partition("<!-- begin: chance")[0].split())


def test_numbers_in_the_words_stand_in_the_tables_beside_them() -> None:
    elsewhere = {
        "0.3": "a weight of the exit loss",
        "0.42": "docs/log.md",
        **dict.fromkeys(("94.1", "96.7", "97.4"), "test_arms_with_more_seeds_are_judged..."),
        "0.5": "a weight of the exit loss",
        "-0.3 to +5.2": "test_the_exit_loss_beside_what_leaves_blocks_out",
    }
    assert misplaced_numbers(recipes_page.PAGE, elsewhere) == set()
