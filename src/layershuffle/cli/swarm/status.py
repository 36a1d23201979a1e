"""`layershuffle swarm status`: a running swarm at a glance."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import read_keys, require_extra
from layershuffle.errors import UsageError

if TYPE_CHECKING:
    from layershuffle.swarm.server.schemas import SwarmAnswer

ADDRESS = "http://127.0.0.1:8000"
KEY_VARIABLE = "LAYERSHUFFLE_API_KEY"


@dataclass
class Gateway:
    """Flags about the gateway that is asked."""

    address: str = ADDRESS
    """Address of the gateway, http:// or https://."""
    api_key_file: Path | None = None
    """File with the key of the gateway, if it takes one; its owner's alone (mode 0600). Default:
    the environment variable LAYERSHUFFLE_API_KEY."""
    api_key: str | None = None
    """The key itself. Other users of this machine can see it while the command runs."""
    authority: Path | None = None
    """For https: file of the certificate to trust (default: the well-known authorities)."""


@dataclass
class Options(Gateway):
    """Flags of `swarm status`."""

    json: bool = False
    """Print everything as JSON."""


def run(argv: Sequence[str]) -> int:
    """Print hosts, blocks, waiting work, latencies and health."""
    about = "Show hosts, blocks, waiting work, latency and health of a running swarm."
    options = parse(Options, argv, command="swarm status", about=about)
    require_extra()

    from layershuffle.swarm.client import SwarmClient

    with SwarmClient(options.address, **client_options(options)) as client:
        swarm = client.swarm()
    print(json.dumps(swarm.model_dump(), indent=2) if options.json else table(swarm))
    return 0


def client_options(gateway: Gateway) -> dict[str, Any]:
    """What the flags tell a client beside the address.

    Raises `UsageError` for two keys, and for a key file that others may read or that holds not
    exactly one.
    """
    return {"api_key": _key(gateway), "authority": gateway.authority}


def _key(gateway: Gateway) -> str | None:
    if gateway.api_key_file is None:
        return gateway.api_key or os.environ.get(KEY_VARIABLE) or None
    if gateway.api_key is not None:
        raise UsageError("The key is given twice", hint="leave --api-key out")
    keys = read_keys(gateway.api_key_file)
    if len(keys) != 1:
        raise UsageError(
            f"The file holds {len(keys)} keys", place=gateway.api_key_file, hint="keep one"
        )
    return keys[0]


def table(swarm: SwarmAnswer) -> str:
    """A line per host; times are milliseconds."""
    width = max([4, *(len(host.name) for host in swarm.hosts)])
    lines = [
        f"{'host':<{width}}  {'condition':<9}{'waiting':>8}{'block ms':>9}{'link ms':>9}  blocks"
    ]
    for host in swarm.hosts:
        blocks = ", ".join(map(str, host.blocks))
        times = "".join(
            f"{'-' if ms is None else format(ms, '.1f'):>9}"
            for ms in (host.compute_ms, host.link_ms)
        )
        why = f"  ({host.why})" if host.why else ""
        lines.append(
            f"{host.name:<{width}}  {host.condition:<9}{host.waiting:>8}{times}  {blocks}{why}"
        )
    return "\n".join(lines)
