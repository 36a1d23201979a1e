"""docs/open-questions.md agrees with the rows of scripts/scenes.py."""

from __future__ import annotations

import math
from itertools import chain

import open_questions
import pytest
import recipes_page
import scenes
import scenes_page
from trainings import key_of


def test_tables_are_made_of_the_results() -> None:
    page = scenes_page.PAGE.read_text(encoding="utf-8")
    assert page == scenes_page.with_tables(page), "run scripts/scenes_page.py"


def test_results_are_those_of_the_planned_runs() -> None:
    rows = open_questions.rows_of("scenes.csv")
    keys = [(row["arm"], row["seed"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= {key_of(run, scenes.KEY) for run in chain(*scenes.STAGES)}
    assert {arm for arm, _ in keys} - set(scenes_page.LABELS) <= {"base"}
    assert all(len(row["any_map"].split()) == scenes.ORDERS for row in rows)
    assert scenes.CSV.stat().st_size < 10_000


def test_the_classifiers_beside_have_as_many_steps() -> None:
    assert scenes.SceneRun.steps == scenes_page.STEPS


def values(in_order: float, *any_order: float) -> scenes_page.TaskScores:
    return scenes_page.TaskScores(in_order=in_order, any_order=any_order)


def measured() -> scenes_page.Measured:
    """Two models per arm, the second one without an ordinary one of its seed."""
    ordinary, shuffled = {0: values(50, 5, 7)}, {0: values(45, 40, 42), 1: values(41, 30, 32)}
    return {
        (arm, task): models
        for arm, models in (("baseline", ordinary), ("layershuffle", shuffled))
        for task in scenes_page.TASKS
    }


def scores() -> recipes_page.RecipeScores:
    """Classifiers that are right on 80 % in order, and on 72 and 56 % in any order."""
    ordered, free = recipes_page.ORDERED, recipes_page.ANY
    return {
        ("baseline", 500, ordered): {0: [80.0], 1: [80.0]},
        ("baseline", 500, free): {0: [4.0], 1: [12.0]},
        ("layershuffle", 500, free): {0: [70.0, 74.0], 1: [56.0], 2: [1.0]},
        ("frozen baseline", 500, free): {},
    }


def test_losses_are_relative_to_ordinary_training_of_the_same_seed() -> None:
    (of_seed,) = scenes_page.losses(measured(), "layershuffle", "map").values()
    assert of_seed == pytest.approx([20, 16])
    (ordinary,) = scenes_page.losses(measured(), "baseline", "map").values()
    assert ordinary == pytest.approx([90, 86])
    assert scenes_page.classification_losses(scores(), "layershuffle") == pytest.approx([10, 30])


def test_every_pair_of_models_has_to_be_on_one_side_of_every_classifier() -> None:
    steady, apart = {0: [40.0, 40.0], 1: [31.0, 31.0]}, {0: [40.0, 40.0], 1: [20.0, 20.0]}
    assert scenes_page.beside(steady, [10, 30]) == "loses more"
    assert scenes_page.beside(steady, [10, 35]) == "not told apart"
    assert scenes_page.beside(steady, [41, 50]) == "loses less"
    assert scenes_page.beside(apart, [10, 30]) == "not told apart"
    # t(0.975, 1) = 12.706: two orders at 39 and 41 give an interval of 12.7 to either side.
    assert scenes_page.beside({0: [39.0, 41.0]}, [27.2]) == "loses more"
    assert scenes_page.beside({0: [39.0, 41.0]}, [27.4]) == "not told apart"


def test_tables_show_means_over_the_models() -> None:
    *_, ordinary, shuffled = scenes_page.score_table(measured()).splitlines()
    assert ordinary == "| ordinary training | 1 | 50.0 | 6.0 | 50.0 | 6.0 |"
    assert shuffled == "| LayerShuffle | 2 | 43.0 | 36.0 | 43.0 | 36.0 |"
    table = scenes_page.loss_table(measured(), scores())
    *_, ordinary, shuffled = table.splitlines()
    assert ordinary == ("| ordinary training | 90.0 | 88.0 |  | 88.0 |  |")
    assert shuffled.startswith("| LayerShuffle | 20.0 | 18.0 | **not told apart** | 18.0 |")


def test_classification_beside_is_that_of_the_recipes() -> None:
    gaps = scenes_page.classification_losses(recipes_page.read_scores(), "layershuffle")
    # docs/recipes.md: 62.8 % in any order where ordinary training has 88.0 % in order.
    assert math.isclose(sum(gaps) / len(gaps), 100 * (1 - 62.8 / 88.0), abs_tol=0.2)
