"""Block hosts as objects in this process.

For tests and comparisons without Ray. The contract suite (tests/swarm) runs over it and over Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from layershuffle.swarm.host import BlockHost, HostInfo
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostUnavailable, Packet, Visit
from layershuffle.swarm.placement import Carrier, HostCall, Node


class LocalHosts:
    """All hosts of a swarm in this process, as one machine (`placement.HostBackend`).

    `names`: the hosts that it runs.
    """

    def __init__(self, names: Sequence[str], *, limits: Limits) -> None:
        self._node = Node("this-process", tuple(names), "127.0.0.1")
        self._limits = limits
        self._hosts: dict[str, BlockHost] = {}
        self.transport = self  # a visit is a call

    async def nodes(self) -> Sequence[Node]:
        """This process, as the only machine."""
        return (self._node,)

    async def start(self, name: str, *, node: str) -> HostInfo:
        """Start a new host without blocks, which replaces an earlier one of its name."""
        del node
        self._hosts[name] = BlockHost(name, limits=self._limits)
        return self._hosts[name].info()

    async def end(self, name: str) -> None:
        """End the host, if there is one; its visits fail."""
        if host := self._hosts.pop(name, None):
            host.close()

    def forget(self) -> None:
        """End all hosts; their visits fail."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    async def call(self, name: str, method: HostCall, *args: Any) -> Any:
        """The result of this method of the host."""
        # In a thread, because a load takes long.
        return await asyncio.to_thread(getattr(self._host(name), method), *args)

    def carriers(self) -> Mapping[str, Carrier]:
        """How visits reach each host: by calls in this process."""
        return dict.fromkeys(self._hosts, Carrier("process"))

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer; see `messages.Transport`."""
        return await self._host(visit.host).visit((visit.block,), packet, budget_ms=visit.budget_ms)

    def _host(self, name: str) -> BlockHost:
        if name not in self._hosts:
            raise HostUnavailable(f"No host {name} is known")
        return self._hosts[name]
