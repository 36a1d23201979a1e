"""The summary of a study and its tables against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixture import facts, merging_rows, run_of, tell, write_merging, write_study

from layershuffle.ground.rows import ScoreRow
from layershuffle.study.paper.numbers import paper_number
from layershuffle.study.paper.report import write_report
from layershuffle.study.paper.summary import summarise
from layershuffle.study.paper.tables import merging_section, table_1
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
        merging=[{"arms": ["layershuffle"]}],
        analyses=[{"name": "umap", "arm": "layershuffle"}],
    )


# --- tables --------------------------------------------------------------------------------------


def no_figure(name, caption, figure):
    return ""


def test_table_1_has_the_differences_to_ordinary_training_in_order(tmp_path):
    """Two models: 0.975 of Student's t with one degree of freedom is 12.706."""
    arms = {"baseline": "baseline", "layershuffle": "layershuffle"}
    out = write_study(
        tmp_path, seeds=(0, 1), arms=arms, undone=[f"{a}-seed{s}" for a in arms for s in (0, 1)]
    )
    scores = {"baseline": ((90.0, 4.0), (92.0, 6.0)), "layershuffle": ((80.0, 70.0), (84.0, 76.0))}
    for arm, models in scores.items():
        for seed, (in_order, any_order) in enumerate(models):
            rows = {
                ("sequential", 12, "", FULL): in_order,
                ("arbitrary", 12, "", REVERSED): any_order,
            }
            finish(out, f"{arm}-seed{seed}", rows)
    rows = table_of(table_1(summarise(read_study(out))))
    cells = {
        (row["Method"], row["Order"]): (row["To sequential baseline"], row["The paper's"])
        for row in rows
    }
    assert cells == {
        ("baseline", "sequential"): ("-", "-"),
        ("baseline", "arbitrary"): ("-86.00", "-82.48"),  # equal gaps have no interval
        ("LayerShuffle", "sequential"): ("-9.00 (-21.7 to +3.7)", "-7.39"),
        ("LayerShuffle", "arbitrary"): ("-18.00 (-43.4 to +7.4)", "-19.84"),
    }
    assert {(row["Models"], row["Orders"]) for row in rows} == {("2", "1")}


def test_an_arm_is_compared_with_the_baseline_of_its_length(tmp_path):
    """Of two baselines, and not with the first one that has ended."""
    arms = {"baseline": "baseline", "layershuffle": "layershuffle"}
    out = write_study(
        tmp_path,
        arms=arms,
        undone=[f"{arm}-seed0" for arm in arms],
        more_arms=[
            {"method": "baseline", "name": "long-baseline", "fit": {"steps": 6000}},
            {"method": "layershuffle", "name": "long", "fit": {"steps": 6000}},
            {"method": "layershuffle", "name": "short", "fit": {"steps": 50}},
        ],
    )
    in_order = {"baseline": 90.0, "layershuffle": 80.0, "long": 85.0, "short": 60.0}

    def differences():
        rows = table_of(table_1(summarise(read_study(out))))
        return {row["Method"]: row["To sequential baseline"] for row in rows}

    for arm, top1 in in_order.items():
        finish(out, f"{arm}-seed0", {("sequential", 12, "", FULL): top1})
    others = {"baseline": "-", "LayerShuffle": "-10.00", "short": "-"}
    assert differences() == {**others, "long": "-"}, "its baseline has not ended"
    finish(out, "long-baseline-seed0", {("sequential", 12, "", FULL): 92.0})
    assert differences() == {**others, "long": "-7.00", "long-baseline": "-"}


def test_the_spread_in_table_2_is_over_models(out):
    """Not over the orders of a model, of which each has two here."""
    rows = [
        row.model_copy(update={"order_seed": seed, "order": order, "top1": row.top1 + shift})
        for row in merging_rows([70.0, 74.0], [66.0])
        for seed, order, shift in ((0, "1,0", -3.0), (1, "0,1", 3.0))
    ]
    write_merging(out, "layershuffle", rows)
    spreads = {
        row["Models"]: (row["Lowest"], row["Highest"])
        for row in table_of(merging_section(summarise(read_study(out)), no_figure))
    }
    assert spreads["LayerShuffle: single models"] == ("70.00", "74.00")
    assert spreads["LayerShuffle: merges"] == ("63.00", "69.00"), "one model, so over its orders"


def test_table_2_stands_beside_the_papers(out):
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    rows = table_of(merging_section(summarise(read_study(out)), no_figure))
    cells = {
        row["Models"]: (row["Top-1"], row["sd"], row["Paper: top-1"], row["Ours - paper"])
        for row in rows
    }
    assert cells == {
        "LayerShuffle: single models": ("72.00", "2.83", "-", "-"),
        "LayerShuffle: merges": ("68.00", "2.00", "59.68 +-1.15", "+8.32"),
        "LayerShuffle: soup, uniform": ("50.00", "-", "-", "-"),
        "LayerShuffle: ensemble, logits-independent": ("80.00", "-", "69.20", "+10.80"),
        "LayerShuffle: ensemble, logits-same": ("79.00", "-", "-", "-"),
    }


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
