"""Tables, claims and figures beyond the main table, against numbers worked out by hand."""

from __future__ import annotations

import json
import re

import pytest
from fixture import facts, merging_rows, write_merging, write_rows, write_study

from layershuffle.stats import mean
from layershuffle.study.budget import budget_points, budget_section
from layershuffle.study.claims import CLAIMS, claims_section, judge
from layershuffle.study.merging_report import draw_swarm, merging_section, swarm
from layershuffle.study.open_choices import QUESTIONS, open_choices
from layershuffle.study.pieces import read_pieces
from layershuffle.study.report import write_report
from layershuffle.study.results import StudyError, read_study
from layershuffle.study.settings import StudySettings
from layershuffle.study.summary import Column, summarise
from layershuffle.study.table1 import choices_table, table_1


def rows_of(run, scores):
    """Rows of a run: {(mode, kept, choose, order): top1}."""
    return [
        {
            "method": run["arm"],
            "seed": run["seed"],
            "mode": mode,
            "kept": kept,
            "choose": choose,
            "order_seed": index,
            "order": order,
            "n": 1000,
            "top1": top1,
            "top5": top1,
            "cross_entropy": 1.0,
            "draw": "pass",
        }
        for index, ((mode, kept, choose, order), top1) in enumerate(scores.items())
    ]


def add_run(out, arm, method, *, seed, scores, part="main", steps=1500):
    plan = json.loads((out / "plan.json").read_text())
    run = {"name": f"{arm}-s{seed}", "arm": arm, "method": method, "seed": seed, "part": part}
    plan["runs"].append(run)
    (out / "plan.json").write_text(json.dumps(plan))
    directory = out / "runs" / run["name"]
    directory.mkdir(parents=True)
    write_rows(directory / "results.csv", rows_of(run, scores))
    (directory / "result.json").write_text(json.dumps({**facts(run, ""), "steps": steps}))


FULL = "0,1,2,3,4,5,6,7,8,9,10,11"


@pytest.fixture
def out(tmp_path):
    return write_study(tmp_path / "study", seeds=(0, 1, 2))


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
    assert ours[head["Top-1"]] == f"{means[0]:.2f}"
    assert ours[head["To sequential baseline"]].split()[0] == f"{means[0] - means[1]:+.2f}"
    assert ours[head["Paper"]] == "62.77 +-0.41"
    assert ours[head["Paper, to sequential baseline"]] == "-19.84"
    assert ours[head["Ours - paper"]] == f"{means[0] - 62.77:+.2f}"
    assert rows["LayerDrop", "sequential"][head["Paper"]] == "-"


def test_reduced_depth_models_share_a_row_and_a_line(out):
    for kept, top1 in ((3, 60.0), (6, 80.0)):
        add_run(
            out,
            f"truncated-{kept}",
            "truncated",
            seed=0,
            scores={
                ("sequential", kept, "", FULL[: 2 * kept - 1]): top1,
                ("arbitrary", kept, "", ",".join(map(str, reversed(range(kept))))): 1.0,
            },
        )
    summary = summarise(read_study(out))
    assert summary.arms[-1] == "truncated"
    curve = summary.curve("truncated", "sequential")
    assert [(cell.kept, cell.top1.mean) for cell in curve] == [(3, 60.0), (6, 80.0)]
    assert summary.depth == 12


def test_the_choice_of_blocks_is_a_table(out):
    scores = {
        ("arbitrary", 3, choose, f"{i},1,2"): 10.0 * i
        for i, choose in ((3, "random"), (4, "spaced"), (5, "first"), (6, "last"))
    }
    add_run(out, "other", "layershuffle", seed=0, scores=scores)
    (table,) = choices_table(summarise(read_study(out))).tables
    assert table.head == ("Arm", "Order", "Blocks kept", "3 kept")
    shown = {row[2]: row[3].split()[0] for row in table.rows if row[0] == "other"}
    assert shown == {"random": "30.0", "spaced": "40.0", "first": "50.0", "last": "60.0"}
    # Nobody else was scored with other choices, and random is not repeated from the main table.
    assert {row[2] for row in table.rows if row[0] == "LayerShuffle"} == {"random"}


def test_the_budget_curve_joins_the_main_arm_and_stays_out_of_the_main_table(out):
    for seed, top1 in ((0, 40.0), (1, 50.0)):
        add_run(
            out,
            "layershuffle-500-steps",
            "layershuffle",
            seed=seed,
            part="budget",
            steps=500,
            scores={
                ("sequential", 12, "", FULL): 60.0,
                ("arbitrary", 12, "", ",".join(FULL.split(",")[::-1])): top1,
            },
        )
    study = read_study(out)
    summary = summarise(study)
    assert "layershuffle-500-steps" not in summary.arms
    points = {(p.steps, p.mode): p.top1 for p in budget_points(study)}
    assert points[500, "arbitrary"].mean == 45.0
    assert points[500, "arbitrary"].models == 2
    own = summary.cell("layershuffle", Column("arbitrary", 12)).top1.mean
    assert points[1500, "arbitrary"].mean == pytest.approx(own)
    section = budget_section(summary)
    assert "45.0" in section.sentences[0]
    assert section.pictures[0].svg.startswith(b"<?xml")
    assert [row[:2] for row in section.tables[0].rows] == [
        ("LayerShuffle", "sequential"),
        ("LayerShuffle", "arbitrary"),
    ]


def test_table_2(out):
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    pieces = read_pieces(out, read_study(out))
    section = merging_section(pieces)
    table = section.tables[0]
    head = {name: place for place, name in enumerate(table.head)}
    rows = {row[0]: row for row in table.rows}
    merges = rows["LayerShuffle: merges"]
    assert merges[head["Top-1"]] == "68.00"
    assert merges[head["sd"]] == "2.00"
    assert merges[head["Paper: top-1"]] == "59.68 +-1.15"
    assert merges[head["Ours - paper"]] == "+8.32"
    assert (merges[head["Lowest"]], merges[head["Highest"]]) == ("66.00", "70.00")
    assert rows["LayerShuffle: ensemble, logits-independent"][head["Paper: top-1"]] == "69.20"
    assert rows["LayerShuffle: ensemble, logits-same"][head["Paper: top-1"]] == "-"
    assert (
        "single models 72.0 %, merges 68.0 % (stem and head: average), -4.0 points"
        in (section.sentences[0])
    )


def test_no_point_of_the_swarm_is_lost(out):
    merges = [60.0 + 0.01 * i for i in range(100)]
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], merges))
    svg = draw_swarm(read_pieces(out, read_study(out))).decode()
    # Two donors, a hundred merges, a soup, two ensembles: each dot is one <use>.
    assert len(re.findall(r"<use [^>]*clip-path|<use [^>]*style=\"fill", svg)) >= 105
    shifts = swarm(merges, step=1.0)
    for i, one in enumerate(merges):
        for j in range(i):
            assert abs(one - merges[j]) >= 1.0 or abs(shifts[i] - shifts[j]) >= 1, "dots overlap"


def verdicts(out):
    study = read_study(out)
    claims = judge(summarise(study), read_pieces(out, study))
    return {claim.says: claim for claim in claims}


def test_claims_are_judged_by_numbers(out):
    before = verdicts(out)
    assert len(before) == len(CLAIMS)
    first = before["With arbitrary order the ordinary model fails, LayerShuffle works"]
    assert first.verdict == "holds"
    assert re.match(r"baseline 90\.3 -> 3\.\d, LayerShuffle 74\.\d in arbitrary", first.evidence)
    lose = next(claim for claim in before.values() if "lose nothing" in claim.says)
    assert (lose.verdict, lose.evidence) == ("not measured", "-")
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    after = verdicts(out)
    # Two single models: the interval is so wide that nothing speaks against "no loss".
    assert after[lose.says].verdict == "holds"
    assert after[lose.says].evidence.startswith("single 72.00, merged 68.00: -4.00 points (")
    ensemble = next(c for c in after.values() if c.says.startswith("An ensemble"))
    assert (ensemble.verdict, ensemble.evidence) == ("holds", "ensemble 80.00, +8.00 points")
    vary = next(c for c in after.values() if "vary more" in c.says)
    assert vary.verdict == "does not hold"
    assert vary.evidence == "single models 2.83, merged 2.00, both over single orders"


def test_the_identity_draw_is_looked_for(out):
    scores = {("arbitrary", 3, "", "0,1,2"): 60.0}
    scores |= {("arbitrary", 3, "", order): 6.0 for order in ("1,0,2", "2,1,0")}
    add_run(out, "truncated-3", "truncated", seed=0, scores=scores)
    claim = next(c for c in verdicts(out).values() if "identity" in c.says)
    assert claim.verdict == "holds"
    assert claim.evidence.startswith("identity 60.0 (1 draws), others 6.0 (2 draws)")


def test_a_difference_has_its_interval(out):
    claim = next(c for c in verdicts(out).values() if "price" in c.says)
    study = summarise(read_study(out))

    def means(arm, mode):
        rows = study.cell(arm, Column(mode, 12)).rows
        return [mean([row.top1 for row in rows if row.seed == seed]) for seed in (0, 1, 2)]

    by = mean(means("baseline", "sequential")) - mean(means("layershuffle", "arbitrary"))
    assert claim.evidence.startswith(f"{by:+.2f} points (")
    assert claims_section(study, ()).tables[0].rows


def test_every_silence_of_the_paper_is_answered():
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
    assert [question.number for question in QUESTIONS] == [f"A{n}" for n in range(1, 20)]
    rows = {row[0]: row for row in open_choices(study).tables[0].rows}
    assert rows["A1"][3:] == ("draw pass, num_orders 20", "draw batch, num_orders 7")
    assert rows["A3"][4] == "encoding.table shared, encoding.table_init normal"
    assert rows["A10"][4].startswith("choose last")
    assert rows["A17"][4].endswith("precision auto; scores: precision fp32; merges: precision fp32")
    assert rows["A12"][3:] == ("ends average", "ends average/base")
    assert all(cell for row in rows.values() for cell in row)


def test_the_report_holds_all_of_it_and_says_what_is_missing(out):
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    plan = json.loads((out / "plan.json").read_text())
    plan["pieces"].append(
        {"name": "umap-x", "kind": "umap", "arm": "layershuffle", "directory": "analysis/umap-x"}
    )
    (out / "plan.json").write_text(json.dumps(plan))
    report = write_report(out)
    assert not report.complete
    page, text = report.html.read_text(), (out / "report.md").read_text()
    assert "13 of 14 tasks are finished; 0 failed, 1 not done yet." in text
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
    assert claims.count("\n## ") == len(CLAIMS)
    assert "**Holds.** ensemble 80.00, +8.00 points." in claims
    assert "umap-x" in page


def test_a_cut_off_piece_is_refused(out):
    write_merging(out, "layershuffle", merging_rows([70.0], [66.0]))
    path = out / "merging" / "layershuffle" / "results.csv"
    path.write_text("kind,index\nmerge")
    with pytest.raises(StudyError, match="finished tasks are not repeated"):
        read_pieces(out, read_study(out))
