"""A claim of speed: its rows, measured, judged and written down. What `benchmarks/` is made of."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layershuffle.bench.pairs import SMOKE, Bound, Effort, Row
from layershuffle.errors import LayerShuffleError
from layershuffle.files import write_text
from layershuffle.machine import hardware, torch_threads, versions

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`text` says in one sentence what is claimed; `rows` measures it, small when it is a smoke.

    `threads`: of torch, `None` for as many as it likes.
    """

    theme: str
    text: str
    rows: Callable[[Effort], Iterable[Row]]
    precision: str = "fp32"
    threads: int | None = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a result file holds. `complete`: every row of the claim is there."""

    schema: int
    theme: str
    claim: str
    date: str
    command: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    complete: bool


def run_claim(
    claim: Claim, file: str, *, tell: Callable[[str], object], argv: list[str] | None = None
) -> int:
    """Measure `claim`, tell every row and write `results/THEME_HARDWARE_DATE.json` beside `file`.

    Until the last row is measured the rows go into a file of that name and ".part", so that a
    run that fails keeps what it measured and takes no whole result's place. Returns the exit code:
    1 if a bound does not hold. With `--smoke` nothing is judged, and nothing is written unless
    `--out DIR` says where.
    """
    options = _options(claim, argv)
    effort = SMOKE if options.smoke else Effort()
    out = options.out or (None if options.smoke else Path(file).parent / "results")
    command = f"python benchmarks/{Path(file).name}"
    with torch_threads(claim.threads):
        result = _empty(claim, command)
        for row in claim.rows(effort):
            tell(row_text(row, judged=not options.smoke))
            result = replace(result, rows=(*result.rows, row))
            if out is not None:
                part = write_result(result, out)
    if out is not None and result.rows:
        tell(f"Written: {write_result(replace(result, complete=True), out)}")
        part.unlink()
    return int(not options.smoke and any(row.holds is False for row in result.rows))


def _options(claim: Claim, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=claim.text)
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds; judges nothing")
    parser.add_argument("--out", type=Path, help="where the result file goes")
    return parser.parse_args(argv)


def _empty(claim: Claim, command: str) -> Result:
    return Result(
        schema=SCHEMA,
        theme=claim.theme,
        claim=claim.text,
        date=time.strftime("%Y-%m-%d"),
        command=command,
        hardware=hardware(claim.precision),
        versions=versions(),
        rows=(),
        complete=False,
    )


def write_result(result: Result, directory: Path) -> Path:
    """Write the file of `result` into `directory`, ending in .part if it is not whole; its path."""
    machine = result.hardware["gpu"] or result.hardware["processor"]
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    ending = ".json" if result.complete else ".json.part"
    path = directory / f"{result.theme}_{name}_{result.date}{ending}"
    rows = [{**asdict(row), "median": row.median, "holds": row.holds} for row in result.rows]
    text = json.dumps({**asdict(result), "rows": rows}, indent=1)
    write_text(path, _short_lists(text) + "\n")
    return path


def is_result(path: Path) -> bool:
    """Whether the file looks like one of `write_result`: other tools keep theirs beside them."""
    return '"theme"' in path.read_text(encoding="utf-8")


def read_result(path: Path) -> Result:
    """What `write_result` wrote. Raises `LayerShuffleError` for anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(_row(row) for row in fields.pop("rows"))
        return Result(**fields, rows=rows)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LayerShuffleError(
            f"This is no result of a benchmark ({error})",
            place=path,
            hint="delete it and run make bench",
        ) from error


def _row(fields: dict[str, Any]) -> Row:
    derived = {"median", "holds"}
    kept = {name: value for name, value in fields.items() if name not in derived}
    bound = kept["bound"]
    kept["bound"] = None if bound is None else Bound(**bound)
    kept["values"] = tuple(kept["values"])
    kept["pairs"] = tuple((one, other) for one, other in kept["pairs"])
    return Row(**kept)


def row_text(row: Row, *, judged: bool = True) -> str:
    """One line: name, median and range, and whether the bound holds."""
    low, high = min(row.values), max(row.values)
    unit = f" {row.unit}" if row.unit else ""
    line = f"{row.name}: {row.what} {row.median:.4g}{unit} ({low:.4g} to {high:.4g}"
    line += f", {len(row.values)} {'pairs' if row.pairs else 'times'})"
    if row.bound is None or not judged:
        return line
    return f"{line}; {bound_text(row.bound)}: {'holds' if row.holds else 'MISSED'}"


def bound_text(bound: Bound) -> str:
    """The bound in words."""
    words = {"at_most": "at most", "at_least": "at least", "equal": "exactly"}
    if bound.kind == "not_above":
        return f"not above {bound.value:g} within noise"
    return f"{words[bound.kind]} {bound.value:,g}"


def _short_lists(text: str) -> str:
    """Lists of numbers on one line each: result files are read by people too."""
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: " ".join(found[0].split()), text)
