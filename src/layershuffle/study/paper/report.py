"""The report of a study, made only from its results; it lists unfinished tasks.

    OUT/report.md      every table and figure beside the paper's numbers
    OUT/report.html    the same as one page that holds its figures
    OUT/figures/       the figures (SVG)

The same results give the same bytes, without dates and independent of the machine.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import figure_bytes
from layershuffle.stats import Difference, compare
from layershuffle.study.dry_run import duration
from layershuffle.study.paper.claims import Verdict, judge
from layershuffle.study.paper.figures import (
    MOST_ARMS,
    PANELS,
    arms_drawn,
    draw_bars,
    draw_figure,
)
from layershuffle.study.paper.markdown import grid, literal, page, picture, printable, section
from layershuffle.study.paper.open_choices import open_choices
from layershuffle.study.paper.summary import Column, Summary, label, summarise
from layershuffle.study.paper.tables import (
    WIDTH,
    DrawFigure,
    budget_section,
    choices_section,
    describe_data,
    main_table,
    merging_section,
    rounds_section,
    settings_tables,
    table_1,
    table_notes,
    table_text,
    unique,
)
from layershuffle.study.store import Study, read_study
from layershuffle.study.tasks import FIGURES, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_DONE = "not done yet"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The written report; `complete`: every planned task is done."""

    summary: Summary
    html: Path
    complete: bool

    @property
    def text(self) -> str:
        """The headline, the main table and the unfinished tasks, for the terminal."""
        lines = textwrap.wrap(headline(self.summary), WIDTH)
        if self.summary.cells:
            lines += ["", table_text(self.summary), ""]
        return "\n".join(
            [*lines, *(f"{printable(f'{task} {why}')}" for task, why in gaps(self.summary.study))]
        )


def write_report(out: Path) -> Report:
    """Read the study in `out` and write its report there.

    Raises `UsageError`, `StudyError` or `DataError` for a study that cannot be read,
    `LayerShuffleError` if `out` cannot be written.
    """
    summary = summarise(read_study(out))

    def draw(name: str, caption: str, figure: Figure) -> str:
        write_bytes(out / FIGURES / f"{name}.svg", figure_bytes(figure, "svg"))
        return picture(f"{FIGURES}/{name}.svg", caption)

    text = render(summary, draw, out=out)
    write_text(out / "report.md", text)
    write_text(out / "report.html", page(text, place=out))
    states = {outcome.state for outcome in summary.study.outcomes}
    return Report(summary=summary, html=out / "report.html", complete=states <= {"done"})


def render(summary: Summary, draw: DrawFigure, *, out: Path) -> str:
    """The report in Markdown; all text from the results is escaped."""
    study = summary.study
    bars = ""
    if 0 < len(summary.arms) <= MOST_ARMS and summary.cells:
        bars = draw(
            "bars", "Images of 100 right, blocks in order (pale) and shuffled.", draw_bars(summary)
        )
    missing = "\n".join(f"- {literal(f'{task} {why}')}" for task, why in gaps(study))
    blocks = [
        f"# {literal(headline(summary))}",
        bars,
        *map(literal, key_facts(summary)),
        literal(f"Study {study.settings.name}: {status(study)} On {describe_data(study)}."),
        missing,
        section(
            "Table 1 and Figures 1b, 1c: top-1 accuracy beside the paper",
            *([main_table(summary)] if summary.cells else ["No run has finished yet."]),
            *(map(literal, table_notes(summary)) if summary.cells else ()),
        ),
        _curves_section(summary, draw),
        table_1(summary),
        choices_section(summary, draw),
        rounds_section(summary),
        budget_section(summary, draw),
        merging_section(summary, draw),
        *_analysis_sections(summary, out),
        _claims_section(summary),
        open_choices(study.settings),
        section("How the checkpoint was picked", *map(literal, _selection(study))),
        _facts_section(study),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


# --- the first sentences -------------------------------------------------------------------------


def headline(summary: Summary) -> str:
    """What the study shows in a sentence: of 100 images, how many each method has right."""
    arbitrary = {arm: summary.means(arm, "arbitrary") for arm in summary.arms}
    scores = {arm: sum(means.values()) / len(means) for arm, means in arbitrary.items() if means}
    if not scores:
        return "No score in arbitrary order yet"
    # The paper's two methods, if the study has them, and the best arm.
    shown = [arm for arm in ("baseline", "layershuffle") if arm in scores]
    best = max(scores, key=lambda arm: scores[arm])
    words = [
        f"{'the ordinary model' if arm == 'baseline' else label(arm)} {'is right ' * (not place)}"
        f"on {scores[arm]:.{1 if scores[arm] < 10 else 0}f}" + " of 100 images" * (not place)
        for place, arm in enumerate(unique([*shown, best]))
    ]
    return f"Shuffled, {', '.join(words)}"


def key_facts(summary: Summary) -> list[str]:
    """What can be said of the differences, with all blocks and with half of them."""
    pruned = [c for c in summary.columns if c.mode == "arbitrary" and c.kept < summary.depth]
    half = min(pruned, key=lambda c: abs(c.kept - summary.depth / 2), default=None)
    facts = (_gain(summary), "" if half is None else _leader(summary, half))
    return [fact for fact in facts if fact]


def _gain(summary: Summary) -> str:
    """The difference between LayerShuffle and the ordinary model in arbitrary order."""
    base, ours = (summary.means(arm, "arbitrary") for arm in ("baseline", "layershuffle"))
    if not (base and ours):
        return ""
    gap = compare(ours, base)
    if math.isinf(gap.low):
        return "There is one model of each: only more seeds show what is chance."
    chance = ": that may be chance" if gap.low <= 0 <= gap.high else ""
    return f"LayerShuffle and the ordinary model, shuffled, differ by {_points(gap)}{chance}."


def _leader(summary: Summary, column: Column) -> str:
    """Which arm is best there. One is called better only if an interval shows it."""
    cells = [cell for arm in summary.arms if (cell := summary.cell(arm, column))]
    if len(cells) < 2:
        return ""
    best, *others = sorted(cells, key=lambda cell: -cell.top1.mean)
    gaps = {other.arm: compare(best.model_means, other.model_means) for other in others}
    rivals = [arm for arm, gap in gaps.items() if not gap.low > 0]
    where = f"With {column.kept} of {summary.depth} blocks in arbitrary order"
    if not rivals:
        # Over all arms, because a wide interval of a lower arm may reach further up.
        nearest = min(gaps, key=lambda arm: gaps[arm].low)
        gap = _points(gaps[nearest])
        return f"{where}, {label(best.arm)} is best: {gap} above {label(nearest)}."
    gap = "there is no interval"
    if math.isfinite(gaps[rivals[0]].low):
        gap = f"they differ by {_points(gaps[rivals[0]])}"
    return (
        f"{where}, no arm can be called best: {label(best.arm)} has the highest mean, but cannot "
        f"be told from {', '.join(map(label, rivals))}: {gap}."
    )


def _points(gap: Difference) -> str:
    return f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"


def status(study: Study) -> str:
    """The progress of the study in one line."""
    states = [outcome.state for outcome in study.outcomes]
    if set(states) <= {"done"}:
        return f"all {len(states)} tasks are finished."
    return (
        f"{states.count('done')} of {len(states)} tasks are finished; {states.count('failed')} "
        f"failed, {states.count('missing')} {NOT_DONE}."
    )


def gaps(study: Study) -> list[tuple[str, str]]:
    """(task, reason) of every unfinished task, those that failed first."""
    # Failures first, because the reader has to act on them.
    failed = [o for o in study.outcomes if o.state == "failed"]
    missing = [(o.task.name, NOT_DONE) for o in study.outcomes if o.state == "missing"]
    return [(o.task.name, f"failed: {o.failure}") for o in failed] + missing


# --- sections ------------------------------------------------------------------------------------


def _curves_section(summary: Summary, draw: DrawFigure) -> str:
    title, arms = "Accuracy against blocks kept", arms_drawn(summary)
    if len(arms) > MOST_ARMS:
        words = f"{len(arms)} arms are too many lines for a figure: results.csv has every score."
        return section(title, words)
    texts = []
    for mode in PANELS if arms else ():
        curves = ((label(arm), summary.curve(arm, mode)) for arm in arms)
        numbers = (
            f"{name}: {', '.join(f'{cell.top1.mean:.1f} % with {cell.kept}' for cell in cells)}"
            for name, cells in curves
            if cells
        )
        texts.append(
            f"Top-1 accuracy against blocks kept, {mode} order. {'; '.join(numbers) or 'No data'}."
        )
    caption = (
        "Means over orders and models with 95 % intervals. Hollow: the paper's numbers on "
        "ImageNet; a bar is a range, and ~ a value that its text only describes."
    )
    figure = draw("figure1", caption, draw_figure(summary)) if arms else ""
    return section(title, figure, *map(literal, texts))


def _analysis_sections(summary: Summary, out: Path) -> list[str]:
    """A section per analysis of the main arms; those along a curve are in its table."""
    arms = {run.task.arm for run in summary.study.runs if run.task.part == "main"}
    blocks: dict[str, list[str]] = {}
    for outcome in summary.study.analyses:
        task, result = outcome.task, outcome.result
        if result is None or task.arm not in arms:
            continue
        shown = blocks.setdefault(result.title, [])
        if result.paragraph:
            shown.append(literal(f"{label(task.arm)} ({task.name}): {result.paragraph}"))
        for path in sorted((out / FIGURES).glob(f"{task.name}-*")):
            caption = f"{task.name}: {path.stem.removeprefix(f'{task.name}-')}"
            shown.append(picture(f"{FIGURES}/{path.name}", caption))
    return [section(title, *shown) for title, shown in blocks.items()]


def _claims_section(summary: Summary) -> str:
    """The section of the measured claims, and a line that names the others."""
    judgements = judge(summary)
    measured = [entry for entry in judgements if entry[1] != "not measured"]
    others = [f'"{claim.says}"' for claim, verdict, _ in judgements if verdict == "not measured"]
    if not measured:
        return ""
    counts = {verdict: sum(j[1] == verdict for j in judgements) for verdict in get_args(Verdict)}
    head = ("The paper says", "Where", "Here", "Numbers", "Criterion")
    return section(
        "Claim by claim",
        literal(
            f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}. Top-1 in "
            "percent of means over models; intervals of differences are 95 %, paired over the "
            "seeds that both arms have (Welch where they share none). The data are not the "
            "paper's, so a claim that does not hold here may hold there."
        ),
        literal(f"Not measured in this study: {'; '.join(others)}." if others else ""),
        grid(
            head, ((c.says, c.where, verdict, text, c.criterion) for c, verdict, text in measured)
        ),
    )


def _selection(study: Study) -> tuple[str, ...]:
    """How the checkpoints were picked, and whether on the reported images."""
    if not study.results:
        return ("No run has picked one yet.",)
    arms: dict[str, list[str]] = {}
    for task, result in study.results:
        arms.setdefault(result.selected.metric, []).append(label(task.arm))
    sentences = [
        f"{', '.join(unique(names))}: the checkpoint with the best {metric}."
        for metric, names in arms.items()
    ]
    # With runs of both protocols, both sentences are needed.
    if any(result.paper_protocol for _, result in study.results):
        sentences.append(
            "Paper protocol: the checkpoint was picked on the same images that the scores are "
            "reported on, as the paper did. Such scores are too good by an unknown amount."
        )
    if not all(result.paper_protocol for _, result in study.results):
        sentences.append(
            "The paper's protocol (picking on the reported split) was not used: a held-out part "
            "of the training data picked, and the reported images were seen by nothing else."
        )
    return tuple(sentences)


def _facts_section(study: Study) -> str:
    """What every run had in common, and where they differ."""
    if not study.results:
        return ""
    training = sum(result.train_seconds for _, result in study.results)
    scoring = sum(result.eval_seconds for _, result in study.results)
    notes = unique(f"Note: {note}" for _, result in study.results for note in result.data.notes)
    differing, shared = settings_tables(
        # Without the seed, which differs in every run and is part of its name.
        study,
        lambda result: {k: v for k, v in result.settings.items() if k != "seed"},
    )
    blocks = [differing, shared]
    for name in ("data", "hardware", "versions"):
        tables = settings_tables(study, partial(_facts_named, name))
        blocks += [f"### {name.capitalize()}", *tables]
    return section(
        "Settings",
        literal(
            f"{len(study.results)} runs took {duration(training)} of training and "
            f"{duration(scoring)} of scoring. plan.json holds the whole recipe, tasks.jsonl the "
            "facts of every task, results.csv a row per run and order, with the order itself."
        ),
        "A row with an order can be computed again: `layershuffle eval runs/ARM-seedSEED/fit "
        "--data DATA --order ORDER`, with --max-images as in the recipe.",
        *map(literal, notes),
        *blocks,
    )


def _facts_named(name: str, result: RunResult) -> dict[str, Any]:
    facts: dict[str, Any] = result.model_dump(exclude={"data": {"notes"}})[name]
    return facts
