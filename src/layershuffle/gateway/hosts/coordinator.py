"""The coordinator: which host holds which blocks, and when the router may send it visits.

It gives blocks to the hosts that dial in (`assignment`), tests every block that a host has loaded
(`health`), and tells the router of those that passed. Use it from the router's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.assignment import (
    COPIES,
    HostCapacity,
    Loading,
    Stay,
    assign,
    overdue,
    settled,
)
from layershuffle.gateway.brain.state import HostState, Visit
from layershuffle.gateway.hosts.children import Children
from layershuffle.gateway.hosts.connections import ConnectedHost, ConnectedHosts
from layershuffle.gateway.hosts.health import ROUNDING, HealthMonitor, Reference
from layershuffle.gateway.hosts.router import Router
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.shut_out import ShutOut
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import counted

_LOOK = 0.1  # seconds between looks at who is there
_GRACE = 0.3  # seconds in which a host may come back before others take its blocks
_AGAIN = 0.2  # seconds after which a block that failed its test is tested again
_MOST_GONE = 64  # hosts that have left and are still listed
_QUIET = 10.0  # seconds between two lines of the log on one host
_SAID = {
    "healthy": (logging.INFO, "is back"),
    "suspect": (logging.WARNING, "is suspected"),
    "shut-out": (logging.WARNING, "is shut out"),
    "draining": (logging.INFO, "takes no more visits"),
    "gone": (logging.WARNING, "has gone"),
}
_JOINED = logging.INFO, "has joined"
_MILLI = 1000.0
_log = logging.getLogger(__name__)


class Coordinator:
    """Keeps the blocks of `model` on the hosts that are there; `run` works until cancelled.

    `copies`: hosts that hold each block, where they have room; `children`: the hosts that this
    gateway starts itself, if any. `away`: hosts that take no visits until `readmit`; `shut_out`:
    those that gave wrong answers, also to the process before; `watching`: whether `run` is active.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        router: Router,
        connected: ConnectedHosts,
        copies: int = COPIES,
        shut_out: ShutOut | None = None,
    ) -> None:
        self.model = model
        self.router = router
        self.connected = connected
        self.children = Children(limits=router.limits)
        self.copies = copies
        self.watching = False
        self.health = HealthMonitor(router)
        self.away = set[str]()
        self.shut_out = shut_out or ShutOut()
        for name, why in list(self.shut_out.why.items())[-_MOST_GONE:]:
            router.put(HostState(name, frozenset(), condition="shut-out", why=why))
        self._references = _references_of(model)
        self._departed: dict[str, tuple[HostCapacity, float]] = {}
        self._planned: list[HostCapacity] = []
        # By name, so that nobody is rid of it by dialling in again.
        self._loading: dict[str, Loading] = {}
        self._stays: dict[str, Stay] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._changed = asyncio.Event()
        self._tests = set[asyncio.Task[None]]()
        connected.watcher = self

    async def run(self) -> None:
        """Give blocks to hosts, and send canaries, until cancelled."""
        self.watching = True
        try:
            # If the health check breaks, so does this, and both are started again.
            async with asyncio.TaskGroup() as group:
                group.create_task(self.health.run())
                while True:
                    self._remember_shut_out()
                    self._plan()
                    self._say()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK):
                            await self._changed.wait()
                    self._changed.clear()
        finally:
            self.watching = False

    async def ready(
        self, hosts: int, *, within: float, say: Callable[[str], object] = _log.info
    ) -> list[int]:
        """Wait for this number of hosts and for all blocks; returns the blocks that nobody holds.

        For blocks that no host has room for it does not wait. It only waits, so `run` must run at
        the same time. `say` gets a sentence for each host.
        """
        end = self.router.clock() + within
        reported = set[str]()
        while True:
            up = {name for name, host in self.connected.items() if self.is_up(host)}
            for name in sorted(up - reported):
                reported.add(name)
                say(f"{name} is up with {counted(len(self.router.swarm[name].blocks), 'block')}")
            lacking = self.router.swarm.lacking(self.model.hosted)
            loading = any(m.assigned.intersection(lacking) for m in self.connected.values())
            if (len(up) >= hosts and not loading) or self.router.clock() >= end:
                return lacking
            await asyncio.sleep(_LOOK / 5)

    def is_up(self, host: ConnectedHost) -> bool:
        """Whether a host serves all blocks that it is to hold: none, if others hold enough."""
        known = self.router.swarm.get(host.name)
        planned = any(capacity.name == host.name for capacity in self._planned)
        return planned and known is not None and known.blocks == host.assigned

    async def close(self) -> None:
        """Stop testing, and end all connections."""
        for task in self._tests:
            task.cancel()
        await asyncio.gather(*self._tests, return_exceptions=True)
        await self.health.close()
        self.connected.close()

    # --- what hosts do (`connections.HostWatcher`) ------------------------------------------------

    def joined(self, host: ConnectedHost) -> None:
        """Make the host known, with what it held where it comes back in time."""
        self._remember_shut_out()
        returned = self._departed.pop(host.name, None)
        loading = frozenset[int]() if returned is None else returned[0].blocks
        known = HostState(host.name, frozenset(), loading=loading)
        if host.name in self.shut_out.why:
            # A new connection is no proof of honesty.
            why = self.shut_out.why[host.name]
            known = known._replace(condition="shut-out", why=why, loading=frozenset())
        elif host.name in self.away:
            known = state.draining(known)
        elif host.hello["memory"] < (least := min(file.size for file in self.model.weights)):
            why = f"its --memory is for no block: one takes {math.ceil(least / 1000)}KB"
            known = known._replace(why=why)
        now = self.router.clock()
        stay = replace(self._stays.get(host.name, Stay(now)), since=now)
        if not settled(stay, now=now, limits=self.router.limits):
            known = known._replace(why=known.why or _waits(stay))
        self.router.put(known)
        self._stays[host.name] = stay
        before_it = self._loading.get(host.name, Loading(0.0))
        self._loading[host.name] = replace(before_it, since=now)
        if returned is not None:
            # It comes back to what it had, and nobody else has taken that yet.
            self.connected.assign(host.name, returned[0].blocks)
        self._changed.set()

    def loaded(self, host: ConnectedHost, block: int) -> None:
        """Test a block that the host has loaded; only then it counts."""
        self.health.expect(host.name, {block: self._references[block]})
        task = asyncio.create_task(self._admit(host, block))
        self._tests.add(task)
        task.add_done_callback(self._tests.discard)

    def failed(self, host: ConnectedHost, block: int, *, why: str) -> None:
        """Count the host for what it has loaded, and give the block to others."""
        key = f"{host.name} loads"
        now = self.router.clock()
        before = self._said.get(key, ("", -math.inf))[1]
        if now - before >= _QUIET:  # it tries again, every few seconds
            self._said[key] = why, now
            _log.warning("Host %s cannot load block %d: %s", host.name, block, why)
        self._give_up(host.name, frozenset({block}), why=f"it cannot load block {block}: {why}")

    def _give_up(self, name: str, blocks: frozenset[int], *, why: str) -> None:
        """Count a host for what it has loaded alone, because it has not loaded `blocks`."""
        loading = self._loading[name]
        failed = loading.failed | blocks
        self._loading[name] = replace(loading, failed=failed, why=why)
        # No request waits for what it still tries.
        self.router.update(name, lambda host: host._replace(loading=frozenset()))
        if failed != loading.failed:
            self._changed.set()

    def leaving(self, host: ConnectedHost) -> None:
        """Send the host no more visits; others take over its blocks."""
        self.router.update(host.name, state.draining)
        self._changed.set()

    def left(self, host: ConnectedHost, why: str) -> None:
        """Forget the connection, and plan anew."""
        name = host.name
        now = self.router.clock()
        limits = self.router.limits
        self.health.drop(name)
        stay = self._stays[name]
        ended_soon = now - stay.since < limits.stable_ms / _MILLI
        stay = replace(stay, short=stay.short + 1 if ended_soon else 0)
        self._stays[name] = stay
        returns_soon = settled(replace(stay, since=now), now=now, limits=limits)
        if returns_soon and self.router.swarm[name].condition in ("healthy", "suspect"):
            # It may come back to its blocks; until then it serves none of them.
            self._departed[name] = replace(self._capacity(host), ready=frozenset()), now
        until = now + limits.return_ms / _MILLI
        self.router.update(name, lambda host: _gone(host, why, until=until))
        gone = [n for n in self.router.swarm if n not in self.connected and n not in self.away]
        if len(gone) > _MOST_GONE:
            longest = min(gone, key=lambda n: self.router.swarm[n].retry_at)
            self.router.swarm.remove(longest)
            self._loading.pop(longest, None)
            self._stays.pop(longest, None)
        self._changed.set()

    def _remember_shut_out(self) -> None:
        for host in self.router.swarm.values():
            if host.condition == "shut-out":
                self.shut_out.add(host.name, host.why)

    def _say(self) -> None:
        """Log what has become of the hosts, of each at most a line in `_QUIET` seconds."""
        now = self.router.clock()
        swarm = self.router.swarm
        self._said = {n: last for n, last in self._said.items() if n.partition(" ")[0] in swarm}
        for host in swarm.values():
            before, at = self._said.get(host.name, ("", -math.inf))
            if host.condition == before or now - at < _QUIET:
                continue
            self._said[host.name] = host.condition, now
            level, words = _SAID[host.condition] if before or not host.usable else _JOINED
            if self.children.holds(host.name):
                level = logging.INFO  # an operator has killed it
            why = f": {host.why}" if host.why else ""
            _log.log(level, "Host %s %s%s", host.name, words, why, extra={"host": host.name})

    async def _admit(self, host: ConnectedHost, block: int) -> None:
        """Test a loaded block until it passes; then the router may use it."""
        name = host.name
        limit = self.router.limits.start_ms / _MILLI
        while await self.health.canary(Visit(name, block, limit)):
            if self.router.swarm[name].condition == "shut-out":
                return
            await asyncio.sleep(_AGAIN)
        # It may have lost the block, or its connection, while it was tested: then it says again
        # that it is ready, and the next test counts.
        if self.connected.get(name) is host and block in host.ready:
            if self._loading[name].failed:
                self.router.update(name, lambda host: host._replace(why=""))
            self._loading[name] = Loading(self.router.clock())
            self.router.update(name, lambda host: _loaded(host, block))

    # --- who holds what ---------------------------------------------------------------------------

    def _capacity(self, host: ConnectedHost) -> HostCapacity:
        hello = host.hello
        return HostCapacity(
            host.name,
            hello["memory"],
            hello["speed"],
            frozenset(hello["held"]),
            host.assigned,
            self.router.swarm[host.name].blocks & host.assigned,
            self._loading[host.name].failed,
        )

    def _look_at_loading(self, now: float) -> None:
        """Give up on hosts that load nothing, and say so in their state."""
        swarm = self.router.swarm
        for name, host in self.connected.items():
            loading = self._loading[name]
            missing = host.assigned - swarm[name].blocks - loading.failed
            files = [self.model.weights[self.model.hosted.index(block)] for block in missing]
            if overdue(loading, files, now=now, limits=self.router.limits):
                blocks = ", ".join(map(str, sorted(missing)))
                seconds = now - loading.since
                self._loading[name] = replace(loading, since=now)
                why = f"it has loaded none of the blocks {blocks} in {seconds:.0f} s"
                self._give_up(name, missing, why=why)
            if self._loading[name].failed and swarm[name].usable:
                why = f"{self._loading[name].why}; until it loads one, it is given one at a time"
                if swarm[name].why != why:
                    self.router.update(name, partial(HostState._replace, why=why))

    def _plan(self) -> None:
        """Give every host its blocks, if who is there has changed."""
        now = self.router.clock()
        swarm = self.router.swarm
        self._look_at_loading(now)
        whole = not swarm.lacking(self.model.hosted)
        present: dict[str, HostCapacity] = {}
        for name, host in self.connected.items():
            # One that comes and goes counts while blocks are missing, and else once it stays.
            stay = self._stays[name]
            stays = not whole or settled(stay, now=now, limits=self.router.limits)
            if stays and swarm[name].why == _waits(stay):
                self.router.update(name, lambda host: host._replace(why=""))
            if stays and swarm[name].condition in ("healthy", "suspect"):
                present[name] = self._capacity(host)
        self._departed = {
            name: (capacity, since)
            for name, (capacity, since) in self._departed.items()
            # Requests wait for a block that nobody else holds.
            if whole and now - since < _GRACE
        }
        capacities = [*present.values(), *(capacity for capacity, _ in self._departed.values())]
        if capacities == self._planned:
            return
        self._planned = capacities
        first = self.model.hosted.start
        given = assign(capacities, self.model.weights, first=first, copies=self.copies)
        for name, blocks in given.items():
            if name in present and blocks != present[name].blocks:
                self._give(name, blocks)

    def _give(self, name: str, blocks: frozenset[int]) -> None:
        # First, so that no visit to a block that leaves is sent behind the assignment.
        loading = self._loading[name]
        soon = frozenset[int]() if loading.failed else blocks
        self.router.update(
            name,
            lambda host: host._replace(blocks=host.blocks & blocks, loading=soon - host.blocks),
        )
        assigned = self.connected[name].assigned
        if not blocks <= assigned:
            self._loading[name] = replace(loading, since=self.router.clock())
        self.health.forget(name, assigned - blocks)
        self.connected.assign(name, blocks)

    # --- commands of operators --------------------------------------------------------------------

    async def drain(self, name: str) -> bool:
        """Stop new visits to `name`; returns whether it has finished those in progress.

        It waits at most as long as a request may take; others take over its blocks.
        """
        self.check_known(name)
        self.away.add(name)
        self.router.update(name, state.draining)
        self._changed.set()
        end = self.router.clock() + self.router.limits.max_deadline_ms / _MILLI
        while (
            (known := self.router.swarm.get(name)) and known.waiting and self.router.clock() < end
        ):
            await asyncio.sleep(_LOOK / 5)
        return known is None or not known.waiting

    def kill(self, name: str) -> None:
        """Kill the process of a host that this gateway started; it stays dead until `readmit`.

        Raises `UsageError` for any other host, and `LayerShuffleError` if it is dead.
        """
        # Hosts that dialled in from elsewhere may be processes of others.
        if name not in self.children.names:
            raise UsageError(f"This gateway did not start a host {name!r}")
        self.children.signal(name, signal.SIGKILL)
        self.children.hold(name)

    def readmit(self, name: str) -> None:
        """Bring back a host that was shut out, drained or ended."""
        self.check_known(name)
        self.away.discard(name)
        self.shut_out.remove(name)
        if name in self.children.names:
            self.children.release(name)
        self.router.update(name, lambda host: host._replace(condition="gone", why="it is starting"))
        # It gets its blocks and its tests anew, as any host that dials in, and the end of this
        # connection, whenever it is felt, counts for nothing.
        self._stays[name] = Stay(self.router.clock(), short=-1)
        self.connected.cut(name)

    def check_known(self, name: str) -> None:
        """Raises `UsageError` for a host that the swarm does not have."""
        known = (self.router.swarm, self.children.names, self.shut_out.why)
        if not any(name in names for names in known):
            names = ", ".join(self.router.swarm) or "none"
            raise UsageError(f"There is no host {name!r}", hint=f"hosts: {names}")


def _references_of(model: ServedModel) -> dict[int, Reference]:
    """What every block that hosts serve has to answer, by its id."""
    rounding = ROUNDING["int8"] if model.quantised else 0.0
    return {
        block: Reference(model.sample, partial(model.compute, block), file.digest, rounding)
        for block, file in zip(model.hosted, model.weights, strict=True)
    }


def _waits(stay: Stay) -> str:
    """Why a host that comes and goes has no blocks."""
    return f"its last {stay.short} connections ended soon; it is given blocks once it stays"


def _loaded(host: HostState, block: int) -> HostState:
    return host._replace(blocks=host.blocks | {block}, loading=host.loading - {block})


def _gone(host: HostState, why: str, *, until: float) -> HostState:
    if host.condition == "shut-out":
        return host._replace(blocks=frozenset(), loading=frozenset(), retry_at=until)
    blocks = host.blocks | host.loading
    gone = host._replace(condition="gone", why=why, retry_at=until)
    return gone._replace(blocks=blocks, loading=frozenset())
