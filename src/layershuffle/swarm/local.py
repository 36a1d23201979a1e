"""Block hosts as objects in this process: every failure at the turn of a switch.

For tests and comparisons without Ray. The contract suite (tests/swarm) runs over it and over Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layershuffle.swarm.host import BlockHost, HostInfo, Misbehaviour
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostGone, HostUnavailable, Visit
from layershuffle.swarm.placement import Node
from layershuffle.swarm.wire import Packet


@dataclass
class _Place:
    """A host, and what is wrong with it: `awake` unless frozen, `open` unless cut off."""

    host: BlockHost
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def reached(self) -> None:
        """Wait until it can be reached, and hears."""
        while not (self.open.is_set() and self.awake.is_set()):
            await self.open.wait()
            await self.awake.wait()


class LocalHosts:
    """All hosts of a swarm on one machine, this process (`placement.Places`).

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
        place.awake.set()
        place.open.set()
        self._places[name] = place
        return place.host.info()

    async def load(self, name: str, program: bytes, *, tensors: Mapping[int, bytes]) -> None:
        """Give it blocks."""
        host = (await self._reached(name)).host
        await asyncio.to_thread(host.load, program, tensors)

    async def unload(self, name: str, blocks: Sequence[int]) -> None:
        """Take blocks from it."""
        (await self._reached(name)).host.unload(blocks)

    async def info(self, name: str) -> HostInfo:
        """What it holds and does."""
        return (await self._reached(name)).host.info()

    async def drain(self, name: str) -> None:
        """It takes no new visits."""
        (await self._reached(name)).host.drain()

    async def end(self, name: str) -> None:
        """End it, if there is one."""
        place = self._places.pop(name, None)
        if place is not None:
            _die(place)

    async def misbehave(self, name: str, kind: Misbehaviour, *, factor: float) -> None:
        """For drills: "slow", "wrong" or "none"."""
        (await self._reached(name)).host.misbehave(kind, factor)

    def kill(self, name: str) -> None:
        """For drills: it is dead at once; visits under way fail."""
        _die(self._living(name))

    def freeze(self, name: str) -> None:
        """For drills: it stops without a word. What it computes at that moment it still does."""
        self._living(name).awake.clear()

    def thaw(self, name: str) -> None:
        """Undo `freeze`."""
        self._living(name).awake.set()

    def cut(self, name: str) -> None:
        """For drills: nothing goes to it or comes from it, and nobody is told."""
        self._living(name).open.clear()

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        self._living(name).open.set()

    async def _reached(self, name: str) -> _Place:
        await self._living(name).reached()
        return self._living(name)

    def _living(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None or place.dead.is_set():
            raise HostGone(f"The process of host {name} is dead")
        return place


def _die(place: _Place) -> None:
    place.dead.set()
    place.host.close()
    place.awake.set()  # whoever waits for it is told
    place.open.set()


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
    await place.reached()
    answer = await place.host.visit(visit.blocks, packet, budget_ms=visit.budget_ms)
    await place.reached()
    return answer
