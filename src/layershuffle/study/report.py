"""The report of a study, drawn from its results alone; a half-done study says what is missing.

    OUT/results.csv    every score of every finished run
    OUT/table.md       the main table beside the paper's numbers, ready for a README
    OUT/report.md      the whole report in Markdown
    OUT/report.html    the same as one self-contained page (no script, nothing fetched)
    OUT/figure1.svg/.png    accuracy against blocks kept

The same results give the same bytes: nothing is dated, nothing depends on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle.files import write_bytes, write_text
from layershuffle.study.content import Section, gaps, headline, key_facts, sections, status
from layershuffle.study.facts import Table
from layershuffle.study.figures import (
    PANELS,
    STYLES,
    describe_panel,
    draw_figure,
    figure_bytes,
    inline_svg,
)
from layershuffle.study.results import read_study, results_csv
from layershuffle.study.summary import Column, Summary, label, printable, summarise
from layershuffle.study.tables import (
    escape_markdown,
    interval_text,
    study_words,
    table_markdown,
    table_notes,
    table_text,
)

__all__ = ["Report", "report_html", "report_markdown", "table_text", "write_report"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written. `complete`: every planned run is finished; `text`: for the terminal."""

    summary: Summary
    files: tuple[Path, ...]
    html: Path
    complete: bool

    @property
    def text(self) -> str:
        """The main table with its legend and what is missing, at most 100 columns wide."""
        return table_text(self.summary)


def write_report(out: Path) -> Report:
    """Read the study in `out` and write its report there.

    Raises `StudyError` for a study that cannot be read, `LayerShuffleError` if `out` cannot be
    written. Without any finished run there is no figure.
    """
    summary = summarise(read_study(out))
    texts = {
        "results.csv": results_csv(summary.study.rows),
        "table.md": table_markdown(summary),
        "report.md": report_markdown(summary),
        "report.html": report_html(summary),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    pictures = _pictures(summary)
    for name, content in pictures.items():
        write_bytes(out / name, content)
    return Report(
        summary=summary,
        files=tuple(out / name for name in (*texts, *pictures)),
        html=out / "report.html",
        complete=all(run.state == "done" for run in summary.study.runs),
    )


def report_html(summary: Summary) -> str:
    """The report as one HTML page; everything from the results is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("layershuffle.study", "templates"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    panels = PANELS if summary.cells else {}
    return environment.get_template("report.html.j2").render(
        name=printable(summary.study.name),
        ours=study_words(summary.study),
        headline=headline(summary),
        facts=key_facts(summary),
        status=status(summary.study),
        gaps=gaps(summary.study),
        table=_main_table(summary),
        notes=table_notes(summary) if summary.cells else [],
        panels=[(title, Markup(inline_svg(summary, mode))) for mode, title in panels.items()],
        colours=[colour for colour, _, _ in STYLES],
        sections=sections(summary),
    )


def report_markdown(summary: Summary) -> str:
    """The report as Markdown; everything from the results is escaped."""
    lines = [f"# {escape_markdown(headline(summary))}", ""]
    lines += [f"Study {escape_markdown(summary.study.name)}: {status(summary.study)}", ""]
    lines += [f"{escape_markdown(fact)}\n" for fact in key_facts(summary)]
    for run, what in gaps(summary.study):
        lines.append(f"- {escape_markdown(run)} {escape_markdown(what)}")
    lines += ["", "## Top-1 accuracy beside the paper", "", table_markdown(summary)]
    if summary.cells:
        lines += [f"{escape_markdown(note)}\n" for note in table_notes(summary)]
        lines += ["## Accuracy against blocks kept", "", "![Figure 1](figure1.svg)", ""]
        lines += [f"{escape_markdown(describe_panel(summary, mode))}\n" for mode in PANELS]
    for section in sections(summary):
        lines += _markdown_section(section)
    return "\n".join(lines).rstrip() + "\n"


def _shown(value: Any) -> Any:
    """Plain text without control characters; markup and numbers as they are."""
    return printable(value) if type(value) is str else value


def _pictures(summary: Summary) -> dict[str, bytes]:
    if not summary.cells:
        return {}
    figure = draw_figure(summary)
    return {
        "figure1.svg": figure_bytes(figure, "svg"),
        "figure1.png": figure_bytes(figure, "png"),
    }


def _main_table(summary: Summary) -> dict[str, Any]:
    """The main table for the template: column groups, then cells with both sides' numbers."""
    groups: list[dict[str, Any]] = []
    for column in summary.columns:
        full = column.kept == summary.depth
        title = f"all {summary.depth} blocks" if full else f"{column.mode} order, blocks kept"
        if not groups or groups[-1]["title"] != title:
            groups.append({"title": title, "names": []})
        groups[-1]["names"].append(column.mode if full else str(column.kept))
    rows = [
        (label(arm), [_html_cell(summary, arm, column) for column in summary.columns])
        for arm in summary.arms
    ]
    return {"groups": groups, "rows": rows}


def _html_cell(summary: Summary, arm: str, column: Column) -> dict[str, Any] | None:
    cell = summary.cell(arm, column)
    if cell is None:
        return None
    number = summary.paper(arm, column)
    one = cell.top1
    return {
        "exact": repr(one.mean),
        "mean": f"{one.mean:.1f}",
        "sd_orders": None if one.sd_orders is None else f"{one.sd_orders:.1f}",
        "sd_models": None if one.sd_models is None else f"{one.sd_models:.1f}",
        "interval": interval_text(one),
        "paper": None if number is None else str(number).partition(" +-")[0],
        "paper_sd": None if number is None or number.sd is None else f"{number.sd:.2f}",
        "source": "" if number is None else number.source,
    }


def _markdown_section(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    lines += [f"{escape_markdown(sentence)}\n" for sentence in section.sentences]
    if section.command:
        lines += ["```sh", printable(section.command).replace("```", "'''"), "```", ""]
    for table in section.tables:
        lines += _markdown_table(table)
    return lines


def _markdown_table(table: Table) -> list[str]:
    if not table.rows:
        return []
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines += [f"| {' | '.join(map(escape_markdown, table.head))} |"]
    lines += [f"|{'---|' * len(table.head)}"]
    lines += [f"| {' | '.join(map(escape_markdown, row))} |" for row in table.rows]
    return [*lines, "", *([table.note, ""] if table.note else [])]
