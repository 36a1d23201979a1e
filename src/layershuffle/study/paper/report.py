"""The report of a study, made only from its results; it lists unfinished tasks.

    OUT/report.md      every table and figure beside the paper's numbers
    OUT/report.html    the same as one page that holds its figures
    OUT/figures/       the figures (SVG)

The same results give the same bytes, without dates and independent of the machine.
"""

from __future__ import annotations

import math
import textwrap
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from layershuffle.analysis.results import numbers_of
from layershuffle.ground.files import write_bytes, write_text
from layershuffle.ground.plotting import figure_bytes
from layershuffle.ground.stats import compare, mean
from layershuffle.ground.text import clock, printable
from layershuffle.study.paper.figures import draw_bars
from layershuffle.study.paper.markdown import grid, html_text, literal, picture, section
from layershuffle.study.paper.summary import Summary, label, summarise
from layershuffle.study.paper.tables import (
    NONE,
    WIDTH,
    DrawFigure,
    curves_section,
    describe_data,
    main_table,
    merging_section,
    settings_table,
    table_1,
    table_notes,
    table_text,
    unique,
)
from layershuffle.study.store import Study, read_study
from layershuffle.study.tasks import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PROTOCOLS = {
    True: "Paper protocol: the checkpoint was picked on the same images that the scores are "
    "reported on, as the paper did. Such scores are too good by an unknown amount.",
    False: "The paper's protocol (picking on the reported split) was not used: a held-out part of "
    "the training data picked, and the reported images were seen by nothing else.",
}


def write_report(out: Path) -> Summary:
    """Read the study in `out` and write its report there. Returns what it shows.

    Raises `UsageError`, `StudyError` or `DataError` for a study that cannot be read,
    `LayerShuffleError` if `out` cannot be written.
    """
    summary = summarise(read_study(out))

    def draw(name: str, caption: str, figure: Figure) -> str:
        write_bytes(out / FIGURES / f"{name}.svg", figure_bytes(figure, "svg"))
        return picture(f"{FIGURES}/{name}.svg", caption)

    text = render(summary, draw, out=out)
    write_text(out / "report.md", text)
    write_text(out / "report.html", html_text(text, place=out))
    return summary


def report_text(summary: Summary) -> str:
    """The headline, the main table and the unfinished tasks, for the terminal."""
    lines = [*textwrap.wrap(headline(summary), WIDTH), ""]
    if summary.cells:
        lines += [table_text(summary), ""]
    for line in unfinished_lines(summary.study):
        lines.append(printable(line))
    return "\n".join(lines)


def render(summary: Summary, draw: DrawFigure, *, out: Path) -> str:
    """The report in Markdown; all text from the results is escaped.

    `draw` writes a figure, and returns the Markdown that shows it. `out`: the directory of the
    study, where the figures of its analyses are.
    """
    study = summary.study
    bars = ""
    if summary.cells:
        caption = "Images of 100 right, blocks in order (pale) and shuffled."
        bars = draw("bars", caption, draw_bars(summary))
    count = len(study.plan.tasks)
    state = (
        f"Study {study.settings.name}: {count - len(study.unfinished)} of {count} tasks are "
        f"finished, on {describe_data(study)}."
    )
    blocks = [
        f"# {literal(headline(summary))}",
        bars,
        literal(main_difference(summary)),
        literal(state),
        "\n".join(f"- {literal(line)}" for line in unfinished_lines(study)),
        section(
            "Table 1 and Figures 1b, 1c: top-1 accuracy beside the paper",
            main_table(summary) if summary.cells else "No run has finished yet.",
            literal(table_notes(summary)),
        ),
        table_1(summary),
        curves_section(summary, draw),
        merging_section(summary, draw),
        *_analysis_sections(study, out),
        section("How the checkpoint was picked", *map(literal, _selection(study))),
        _facts_section(study),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


# --- the first sentences -------------------------------------------------------------------------


def headline(summary: Summary) -> str:
    """What the study shows in a sentence: of 100 images, how many each method has right, shuffled
    and in order, where a method has its price."""
    scores: dict[str, float] = {}
    in_order: dict[str, float] = {}
    for arm in summary.arms:
        means = summary.means(arm, "arbitrary")
        if means:
            scores[arm] = mean(means)
        sequential = summary.means(arm, "sequential")
        if sequential:
            in_order[arm] = mean(sequential)
    if not scores:
        return "No score in arbitrary order yet"
    # The paper's two methods, if the study has them, and the best arm.
    best = max(scores, key=lambda arm: scores[arm])
    parts: list[str] = []
    named = [arm for arm in unique(["baseline", "layershuffle", best]) if arm in scores]
    for arm in named:
        name = "the ordinary model" if arm == "baseline" else summary.name(arm)
        score = f"{scores[arm]:.1f}" if scores[arm] < 10 else f"{scores[arm]:.0f}"
        if parts:
            parts.append(f"{name} on {score}")
        else:
            parts.append(f"{name} is right on {score} of 100 images")
    shuffled = f"Shuffled, {', '.join(parts)}"
    if not all(arm in in_order for arm in named):
        return shuffled
    # With a digit more: the price is often below one image of 100.
    ordered = [f"{in_order[arm]:.1f}" for arm in named]
    if len(ordered) == 1:
        return f"{shuffled}; in order on {ordered[0]}"
    return f"{shuffled}; in order on {', '.join(ordered[:-1])} and {ordered[-1]}"


def main_difference(summary: Summary) -> str:
    """The difference between LayerShuffle and the ordinary model in arbitrary order."""
    base = summary.means("baseline", "arbitrary")
    ours = summary.means("layershuffle", "arbitrary")
    if not (base and ours):
        return ""
    gap = compare(ours, base)
    if math.isinf(gap.low):
        return f"LayerShuffle and the ordinary model, shuffled, differ by {gap}."
    points = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    chance = ": that may be chance" if gap.low <= 0 <= gap.high else ""
    return f"LayerShuffle and the ordinary model, shuffled, differ by {points}{chance}."


def unfinished_lines(study: Study) -> list[str]:
    """A line for every unfinished task, those that failed first, because a reader has to act."""
    failed = []
    waiting = []
    for name, failure in study.unfinished.items():
        if failure:
            failed.append(f"{name} failed: {' '.join(failure.split())}")
        else:
            waiting.append(f"{name} not done yet")
    return failed + waiting


# --- sections ------------------------------------------------------------------------------------


def _analysis_sections(study: Study, out: Path) -> list[str]:
    """A section per kind of analysis: its figures, and its numbers with a column per model."""
    figures: dict[str, list[str]] = {}
    # Title of the section -> name of the number -> name of the model -> the number as text.
    numbers: dict[str, dict[str, dict[str, str]]] = {}
    for task, result in study.analyses:
        shown = figures.setdefault(result.title, [])
        for path in sorted((out / FIGURES).glob(f"{escape(task.name)}-*")):
            caption = f"{task.name}: {path.stem.removeprefix(f'{task.name}-')}"
            shown.append(picture(f"{FIGURES}/{path.name}", caption))
        rows = numbers.setdefault(result.title, {})
        for number in numbers_of(result.facts):
            row = rows.setdefault(number["name"], {})
            row[task.model.name] = _number_text(
                number["value"], low=number["low"], high=number["high"]
            )
    sections = []
    for title, pictures in figures.items():
        rows = numbers[title]
        names: list[str] = []
        for row in rows.values():
            names += row
        models = unique(names)
        cells = []
        for name, row in rows.items():
            cell = [name]
            for model in models:
                cell.append(row.get(model, NONE))
            cells.append(cell)
        sections.append(section(title, *pictures, grid(("Number", *models), cells)))
    return sections


def _number_text(value: float, *, low: float, high: float) -> str:
    """A number of an analysis with its interval; whole numbers, as those of images, in full."""
    text = f"{value:.0f}" if value.is_integer() else f"{value:.3g}"
    return f"{text} ({low:.3g} to {high:.3g})" if math.isfinite(low) else text


def _selection(study: Study) -> list[str]:
    """How the checkpoints were picked, and whether on the reported images."""
    arms: dict[str, list[str]] = {}
    protocols: set[bool] = set()
    for task, result in study.runs:
        arms.setdefault(result.selected.metric, []).append(label(task.arm))
        protocols.add(result.paper_protocol)
    sentences = []
    for metric, names in arms.items():
        sentences.append(f"{', '.join(unique(names))}: the checkpoint with the best {metric}.")
    # With runs of both protocols, both sentences are needed.
    for protocol in sorted(protocols, reverse=True):
        sentences.append(_PROTOCOLS[protocol])
    return sentences


def _facts_section(study: Study) -> str:
    """The settings of the runs, where they ran, and for how long; "" before the first has ended."""
    if not study.runs:
        return ""
    training = 0.0
    scoring = 0.0
    machines = []
    notes = []
    for _, result in study.runs:
        training += result.train_seconds
        scoring += result.eval_seconds
        machines.append(str(result.hardware.get("gpu") or result.hardware.get("processor")))
        for note in result.data.notes:
            notes.append(f"Note: {note}")
    return section(
        "Settings",
        literal(
            f"{len(study.runs)} runs took {clock(training)} of training and "
            f"{clock(scoring)} of scoring ({'; '.join(unique(machines))}). plan.json holds the "
            "whole recipe, tasks.jsonl the facts of every task, results.csv a row per run and "
            "order, with the order itself."
        ),
        "A row with an order can be computed again: `layershuffle eval runs/ARM-seedSEED/fit "
        "--data DATA --order ORDER`, with --max-images, --precision and --batch-size as in the "
        "recipe.",
        *map(literal, unique(notes)),
        settings_table(study),
    )
