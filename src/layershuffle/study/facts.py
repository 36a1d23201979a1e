"""The report's tables of facts: scores, runs, settings, orders. Pure, any format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layershuffle.stats import Estimate
from layershuffle.study.results import Run, RunFacts, Study
from layershuffle.study.summary import Cell, Summary, label
from layershuffle.study.tables import choice_words, interval_text

_NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of facts.

    `folded` ones start closed where the format can; `numbers`: figures, to be aligned as such.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    folded: bool = False
    numbers: bool = False


def scores_table(summary: Summary) -> Table:
    """Every cell with all its spreads."""
    head = (
        "Arm",
        "Order",
        "Kept",
        "Which blocks",
        "Drawn per",
        "Models",
        "Orders",
        "Images",
        "Top-1",
        "sd orders",
        "sd models",
        "95 %",
        "over",
        "Lowest",
        "Highest",
        "Top-5",
        "Cross-entropy",
    )
    rows = tuple(
        (
            label(cell.arm),
            cell.mode,
            str(cell.kept),
            choice_words(cell.choose),
            cell.draw,
            *_estimate(cell.top1),
            f"{cell.top5.mean:.2f}",
            f"{cell.cross_entropy.mean:.4f}",
        )
        for cell in summary.cells
    )
    return Table(
        title="Every condition, with its spreads",
        head=head,
        rows=rows,
        note="Accuracies in percent, cross-entropy in nats; sd = standard deviation. "
        "Lowest and highest: single orders. One row per score: results.csv.",
        folded=True,
        numbers=True,
    )


def _estimate(one: Estimate) -> tuple[str, ...]:
    spreads = (_NONE if sd is None else f"{sd:.2f}" for sd in (one.sd_orders, one.sd_models))
    return (
        str(one.models),
        str(one.orders),
        f"{one.images:,}",
        f"{one.mean:.2f}",
        *spreads,
        interval_text(one),
        one.kind,
        f"{one.least:.2f}",
        f"{one.most:.2f}",
    )


def runs_table(study: Study) -> Table:
    """Every planned run: its state, time and checkpoint."""
    head = (
        "Run",
        "Arm",
        "Seed",
        "State",
        "Steps",
        "Kept step",
        "Value",
        "Training",
        "Evaluation",
        "Images/s",
        "Finished",
        "Settings hash",
    )
    return Table(
        title="",
        head=head,
        rows=tuple(map(_run_row, study.runs)),
        numbers=True,
        note="Kept step and value: the checkpoint that was picked and its score on the "
        "picking split. Images/s while training.",
    )


def _run_row(run: Run) -> tuple[str, ...]:
    start = (run.plan.name, label(run.plan.arm), str(run.plan.seed), run.state)
    facts = run.facts
    if facts is None:
        return (*start, *[_NONE] * 8)
    return (
        *start,
        f"{facts.steps:,}",
        f"{facts.selected_step:,}",
        f"{facts.selected_value:.4f}",
        duration(facts.train_seconds),
        duration(facts.eval_seconds),
        f"{facts.images_per_second:,.0f}",
        facts.finished,
        facts.settings_hash[:12],
    )


def duration(seconds: float) -> str:
    """ "2 min 30 s": the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def recipe_table(study: Study) -> Table:
    """The resolved recipe, flat."""
    rows = tuple(flatten(study.recipe).items())
    return Table(title="Recipe, with all defaults", head=("name", "value"), rows=rows, folded=True)


def shared_table(
    title: str,
    study: Study,
    *,
    of: Callable[[RunFacts], Mapping[str, Any]],
    folded: bool = False,
) -> Table:
    """One line per setting; where runs differ, one per value with the runs that have it."""
    known = [(run.plan.name, flatten(of(run.facts))) for run in study.runs if run.facts]
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for _, facts in known for key in facts):
        values: dict[str, list[str]] = {}
        for name, facts in known:
            values.setdefault(facts.get(key, _NONE), []).append(name)
        for value, names in values.items():
            rows.append((key, value, "all" if len(values) == 1 else ", ".join(names)))
    if all(names == "all" for _, _, names in rows):
        head, rows = ("name", "all runs"), [row[:2] for row in rows]
    else:
        head = ("name", "value", "runs")
    return Table(title=title, head=head, rows=tuple(rows), folded=folded)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `{"fit.steps": "1500"}`; lists of plain values as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        parts = value
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            parts = {str(index): one for index, one in enumerate(value)}
        if isinstance(parts, Mapping) and parts:
            flat |= flatten(parts, f"{name}.")
        else:
            flat[name] = _plain(value)
    return flat


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def orders_tables(summary: Summary) -> list[Table]:
    """Per condition, every drawn order with the accuracy of each arm under it."""
    groups: dict[tuple[str, int, str, str], list[Cell]] = {}
    for cell in summary.cells:
        groups.setdefault((cell.mode, cell.kept, cell.choose, cell.draw), []).append(cell)
    return [_order_table(key, cells) for key, cells in groups.items()]


def _order_table(key: tuple[str, int, str, str], cells: Sequence[Cell]) -> Table:
    mode, kept, choose, draw = key
    scores: dict[tuple[int, str], dict[str, list[float]]] = {}
    for cell in cells:
        for row in cell.rows:
            of_order = scores.setdefault((row.order_seed, row.order), {})
            of_order.setdefault(cell.arm, []).append(row.top1)
    rows = []
    for (index, order), by_arm in sorted(scores.items()):
        means = [by_arm.get(cell.arm) for cell in cells]
        shown = [_NONE if one is None else f"{sum(one) / len(one):.2f}" for one in means]
        rows.append((str(index), order or f"a new one per {draw}", *shown))
    blocks = "" if not choose else f", {choice_words(choose)}"
    return Table(
        title=f"{mode.capitalize()} order, {kept} blocks{blocks}",
        head=("Draw", "Order", *(label(cell.arm) for cell in cells)),
        rows=tuple(rows),
        folded=True,
        numbers=True,
    )
