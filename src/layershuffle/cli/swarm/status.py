"""`layershuffle swarm status`: a running swarm at a glance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layershuffle.cli.parsing import parse

if TYPE_CHECKING:
    from layershuffle.swarm.gateway.answers import SwarmAnswer

ADDRESS = "http://127.0.0.1:8000"


@dataclass
class Options:
    """Flags of `swarm status`."""

    address: str = ADDRESS
    """Address of the gateway."""
    api_key: str | None = None
    """Key of the gateway, if it takes one."""
    json: bool = False
    """Print everything as JSON."""


def run(argv: Sequence[str]) -> int:
    """Print hosts, blocks, waiting work, latencies and health."""
    about = "Show hosts, blocks, waiting work, latency and health of a running swarm."
    options = parse(Options, argv, command="swarm status", about=about)

    from layershuffle.swarm.client import SwarmClient

    with SwarmClient(options.address, api_key=options.api_key) as client:
        swarm = client.swarm()
    print(json.dumps(swarm.model_dump(), indent=2) if options.json else table(swarm))
    return 0


def table(swarm: SwarmAnswer) -> str:
    """A line per host; times are milliseconds."""
    width = max([4, *(len(host.name) for host in swarm.hosts)])
    lines = [f"{'host':<{width}}  {'condition':<9}{'waiting':>8}{'block':>8}{'link':>8}  blocks"]
    for host in swarm.hosts:
        blocks = ", ".join(map(str, host.blocks))
        times = "".join(
            f"{'-' if ms is None else format(ms, '.1f'):>8}"
            for ms in (host.compute_ms, host.link_ms)
        )
        why = f"  ({host.why})" if host.why else ""
        lines.append(
            f"{host.name:<{width}}  {host.condition:<9}{host.waiting:>8}{times}  {blocks}{why}"
        )
    return "\n".join(lines)
