"""Table 1: every method in both order modes, top-1 and top-5, beside the paper's numbers."""

from __future__ import annotations

from dataclasses import replace

from layershuffle.plotting import figure_bytes
from layershuffle.stats import Estimate, mean, welch_interval
from layershuffle.study.facts import Table
from layershuffle.study.figures import draw_figure
from layershuffle.study.results import MODES
from layershuffle.study.sections import Picture, Section
from layershuffle.study.summary import Cell, Column, Summary, label, shown_arm
from layershuffle.study.tables import choice_words, interval_text

_NONE = "-"
_CHOICES = ("spaced", "first", "last")
_HEAD = (
    "Method", "Order", "Models", "Orders", "Top-1", "sd models", "sd orders", "95 %", "Top-5",
    "To sequential baseline", "Paper", "Paper, to sequential baseline", "Ours - paper",
)  # fmt: skip


def table_1(summary: Summary) -> Section | None:
    """The section, or `None` while no full stack has been scored."""
    cells = [
        cell
        for arm in summary.arms
        for mode in MODES
        if (cell := summary.cell(arm, Column(mode, summary.depth))) is not None
    ]
    if not cells:
        return None
    return Section(
        title="Table 1: all blocks, sequential and arbitrary order",
        sentences=(
            "Top-1 and top-5 in percent. The spread over models (seeds) and the spread over "
            "orders within a model are different things; the paper prints one +- without saying "
            "which. Differences to the baseline run in sequential order are what compares across "
            "data sets.",
        ),
        tables=(Table(title="", head=_HEAD, rows=tuple(_rows(summary, cells)), numbers=True),),
    )


def _rows(summary: Summary, cells: list[Cell]) -> list[tuple[str, ...]]:
    paper_base = summary.paper("baseline", Column("sequential", summary.depth))
    rows = []
    for cell in cells:
        one, number = cell.top1, summary.paper(cell.arm, Column(cell.mode, cell.kept))
        theirs = _NONE
        if number is not None and paper_base is not None:
            theirs = f"{number.value - paper_base.value:+.2f}"
        rows.append(
            (
                label(cell.arm), cell.mode, str(one.models), str(one.orders), f"{one.mean:.2f}",
                *_spreads(one), interval_text(one), f"{cell.top5.mean:.2f}",
                _to_baseline(summary, cell),
                _NONE if number is None else str(number), theirs,
                _NONE if number is None else f"{one.mean - number.value:+.2f}",
            )
        )  # fmt: skip
    return rows


def _to_baseline(summary: Summary, cell: Cell) -> str:
    """Difference to the sequential baseline refined from the same model, with its interval."""
    base = summary.cell(_baseline_of(summary, cell.arm), Column("sequential", summary.depth))
    if base is None or base is cell:
        return _NONE
    ours, theirs = cell.model_means, base.model_means
    words = f"{mean(ours) - mean(theirs):+.2f}"
    if min(len(ours), len(theirs)) > 1:
        low, high = welch_interval(ours, theirs)
        words += f" ({low:+.1f} to {high:+.1f})"
    return words


def _baseline_of(summary: Summary, arm: str) -> str:
    """The baseline arm whose runs start from the same model as those of `arm`."""
    models = {
        shown_arm(run.plan): (run.facts.settings.get("model"), run.plan.method)
        for run in summary.study.runs
        if run.facts is not None and run.plan.part == "main"
    }
    model = models.get(arm, (None, ""))[0]
    return next((name for name, found in models.items() if found == (model, "baseline")), "")


def _spreads(one: Estimate) -> tuple[str, ...]:
    return tuple(_NONE if sd is None else f"{sd:.2f}" for sd in (one.sd_models, one.sd_orders))


def choices_table(summary: Summary) -> Section | None:
    """Which blocks are kept: random, evenly spaced, first, last (Figures 1b, 1c; A8)."""
    choices = {cell.choose for cell in summary.cells} - {""}
    if len(choices) < 2:
        return None
    kept = sorted({cell.kept for cell in summary.cells if cell.choose not in ("", "random")})
    rows = [
        (label(arm), mode, choose, *_by_kept(summary, arm, mode, choose=choose, kept=kept))
        for arm in summary.arms
        for mode in MODES
        for choose in ("random", *_CHOICES)
        if choose in choices
    ]
    head = ("Arm", "Order", "Blocks kept", *(f"{count} kept" for count in kept))
    return Section(
        title="Figures 1b and 1c: which blocks are kept",
        sentences=(
            "Top-1 in percent with its 95 % interval. The paper does not say which blocks its "
            "pruned models keep.",
        ),
        pictures=tuple(_picture(summary, choose) for choose in _CHOICES if choose in choices),
        tables=(
            Table(
                title="", head=head, numbers=True,
                rows=tuple(row for row in rows if set(row[3:]) != {_NONE}),
            ),
        ),
    )  # fmt: skip


def _picture(summary: Summary, choose: str) -> Picture:
    """Figure 1 with the blocks chosen in one of the other ways."""
    return Picture(
        file=f"figure1-{choose}.svg",
        caption=f"Accuracy against blocks kept, {choice_words(choose)}.",
        svg=figure_bytes(draw_figure(replace(summary, choose=choose)), "svg"),
    )


def _by_kept(
    summary: Summary, arm: str, mode: str, *, choose: str, kept: list[int]
) -> tuple[str, ...]:
    found = {
        cell.kept: cell.top1
        for cell in summary.cells
        if (cell.arm, cell.mode, cell.choose) == (arm, mode, choose)
    }
    return tuple(
        f"{found[count].mean:.1f} ({interval_text(found[count])})" if count in found else _NONE
        for count in kept
    )
