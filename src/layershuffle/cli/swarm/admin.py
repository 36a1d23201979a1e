"""`layershuffle swarm drain`, `readmit` and `roll`: change a running swarm from its own machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from layershuffle.cli.command import Command
from layershuffle.cli.swarm.serving import state_flag
from layershuffle.extras import require

if TYPE_CHECKING:
    from layershuffle.swarm.server.operating import Operator


@dataclass(frozen=True, kw_only=True)
class _OperatorCommand(Command):
    """A change to the running swarm, by the operator's key."""

    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""

    def operator(self) -> AbstractContextManager[Operator]:
        """A connection to the swarm. Raises `UsageError` if none runs on this machine."""
        require("swarm")

        from layershuffle.swarm.server.operating import Operator

        return closing(Operator(self.state))


@dataclass(frozen=True)
class _NamedHostCommand(_OperatorCommand):
    """A change to one host."""

    host: str
    """Name of the host in the plan."""


@dataclass(frozen=True, kw_only=True)
class DrainCommand(_NamedHostCommand):
    """Let a host finish its work and take no more; run this on the machine of the server."""

    def run(self) -> int:
        """Wait until the host has nothing left to do."""
        with self.operator() as operator:
            empty = operator.command("drain", host=self.host)["empty"]
        # A drain waits for a while; visits under way end at their own deadlines in any case.
        end = "is empty" if empty else "still has work, which will end at its deadlines"
        print(
            f"Host {self.host} takes no new visits and {end}. "
            f"Next: layershuffle swarm readmit {quote(self.host)}{state_flag(self.state)}, or take "
            "its machine away"
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class ReadmitCommand(_NamedHostCommand):
    """Start an excluded, drained or dead host again; run this on the machine of the server."""

    def run(self) -> int:
        """Readmit the host; it serves again once its answers were found correct."""
        with self.operator() as operator:
            operator.command("readmit", host=self.host)
        print(f"Host {self.host} is starting. Next: layershuffle swarm status --address URL")
        return 0


@dataclass(frozen=True)
class RollCommand(_OperatorCommand):
    """Serve another export of the model, without a failed request; run this on its machine."""

    directory: Path
    """Directory of `layershuffle export`, of the same form as the model that is served."""

    def run(self) -> int:
        """Wait until hosts have loaded it beside the other, and it has taken over."""
        with self.operator() as operator:
            before = operator.command("roll", model=str(self.directory.absolute()))["before"]
        back = f"layershuffle swarm roll {quote(before)}{state_flag(self.state)}"
        print(f"{self.directory} is served. To take it back: {back}")
        return 0
