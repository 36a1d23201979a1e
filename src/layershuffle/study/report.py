"""The report of a study, drawn from its results alone; a half-done study says what is missing.

    OUT/results.csv    every score of every finished run
    OUT/table.md       the main table beside the paper's numbers, ready for a README
    OUT/report.md      the whole report in Markdown
    OUT/report.html    the same as one self-contained page (no script, nothing fetched)
    OUT/figure1.svg/.png    accuracy against blocks kept

The same results give the same bytes: nothing is dated, nothing depends on the machine.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import figure_bytes
from layershuffle.study.claims_page import claims_markdown
from layershuffle.study.content import gaps, headline, key_facts, sections, status
from layershuffle.study.facts import Table
from layershuffle.study.figures import (
    PANELS,
    STYLES,
    describe_panel,
    draw_figure,
    inline_svg,
)
from layershuffle.study.pieces import Piece, read_pieces
from layershuffle.study.results import read_study, results_csv
from layershuffle.study.sections import Section
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
    """What was written. `complete`: every planned task is done; `text`: for the terminal."""

    summary: Summary
    files: tuple[Path, ...]
    html: Path
    complete: bool

    pieces: tuple[Piece, ...] = ()

    @property
    def text(self) -> str:
        """The main table with its legend and what is missing, at most 100 columns wide."""
        return table_text(self.summary, gaps(self.summary.study, self.pieces))


def write_report(out: Path) -> Report:
    """Read the study in `out` and write its report there.

    Raises `StudyError` for a study that cannot be read, `LayerShuffleError` if `out` cannot be
    written. Without any finished run there is no figure.
    """
    study = read_study(out)
    summary, pieces = summarise(study), read_pieces(out, study)
    parts = [_with_pictures(section, out) for section in sections(summary, pieces)]
    texts = {
        "results.csv": results_csv(study.rows),
        "table.md": table_markdown(summary),
        "report.md": report_markdown(summary, pieces, parts=parts),
        "report.html": report_html(summary, pieces, parts=parts),
        "claims.md": claims_markdown(summary, pieces),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    pictures = _pictures(summary) | _new_pictures(parts)
    for name, content in pictures.items():
        write_bytes(out / name, content)
    return Report(
        summary=summary,
        pieces=pieces,
        files=tuple(out / name for name in (*texts, *pictures)),
        html=out / "report.html",
        complete={task.state for task in study.runs} | {piece.state for piece in pieces}
        <= {"done"},
    )


def _with_pictures(section: Section, out: Path) -> Section:
    """The section with the content of figures that are on disk already."""
    loaded = (
        picture if picture.svg else replace(picture, svg=(out / picture.file).read_bytes())
        for picture in section.pictures
    )
    return replace(section, pictures=tuple(loaded))


def _new_pictures(parts: Sequence[Section]) -> dict[str, bytes]:
    return {
        picture.file: picture.svg
        for section in parts
        for picture in section.pictures
        if picture.svg is not None and "/" not in picture.file
    }


def report_html(
    summary: Summary, pieces: Sequence[Piece] = (), *, parts: Sequence[Section] | None = None
) -> str:
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
        status=status(summary.study, pieces),
        gaps=gaps(summary.study, pieces),
        table=_main_table(summary),
        notes=table_notes(summary) if summary.cells else [],
        panels=[(title, Markup(inline_svg(summary, mode))) for mode, title in panels.items()],
        colours=[colour for colour, _, _ in STYLES],
        sections=sections(summary, pieces) if parts is None else parts,
        data_uri=_data_uri,
    )


def report_markdown(
    summary: Summary, pieces: Sequence[Piece] = (), *, parts: Sequence[Section] | None = None
) -> str:
    """The report as Markdown; everything from the results is escaped."""
    lines = [f"# {escape_markdown(headline(summary))}", ""]
    lines += [f"Study {escape_markdown(summary.study.name)}: {status(summary.study, pieces)}", ""]
    lines += [f"{escape_markdown(fact)}\n" for fact in key_facts(summary)]
    for run, what in gaps(summary.study, pieces):
        lines.append(f"- {escape_markdown(run)} {escape_markdown(what)}")
    lines += ["", "## Top-1 accuracy beside the paper", "", table_markdown(summary)]
    if summary.cells:
        lines += [f"{escape_markdown(note)}\n" for note in table_notes(summary)]
        lines += ["## Accuracy against blocks kept", "", "![Figure 1](figure1.svg)", ""]
        lines += [f"{escape_markdown(describe_panel(summary, mode))}\n" for mode in PANELS]
    for section in sections(summary, pieces) if parts is None else parts:
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
    for picture in section.pictures:
        lines += [f"![{escape_markdown(picture.caption)}]({quote(picture.file)})", ""]
    for table in section.tables:
        lines += _markdown_table(table)
    return lines


def _data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg).decode('ascii')}"


def _markdown_table(table: Table) -> list[str]:
    if not table.rows:
        return []
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines += [f"| {' | '.join(map(escape_markdown, table.head))} |"]
    lines += [f"|{'---|' * len(table.head)}"]
    lines += [f"| {' | '.join(map(escape_markdown, row))} |" for row in table.rows]
    return [*lines, "", *([table.note, ""] if table.note else [])]
