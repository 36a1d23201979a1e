"""What the report says, as plain data: headline, sentences and tables for any format.

Pure: from `Summary` to text. `report.py` puts it into HTML and Markdown.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from layershuffle.study.analysis_report import analysis_sections
from layershuffle.study.budget import budget_section
from layershuffle.study.claims import claims_section
from layershuffle.study.facts import (
    orders_tables,
    recipe_table,
    runs_table,
    scores_table,
    shared_table,
)
from layershuffle.study.merging_report import merging_section
from layershuffle.study.open_choices import open_choices
from layershuffle.study.pieces import Piece
from layershuffle.study.results import Row, Run, Study
from layershuffle.study.sections import Section
from layershuffle.study.settings import StudySettings
from layershuffle.study.summary import Cell, Column, Summary, label
from layershuffle.study.table1 import choices_table, table_1
from layershuffle.study.tables import NOT_DONE

_FIT = "fit"  # what `layershuffle.study.worker` trains into; `layershuffle eval` takes it


def headline(summary: Summary) -> str:
    """The one sentence to remember, from the numbers: arbitrary order, baseline against ours."""
    known = [arm for arm in summary.arms if arm in ("baseline", "layershuffle")]
    arms = known or list(summary.arms[:_MOST_IN_HEADLINE])
    column = Column("arbitrary", summary.depth)
    cells = [cell for arm in arms if (cell := summary.cell(arm, column))]
    parts = [f"{label(cell.arm)} {_percent(cell)}" for cell in cells]
    if parts:
        return f"Blocks in arbitrary order: {', '.join(parts)}"
    return "No score in arbitrary order yet"


def key_facts(summary: Summary) -> list[str]:
    """Up to three more sentences drawn from the numbers."""
    return [fact for fact in (_sequential(summary), *_pruned(summary)) if fact]


def status(study: Study, pieces: Sequence[Piece] = ()) -> str:
    """How much of the study is there, in one line."""
    states = [run.state for run in study.runs] + [piece.state for piece in pieces]
    noun = "tasks" if pieces else "runs"
    if set(states) <= {"done"}:
        return f"All {len(states)} {noun} are finished."
    return (
        f"{states.count('done')} of {len(states)} {noun} are finished; {states.count('failed')} "
        f"failed, {states.count('missing')} not done yet."
    )


def gaps(study: Study, pieces: Sequence[Piece] = ()) -> list[tuple[str, str]]:
    """(task, what happened) of every task that is not finished."""
    tasks = [(run.plan.name, run.state, run.failure) for run in study.runs]
    tasks += [(piece.name, piece.state, piece.failure) for piece in pieces]
    failed = [(name, f"failed: {why}") for name, state, why in tasks if state == "failed"]
    return failed + [(name, NOT_DONE) for name, state, _ in tasks if state == "missing"]


def sections(summary: Summary, pieces: Sequence[Piece] = ()) -> list[Section]:
    """Everything below the main table and the figure."""
    results = (
        table_1(summary),
        choices_table(summary),
        budget_section(summary),
        merging_section(pieces),
        *analysis_sections(pieces),
        claims_section(summary, pieces),
    )
    return [*(section for section in results if section is not None), *_facts(summary)]


def _facts(summary: Summary) -> list[Section]:
    study = summary.study
    return [
        open_choices(StudySettings(**study.recipe)),
        Section(title="All scores", tables=(scores_table(summary),)),
        Section(title="How the checkpoint was picked", sentences=tuple(_selection(study))),
        Section(title="Runs", sentences=(_seeds(study),), tables=(runs_table(study),)),
        Section(
            title="Settings",
            tables=(
                recipe_table(study),
                shared_table(
                    "Settings of the runs", study, of=lambda facts: facts.settings, folded=True
                ),
            ),
        ),
        Section(
            title="Data",
            sentences=tuple(_notes(study)),
            tables=(
                shared_table(
                    "",
                    study,
                    of=lambda facts: {k: v for k, v in facts.data.items() if k != "notes"},
                ),
            ),
        ),
        Section(
            title="Hardware and versions",
            sentences=tuple(_versions(study)),
            tables=(
                shared_table("Hardware", study, of=lambda facts: facts.hardware),
                shared_table("Versions", study, of=lambda facts: facts.versions),
            ),
        ),
        Section(title="Orders drawn", sentences=(_DRAWN,), tables=tuple(orders_tables(summary))),
        _replay(study),
    ]


_MOST_IN_HEADLINE = 4
_DRAWN = (
    "Every order that was scored, with the top-1 accuracy (%) of each arm under it, averaged over "
    "its models. Block ids count from 0; the block named first runs first."
)


def _percent(cell: Cell) -> str:
    return f"{cell.top1.mean:.1f} %"


def _sequential(summary: Summary) -> str:
    column = Column("sequential", summary.depth)
    cells = [cell for arm in summary.arms if (cell := summary.cell(arm, column))]
    shown = ", ".join(f"{label(cell.arm)} {_percent(cell)}" for cell in cells)
    return f"In sequential order: {shown}." if shown else ""


def _pruned(summary: Summary) -> list[str]:
    """The best arm with about half of the blocks, in arbitrary order."""
    half = [c for c in summary.columns if c.mode == "arbitrary" and c.kept < summary.depth]
    if not half:
        return []
    column = min(half, key=lambda c: abs(c.kept - summary.depth / 2))
    cells = [cell for arm in summary.arms if (cell := summary.cell(arm, column))]
    best = max(cells, key=lambda cell: cell.top1.mean)
    return [
        f"With {column.kept} of {summary.depth} blocks in arbitrary order, {label(best.arm)} is "
        f"best: {_percent(best)}."
    ]


def _selection(study: Study) -> list[str]:
    done = [run.facts for run in study.runs if run.facts]
    arms: dict[str, list[str]] = {}
    for run in study.runs:
        if run.facts:
            arms.setdefault(run.facts.selected_metric, []).append(label(run.plan.arm))
    words = [
        f"{', '.join(dict.fromkeys(names))}: the checkpoint with the best {metric}."
        for metric, names in arms.items()
    ]
    if any(facts.paper_protocol for facts in done):
        words.append(
            "Paper protocol: the checkpoint was picked on the same images that the scores are "
            "reported on, as the paper did. Such scores are too good by an unknown amount."
        )
    if not all(facts.paper_protocol for facts in done):
        words.append(
            "The paper's protocol (picking on the reported split) was not used: a held-out part "
            "of the training data picked, and the reported images were seen by nothing else."
        )
    return words if done else ["No run has picked one yet."]


def _seeds(study: Study) -> str:
    seeds = sorted({run.plan.seed for run in study.runs})
    noun = "Seed" if len(seeds) == 1 else "Seeds"
    return f"{noun} of the runs: {', '.join(map(str, seeds))}."


def _notes(study: Study) -> list[str]:
    notes = [str(note) for run in study.runs if run.facts for note in run.facts.data["notes"]]
    return [f"Note: {note}" for note in dict.fromkeys(notes)]


def _versions(study: Study) -> list[str]:
    words = [f"The study was planned by layershuffle {study.code_version}."]
    if study.unplanned:
        words.append(f"Ignored, because the plan does not name them: {', '.join(study.unplanned)}.")
    return words


def _replay(study: Study) -> Section:
    title = "Replay a number"
    found = _example(study)
    if found is None:
        return Section(title=title, sentences=("No finished run has an order to replay yet.",))
    run, row = found
    data = str(run.facts.data["spec"]) if run.facts else ""
    words = ["layershuffle", "eval", f"runs/{run.plan.name}/{_FIT}"]
    most = study.recipe.get("evaluate", {}).get("max_images")
    words += ["--data", data] + (["--max-images", str(most)] if most else [])
    command = shlex.join([*words, "--order", row.order])
    sentence = (
        "Every line of results.csv with an order can be computed again from the run's model. "
        "From this report's directory (a relative path to data counts from where the study was "
        f"started), the command below gives {label(row.method)}, seed "
        f"{row.seed}, in {row.mode} order with {row.kept} blocks: top-1 {row.top1:.2f} %, "
        f"cross-entropy {row.cross_entropy:.4f}, on {row.n:,} images."
    )
    return Section(title=title, sentences=(sentence,), command=command)


def _example(study: Study) -> tuple[Run, Row] | None:
    """A row worth replaying: a full arbitrary order, of a shuffled method if there is one."""
    rows = [(run, row) for run in study.runs for row in run.rows if row.order]
    return max(
        rows,
        key=lambda one: (
            one[1].mode == "arbitrary",
            one[1].choose == "",
            one[0].plan.method.startswith("layershuffle"),
        ),
        default=None,
    )
