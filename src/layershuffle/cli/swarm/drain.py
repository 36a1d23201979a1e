"""`layershuffle swarm drain HOST`: let a host finish and take no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import require_extra


@dataclass
class Options:
    """Flags of commands about one host."""

    host: tyro.conf.Positional[str]
    """Name of the host."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""


def run(argv: Sequence[str]) -> int:
    """Wait until the host has nothing left to do."""
    about = "Let a host finish what it has and take no more; run on the machine of the gateway."
    options = parse(Options, argv, command="swarm drain", about=about)
    require_extra()

    from layershuffle.swarm.server.admin import operator_of

    with operator_of(options.state) as operator:
        empty = operator.drain(options.host)
    end = "is empty" if empty else "still has work, which will end at its deadlines"
    print(
        f"Host {options.host} takes no new visits and {end}. "
        f"Next: layershuffle swarm readmit {options.host}, or take its machine away"
    )
    return 0
