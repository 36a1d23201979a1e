"""Tables, claims and figures beyond the main table, against numbers worked out by hand."""

from __future__ import annotations

import re

import pytest
from fixture import merging_rows, outside, write_merging, write_run, write_study
from scipy.stats import ttest_rel

from layershuffle.results import ScoreRow
from layershuffle.stats import mean, wilson_interval
from layershuffle.study.budget import budget_points, budget_section
from layershuffle.study.claims import judge
from layershuffle.study.merging_report import merging_section
from layershuffle.study.open_choices import QUESTIONS, open_choices
from layershuffle.study.plan import read_study_plan, runs_of
from layershuffle.study.report import escape_markdown, write_report
from layershuffle.study.score_tables import choices_table
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_study
from layershuffle.study.summary import Column, summarise
from layershuffle.study.tables import table_1, table_notes
from layershuffle.study.verdicts import CLAIMS


def finish(out, name, scores, **facts):
    """Finish a run that is planned: {(mode, kept, choose, order): top1}."""
    task = next(task for task in runs_of(read_study_plan(out)) if task.name == name)
    rows = [
        ScoreRow(
            method=task.arm, seed=task.settings.seed, mode=mode, kept=kept, choose=choose,
            order_seed=index, order=order, n=1000, top1=top1, top5=top1, cross_entropy=1.0,
            draw="pass",
        )
        for index, ((mode, kept, choose, order), top1) in enumerate(scores.items())
    ]  # fmt: skip
    task.directory(out).mkdir(parents=True)
    write_run(out, task, rows, **facts)


FULL = "0,1,2,3,4,5,6,7,8,9,10,11"
REVERSED = ",".join(FULL.split(",")[::-1])


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
        budget={"arms": ["layershuffle"], "steps": [500], "seeds": [0, 1]},
        merging={"arms": ["layershuffle"]},
        analyses=[{"name": "umap", "arm": "layershuffle"}],
    )


def test_table_1_gives_differences_to_the_sequential_baseline(out):
    summary = summarise(read_study(out))
    (table,) = table_1(summary).tables
    head = {name: place for place, name in enumerate(table.head)}
    rows = {(row[0], row[1]): row for row in table.rows}
    ours = rows["LayerShuffle", "arbitrary"]
    means = [
        summary.cell(arm, Column(mode, 12)).top1.mean
        for arm, mode in (("layershuffle", "arbitrary"), ("baseline", "sequential"))
    ]
    assert ours[head["To sequential baseline"]].split()[0] == f"{means[0] - means[1]:+.2f}"
    assert ours[head["The paper's"]] == "-19.84"
    assert rows["LayerDrop", "sequential"][head["The paper's"]] == "-"
    # The means and the paper's own numbers stand in the main table.
    assert not {"Top-1", "Paper", "Top-5"} & set(head)


def test_reduced_depth_models_share_a_row_and_a_line(out):
    for kept, top1 in ((3, 60.0), (6, 80.0)):
        finish(
            out,
            f"truncated-{kept}-seed0",
            {
                ("sequential", kept, "", FULL[: 2 * kept - 1]): top1,
                ("arbitrary", kept, "", ",".join(map(str, reversed(range(kept))))): 1.0,
            },
        )
    summary = summarise(read_study(out))
    assert "truncated" in summary.arms
    curve = summary.curve("truncated", "sequential")
    assert [(cell.kept, cell.top1.mean) for cell in curve] == [(3, 60.0), (6, 80.0)]
    assert summary.depth == 12


def test_the_choice_of_blocks_is_a_table(out):
    scores = {
        ("arbitrary", 3, choose, f"{i},1,2"): 10.0 * i
        for i, choose in ((3, "random"), (4, "spaced"), (5, "first"), (6, "last"))
    }
    finish(out, "other-seed0", scores)
    (table,) = choices_table(summarise(read_study(out))).tables
    assert table.head == ("Arm", "Order", "Blocks kept", "3 kept")
    shown = {row[2]: row[3].split()[0] for row in table.rows if row[0] == "other"}
    # The numbers of random choices stand in the main table, and nobody else has other ones.
    assert shown == {"spaced": "40.0", "first": "50.0", "last": "60.0"}
    assert {row[0] for row in table.rows} == {"other"}


def test_the_budget_curve_joins_the_main_arm_and_stays_out_of_the_main_table(out):
    for seed, top1 in ((0, 40.0), (1, 50.0)):
        scores = {("sequential", 12, "", FULL): 60.0, ("arbitrary", 12, "", REVERSED): top1}
        finish(out, f"layershuffle-500-steps-seed{seed}", scores, steps=500)
    study = read_study(out)
    summary = summarise(study)
    assert "layershuffle-500-steps" not in summary.arms
    points = {(p.steps, p.mode): p.top1 for p in budget_points(study)}
    assert points[500, "arbitrary"].mean == 45.0
    assert points[500, "arbitrary"].models == 2
    own = summary.cell("layershuffle", Column("arbitrary", 12)).top1.mean
    assert points[1500, "arbitrary"].mean == pytest.approx(own)
    section = budget_section(summary)
    assert section.tables[0].rows[1][2].startswith("45.0 (")
    (axes,) = section.pictures[0].figure.axes
    assert len(axes.containers) == 2  # a line per mode
    assert [row[:2] for row in section.tables[0].rows] == [
        ("LayerShuffle", "sequential"),
        ("LayerShuffle", "arbitrary"),
    ]


def test_the_legend_of_the_budget_lies_below_its_panel(out):
    for seed in (0, 1):
        scores = {("sequential", 12, "", FULL): 60.0, ("arbitrary", 12, "", REVERSED): 40.0}
        finish(out, f"layershuffle-500-steps-seed{seed}", scores, steps=500)
    (picture,) = budget_section(summarise(read_study(out))).pictures
    assert outside(picture.figure) == []
    (part,) = picture.figure.subfigs
    (legend,) = part.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["LayerShuffle, sequential", "LayerShuffle, arbitrary"]
    assert legend.get_window_extent().y1 <= part.axes[0].get_window_extent().y0


def verdicts(out):
    judgements = judge(summarise(read_study(out)))
    return {claim.says: (verdict, evidence) for claim, verdict, evidence in judgements}


def verdict_on(words, judgements):
    (judgement,) = [pair for says, pair in judgements.items() if words in says]
    return judgement


def test_claims_are_judged_by_numbers(out):
    before = verdicts(out)
    assert len(before) == len(CLAIMS)
    verdict, evidence = verdict_on("LayerShuffle works", before)
    assert verdict == "holds"
    assert re.match(r"baseline 90\.3 -> 3\.\d, LayerShuffle 74\.\d in arbitrary", evidence)
    assert verdict_on("lose nothing", before) == ("not measured", "-")
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    after = verdicts(out)
    # Two single models: the interval is so wide that nothing speaks against "no loss".
    verdict, evidence = verdict_on("lose nothing", after)
    assert verdict == "holds"
    assert evidence.startswith("layershuffle single 72.00, merged 68.00: -4.00 points (")
    assert verdict_on("An ensemble", after) == ("holds", "ensemble 80.00, +8.00 points")
    assert verdict_on("vary more", after) == (
        "does not hold",
        "single models 2.83, merged 2.00, both over single orders (over merges of these models)",
    )


def test_a_claim_is_not_held_by_a_difference_without_an_interval(out):
    write_merging(out, "layershuffle", merging_rows([90.0] * 3, [20.0] * 3))
    verdict, evidence = verdict_on("lose nothing", verdicts(out))
    assert verdict == "does not hold"
    assert "-70.00 points (one model or equal differences, no interval)" in evidence


def test_merges_are_judged_on_the_arm_that_loses_least_and_name_random_slots(tmp_path):
    out = write_study(
        tmp_path,
        arms={"baseline": "baseline", "layershuffle": "layershuffle", "slow": "layershuffle"},
        seeds=(0, 1),
        orders=2,
        merging={"arms": ["baseline", "layershuffle", "slow"]},
    )
    own = [60.0, 60.5, 61.0]
    random = [
        row.model_copy(update={"name": "random slots", "main": 0, "top1": top1})
        for row, top1 in zip(merging_rows([], own)[:3], (2.0, 3.0, 10.0), strict=True)
    ]
    write_merging(out, "baseline", [*merging_rows([90.0, 90.2], own), *random])
    write_merging(out, "layershuffle", merging_rows([70.0, 70.2], own))
    write_merging(out, "slow", merging_rows([66.0, 66.2], [63.0, 63.1, 63.2]))
    after = verdicts(out)
    verdict, evidence = verdict_on("lose nothing", after)
    assert verdict == "holds partly"  # 3 points; the other arm loses 9.6
    assert "layershuffle single 70.10, merged 60.50: -9.60 points" in evidence
    assert "slow single 66.10, merged 63.10: -3.00 points" in evidence
    assert verdict_on("Merges of ordinary", after) == (
        "holds partly",
        "single 90.10, merged 60.50; with random slots 5.00 +-4.36 (over merges of these models)",
    )
    names = [row[0] for row in merging_section(read_study(out)).tables[0].rows]
    assert {"baseline: merges", "baseline: merges, random slots"} <= set(names)


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
    summary = summarise(read_study(out))
    ours = summary.means("layershuffle", "arbitrary")
    for arm, gap, loss in (("layershuffle-position", 3.0, 0.5), ("zero", 1.0, 0.4)):
        for seed in (0, 1):
            top1 = ours[seed] + gap + (0.01, -0.01)[seed]
            scores = {("arbitrary", 12, "", REVERSED): top1}
            finish(out, f"{arm}-seed{seed}", scores, held_out=loss)
    verdict, evidence = verdict_on("its position helps", verdicts(out))
    assert verdict == "holds"  # the start with the better test score is not taken
    assert evidence.startswith("zero +1.00 points (")
    assert "; layershuffle-position +3.00 points (" in evidence


def test_claims_that_were_not_measured_are_named_in_one_line(out):
    judgements = verdicts(out)
    measured = [says for says, (verdict, _) in judgements.items() if verdict != "not measured"]
    assert 0 < len(measured) < len(CLAIMS)
    write_report(out)
    page = (out / "claims.md").read_text()
    for number, says in enumerate(measured, start=1):
        assert f"## {number}. {escape_markdown(says)}\n" in page
    assert page.count("\n## ") == len(measured)
    assert f"{len(CLAIMS) - len(measured)} not measured" in page
    (line,) = [line for line in page.splitlines() if line.startswith("Not measured in this study")]
    for says in judgements.keys() - set(measured):
        assert escape_markdown(says) in line
    assert line in (out / "report.md").read_text()


def test_the_identity_draw_is_looked_for(out):
    scores = {("arbitrary", 3, "", "0,1,2"): 60.0}
    scores |= {("arbitrary", 3, "", order): 6.0 for order in ("1,0,2", "2,1,0")}
    finish(out, "truncated-3-seed0", scores)
    verdict, evidence = verdict_on("identity", verdicts(out))
    assert verdict == "holds"
    assert evidence.startswith("identity 60.0 (1 draws), others 6.0 (2 draws)")


def test_a_difference_has_its_interval(out):
    _, evidence = verdict_on("price", verdicts(out))
    summary = summarise(read_study(out))

    def means(arm, mode):
        rows = summary.cell(arm, Column(mode, 12)).rows
        return [mean([row.top1 for row in rows if row.seed == seed]) for seed in (0, 1, 2)]

    base, ours = means("baseline", "sequential"), means("layershuffle", "arbitrary")
    slow = ttest_rel(base, ours).confidence_interval(0.95)
    points = mean(base) - mean(ours)
    assert evidence.startswith(
        f"{points:+.2f} points ({slow.low:+.2f} to {slow.high:+.2f}, 3 common seeds)"
    )
    (table,) = table_1(summary).tables
    place = table.head.index("To sequential baseline")
    (row,) = [row for row in table.rows if row[:2] == ("LayerShuffle", "arbitrary")]
    assert row[place] == f"{-points:+.2f} ({-slow.high:+.1f} to {-slow.low:+.1f})"


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [(1.9, "holds"), (-1.9, "holds"), (4.9, "holds partly"), (-5.1, "does not hold")],
)
def test_a_claim_between_bounds(tmp_path, gap, verdict):
    """Refined at 9 blocks against LayerDrop pruned to 9: within 2 points, partly within 5."""
    out = write_study(
        tmp_path,
        arms={"baseline": "baseline"},
        orders=2,
        more_arms=[
            {"method": "layerdrop"},
            {"method": "truncated", "name": "truncated-9", "fit": {"kept": 9}},
        ],
    )
    nine = FULL[: 2 * 9 - 1]
    finish(out, "layerdrop-seed0", {("sequential", 9, "random", nine): 70.0})
    finish(out, "truncated-9-seed0", {("sequential", 9, "", nine): 70.0 + gap})
    assert verdict_on("refined at 9 blocks", verdicts(out)) == (
        verdict,
        f"{gap:+.2f} points (one model or equal differences, no interval)",
    )


def test_models_that_are_never_right_are_judged(tmp_path):
    """No gain is not a slight gain, and 0 % is no divisor."""
    arms = ["baseline", "layershuffle", "layershuffle-position"]
    out = write_study(
        tmp_path,
        seeds=(0, 1),
        arms={"layerdrop": "layerdrop"},
        more_arms=[{"method": method} for method in arms],
        merging={"arms": ["baseline"]},
    )
    for arm in arms:
        for seed in (0, 1):
            scores = {("sequential", 12, "", FULL): 0.0, ("arbitrary", 12, "", REVERSED): 0.0}
            finish(out, f"{arm}-seed{seed}", scores)
    write_merging(out, "baseline", merging_rows([0.0, 0.0], [0.0, 0.0]))
    judged = verdicts(out)
    slightly = ("does not hold", "+0.00 points (one model or equal differences, no interval)")
    verdict, evidence = verdict_on("helps only slightly", judged)
    assert (verdict, evidence) == (slightly[0], f"layershuffle-position {slightly[1]}")
    assert verdict_on("unusable", judged) == (
        "holds",
        "single 0.00, merged 0.00 (over merges of these models)",
    )
    assert verdict_on("price of arbitrary", judged) == ("not measured", "-")


def test_every_detail_that_the_paper_omits_has_a_note():
    study = StudySettings(
        name="s",
        model="bundled:digits",
        data="digit-pairs",
        arms=[
            {"method": "layershuffle-position", "fit": {"encoding": {"table": "shared"}}},
            {"method": "truncated", "fit": {"kept": 3, "choose": "last"}},
        ],
        evaluate={"draw": "batch", "num_orders": 7},
        merging={"arms": ["truncated"], "options": {"ends": ["average", "base"]}},
    )
    assert [question[0] for question in QUESTIONS] == [f"A{n}" for n in range(1, 20)]
    rows = {row[0]: row for row in open_choices(study).tables[0].rows}
    assert rows["A1"][3:] == ("draw pass, num_orders 20", "draw batch, num_orders 7")
    assert rows["A3"][4] == "encoding.table shared, encoding.table_init normal"
    assert rows["A10"][4].startswith("choose last")
    assert rows["A17"][4].endswith("precision auto; scores: precision fp32; merges: precision fp32")
    assert rows["A12"][3:] == ("ends average", "ends average/base")
    assert all(cell for row in rows.values() for cell in row)


def test_the_report_holds_all_of_it_and_says_what_is_missing(out):
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    report = write_report(out)
    assert not report.complete
    page, text = report.html.read_text(), (out / "report.md").read_text()
    assert "13 of 19 tasks are finished; 0 failed, 6 not done yet." in text
    for words in (
        "Table 1",
        "Table 2 and Figure 5",
        "Claim by claim",
        "What the paper leaves open",
    ):
        assert words in page
        assert f"## {words}" in text
    assert "data:image/svg+xml;base64," in page
    assert "](figure5.svg)" in text
    assert (out / "figure5.svg").is_file()
    claims = (out / "claims.md").read_text()
    assert "**Holds.** ensemble 80.00, +8.00 points." in claims
    assert "umap-layershuffle-seed0" in page


def test_grouped_images_widen_the_interval_and_the_notes_say_so(tmp_path):
    """One model in one order: Wilson over 343 images in place of 1,000."""
    out = write_study(tmp_path, arms={"baseline": "baseline"}, more_arms=[{"method": "layerdrop"}])
    (task,) = [task for task in runs_of(read_study_plan(out)) if task.name == "layerdrop-seed0"]
    row = ScoreRow(
        method="layerdrop", seed=0, mode="sequential", kept=12, choose="", order_seed=0, order=FULL,
        n=1000, top1=80.0, top5=95.0, cross_entropy=1.0, draw="pass", top1_n=343, top5_n=400,
    )  # fmt: skip
    task.directory(out).mkdir(parents=True)
    write_run(out, task, [row])
    summary = summarise(read_study(out))
    cell = summary.cell("layerdrop", Column("sequential", 12))
    assert (cell.top1.low, cell.top1.high) == wilson_interval(80.0, 343)
    assert (cell.top5.low, cell.top5.high) == wilson_interval(95.0, 400)
    (note,) = [note for note in table_notes(summary) if "Wilson" in note]
    # The baseline of this study has no groups: it is older, or its data name none.
    single = "(one model in one order, or equal scores)"
    words = f"{single}, which count as 343 independent ones, or were taken as"
    assert words in note
    plain = write_study(tmp_path / "plain", arms={"baseline": "baseline"})
    (note,) = [note for note in table_notes(summarise(read_study(plain))) if "Wilson" in note]
    assert f"Wilson over 5,000 images {single}, taken as independent" in note


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
    assert verdict_on("varies most", verdicts(out))[0] == verdict
