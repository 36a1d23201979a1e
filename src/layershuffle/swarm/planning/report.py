"""A plan and its figures as text."""

from __future__ import annotations

import math
from collections.abc import Callable

from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.planning.prediction import Figures, Prediction

_MOST_HOSTS = 20
_UNITS = {"throughput": "requests/s", "latency": "ms", "lifetime": "requests"}


def plan_report(plan: SwarmPlan, prediction: Prediction) -> str:
    """Who holds what, the figures beside those of fixed orders, and how good the plan is."""
    return "\n".join([*_placement(plan), "", *_table(prediction), "", *_notes(prediction)])


def _placement(plan: SwarmPlan) -> list[str]:
    names = list(plan.hosts)
    width = max(len(name) for name in names[:_MOST_HOSTS])
    lines = [
        f"  {name:<{width}}  {', '.join(map(str, plan.hosts[name].blocks))}"
        for name in names[:_MOST_HOSTS]
    ]
    if len(names) > _MOST_HOSTS:
        lines.append(f"  and {len(names) - _MOST_HOSTS} more hosts")
    copies = sum(len(host.blocks) for host in plan.hosts.values())
    return [f"{len(names)} host{'s hold' if len(names) > 1 else ' holds'} {copies} blocks:", *lines]


_ROWS: tuple[tuple[str, Callable[[Figures], float | None], str], ...] = (
    ("requests per second, at most", lambda one: one.throughput, ",.1f"),
    ("milliseconds of a request alone", lambda one: one.latency_ms, ",.1f"),
    ("requests until a battery is empty", lambda one: one.life, ",.0f"),
    ("% answered, hosts away at times", lambda one: 100 * one.answered, ".2f"),
    ("blocks of an answer, mean", lambda one: one.blocks, ".2f"),
    ("% right of all requests", lambda one: one.accuracy, ".1f"),
)


def _table(prediction: Prediction) -> list[str]:
    columns = {
        "free order": prediction.order_free,
        "same, in order": prediction.in_order,
        "best pipeline": prediction.pipeline,
    }
    lines = ["".join([f"{'':<34}", *(f"{name:>16}" for name in columns)])]
    for label, value, form in _ROWS:
        cells = ["-" if one is None else _cell(value(one), form) for one in columns.values()]
        lines.append("".join([f"{label:<34}", *(f"{cell:>16}" for cell in cells)]))
    return lines


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "no limit" if math.isinf(value) else format(value, form)


def _notes(prediction: Prediction) -> list[str]:
    unit = _UNITS[prediction.objective]
    how = "an exact programme" if prediction.solver == "exact" else "greedy placement"
    lines = [f"{prediction.objective}, by {how}: {_best(prediction, unit)}."]
    if prediction.demand < prediction.depth:
        lines.append(
            f"A request runs {prediction.demand} of {prediction.depth} blocks in free order; "
            "a fixed order needs all."
        )
    if prediction.pipeline is None:
        lines.append("No pipeline of intervals, one per host, fits the hosts' memory.")
    if prediction.order_free.accuracy is None:
        lines.append("Accuracy is not known: layershuffle swarm calibrate measures it.")
    return lines


def _best(prediction: Prediction, unit: str) -> str:
    if prediction.gap < 1e-4:
        return f"{_cell(prediction.value, ',.2f')} {unit}, which no placement can beat"
    return (
        f"{_cell(prediction.value, ',.2f')} {unit}, within {100 * prediction.gap:.1f} % of "
        f"what no placement can beat ({_cell(prediction.bound, ',.2f')} {unit})"
    )
