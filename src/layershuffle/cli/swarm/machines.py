"""`layershuffle swarm head` and `layershuffle swarm host`: the machines of a swarm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from layershuffle.cli.swarm.options import TlsOptions, tls_of
from layershuffle.extras import require


@dataclass(frozen=True, kw_only=True)
class HeadCommand(TlsOptions):
    """Start the head of a swarm of several machines, in the foreground; it holds no blocks.

    The first start makes the token. Copy it to every machine that should hold blocks (mode 0600).
    Whoever has the token can run code on every machine of the swarm.
    """

    ip: str
    """Address of this machine in its private network, by which the others reach it."""
    port: int = 6400
    """First of the hundred ports that the head uses."""
    store: Path | None = None
    """Directory of the head's state, so that a restarted head loses nothing (default:
    ~/.local/state/layershuffle/swarm/store)."""

    def run(self) -> int:
        """Become Ray's head with the swarm's settings; it runs until it is stopped."""
        require("swarm")

        from layershuffle.swarm.ray_config import (
            default_token,
            environment,
            head_command,
            new_token,
        )
        from layershuffle.swarm.server.admin import scratch_directory, state_directory

        token = self.token or default_token()
        # A later start keeps it: the other machines have copies.
        if not token.exists():
            new_token(token)
        tls = tls_of(self)
        store = self.store or state_directory() / "store"
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Named by the port, so that a head and hosts can share a machine.
        scratch = scratch_directory(f"head-{self.port}")
        command = head_command(scratch, ip=self.ip, port=self.port)
        address = f"{self.ip}:{self.port}"
        print(
            f"The head is at {address}; its token is {token}.\n"
            f"On every machine that should hold blocks, copy the token, then run\n"
            f"  layershuffle swarm host --address {address} --name NAME --ip ITS-IP\n"
            f"Here, in another shell: layershuffle swarm deploy PLAN.yaml --address {address}",
            flush=True,
        )
        _become(command, environment(token, tls=tls, store=store))


@dataclass(frozen=True, kw_only=True)
class HostCommand(TlsOptions):
    """Let this machine hold blocks for the head at --address, in the foreground.

    It may come and go at any time. The plan says by --name which blocks it holds.
    """

    address: str
    """Address of the head, as the head printed it."""
    name: str
    """Name of this host in the plan; any other name makes it a spare."""
    ip: str
    """Address of this machine in its private network, by which the others reach it."""
    port: int = 6500
    """First of the hundred ports that the host uses."""
    threads: int = 1
    """Threads of torch."""

    def run(self) -> int:
        """Become a member of the head's Ray cluster; it runs until it is stopped."""
        require("swarm")

        from layershuffle.swarm.ray_config import (
            check_token,
            default_token,
            environment,
            host_command,
        )
        from layershuffle.swarm.ray_session import check_answers
        from layershuffle.swarm.server.admin import scratch_directory

        token = self.token or default_token()
        check_token(token)  # Ray itself would try for 20 seconds
        check_answers(self.address)
        command = host_command(
            scratch_directory(f"host-{self.port}"),
            address=self.address,
            name=self.name,
            ip=self.ip,
            port=self.port,
        )
        _become(command, environment(token, tls=tls_of(self), threads=self.threads, port=self.port))


def _become(command: Sequence[str], settings: dict[str, str]) -> NoReturn:
    """This process becomes `command`, so that its supervisor watches Ray itself."""
    # What Python still buffers is lost here, so whatever is printed before must be flushed.
    os.execve(command[0], list(command), {**os.environ, **settings})
