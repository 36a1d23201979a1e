# Ran at commit 8550626.
"""Write the tables of docs/performance.md, rounds.md and swarm.md from benchmarks/results.

python scripts/performance_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from layershuffle.errors import LayerShuffleError
from layershuffle.files import write_text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from _harness import GPU_TARGETS, ClaimResult, ClaimRow, newest  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
GPU_THEME = "gpu"
_HEAD = (
    "| what | ratio or number | median | range | times | promised | |\n"
    "|:--|:--|--:|:--|--:|:--|:--|"
)


def newest_rows(theme: str) -> dict[str, ClaimRow]:
    """Every row in the newest result of a benchmark, by name."""
    results = [result for result in newest(RESULTS) if result.theme == theme]
    return {row.name: row for row in max(results, key=lambda result: result.date).rows}


def medians_of(theme: str) -> dict[str, float]:
    """The median of every row in the newest result of a benchmark, by name."""
    return {name: row.median for name, row in newest_rows(theme).items()}


def with_marked(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks `name`. Raises `LayerShuffleError` without them."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, begins, marked = page.partition(begin)
    _, ends, after = marked.partition(end)
    if not begins or not ends:
        raise LayerShuffleError(f"The page has no {begin} ... {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def with_tables(page: str, results: Sequence[ClaimResult]) -> str:
    """`page` with new tables between its marks. Raises `LayerShuffleError` if a mark is missing."""
    on_cpu = [result for result in results if result.theme != GPU_THEME]
    on_gpu = [result for result in results if result.theme == GPU_THEME]
    page = with_marked(page, "cpu", "\n".join(_by_machine(on_cpu)))
    return with_marked(page, "gpu", "\n".join(_by_machine(on_gpu)) if on_gpu else _not_measured())


def with_claims(page: str, results: Sequence[ClaimResult]) -> str:
    """`page` with the new rows of single claims between the marks that bear their themes."""
    for theme in dict.fromkeys(result.theme for result in results):
        if f"<!-- begin: {theme} -->" in page:
            of_theme = [result for result in results if result.theme == theme]
            page = with_marked(page, theme, "\n".join(_by_machine(of_theme)).rstrip())
    return page


def _by_machine(results: Sequence[ClaimResult]) -> Iterator[str]:
    for machine in dict.fromkeys(result.machine for result in results):
        yield f"On {machine}:\n"
        yield _HEAD
        for result in results:
            if result.machine == machine:
                yield f"| **{result.claim}** `{result.command}`, {result.date} | | | | | | |"
                yield from map(_line, result.rows)
        yield ""


def _line(row: ClaimRow) -> str:
    single = len(row.values) == 1
    unit = f" {row.unit}" if row.unit else ""
    cells = (
        row.name,
        row.what.rstrip(",:"),
        f"{_number(row.median)}{unit}",
        "" if single else f"{_number(min(row.values))} to {_number(max(row.values))}",
        "" if single else f"{len(row.values)}{' pairs' if row.pairs else ''}",
        "" if row.bound is None else str(row.bound),
        {True: "holds", False: "**missed**", None: ""}[row.holds],
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _not_measured() -> str:
    lines = ["Not measured yet: `make bench-gpu` on a machine with an NVIDIA H200.\n", _HEAD]
    for name, (what, unit, bound) in GPU_TARGETS.items():
        promise = "" if bound is None else f"{bound}{f' {unit}' if unit else ''}"
        lines.append(f"| {name} | {what.rstrip(',:')} | not measured yet | | | {promise} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    pages = {"performance": with_tables, "rounds": with_claims, "swarm": with_claims}
    for name, with_results in pages.items():
        file = ROOT / "docs" / f"{name}.md"
        write_text(file, with_results(file.read_text(encoding="utf-8"), newest(RESULTS)))
        print(f"Written: {file}")
