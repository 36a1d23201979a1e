"""docs/rounds.md agrees with the committed scores of the shipped model."""

from __future__ import annotations

import open_questions
import rounds_page

import layershuffle as ls


def test_tables_are_made_of_the_results() -> None:
    page = rounds_page.PAGE.read_text(encoding="utf-8")
    assert page == rounds_page.with_tables(page), "run scripts/rounds_page.py"


def test_the_shipped_model_scores_as_committed() -> None:
    """All blocks in the first drawn order, in rounds of one, on the scored pairs."""
    cells = {
        (row["case"], row["count"], row["passes"]): row["top1"].split()
        for row in open_questions.rows_of(rounds_page.CSV)
    }
    model = ls.load(rounds_page.MODEL)
    batches = open_questions.scored_batches(model)
    (score, *_) = ls.evaluate(model, batches, modes="arbitrary", num_orders=1)
    assert cells["rounds", "1", "1"][0] == f"{score.top1:.2f}"
    # Blocks one after the other are the same with a barrier and without one.
    assert cells["rounds", "1", "1"] == cells["under way", "1", "1"]
