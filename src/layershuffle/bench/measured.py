"""From what was measured to what is reported, the same for training and inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layershuffle.bench.choices import Chosen
from layershuffle.bench.machine import matmul_ceiling
from layershuffle.bench.marks import median_phases
from layershuffle.bench.report import Mode, Report, throughput
from layershuffle.compiling import BlockCompiler
from layershuffle.machine import versions

WARM_UP, PHASED = 3, 5
"""Steps before the timed ones, which are not counted, and after them, to see the phases."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`seconds` of every timed step; seconds by phase of the steps after those; `memory`: bytes at
    the highest, and whose; `syncs` in all timed steps.
    """

    seconds: Sequence[float]
    phases: Sequence[Mapping[str, float]]
    mode: Mode
    memory: tuple[int, str]
    syncs: int


def report_of(
    kind: str,
    chosen: Chosen,
    *,
    measured: Measured,
    flops_per_image: int,
    ceiling: float,
    facts: Mapping[str, Any],
) -> Report:
    """The report. `ceiling`: FLOP/s of a matrix product before; it is measured again here."""
    rate = throughput(measured.seconds, chosen.batch)
    ceiling = max(ceiling, matmul_ceiling(chosen.device, chosen.precision))
    return Report(
        kind=kind,
        conditions=chosen.conditions(),
        rate=rate,
        mode=measured.mode,
        mfu=rate.median * flops_per_image / ceiling,
        ceiling=ceiling,
        flops_per_image=flops_per_image,
        phases={name: 1e3 * value for name, value in median_phases(measured.phases).items()},
        memory=measured.memory,
        syncs=measured.syncs / len(measured.seconds) if chosen.device == "cuda" else None,
        facts=facts,
        versions=versions(),
    )


def mode_of(compiler: BlockCompiler, *, graphs_before: int) -> Mode:
    """Whether the blocks ran compiled, and how many graphs came after warm-up."""
    return Mode(
        name="compiled" if compiler.on else "eager",
        reason=compiler.reason,
        graphs=compiler.graphs,
        recompiles=compiler.graphs - graphs_before,
    )
