"""Block hosts as objects in this process: every failure at the turn of a switch.

For tests and comparisons without Ray. The contract suite (tests/swarm) runs over it and over Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.host import BlockHost, HostInfo, Misbehaviour
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostGone, HostUnavailable, Visit
from layershuffle.swarm.placement import Node
from layershuffle.swarm.wire import Packet


@dataclass
class _Place:
    """A host, and what is wrong with the way to it."""

    host: BlockHost
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)


class LocalHosts:
    """All hosts of a swarm on one machine, this process (`coordinator.Places`).

    `names`: the hosts that it is to run.
    """

    def __init__(self, names: Sequence[str], *, limits: Limits) -> None:
        self._node = Node("this-process", tuple(names), "127.0.0.1")
        self._limits = limits
        self._places: dict[str, _Place] = {}
        self.transport = LocalTransport(self)

    async def nodes(self) -> Sequence[Node]:
        """This process."""
        return (self._node,)

    async def start(self, name: str, *, node: str) -> HostInfo:
        """A new host without blocks, in the place of an earlier one of its name."""
        del node
        place = _Place(BlockHost(name, limits=self._limits))
        place.open.set()
        self._places[name] = place
        return place.host.info()

    async def load(self, name: str, program: bytes, *, tensors: Mapping[int, bytes]) -> None:
        """Give it blocks."""
        self._living(name).host.load(program, tensors)

    async def unload(self, name: str, blocks: Sequence[int]) -> None:
        """Take blocks from it."""
        self._living(name).host.unload(blocks)

    async def info(self, name: str) -> HostInfo:
        """What it holds and does."""
        return self._living(name).host.info()

    async def drain(self, name: str) -> None:
        """It takes no new visits."""
        self._living(name).host.drain()

    async def end(self, name: str) -> None:
        """End it, if there is one."""
        if name in self._places:
            self.kill(name)
            del self._places[name]

    async def misbehave(self, name: str, kind: Misbehaviour, *, factor: float) -> None:
        """For drills: "slow", "wrong" or "none"."""
        self._living(name).host.misbehave(kind, factor)

    def kill(self, name: str) -> None:
        """For drills: it is dead at once; visits under way fail."""
        self._places[name].dead.set()
        self._places[name].host.close()

    def freeze(self, name: str) -> None:
        """For drills: nothing goes to it or comes from it, and nobody is told."""
        self._living(name).open.clear()

    def thaw(self, name: str) -> None:
        """Undo `freeze`."""
        self._living(name).open.set()

    def _living(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None or place.dead.is_set():
            raise LayerShuffleError(f"The process of host {name} is dead")
        return place


class LocalTransport:
    """Visits to hosts of this process (`messages.Transport`)."""

    def __init__(self, hosts: LocalHosts) -> None:
        self._hosts = hosts

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer; see `messages.Transport`."""
        place = self._hosts._places.get(visit.host)
        if place is None:
            raise HostUnavailable(f"No host {visit.host} is known")
        work = asyncio.ensure_future(_through(place, visit, packet))
        death = asyncio.ensure_future(place.dead.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if place.dead.is_set():
                raise HostGone(f"The process of host {visit.host} is dead")
            return work.result()
        finally:
            work.cancel()
            death.cancel()


async def _through(place: _Place, visit: Visit, packet: Packet) -> Answer:
    await place.open.wait()
    answer = await place.host.visit(visit.blocks, packet, budget_ms=visit.limit * 1000)
    await place.open.wait()
    return answer
