"""`layershuffle swarm readmit HOST`: start a shut-out, drained or dead host anew."""

from __future__ import annotations

from collections.abc import Sequence

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.drain import Options
from layershuffle.cli.swarm.serving import require_extra


def run(argv: Sequence[str]) -> int:
    """Begin it; the host comes back once its canaries are right."""
    about = "Start a shut-out, drained or dead host anew; run on the machine of the gateway."
    options = parse(Options, argv, command="swarm readmit", about=about)
    require_extra()

    from layershuffle.swarm.server.admin import operator_of

    with operator_of(options.state) as operator:
        operator.readmit(options.host)
    print(f"Host {options.host} is starting. Next: layershuffle swarm status")
    return 0
