"""The report of a bench. A throughput is never given without hardware, dtype and batch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layershuffle.bench.machine import matmul_ceiling
from layershuffle.bench.timing import median_phases
from layershuffle.core.compiling import BlockCompiler
from layershuffle.machine import versions
from layershuffle.text import counted, listing


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which a throughput was measured."""

    model: str
    batch: int
    dtype: str
    hardware: Mapping[str, Any]

    def __str__(self) -> str:
        threads = self.hardware["threads"]
        on = self.hardware["gpu"] or f"{self.hardware['processor']}, {counted(threads, 'thread')}"
        return f"{self.model}, batch {self.batch}, {self.dtype}, on {on}"


@dataclass(frozen=True, kw_only=True)
class CompileMode:
    """Whether the blocks were compiled. `reason`: the reason for eager mode."""

    name: str = "eager"
    reason: str | None = None
    graphs: int = 0
    recompiles: int = 0

    def __str__(self) -> str:
        if self.name == "eager":
            return f"eager ({self.reason})" if self.reason else "eager"
        return f"compiled, {self.graphs} graphs, {self.recompiles} recompiles after warm-up"


def mode_of(compiler: BlockCompiler, *, graphs_before: int) -> CompileMode:
    """The mode in which the blocks ran. `graphs_before`: graphs at the end of the warm-up."""
    return CompileMode(
        name="compiled" if compiler.on else "eager",
        reason=compiler.reason,
        graphs=compiler.graphs,
        recompiles=compiler.graphs - graphs_before,
    )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """`unit` per second: median, lowest and highest over the timed steps, without warm-up."""

    unit: str
    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The result of one bench. A field that does not apply is `None` or empty.

    `mfu`: the model's FLOP/s as a share of `ceiling`, the FLOP/s of a matrix product in this run.
    `phases`: median milliseconds of a step by phase. `memory`: peak bytes, and a description of the
    memory. `syncs`: times per step that the host waited for the GPU. `facts`: other results.
    """

    kind: str
    conditions: Conditions
    rate: Throughput
    mode: CompileMode | None = None
    mfu: float | None = None
    ceiling: float | None = None
    flops_per_image: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[int, str] | None = None
    syncs: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def throughput(seconds: Sequence[float], images: int, *, unit: str = "images") -> Throughput:
    """The throughput of steps that took `seconds` with `images` each."""
    return Throughput(
        unit=unit,
        # The median, which a few slow steps on a shared machine do not change.
        median=images / statistics.median(seconds),
        low=images / max(seconds),
        high=images / min(seconds),
        steps=len(seconds),
    )


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """The measurements of a bench of steps.

    `seconds`: time of every timed step. `phases`: seconds by phase of further steps. `memory`: peak
    bytes, and a description of the memory. `syncs`: total number in all timed steps.
    """

    seconds: list[float]
    phases: list[dict[str, float]]
    mode: CompileMode
    memory: tuple[int, str]
    syncs: int

    def report(
        self,
        kind: str,
        conditions: Conditions,
        *,
        device: str,
        flops: int,
        ceiling: float,
        facts: Mapping[str, Any],
    ) -> BenchReport:
        """The report. `flops` per image; `ceiling` as measured before; this measures it again."""
        rate = throughput(self.seconds, conditions.batch)
        # The higher of two, because other work on the machine may have slowed one of them.
        ceiling = max(ceiling, matmul_ceiling(device, conditions.dtype))
        return BenchReport(
            kind=kind,
            conditions=conditions,
            rate=rate,
            mode=self.mode,
            mfu=rate.median * flops / ceiling,
            ceiling=ceiling,
            flops_per_image=flops,
            phases={name: 1e3 * value for name, value in median_phases(self.phases).items()},
            memory=self.memory,
            # None, not 0, because nothing was counted on a CPU.
            syncs=self.syncs / len(self.seconds) if device == "cuda" else None,
            facts=facts,
            versions=versions(),
        )


def report_text(report: BenchReport) -> str:
    """The report as text; `dataclasses.asdict` gives it for programs."""
    rate = report.rate
    steps = f"{rate.low:,.1f} to {rate.high:,.1f}, {rate.steps} steps"
    rows = {f"{rate.unit}/s": f"{rate.median:,.1f} ({steps})"}
    if report.mode is not None:
        rows["blocks"] = str(report.mode)
    if report.mfu is not None and report.ceiling is not None:
        rows["MFU"] = (
            f"{100 * report.mfu:.1f} % of {report.ceiling / 1e12:.3g} TFLOP/s, a "
            f"{report.conditions.dtype} matrix product measured here just now; "
            f"{(report.flops_per_image or 0) / 1e9:.3g} GFLOP per image"
        )
    if report.phases:
        parts = [f"{name} {ms:.2f}" for name, ms in report.phases.items()]
        rows["step"] = f"{sum(report.phases.values()):.2f} ms: {', '.join(parts)}"
    if report.memory is not None:
        rows["memory"] = f"{report.memory[0] / 2**20:,.0f} MiB at most: {report.memory[1]}"
    if report.syncs is not None:
        rows["syncs"] = f"{report.syncs:g} per step"
    rows |= {name: str(value) for name, value in report.facts.items()}
    return f"{report.kind}: {report.conditions}\n{listing([*rows.items()])}"
