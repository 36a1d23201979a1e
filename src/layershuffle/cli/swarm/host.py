"""`layershuffle swarm host`: let this machine hold blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.head import Security, become, tls_of
from layershuffle.cli.swarm.serving import require_extra

_ABOUT = (
    "Let this machine hold blocks for the head at --address, in the foreground. It may come and go "
    "at any time; which blocks it holds is up to the plan, by its --name."
)


@dataclass(kw_only=True)
class Options(Security):
    """Flags of `swarm host`."""

    address: str
    """Address of the head, as it printed it."""
    name: str
    """Name of this host in the plan; any other name makes it a spare."""
    ip: str
    """Address of this machine, in its private network, by which the others reach it."""
    port: int = 6500
    """First of the hundred ports that the host uses."""
    threads: int = 1
    """Threads of torch."""


def run(argv: Sequence[str]) -> int:
    """Become a member of the head's Ray cluster; ends when it is told to."""
    options = parse(Options, argv, command="swarm host", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.ray_config import (
        check_token,
        default_token,
        environment,
        host_command,
    )
    from layershuffle.swarm.ray_session import check_answers
    from layershuffle.swarm.server.admin import scratch_directory

    token = options.token or default_token()
    check_token(token)  # Ray itself would try for 20 seconds
    check_answers(options.address)
    become(
        host_command(
            scratch_directory(f"host-{options.port}"),
            address=options.address,
            name=options.name,
            ip=options.ip,
            port=options.port,
        ),
        environment(token, tls=tls_of(options), threads=options.threads),
    )
