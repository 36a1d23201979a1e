"""`layershuffle swarm swap HOST BLOCK --donor MODEL`: new weights under a running swarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import require_extra


@dataclass
class Options:
    """Flags of `swarm swap`."""

    host: tyro.conf.Positional[str]
    """Name of the host."""
    block: tyro.conf.Positional[int]
    """Id of the block that it holds."""
    donor: str
    """Model that the block comes from: a sibling, refined from the same base."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""


def run(argv: Sequence[str]) -> int:
    """Swap it; no request is lost."""
    about = "Let a block of a host come from a sibling model; run on the machine of the gateway."
    options = parse(Options, argv, command="swarm swap", about=about)
    require_extra()

    from layershuffle.swarm.server.admin import operator_of

    with operator_of(options.state) as operator:
        operator.swap(options.host, options.block, donor=options.donor)
    print(f"Block {options.block} of host {options.host} comes from {options.donor} now.")
    return 0
