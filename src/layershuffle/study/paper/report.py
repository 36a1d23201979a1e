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
from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import figure_bytes
from layershuffle.stats import compare
from layershuffle.study.paper.figures import draw_bars
from layershuffle.study.paper.markdown import grid, literal, page, picture, printable, section
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
from layershuffle.text import clock

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
    write_text(out / "report.html", page(text, place=out))
    return summary


def report_text(summary: Summary) -> str:
    """The headline, the main table and the unfinished tasks, for the terminal."""
    lines = [*textwrap.wrap(headline(summary), WIDTH), ""]
    lines += [table_text(summary), ""] if summary.cells else []
    return "\n".join([*lines, *map(printable, gaps(summary.study))])


def render(summary: Summary, draw: DrawFigure, *, out: Path) -> str:
    """The report in Markdown; all text from the results is escaped."""
    study = summary.study
    bars = ""
    if summary.cells:
        bars = draw(
            "bars", "Images of 100 right, blocks in order (pale) and shuffled.", draw_bars(summary)
        )
    blocks = [
        f"# {literal(headline(summary))}",
        bars,
        literal(gain(summary)),
        literal(
            f"Study {study.settings.name}: {len(study.plan.tasks) - len(study.unfinished)} of "
            f"{len(study.plan.tasks)} tasks are finished, on {describe_data(study)}."
        ),
        "\n".join(f"- {literal(line)}" for line in gaps(study)),
        section(
            "Table 1 and Figures 1b, 1c: top-1 accuracy beside the paper",
            main_table(summary) if summary.cells else "No run has finished yet.",
            literal(table_notes(summary)),
        ),
        table_1(summary),
        curves_section(summary, draw),
        merging_section(summary, draw),
        *_analysis_sections(summary, out),
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


def gain(summary: Summary) -> str:
    """The difference between LayerShuffle and the ordinary model in arbitrary order."""
    base, ours = (summary.means(arm, "arbitrary") for arm in ("baseline", "layershuffle"))
    if not (base and ours):
        return ""
    gap = compare(ours, base)
    if math.isinf(gap.low):
        return "There is one model of each: only more seeds show what is chance."
    points = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    chance = ": that may be chance" if gap.low <= 0 <= gap.high else ""
    return f"LayerShuffle and the ordinary model, shuffled, differ by {points}{chance}."


def gaps(study: Study) -> list[str]:
    """A line for every unfinished task, those that failed first, because a reader has to act."""
    left = study.unfinished.items()
    failed = [f"{name} failed: {failure}" for name, failure in left if failure]
    return failed + [f"{name} not done yet" for name, failure in left if not failure]


# --- sections ------------------------------------------------------------------------------------


def _analysis_sections(summary: Summary, out: Path) -> list[str]:
    """A section per analysis."""
    blocks: dict[str, list[str]] = {}
    numbers: dict[str, dict[str, dict[str, str]]] = {}
    for task, result in summary.study.analyses:
        for number in numbers_of(result.facts):
            row = numbers.setdefault(result.title, {}).setdefault(number["name"], {})
            row[task.model.name] = f"{number['value']:.6g}"
        shown = blocks.setdefault(result.title, [])
        for path in sorted((out / FIGURES).glob(f"{escape(task.name)}-*")):
            caption = f"{task.name}: {path.stem.removeprefix(f'{task.name}-')}"
            shown.append(picture(f"{FIGURES}/{path.name}", caption))
    sections = []
    for title, pictures in blocks.items():
        rows = numbers.get(title, {})
        models = unique(model for row in rows.values() for model in row)
        cells = ((name, *(row.get(model, NONE) for model in models)) for name, row in rows.items())
        sections.append(section(title, *pictures, grid(("Number", *models), cells)))
    return sections


def _selection(study: Study) -> list[str]:
    """How the checkpoints were picked, and whether on the reported images."""
    arms: dict[str, list[str]] = {}
    protocols: dict[bool, list[str]] = {}
    for task, result in study.runs:
        arms.setdefault(result.selected.metric, []).append(label(task.arm))
        protocols.setdefault(result.paper_protocol, []).append(label(task.arm))
    picked = [
        f"{', '.join(unique(names))}: the checkpoint with the best {metric}."
        for metric, names in arms.items()
    ]
    # With runs of both protocols, both sentences are needed.
    return picked + [_PROTOCOLS[protocol] for protocol in sorted(protocols, reverse=True)]


def _facts_section(study: Study) -> str:
    """The settings of the runs, where they ran, and for how long."""
    if not study.runs:
        return ""
    training = sum(result.train_seconds for _, result in study.runs)
    scoring = sum(result.eval_seconds for _, result in study.runs)
    machines = unique(
        str(result.hardware.get("gpu") or result.hardware.get("processor"))
        for _, result in study.runs
    )
    notes = unique(f"Note: {note}" for _, result in study.runs for note in result.data.notes)
    return section(
        "Settings",
        literal(
            f"{len(study.runs)} runs took {clock(training)} of training and "
            f"{clock(scoring)} of scoring ({'; '.join(machines)}). plan.json holds the whole "
            "recipe, tasks.jsonl the facts of every task, results.csv a row per run and order, "
            "with the order itself."
        ),
        "A row with an order can be computed again: `layershuffle eval runs/ARM-seedSEED/fit "
        "--data DATA --order ORDER`, with --max-images as in the recipe.",
        *map(literal, notes),
        settings_table(study),
    )
