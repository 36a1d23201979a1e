"""`layershuffle swarm plan HOSTS.yaml`: which host is to hold which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.plan import DEFAULT_MODEL
from layershuffle.swarm.planning.problem import Objective

_ABOUT = (
    "Find which host is to hold which blocks of a model, and what to expect of it, beside the same "
    "for fixed-order pipelines. HOSTS.yaml says how large, fast, far away and reliable hosts are."
)


@dataclass(kw_only=True)
class Options:
    """Flags of `swarm plan`."""

    hosts: tyro.conf.Positional[Path]
    """The hosts: YAML, see docs/swarm.md."""
    model: str = DEFAULT_MODEL
    """Model to serve."""
    objective: Objective = "latency"
    """throughput, latency, or lifetime (the smallest battery lasts longest)."""
    replicas: int = 1
    """Hosts that hold each block."""
    reach: float | None = None
    """Probability with which each block is to be reachable."""
    floor: float | None = None
    """lifetime: requests may leave out blocks as long as this accuracy (percent) is to be had."""
    wire: Wire = "fp32"
    """Type of states on the wire: fp32, fp16 or int8."""
    time_limit: float = 20.0
    """Seconds for the exact solver."""
    out: Path | None = None
    """Write the plan to this file, for `swarm deploy`."""


def run(argv: Sequence[str]) -> int:
    """Plan, print, and write."""
    options = parse(Options, argv, command="swarm plan HOSTS", about=_ABOUT)

    from layershuffle.files import write_text
    from layershuffle.swarm.plan import plan_text
    from layershuffle.swarm.planning import plan, plan_report, read_hosts
    from layershuffle.swarm.service import model_facts

    hosts = read_hosts(options.hosts)
    facts = model_facts(options.model, wire=options.wire)
    found, prediction = plan(
        hosts,
        facts,
        objective=options.objective,
        replicas=options.replicas,
        reach=options.reach,
        floor=options.floor,
        time_limit=options.time_limit,
        model=options.model,
        wire=options.wire,
    )
    print(
        f"A block of one image takes {facts.block_ms:.3g} ms here, just measured: that is "
        "`speed: 1` (block_ms or blocks_per_s in the file come before).\n"
    )
    print(plan_report(found, prediction))
    if options.out is not None:
        write_text(options.out, plan_text(found))
        print(f"In {options.out}. Next: layershuffle swarm simulate {options.out}, or swarm deploy")
    return 0
