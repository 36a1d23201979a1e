"""The harness of `benchmarks/`: claims, their rows and bounds, and result files.

A script states a `Claim` and calls `run_claim`, which measures its rows, judges them and puts them
into `results/claims.csv`: the newest rows of every theme on a processor, and on each GPU.
`scripts/tables.py` shows them on the pages.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from _clocks import SMOKE, Effort, Pairs, Side, paired

from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.files import write_text
from layershuffle.ground.machine import hardware, torch_threads, versions

CLAIMS = "claims.csv"
_NOISE_CAP = 1.05


# --- rows and bounds ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What a row promises of the median of its values.

    `equal`: of every value. `not_above`: no more than `value` within noise, that is, the 95 %
    interval of the median reaches down to `value`, and the median is at most 5 % above it.
    """

    kind: Literal["at_most", "at_least", "equal", "not_above"]
    value: float

    def holds(self, values: Sequence[float]) -> bool:
        """Whether `values` keep the promise."""
        middle = statistics.median(values)
        if self.kind == "at_most":
            return middle <= self.value
        if self.kind == "at_least":
            return middle >= self.value
        if self.kind == "equal":
            return all(value == self.value for value in values)
        return middle <= _NOISE_CAP * self.value and interval_of_median(values)[0] <= self.value

    def __str__(self) -> str:
        if self.kind == "not_above":
            return f"not above {self.value:g} within noise"
        words = {"at_most": "at most", "at_least": "at least", "equal": "exactly"}
        return f"{words[self.kind]} {self.value:,g}"


GPU_TARGETS: dict[str, tuple[str, str, Bound | None]] = {
    # What one NVIDIA H200 is to reach; name: (what, unit, bound).
    "training": ("ViT-B/16 at 224, batch 640, bf16:", "images/s", Bound("at_least", 3500)),
    "training, MFU": ("of a matrix product measured in the run:", "%", None),
    "training, recompiles": ("after warm-up:", "graphs", Bound("equal", 0)),
    "training, syncs": ("the host waits for the GPU", "times a step", Bound("equal", 0)),
    "training, memory": ("at the highest:", "GB", Bound("at_most", 60)),
    "inference": ("ViT-B/16 at 224, batch 640, bf16:", "images/s", Bound("at_least", 12_500)),
    "inference, MFU": ("of a matrix product measured in the run:", "%", None),
    "training step, order": ("shuffled / fixed order", "", Bound("at_most", 1.01)),
    "training step, compiled": ("eager / compiled", "", None),
    "inference, compiled": ("eager / compiled", "", Bound("at_least", 1.12)),
    "training step, plain": ("plain Trainer, as the authors' / ours", "", Bound("at_least", 2.5)),
    "training, four orders per batch": ("in groups of 160:", "images/s", None),
    "leave-one-out and base": ("one by one / together", "", Bound("at_least", 1.55)),
}


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval for the median that assumes no distribution: two of the sorted values.

    Fewer than six values cannot give one: then their whole range.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0, 2 * 0.5**count  # chance that all lie on one side of the median
    while outside + 2 * math.comb(count, below + 1) * 0.5**count <= 0.05:
        below += 1
        outside += 2 * math.comb(count, below) * 0.5**count
    return ordered[below], ordered[count - 1 - below]


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One thing that was measured: `values` in `unit`, or ratios (`unit` is "") of `pairs`.

    `what` says it in words, "naive / together" for a ratio. A row without `bound` promises nothing.
    `settings`: model, batch, dtype and the like. `facts`: what else was seen, such as counts.
    """

    name: str
    what: str
    values: tuple[float, ...]
    unit: str = ""
    bound: Bound | None = None
    pairs: tuple[tuple[float, float], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The number that is judged."""
        return statistics.median(self.values)

    @property
    def holds(self) -> bool | None:
        """Whether the bound does, `None` without one."""
        return None if self.bound is None else self.bound.holds(self.values)

    def text(self, *, judged: bool = True) -> str:
        """One line: name, median and range, and whether the bound holds."""
        low, high = min(self.values), max(self.values)
        unit = f" {self.unit}" if self.unit else ""
        line = f"{self.name}: {self.what} {self.median:.4g}{unit} ({low:.4g} to {high:.4g}"
        line += f", {len(self.values)} {'pairs' if self.pairs else 'times'})"
        if self.bound is None or not judged:
            return line
        return f"{line}; {self.bound}: {'holds' if self.holds else 'MISSED'}"


def compare(
    name: str,
    what: str,
    *,
    a: Side,
    b: Side,
    effort: Effort,
    bound: Bound | None = None,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> ClaimRow:
    """The row of A against B: its values are seconds of A over seconds of B, pair by pair."""
    row = ratio_row(name, what, pairs=paired(a, b, effort=effort), settings=settings or {})
    return replace(row, bound=bound, facts=facts or {})


def ratio_row(name: str, what: str, *, pairs: Pairs, settings: Mapping[str, Any]) -> ClaimRow:
    """The row of two sides that were timed already."""
    settings = {**settings, "turns_per_pair": pairs.turns}
    return ClaimRow(
        name=name, what=what, values=pairs.ratios, pairs=pairs.seconds, settings=settings
    )


# --- claims and their results ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`text` is what is claimed, in one sentence; `rows` measures it, in little for a smoke test.

    `threads`: of torch, `None` for as many as it likes.
    """

    theme: str
    text: str
    rows: Callable[[Effort], Iterable[ClaimRow]]
    precision: str = "fp32"
    threads: int | None = 1


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """The measured rows of a claim. `seconds`: how long that took, `None` if it was not noted."""

    theme: str
    claim: str
    date: str
    command: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: tuple[ClaimRow, ...]
    seconds: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What a newer result replaces: one of the same theme, also if of another processor, which
        would else stand beside it in a table without a column that says so."""
        return self.theme, self.hardware["gpu"] or "processor"

    @property
    def machine(self) -> str:
        """The hardware in words."""
        hardware, torch = self.hardware, self.versions["torch"]
        if hardware["gpu"]:
            return f"{hardware['gpu']}, {hardware['precision']}, torch {torch}"
        threads = "one thread" if hardware["threads"] == 1 else f"{hardware['threads']} threads"
        return (
            f"{hardware['processor']}, {threads} of {hardware['cores']} cores, "
            f"{hardware['precision']}, torch {torch}"
        )


def run_claim(
    claim: Claim, file: str, *, tell: Callable[[str], object], argv: list[str] | None = None
) -> int:
    """Measure `claim`, tell every row and put them into `results/claims.csv` beside `file`.

    Until the last row is measured the rows go into `results/THEME.csv.part`: a run that fails keeps
    what it measured and replaces no whole result. Returns the exit code: 1 if a bound does not
    hold. With `--smoke` nothing is judged, and nothing is written without `--out DIR`.
    """
    parser = argparse.ArgumentParser(description=claim.text)
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds; judges nothing")
    parser.add_argument("--out", type=Path, help="the directory of claims.csv")
    options = parser.parse_args(argv)
    effort = SMOKE if options.smoke else Effort()
    out = options.out or (None if options.smoke else Path(file).parent / "results")
    begun = time.monotonic()
    with torch_threads(claim.threads):
        result = ClaimResult(
            theme=claim.theme,
            claim=claim.text,
            date=time.strftime("%Y-%m-%d"),
            command=shlex.join(["python", f"benchmarks/{Path(file).name}", *sys.argv[1:]]),
            hardware=hardware(claim.precision, device="auto"),
            versions=versions(),
            rows=(),
        )
        for row in claim.rows(effort):
            tell(row.text(judged=not options.smoke))
            result = replace(result, rows=(*result.rows, row))
            if out is not None:
                part = out / f"{claim.theme}.csv.part"
                write_results([result], part)
    if out is not None and result.rows:
        result = replace(result, seconds=round(time.monotonic() - begun, 1))
        path = out / CLAIMS
        others = [other for other in read_results(path) if other.key != result.key]
        write_results([*others, result], path)
        part.unlink()
        tell(f"Written: {path}, after {result.seconds:.0f} s")
    return int(not options.smoke and any(row.holds is False for row in result.rows))


def write_results(results: Sequence[ClaimResult], path: Path) -> None:
    """Write one line per row, sorted by theme. The first columns are those that pages show."""
    lines = [
        {
            "theme": result.theme,
            "claim": result.claim,
            "command": result.command,
            "date": result.date,
            "machine": result.machine,
            "name": row.name,
            "what": row.what.rstrip(",:"),
            **_shown(row),
            "unit": row.unit,
            "bound": json.dumps(row.bound and asdict(row.bound)),
            "values": json.dumps(row.values),
            "pairs": json.dumps(row.pairs),
            "settings": json.dumps(row.settings),
            "facts": json.dumps(row.facts),
            "seconds": json.dumps(result.seconds),
            "hardware": json.dumps(result.hardware),
            "versions": json.dumps(result.versions),
        }
        for result in sorted(results, key=lambda result: result.key)
        for row in result.rows
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_text(path, file.getvalue())


def _shown(row: ClaimRow) -> dict[str, str]:
    """What was measured, in words."""
    single = len(row.values) == 1
    return {
        "median": f"{_number(row.median)} {row.unit}".rstrip(),
        "range": "" if single else f"{_number(min(row.values))} to {_number(max(row.values))}",
        "times": "" if single else f"{len(row.values)}{' pairs' if row.pairs else ''}",
        "promised": "" if row.bound is None else str(row.bound),
        "verdict": {True: "holds", False: "missed", None: ""}[row.holds],
    }


def _number(value: float) -> str:
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def read_results(path: Path) -> list[ClaimResult]:
    """The results in a file of `write_results`, none if it is not there.

    Raises `LayerShuffleError` for any other file.
    """
    if not path.exists():
        return []
    results: dict[tuple[str, str], ClaimResult] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                read = _read(line)
                earlier = results.get(read.key)
                rows = (*earlier.rows, *read.rows) if earlier else read.rows
                results[read.key] = replace(read, rows=rows)
        if not results:
            raise ValueError("no rows")
    except (ValueError, TypeError, KeyError) as error:
        raise LayerShuffleError(
            f"This is no file of results of benchmarks ({error!r})",
            place=path,
            hint="delete it and run make bench",
        ) from error
    return list(results.values())


def _read(line: Mapping[str, str]) -> ClaimResult:
    """The result of one row."""
    bound = json.loads(line["bound"])
    row = ClaimRow(
        name=line["name"],
        what=line["what"],
        unit=line["unit"],
        bound=bound and Bound(**bound),
        values=tuple(json.loads(line["values"])),
        pairs=tuple((a, b) for a, b in json.loads(line["pairs"])),
        settings=json.loads(line["settings"]),
        facts=json.loads(line["facts"]),
    )
    return ClaimResult(
        theme=line["theme"],
        claim=line["claim"],
        command=line["command"],
        date=line["date"],
        hardware=json.loads(line["hardware"]),
        versions=json.loads(line["versions"]),
        seconds=json.loads(line["seconds"]),
        rows=(row,),
    )
