"""The report of a study, made only from its results; it lists unfinished tasks.

    OUT/results.csv    every score of every finished run
    OUT/table.md       the main table beside the paper's numbers, ready for a README
    OUT/claims.md      the paper's claims that were measured, one by one
    OUT/report.md      the whole report in Markdown
    OUT/report.html    the same as one self-contained page (no script, nothing fetched)
    OUT/figure1.svg/.png    accuracy against blocks kept, of at most 15 arms

The same results give the same bytes, without dates and independent of the machine.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import figure_bytes
from layershuffle.results import write_rows
from layershuffle.study.budget import budget_section
from layershuffle.study.claims import judge
from layershuffle.study.figures import (
    PANELS,
    STYLES,
    describe_panel,
    draw_figure,
    inline_svg,
    too_many_arms,
)
from layershuffle.study.headline import headline, key_facts
from layershuffle.study.merging_report import merging_section
from layershuffle.study.open_choices import open_choices
from layershuffle.study.paper import SETTING
from layershuffle.study.plan import RunSpec
from layershuffle.study.score_tables import choices_table, rounds_section, scores_table
from layershuffle.study.store import read_study
from layershuffle.study.summary import ScoreCell, Summary, label, printable, summarise
from layershuffle.study.tables import (
    NONE,
    NOT_DONE,
    Picture,
    Section,
    Table,
    describe_data,
    interval_text,
    main_table,
    runs_table,
    settings_tables,
    table_1,
    table_notes,
    table_text,
    unique,
)
from layershuffle.study.tasks import AnalysisResult, RunResult, Study
from layershuffle.study.verdicts import Verdict
from layershuffle.text import markdown_table

if TYPE_CHECKING:
    import jinja2
    from matplotlib.figure import Figure

FIT_DIRECTORY = "fit"
"""The directory of the training below that of a run; `layershuffle eval` accepts it."""
KEPT_DPI = 76  # a repository holds these figures: 150 would make them three times as large


@dataclass(frozen=True, kw_only=True)
class Report:
    """The written report. `complete`: every planned task is done; `text`: for the terminal."""

    summary: Summary
    files: tuple[Path, ...]
    html: Path
    complete: bool

    @property
    def text(self) -> str:
        """The main table with its legend and the unfinished tasks, at most 100 columns wide."""
        return table_text(self.summary, gaps(self.summary.study))


def write_report(out: Path) -> Report:
    """Read the study in `out` and write its report there.

    Raises `UsageError`, `StudyError` or `DataError` for a study that cannot be read,
    `LayerShuffleError` if `out` cannot be written. Without any finished run there is no figure.
    """
    study = read_study(out)
    summary = summarise(study)
    pictures: dict[str, bytes] = {}
    drawn: list[str] = []

    def draw(figure: Figure, name: str, *, kind: Literal["png", "svg"]) -> str:
        """Draw the figure. Returns the name of its file."""
        file = f"{name}.{kind}"
        drawn.append(file)
        # Kept figures were reduced to a palette; drawn again, their bytes would differ.
        if study.kept and (out / file).exists():
            pictures[file] = (out / file).read_bytes()
        else:
            pictures[file] = figure_bytes(figure, kind, dpi=KEPT_DPI if study.kept else 150)
        return file

    kind: Literal["png", "svg"] = "png" if study.kept else "svg"
    if summary.cells and not too_many_arms(summary):
        figure = draw_figure(summary)
        draw(figure, "figure1", kind=kind)
        if not study.kept:
            draw(figure, "figure1", kind="png")  # for pages that cannot show SVG
    parts = []
    for section in sections(summary):
        files = []
        for picture in section.pictures:
            if picture.figure is not None:
                files.append(draw(picture.figure, picture.file, kind=kind))
            else:
                pictures[picture.file] = (out / picture.file).read_bytes()
                files.append(picture.file)
        named = (replace(p, file=f) for p, f in zip(section.pictures, files, strict=True))
        parts.append(replace(section, pictures=tuple(named)))
    texts = render(summary, parts, pictures=pictures)
    # Not padded, because repositories hold these files; no digit is lost.
    write_rows(out / "results.csv", study.rows, padded=False)
    for name, text in texts.items():
        write_text(out / name, text)
    for name in drawn:
        write_bytes(out / name, pictures[name])
    return Report(
        summary=summary,
        files=tuple(out / name for name in ("results.csv", *texts, *drawn)),
        html=out / "report.html",
        complete={outcome.state for outcome in study.outcomes} <= {"done"},
    )


def render(summary: Summary, parts: list[Section], *, pictures: dict[str, bytes]) -> dict[str, str]:
    """The pages of the report by file name; all text from the results is escaped.

    `pictures`: the content of the figures that the page embeds, by file.
    """
    import jinja2
    from markupsafe import Markup

    judgements = [(c, verdict, text) for c, verdict, text in judge(summary)]
    no_figure = too_many_arms(summary)
    values: dict[str, Any] = {
        "name": printable(summary.study.settings.name),
        "ours": describe_data(summary.study),
        "paper_setting": SETTING,
        "headline": headline(summary),
        "facts": key_facts(summary),
        "status": status(summary.study),
        "gaps": gaps(summary.study),
        "table": main_table(summary),
        "table_title": "Table 1 and Figures 1b, 1c: top-1 accuracy beside the paper",
        "notes": [*table_notes(summary), *filter(None, [no_figure])] if summary.cells else [],
        "figure": next((name for name in pictures if name.startswith("figure1.")), None),
        "descriptions": [describe_panel(summary, mode) for mode in PANELS],
        "sections": parts,
        "judgements": [j for j in judgements if j[1] != "not measured"],
        "unmeasured": unmeasured(summary),
        "verdicts": {
            verdict: sum(j[1] == verdict for j in judgements) for verdict in get_args(Verdict)
        },
    }
    panels = PANELS if summary.cells and not no_figure else {}
    html_values = {
        "panels": [(title, Markup(inline_svg(summary, mode))) for mode, title in panels.items()],
        "colours": [colour for colour, _, _ in STYLES],
        "data_uri": lambda file: _data_uri(file, pictures[file]),
    }

    def environment(*, escape: bool) -> jinja2.Environment:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("layershuffle.study", "templates"),
            autoescape=escape,
            # Control characters could drive the reader's terminal.
            finalize=lambda value: printable(value) if escape and type(value) is str else value,
            # Otherwise a misspelt name would give an empty string.
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {"md": escape_markdown, "interval": interval_text}
        environment.filters["main_grid"] = _main_grid
        environment.filters["grid"] = lambda table: markdown_table(
            [*map(escape_markdown, table.head)],
            [[*map(escape_markdown, row)] for row in table.rows],
        )
        environment.filters["code"] = lambda text: printable(text).replace("```", "'''")
        return environment

    # Markdown has its own filter, because HTML entities would be visible in a code block.
    markdown, html = environment(escape=False), environment(escape=True)
    pages = {
        f"{page}.md": markdown.get_template(f"{page}.md.j2").render(values).rstrip() + "\n"
        for page in ("table", "report", "claims")
    }
    page = html.get_template("report.html.j2").render(values | html_values)
    return pages | {"report.html": page}


def escape_markdown(text: str) -> str:
    """`text` as literal text inside a Markdown table or paragraph."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # "$" and "~" too, which GitHub interprets as mathematics and deleted text.
    return re.sub(r"([\\`*_\[\]|$~!#])", r"\\\1", safe)


def _main_grid(table: dict[str, Any]) -> str:
    """The main table in Markdown: a row per arm, the paper's numbers in italics below it."""

    def text(cell: ScoreCell | None) -> str:
        if cell is None:
            return NONE
        sd = cell.top1.sd_orders
        spread = "" if sd is None else f" &plusmn;{sd:.1f}"
        return f"**{cell.top1.mean:.1f}**{spread} ({interval_text(cell.top1)})"

    rows = []
    for arm, cells in table["rows"]:
        rows.append([escape_markdown(arm), *(text(cell) for cell, _ in cells)])
        numbers = ["" if n is None else f"*{n}*".replace("+-", "&plusmn;") for _, n in cells]
        if any(numbers):
            rows.append(["*the paper*", *numbers])
    return markdown_table(["", *table["names"]], rows, align="l" + "r" * len(table["names"]))


def _data_uri(file: str, content: bytes) -> str:
    kind = "png" if file.endswith(".png") else "svg+xml"
    return f"data:image/{kind};base64,{b64encode(content).decode('ascii')}"


# --- contents of the report ----------------------------------------------------------------------


def status(study: Study) -> str:
    """The progress of the study in one line."""
    states = [outcome.state for outcome in study.outcomes]
    noun = "tasks" if study.mergings or study.analyses else "runs"
    if set(states) <= {"done"}:
        return f"All {len(states)} {noun} are finished."
    return (
        f"{states.count('done')} of {len(states)} {noun} are finished; {states.count('failed')} "
        f"failed, {states.count('missing')} not done yet."
    )


def gaps(study: Study) -> list[tuple[str, str]]:
    """(task, reason) of every unfinished task, those that failed first."""
    # Failures first, because the reader has to act on them.
    failed = [o for o in study.outcomes if o.state == "failed"]
    missing = [(o.task.name, NOT_DONE) for o in study.outcomes if o.state == "missing"]
    return [(o.task.name, f"failed: {o.failure}") for o in failed] + missing


def unmeasured(summary: Summary) -> str:
    """A line that lists the claims that this study cannot judge; "" without such claims."""
    names = [f'"{c.says}"' for c, verdict, _ in judge(summary) if verdict == "not measured"]
    return f"Not measured in this study: {'; '.join(names)}." if names else ""


def sections(summary: Summary) -> list[Section]:
    """The sections below the main table and its figure."""
    study = summary.study
    seeds = sorted({run.task.settings.seed for run in study.runs})
    noun = "Seed" if len(seeds) == 1 else "Seeds"
    shared, differing = settings_tables(
        # Without the seed, which differs in every run and is part of its name.
        study,
        lambda result: {k: v for k, v in result.settings.items() if k != "seed"},
        title="Settings of the runs",
    )
    data = settings_tables(study, lambda result: result.data.model_dump(exclude={"notes"}))
    notes = unique(f"Note: {note}" for result in study.results for note in result.data.notes)
    ignored = f"Ignored, because the plan does not name them: {', '.join(study.unplanned)}."
    results = (
        table_1(summary),
        choices_table(summary),
        rounds_section(summary),
        budget_section(summary),
        merging_section(study),
        *_analysis_sections(study),
        _claims_section(summary),
        open_choices(study.settings),
        Section(
            title="All scores",
            sentences=("results.csv holds one row per run and order, with the order itself.",),
            tables=(scores_table(summary),),
        ),
        Section(title="How the checkpoint was picked", sentences=_selection(study)),
        Section(
            title="Runs",
            sentences=(
                f"{noun} of the runs: {', '.join(map(str, seeds))}.",
                *([ignored] if study.unplanned else []),
            ),
            tables=(runs_table(study),),
        ),
        Section(
            title="Settings",
            sentences=("plan.json holds the whole recipe, with all defaults.",),
            tables=(differing, replace(shared, folded=True)),
        ),
        Section(title="Data", sentences=notes, tables=data),
        Section(
            title="Hardware and versions",
            tables=(
                *settings_tables(study, lambda result: result.hardware, title="Hardware"),
                *settings_tables(study, lambda result: result.versions, title="Versions"),
            ),
        ),
        _replay(study),
    )
    return [section for section in results if section is not None]


def _analysis_sections(study: Study) -> list[Section]:
    """A section per analysis name, with a paragraph and the figures of every analysed model."""
    groups: dict[str, list[tuple[str, str, AnalysisResult]]] = {}
    for outcome in study.main_analyses:
        task = outcome.task
        if outcome.result is not None:
            group = groups.setdefault(task.options.name, [])
            group.append((task.name, task.arm, outcome.result))
    return [
        Section(
            title=group[0][2].title,
            sentences=tuple(
                f"{label(arm)} ({task}): {result.paragraph}"
                for task, arm, result in group
                if result.paragraph
            ),
            pictures=tuple(
                Picture(file=file, caption=f"{task}: {Path(file).stem.removeprefix(f'{task}-')}")
                for task, _, result in group
                for file in result.pictures
            ),
        )
        for group in groups.values()
    ]


def _claims_section(summary: Summary) -> Section | None:
    """The section of the measured claims; `None` if no claim was measured."""
    rows = tuple(
        (claim.says, claim.where, verdict, text, claim.criterion)
        for claim, verdict, text in judge(summary)
        if verdict != "not measured"
    )
    if not rows:
        return None
    sentences = (
        "Top-1 in percent of means over models; intervals of differences are 95 %, paired over "
        "the seeds that both arms have (Welch where they share none). "
        "The data are not the paper's, so a claim that does not hold here may hold there.",
        unmeasured(summary),
    )
    head = ("The paper says", "Where", "Here", "Numbers", "Criterion")
    return Section(
        title="Claim by claim",
        sentences=tuple(filter(None, sentences)),
        tables=(Table(head=head, rows=rows),),
    )


def _selection(study: Study) -> tuple[str, ...]:
    """How the checkpoints were picked, and whether on the reported images."""
    if not study.results:
        return ("No run has picked one yet.",)
    arms: dict[str, list[str]] = {}
    for result in study.results:
        arms.setdefault(result.selected.metric, []).append(label(result.arm))
    sentences = [
        f"{', '.join(unique(names))}: the checkpoint with the best {metric}."
        for metric, names in arms.items()
    ]
    # With runs of both protocols, both sentences are needed.
    if any(result.paper_protocol for result in study.results):
        sentences.append(
            "Paper protocol: the checkpoint was picked on the same images that the scores are "
            "reported on, as the paper did. Such scores are too good by an unknown amount."
        )
    if not all(result.paper_protocol for result in study.results):
        sentences.append(
            "The paper's protocol (picking on the reported split) was not used: a held-out part "
            "of the training data picked, and the reported images were seen by nothing else."
        )
    return tuple(sentences)


def _replay(study: Study) -> Section:
    """A section with a command that computes one of the scores again."""
    title = "Replay a number"
    rows = [
        (run.task, run.result, row)
        for run in study.runs
        if run.result is not None
        for row in run.result.rows
        if row.order
    ]
    if not rows:
        return Section(title=title, sentences=("No finished run has an order to replay yet.",))

    def worth(entry: tuple[RunSpec, RunResult, Any]) -> tuple[bool, bool, bool]:
        # Prefer a full arbitrary order of a shuffled method.
        task, _, row = entry
        shuffled = task.settings.method.startswith("layershuffle")
        return row.mode == "arbitrary", row.choose == "", shuffled

    task, result, row = max(rows, key=worth)
    most = study.settings.evaluate.max_images
    command = ["layershuffle", "eval", f"runs/{task.name}/{FIT_DIRECTORY}"]
    command += ["--data", result.data.spec] + (["--max-images", str(most)] if most else [])
    command += ["--order", row.order]
    sentence = (
        "Every line of results.csv with an order can be computed again from the run's model. "
        "From the study's directory (a relative path to data counts from where the study was "
        f"started), the command below gives {label(row.method)}, seed {row.seed}, in {row.mode} "
        f"order with {row.kept} blocks: top-1 {row.top1:.2f} %, cross-entropy "
        f"{row.cross_entropy:.4f}, on {row.n:,} images."
    )
    return Section(title=title, sentences=(sentence,), command=shlex.join(command))
