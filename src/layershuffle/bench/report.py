"""The report of a bench. A throughput is never given without hardware, dtype and batch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layershuffle.text import counted, listing


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The result of one bench.

    `rates`: images per second of every timed step. `blocks`: whether they were compiled, the
    reason if not, the graphs, and the recompiles after the warm-up. `ceiling`: FLOP/s of a matrix
    product in this run. `phases`: median milliseconds of a step by phase. `memory`: peak bytes, and
    a description of the memory.
    """

    kind: str
    model: str
    batch_size: int
    orders_per_batch: int
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    rates: tuple[float, ...]
    blocks: Mapping[str, Any]
    ceiling: float
    flops_per_image: int
    phases: Mapping[str, float]
    memory: tuple[int, str]

    @property
    def rate(self) -> float:
        """The median rate, which a few slow steps on a shared machine do not change."""
        return statistics.median(self.rates)

    @property
    def mfu(self) -> float:
        """The model's FLOP/s as a share of the ceiling."""
        return self.rate * self.flops_per_image / self.ceiling

    @property
    def conditions(self) -> str:
        """Model, batch, dtype and hardware in words."""
        on = self.hardware["gpu"] or (
            f"{self.hardware['processor']}, {counted(self.hardware['threads'], 'thread')}"
        )
        return f"{self.model}, batch {self.batch_size}, {self.hardware['precision']}, on {on}"


def report_text(report: BenchReport) -> str:
    """The report as text; `dataclasses.asdict` gives it for programs."""
    rates, blocks = report.rates, report.blocks
    parts = [f"{name} {ms:.2f}" for name, ms in report.phases.items()]
    rows = {
        "images/s": f"{report.rate:,.1f} ({min(rates):,.1f} to {max(rates):,.1f}, "
        f"{len(rates)} steps)",
        "blocks": f"eager ({blocks['reason']})"
        if blocks["mode"] == "eager"
        else f"compiled, {counted(blocks['graphs'], 'graph')}, "
        f"{counted(blocks['recompiles'], 'recompile')} after warm-up",
        "orders": f"{report.orders_per_batch} per batch",
        "MFU": f"{100 * report.mfu:.1f} % of {report.ceiling / 1e12:.3g} TFLOP/s, a "
        f"{report.hardware['precision']} matrix product measured here just now; "
        f"{report.flops_per_image / 1e9:.3g} GFLOP per image",
        "step": f"{sum(report.phases.values()):.2f} ms: {', '.join(parts)}",
        "memory": f"{report.memory[0] / 2**20:,.0f} MiB at most: {report.memory[1]}",
    }
    return f"{report.kind}: {report.conditions}\n{listing([*rows.items()])}"
