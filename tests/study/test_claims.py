"""Summary, tables and claims against numbers worked out by hand.

`tests/test_docs.py` compares every cell of the report of digits-paper, with all claims.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixture import facts, merging_rows, run_of, tell, write_merging, write_study

from layershuffle.results import ScoreRow
from layershuffle.study.paper.claims import CLAIMS, judge
from layershuffle.study.paper.markdown import literal
from layershuffle.study.paper.numbers import paper_number
from layershuffle.study.paper.report import write_report
from layershuffle.study.paper.summary import summarise
from layershuffle.study.paper.tables import budget_curves, budget_section
from layershuffle.study.store import read_study

FULL = "0,1,2,3,4,5,6,7,8,9,10,11"
REVERSED = ",".join(FULL.split(",")[::-1])


def finish(out, name, scores, **changed):
    """Finish a run that is planned: {(mode, kept, choose, order): top1}."""
    task = run_of(out, name)
    rows = [
        ScoreRow(
            method=task.arm, seed=task.settings.seed, mode=mode, kept=kept, choose=choose,
            order_seed=index, order=order, n=1000, top1=top1, top5=top1, cross_entropy=1.0,
        )
        for index, ((mode, kept, choose, order), top1) in enumerate(scores.items())
    ]  # fmt: skip
    tell(out, task.name, **facts(task, **changed), rows=rows)


def table_of(text, number=0):
    """The rows of a table in Markdown, by the names of its columns."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    lines = [line.replace("\\", "")[2:-2].split(" | ") for line in blocks[number].splitlines()]
    head, _, *rows = lines
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture
def out(tmp_path):
    """Three seeds of four arms are done, other planned tasks are not."""
    return write_study(
        tmp_path / "study",
        seeds=(0, 1, 2),
        more_arms=[
            {"method": "truncated", "name": "truncated-3", "fit": {"kept": 3}, "seeds": [0]},
            {"method": "truncated", "name": "truncated-6", "fit": {"kept": 6}, "seeds": [0]},
            {"method": "layershuffle", "name": "other", "seeds": [0]},
        ],
        budget=[{"arms": ["layershuffle"], "steps": [500], "seeds": [0, 1]}],
        merging=[{"arms": ["layershuffle"]}],
        analyses=[{"name": "umap", "arm": "layershuffle"}],
    )


def test_the_budget_curve_joins_the_main_arm_and_stays_out_of_the_main_table(out):
    for seed, top1 in ((0, 40.0), (1, 50.0)):
        scores = {("sequential", 12, "", FULL): 60.0, ("arbitrary", 12, "", REVERSED): top1}
        finish(out, f"layershuffle-500-steps-seed{seed}", scores, steps=500)
    study = read_study(out)
    summary, curves = summarise(study), budget_curves(study)
    assert "layershuffle-500-steps" not in summary.arms
    curve = curves["layershuffle", "arbitrary"]
    assert (curve[500].mean, curve[500].models) == (45.0, 2)
    own = summary.cell("layershuffle", "arbitrary").top1.mean
    assert curve[1500].mean == pytest.approx(own)
    figures = []
    rows = table_of(budget_section(summary, lambda *of: figures.append(of[2]) or ""))
    assert [row["Order"] for row in rows] == ["sequential", "arbitrary"]
    assert rows[1]["500 steps"].startswith("45.0 (")
    (axes,) = figures[0].axes
    assert [list(line.lines[0].get_xdata()) for line in axes.containers] == [[500, 1500]] * 2


# --- claims --------------------------------------------------------------------------------------


def verdict_on(words, out):
    judgements = judge(summarise(read_study(out)))
    assert len(judgements) == len(CLAIMS)
    (judgement,) = [pair for claim, *pair in judgements if words in claim.says]
    return tuple(judgement)


def test_claims_are_judged_by_numbers(out):
    verdict, evidence = verdict_on("LayerShuffle works", out)
    assert verdict == "holds"
    assert evidence.startswith("baseline 90.3 -> 3.")
    assert verdict_on("lose nothing", out) == ("not measured", "-")
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    # Two single models: the interval is so wide that nothing speaks against "no loss".
    verdict, evidence = verdict_on("lose nothing", out)
    assert verdict == "holds"
    assert evidence.startswith("layershuffle single 72.00, merged 68.00: -4.00 points (")
    assert verdict_on("An ensemble", out) == ("holds", "ensemble 80.00, +8.00 points")
    assert verdict_on("vary more", out) == (
        "does not hold",
        "single models 2.83, merged 2.00, both over single orders (over merges of these models)",
    )


@pytest.mark.parametrize(
    ("classes", "shuffled", "verdict"),
    [(10, 17.9, "holds"), (10, 18.1, "holds partly"), (100, 17.9, "holds partly")],
)
def test_a_share_of_an_accuracy_is_of_what_is_above_chance(tmp_path, classes, shuffled, verdict):
    """Of ten classes a guess is right on ten in a hundred, and a tenth of 80 points is 8."""
    out = write_study(tmp_path, seeds=(0,), orders=1)
    for arm, in_order, any_order in (("baseline", 90.0, shuffled), ("layershuffle", 85.0, 80.0)):
        scores = {
            ("sequential", 12, "", FULL): in_order,
            ("arbitrary", 12, "", REVERSED): any_order,
        }
        finish(out, f"{arm}-seed0", scores, classes=classes)
    assert verdict_on("LayerShuffle works", out)[0] == verdict


def test_the_start_of_the_position_encoding_is_picked_on_held_out_images(tmp_path):
    zero = {"method": "layershuffle-position", "name": "zero"}
    zero["fit"] = {"encoding": {"projection_init": "zero"}}
    out = write_study(
        tmp_path,
        arms={"layershuffle": "layershuffle"},
        seeds=(0, 1),
        orders=2,
        more_arms=[{"method": "layershuffle-position"}, zero],
    )
    ours = summarise(read_study(out)).means("layershuffle", "arbitrary")
    for arm, gap, loss in (("layershuffle-position", 3.0, 0.5), ("zero", 1.0, 0.4)):
        for seed in (0, 1):
            top1 = ours[seed] + gap + (0.01, -0.01)[seed]
            scores = {("arbitrary", 12, "", REVERSED): top1}
            finish(out, f"{arm}-seed{seed}", scores, held_out=loss)
    verdict, evidence = verdict_on("its position helps", out)
    assert verdict == "holds"  # the start with the better test score is not taken
    assert evidence.startswith("zero +1.00 points (")
    assert "; layershuffle-position +3.00 points (" in evidence


def test_claims_that_were_not_measured_are_named_in_one_line(out):
    judgements = judge(summarise(read_study(out)))
    write_report(out)
    lines = (out / "report.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Not measured in this study")]
    for claim, verdict, _ in judgements:
        is_row = any(row.startswith(f"| {literal(claim.says)} |") for row in lines)
        assert is_row == (verdict != "not measured") == (literal(claim.says) not in line)
    count = sum(verdict == "not measured" for _, verdict, _ in judgements)
    assert 0 < count < len(CLAIMS)
    assert any(f"{count} not measured. Top-1 in percent" in row for row in lines)


def test_models_that_are_never_right_are_judged(tmp_path):
    """No gain is not a slight gain, and 0 % is no divisor."""
    arms = ["baseline", "layershuffle", "layershuffle-position"]
    out = write_study(
        tmp_path,
        seeds=(0, 1),
        arms={"layerdrop": "layerdrop"},
        more_arms=[{"method": method} for method in arms],
        merging=[{"arms": ["baseline"]}],
    )
    for arm in arms:
        for seed in (0, 1):
            scores = {("sequential", 12, "", FULL): 0.0, ("arbitrary", 12, "", REVERSED): 0.0}
            finish(out, f"{arm}-seed{seed}", scores)
    write_merging(out, "baseline", merging_rows([0.0, 0.0], [0.0, 0.0]))
    assert verdict_on("helps only slightly", out) == (
        "does not hold",
        "layershuffle-position +0.00 points (one model or equal differences, no interval)",
    )
    for words in ("unusable", "price of arbitrary", "LayerShuffle works"):
        assert verdict_on(words, out) == ("not measured", "-")


@pytest.mark.parametrize(
    ("predict", "verdict"),
    [((40.0, 50.0, 60.0, 70.0, 80.0), "holds"), ((60.0, 60.0, 60.1, 60.0, 60.0), "undecided")],
)
def test_spreads_of_few_models_are_told_apart_or_not(tmp_path, predict, verdict):
    arms = ("layershuffle", "layershuffle-position", "layershuffle-predict")
    out = write_study(
        tmp_path, arms={"baseline": "baseline"}, seeds=range(5), orders=1,
        more_arms=[{"method": method} for method in arms],
    )  # fmt: skip
    others = (60.0, 60.2, 60.1, 60.0, 60.1), (60.0, 60.1, 60.3, 60.1, 60.2)
    for arm, scores in zip(arms, (*others, predict), strict=True):
        for seed, top1 in enumerate(scores):
            finish(out, f"{arm}-seed{seed}", {("arbitrary", 12, "", REVERSED): top1})
    assert verdict_on("varies most", out)[0] == verdict


# --- notes ---------------------------------------------------------------------------------------


def test_analyses_have_their_figures_and_numbers(out):
    blocks = {"blocks": 12.0, "tokens": {"mean": {"purity": 0.6, "chance": 0.2}}}
    name = "umap-layershuffle-seed0"
    tell(out, name, title="UMAP (Figure 4)", facts=blocks)
    (out / "figures").mkdir()
    (out / "figures" / f"{name}-joint.svg").write_text("<svg/>")
    write_report(out)
    text = (out / "report.md").read_text()
    assert f"## UMAP (Figure 4)\n\n![{name}: joint]" in text
    assert "| Number | layershuffle-seed0 |" in text
    assert "| mean: purity | 0.6 |" in text
    assert verdict_on("output depends on its position", out)[0] == "holds"


# --- the summary ----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    return write_study(tmp_path / "alone", orders=3)


def with_rows(out, change):
    """The summary after every row was replaced."""
    study = read_study(out)
    runs = []
    for task, result in study.runs:
        rows = tuple(new for row in result.rows for new in change(row))
        runs.append((task, result.model_copy(update={"rows": rows})))
    return summarise(replace(study, runs=tuple(runs)))


def test_many_levels_are_thinned_to_quarters(alone):
    def all_depths(row):
        if (row.mode, row.kept, row.order_seed) != ("arbitrary", 12, 0):
            return [row] if row.kept == 12 else []
        fewer = (row.model_copy(update={"kept": k, "choose": "random"}) for k in range(1, 12))
        return [row, *fewer]

    summary = with_rows(alone, all_depths)
    assert [kept for mode, kept in summary.columns if mode == "arbitrary"] == [12, 9, 6, 3]
    assert [cell.kept for cell in summary.curve("layershuffle", "arbitrary")] == list(range(1, 13))


def test_random_choice_leads_and_others_stay_apart(alone):
    def and_spaced(row):
        return [row, row.model_copy(update={"choose": "spaced"})] if row.choose else [row]

    summary = with_rows(alone, and_spaced)
    assert summary.choose == "random"
    cell = summary.cell("baseline", "arbitrary", kept=9)
    assert (cell.choose, cell.top1.orders) == ("random", 3)
    assert sum(cell.choose == "spaced" for cell in summary.cells) == 4 * 6


def test_rounds_and_passes_are_no_cells_of_the_paper(alone):
    def and_rounds(row):
        return [row, row.model_copy(update={"parallel": 2}), row.model_copy(update={"passes": 3})]

    assert with_rows(alone, and_rounds).cells == summarise(read_study(alone)).cells


def test_arms_of_another_depth_stand_under_their_number_of_blocks(alone):
    def shallow(row):
        fields = {"kept": 3, "order": "0,1,2", "top1": 44.0, "choose": ""}
        if row.method != "layerdrop":
            return [row]
        is_first = (row.mode, row.kept) == ("sequential", 12)
        return [row.model_copy(update=fields)] if is_first else []

    summary = with_rows(alone, shallow)
    cell = summary.cell("layerdrop", "sequential", kept=3)
    assert cell.top1.mean == 44.0
    assert summary.depth == 12
    assert summary.cell("layerdrop", "sequential") is None


@pytest.mark.parametrize(
    ("arm", "mode", "kept", "depth", "shown"),
    [
        ("baseline", "arbitrary", 12, 12, "0.13 +-0.03"),
        ("layershuffle", "sequential", 3, 12, "~18"),
        ("layerdrop", "sequential", 9, 12, "~70-80"),
        ("layershuffle", "arbitrary", 6, 6, "62.77 +-0.41"),
        ("layershuffle", "sequential", 3, 6, None),
        ("layershuffle", "arbitrary", 9, 12, None),
        ("layerdrop-p0.5", "sequential", 9, 12, None),
    ],
)
def test_the_papers_number_for_a_cell(arm, mode, kept, depth, shown):
    number = paper_number(arm, mode, kept=kept, depth=depth)
    assert (number and number.text) == shown
