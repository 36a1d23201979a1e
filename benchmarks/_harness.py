"""The harness of `benchmarks/`: claims, their rows and bounds, and result files.

A script states a `Claim` and calls `run_claim`, which measures its rows, judges them and writes
`results/THEME_HARDWARE_DATE.json`. `scripts/performance_page.py` puts these files into the pages.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from layershuffle.bench.timing import SMOKE, Effort, Pairs, Side, paired
from layershuffle.errors import LayerShuffleError
from layershuffle.files import write_text
from layershuffle.machine import hardware, torch_threads, versions

SCHEMA = 1
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
    "training step, precision": ("bf16 autocast / bf16-pure", "", None),
    "training step, compiled": ("eager / compiled", "", None),
    "inference, compiled": ("eager / compiled", "", Bound("at_least", 1.12)),
    "training step, plain": ("plain Trainer, as the authors' / ours", "", Bound("at_least", 2.5)),
    "training, four orders per batch": ("in groups of 160:", "images/s", None),
    "reading": ("JPEG files of 500 x 375, all cores:", "images/s", Bound("at_least", 3500)),
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


# --- claims and result files ----------------------------------------------------------------------


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
    """The content of a result file. `complete`: every row of the claim is there.

    `seconds`: how long the measurement took, `None` in files of before that was noted.
    """

    schema: int
    theme: str
    claim: str
    date: str
    command: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: tuple[ClaimRow, ...]
    complete: bool
    seconds: float | None = None

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
    """Measure `claim`, tell every row and write `results/THEME_HARDWARE_DATE.json` beside `file`.

    Until the last row is measured the rows go into a file of that name and ".part": a run that
    fails keeps what it measured and replaces no whole result. Returns the exit code: 1 if a bound
    does not hold. With `--smoke` nothing is judged, and nothing is written without `--out DIR`.
    """
    parser = argparse.ArgumentParser(description=claim.text)
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds; judges nothing")
    parser.add_argument("--out", type=Path, help="where the result file goes")
    options = parser.parse_args(argv)
    effort = SMOKE if options.smoke else Effort()
    out = options.out or (None if options.smoke else Path(file).parent / "results")
    begun = time.monotonic()
    with torch_threads(claim.threads):
        result = ClaimResult(
            schema=SCHEMA,
            theme=claim.theme,
            claim=claim.text,
            date=time.strftime("%Y-%m-%d"),
            command=f"python benchmarks/{Path(file).name}",
            hardware=hardware(claim.precision),
            versions=versions(),
            rows=(),
            complete=False,
        )
        for row in claim.rows(effort):
            tell(row.text(judged=not options.smoke))
            result = replace(result, rows=(*result.rows, row))
            if out is not None:
                part = write_result(result, out)
    if out is not None and result.rows:
        result = replace(result, complete=True, seconds=round(time.monotonic() - begun, 1))
        tell(f"Written: {write_result(result, out)}, after {result.seconds:.0f} s")
        part.unlink()
    return int(not options.smoke and any(row.holds is False for row in result.rows))


def write_result(result: ClaimResult, directory: Path) -> Path:
    """Write the file of `result`, which ends in .part if it is not whole, and return its path."""
    machine = result.hardware["gpu"] or result.hardware["processor"]
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    ending = ".json" if result.complete else ".json.part"
    path = directory / f"{result.theme}_{name}_{result.date}{ending}"
    rows = [{**asdict(row), "median": row.median, "holds": row.holds} for row in result.rows]
    text = json.dumps({**asdict(result), "rows": rows}, indent=1)
    # People read result files too: a list of numbers stands on one line.
    text = re.sub(r"\[[\s\d.,eE+-]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_text(path, text + "\n")
    return path


def read_result(path: Path) -> ClaimResult:
    """The content of a file of `write_result`. Raises `LayerShuffleError` for anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(_row(row) for row in fields.pop("rows"))
        return ClaimResult(**fields, rows=rows)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LayerShuffleError(
            f"This is no result of a benchmark ({error})",
            place=path,
            hint="delete it and run make bench",
        ) from error


def _row(fields: dict[str, Any]) -> ClaimRow:
    fields = {name: value for name, value in fields.items() if name not in ("median", "holds")}
    fields["bound"] = None if fields["bound"] is None else Bound(**fields["bound"])
    fields["values"] = tuple(fields["values"])
    fields["pairs"] = tuple((a, b) for a, b in fields["pairs"])
    return ClaimRow(**fields)


def newest(directory: Path) -> list[ClaimResult]:
    """The newest result in `directory` of every theme and machine, by theme.

    Raises `LayerShuffleError` for an incomplete one: the page would be incomplete without a word.
    """
    results: dict[tuple[str, str], ClaimResult] = {}
    for path in sorted(directory.glob("*.json")):  # dates sort as text
        if '"theme"' not in path.read_text(encoding="utf-8"):
            continue  # swarm_load.py keeps a file of another form there
        result = read_result(path)
        if not result.complete:
            raise LayerShuffleError(
                "This result is not complete: its benchmark stopped before its last row",
                place=path,
                hint=f"delete it and run {result.command}",
            )
        results[result.theme, result.machine] = result
    return [results[key] for key in sorted(results)]
