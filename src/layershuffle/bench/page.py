"""The tables of docs/performance.md, made of result files and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from layershuffle.bench.claims import Result, bound_text, is_result, read_result
from layershuffle.bench.pairs import Row
from layershuffle.bench.targets import GPU
from layershuffle.errors import LayerShuffleError

GPU_THEME = "gpu"
_BEGIN, _END = "<!-- begin: {} -->", "<!-- end: {} -->"
_HEAD = (
    "| what | ratio or number | median | range | times | promised | |\n"
    "|:--|:--|--:|:--|--:|:--|:--|"
)


def newest(directory: Path) -> list[Result]:
    """Of every theme and machine the newest result in `directory`, by theme.

    Raises `LayerShuffleError` for one that is cut short: the page would be, without a word.
    """
    found: dict[tuple[str, str], Result] = {}
    for path in sorted(filter(is_result, directory.glob("*.json"))):  # dates sort as text
        result = read_result(path)
        if not result.complete:
            raise LayerShuffleError(
                "This result is not complete: its benchmark stopped before its last row",
                place=path,
                hint=f"delete it and run {result.command}",
            )
        found[result.theme, _machine(result)] = result
    return [found[key] for key in sorted(found)]


def with_tables(page: str, results: Sequence[Result]) -> str:
    """`page` with what stands between its marks made anew. Raises if a mark is missing."""
    on_cpu = [result for result in results if result.theme != GPU_THEME]
    on_gpu = [result for result in results if result.theme == GPU_THEME]
    page = _between(page, "cpu", "\n".join(_by_machine(on_cpu)))
    return _between(page, "gpu", "\n".join(_by_machine(on_gpu)) if on_gpu else _not_measured())


def with_claims(page: str, results: Sequence[Result]) -> str:
    """`page` with the rows of single claims between the marks that bear their themes made anew."""
    for theme in dict.fromkeys(result.theme for result in results):
        if _BEGIN.format(theme) in page:
            mine = [result for result in results if result.theme == theme]
            page = _between(page, theme, "\n".join(_by_machine(mine)).rstrip())
    return page


def _between(page: str, name: str, text: str) -> str:
    begin, end = _BEGIN.format(name), _END.format(name)
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise LayerShuffleError(f"The page has no {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


def _by_machine(results: Sequence[Result]) -> Iterator[str]:
    machines = dict.fromkeys(_machine(result) for result in results)
    for machine in machines:
        yield f"On {machine}:\n"
        yield _HEAD
        for result in results:
            if _machine(result) == machine:
                yield f"| **{result.claim}** `{result.command}`, {result.date} | | | | | | |"
                yield from map(_line, result.rows)
        yield ""


def _machine(result: Result) -> str:
    hardware = result.hardware
    torch = result.versions["torch"]
    if hardware["gpu"]:
        return f"{hardware['gpu']}, {hardware['precision']}, torch {torch}"
    threads = "one thread" if hardware["threads"] == 1 else f"{hardware['threads']} threads"
    return (
        f"{hardware['processor']}, {threads} of {hardware['cores']} cores, "
        f"{hardware['precision']}, torch {torch}"
    )


def _line(row: Row) -> str:
    low, high = _number(min(row.values)), _number(max(row.values))
    single = len(row.values) == 1
    unit = f" {row.unit}" if row.unit else ""
    verdict = {True: "holds", False: "**missed**", None: ""}[row.holds]
    cells = (
        row.name,
        row.what.rstrip(",:"),
        f"{_number(row.median)}{unit}",
        "" if single else f"{low} to {high}",
        "" if single else f"{len(row.values)}{' pairs' if row.pairs else ''}",
        "" if row.bound is None else bound_text(row.bound),
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _not_measured() -> str:
    lines = ["Not measured yet: `make bench-gpu` on a machine with an NVIDIA H200.\n", _HEAD]
    lines += [
        f"| {name} | {what.rstrip(',:')} | not measured yet | | | "
        f"{'' if bound is None else bound_text(bound)}{f' {unit}' if bound and unit else ''} | |"
        for name, (what, unit, bound) in GPU.items()
    ]
    return "\n".join(lines)
