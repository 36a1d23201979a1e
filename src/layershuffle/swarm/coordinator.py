"""The coordinator starts block hosts on machines, watches them, and updates the router.

It is a thin layer around `placement.reconcile`. A `placement.HostBackend` runs the processes: Ray
(`ray_hosts.RayHosts`), or objects in this process. Use it from the router's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm import state
from layershuffle.swarm.health import HealthMonitor, references
from layershuffle.swarm.placement import (
    Drop,
    HostAction,
    HostBackend,
    HostRecord,
    Node,
    Reload,
    Start,
    ended,
    reconcile,
)
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView

if TYPE_CHECKING:
    from layershuffle.swarm.bundle import Bundle

_Result = TypeVar("_Result")
_MILLI = 1000.0
_POLL = 0.02  # seconds between looks at whether a draining host is empty
_log = logging.getLogger(__name__)
_STATUS = "layershuffle swarm status shows the hosts"


class Coordinator:
    """Starts the hosts of `plan` and keeps them running; `run` does the work until cancelled.

    `bundle` holds the plan's model. `watching`: whether `run` is active.

    A decision about a host is written to `hosts` at once and cancels earlier operations. Its
    process follows later, one operation at a time for each host.
    """

    def __init__(
        self,
        plan: SwarmPlan,
        *,
        router: Router,
        backend: HostBackend,
        bundle: Bundle,
    ) -> None:
        self.plan, self.router, self.backend = plan, router, backend
        self.health = HealthMonitor(router)
        self.bundle = bundle
        self.hosts: dict[str, HostRecord] = {}
        self.watching = False
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._arrived: set[str] = set()  # hosts that have been up
        # Weak, so that a lock lasts as long as a task holds it or waits for it. `Lock.locked` does
        # not count waiting tasks, so deleting locks by hand could remove one under them.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unknown = ""  # why the machines are unknown
        self._asking: asyncio.Future[Sequence[Node]] | None = None
        for name, host in plan.hosts.items():
            # Listed from the start, so users see which hosts are still missing.
            absent = HostView(name, frozenset(host.blocks))
            self._show(replace(absent, condition="gone", why="it has not come yet"))

    @property
    def traces(self) -> set[str]:
        """Names of the hosts about which anything is stored; hosts that left are forgotten."""
        return {*self.hosts, *self._starting, *self._locks, *self.health.traces}

    async def run(self) -> None:
        """Watch machines and hosts, send canaries and start missing hosts, until cancelled.

        Failures of hosts, of any kind, do not end it.
        """
        health = asyncio.create_task(self.health.run())
        self.watching = True
        try:
            # If the health check breaks, this watch ends too, and `service.keep_running` restarts
            # both.
            while not health.done():
                await self._look()
                await asyncio.sleep(self.router.limits.watch_ms / _MILLI)
            health.result()
        finally:
            self.watching = False
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)

    async def ready(
        self, *, within: float, say: Callable[[str], object] = _log.info
    ) -> tuple[str, ...]:
        """Wait until all hosts of the plan are up; returns those not up after `within` seconds.

        It only waits, so `run` must run at the same time. `say` is called with a sentence for each
        host that is up.
        """
        clock, reported = self.router.clock, set[str]()
        end, count = clock() + within, len(self.plan.hosts)
        while True:
            up = {name for name in self.plan.hosts if self.is_up(name)}
            for name in sorted(up - reported):
                reported.add(name)
                say(f"{name} is up ({len(reported)} of {count})")
            if len(up) == count or clock() >= end:
                return tuple(name for name in self.plan.hosts if name not in up)
            await asyncio.sleep(_POLL)

    async def close(self) -> None:
        """End all hosts."""
        await self.health.close()
        if self._asking is not None:
            self._asking.cancel()
        await asyncio.gather(*map(self._end, self.hosts), *self._ending)

    def begin_anew(self, why: str) -> None:
        """Restart all hosts, or find surviving ones, after the backend has lost its processes.

        Hosts that an operator stopped stay away.
        """
        if self._asking is not None:  # it asks a backend that has ended, and would wait forever
            self._asking.cancel()
        for name, host in [*self.hosts.items()]:
            if host.phase != "held":
                self._do(Drop(name, why))

    # --- commands of operators --------------------------------------------------------------------

    async def drain(self, name: str) -> bool:
        """Stop new visits to `name`; returns whether it has finished those in progress.

        It waits at most as long as a request may take. A host that is not up (it is starting, or
        dead) has nothing to finish: its process ends, and it stays away until `readmit`.
        """
        self.record_of(name)
        # Before any await, or the next check of the machines would start it again.
        self.hold(name, "it is leaving")
        view = self.router.swarm.get(name)
        if view is None or view.condition == "gone":
            self._gone(name, "it has left")
            await self._end(name)
            return True
        self.router.update(name, state.draining)
        end = self.router.clock() + self.router.limits.max_deadline_ms / _MILLI
        while (view := self.router.swarm.get(name)) and view.waiting and self.router.clock() < end:
            await asyncio.sleep(_POLL)
        return view is None or not view.waiting

    async def leave(self, name: str) -> None:
        """Drain `name`, then end its process; it stays away until `readmit`."""
        await self.drain(name)
        host = self.hosts.get(name)
        if host is not None and host.phase == "held":  # it was not readmitted meanwhile
            self._gone(name, "it has left")
            await self._end(name)

    async def readmit(self, name: str) -> None:
        """End the process of `name` and start a new one, in the background.

        This brings back hosts that were shut out, drained or dead.
        """
        host = self.record_of(name)
        self._gone(name, "it is starting")
        self._begin(Start(name, host.node, host.blocks), anew=True)

    # --- starting and ending hosts ----------------------------------------------------------------

    async def _look(self) -> None:
        """Check the machines once: decide on actions and begin them.

        Nothing here waits for a host, so one slow host never delays the others.
        """
        try:
            nodes = await self._machines()
        except LayerShuffleError as error:
            if error.cause != self._unknown:  # twice a second it would fill the log
                _log.warning("The swarm's machines are unknown now: %s", error.cause)
            self._unknown = error.cause
            return
        self._unknown = ""
        now = self.router.clock()
        for host in [*self.hosts.values()]:
            # The router learns of a death first, from a visit that fails.
            if host.phase == "up" and self.router.swarm[host.name].condition == "gone":
                _log.warning("Host %s has died", host.name)
                self.hosts[host.name] = ended(host, now=now, limits=self.router.limits)
        for action in reconcile(
            self.plan, nodes, hosts=self.hosts, now=now, depth=self.router.depth
        ):
            _log.info("%s", action)
            self._do(action)

    async def _machines(self) -> Sequence[Node]:
        """The available machines; there is at most one query at a time.

        A query that hangs may occupy a thread, and a new one every half second would use up all
        threads.
        """
        limit = self.router.limits.watch_ms
        # Wait for the same query again: it may answer after the next check.
        asking = self._asking = self._asking or asyncio.ensure_future(self.backend.nodes())
        done, _ = await asyncio.wait({asking}, timeout=limit / _MILLI)
        if not done:
            raise LayerShuffleError(f"there was no answer within {limit:g} ms")
        self._asking = None
        if asking.cancelled():  # `begin_anew`
            raise LayerShuffleError("the process that should have answered has ended")
        return asking.result()

    def _do(self, action: HostAction) -> None:
        name = action.name
        if isinstance(action, Start):
            self._begin(action, anew=name in self.hosts)
        elif isinstance(action, Reload):
            self._begin(Start(name, self.hosts[name].node, action.blocks), anew=False)
        else:
            self._stop(name)
            self._gone(name, action.why)
            del self.hosts[name]
            self.health.drop(name)
            # Hosts of the plan stay listed as gone, but spares come and go for years.
            if name not in self.plan.hosts:
                self.router.swarm = self.router.swarm.without(name)
                self._arrived.discard(name)
            ending = asyncio.create_task(self._ended(name))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _begin(self, start: Start, *, anew: bool) -> None:
        """Start the host in the background; with `anew`, its present process ends first."""
        before = self.hosts.get(start.name)
        # Failures on one machine do not count on another.
        tries = before.tries if before is not None and before.node == start.node else 0
        self._stop(start.name)
        self.hosts[start.name] = HostRecord(start.name, start.node, start.blocks, tries=tries)
        self._starting[start.name] = asyncio.create_task(self._bring_up(start, anew=anew))
        self._starting[start.name].add_done_callback(_log_failure)

    async def _bring_up(self, start: Start, *, anew: bool) -> None:
        """Start the process, load blocks and run canaries, before the router sends visits."""
        name = start.name
        async with self._lock_of(name):
            if anew:
                # A dead or stopped process may still occupy its name, and its blocks are unknown.
                await self._end_process(name)
            try:
                why = await self._call(name, self._filled(start))
            except LayerShuffleError as error:
                why = error.cause
            if why:
                _log.warning("Host %s did not start: %s", name, why)
                await self._end_process(name)
                return self._failed(name, why)
            now, before = self.router.clock(), self.router.swarm.get(name)
            self.hosts[name] = replace(self.hosts[name], phase="up", since=now, why="")
            self._show(HostView(name, start.blocks))
            if name in self._arrived and before and before.condition == "gone":
                # A warning like that of its death, because an info is not shown.
                _log.warning("Host %s is up again", name)
            self._arrived.add(name)
            await self._trim(start)

    def _failed(self, name: str, why: str) -> None:
        now, limits = self.router.clock(), self.router.limits
        self.hosts[name] = ended(self.hosts[name], now=now, limits=limits, why=why)
        self._gone(name, why)

    async def _filled(self, start: Start) -> str:
        """Start the host's process and load its blocks; returns the fault of a canary, or ""."""
        name = start.name
        info = await self.backend.start(name, node=start.node)
        self.has_process(name, info.pid)
        self.health.drop(name)
        # In a thread, because it reads all weights for their digests.
        expected = await asyncio.to_thread(references, self.bundle, start.blocks)
        # An adopted process still has its blocks; equal ones are not sent again.
        missing = [
            block
            for block in sorted(start.blocks)
            if info.blocks.get(block) != expected[block].digest
        ]
        if missing:
            tensors = [self.bundle.tensors[block] for block in missing]
            await self.backend.call(name, "load", self.bundle.program, missing, *tensors)
        self.health.expect(name, expected)
        # The first answers of a new process take longer, so they may take as long as a start.
        return await self.health.check(name, limit=self.router.limits.start_ms / _MILLI)

    async def _trim(self, start: Start) -> None:
        """Unload surplus blocks of an adopted host."""
        try:
            info = await self._call(start.name, self.backend.call(start.name, "info"))
            if surplus := sorted(set(info.blocks) - start.blocks):
                await self._call(start.name, self.backend.call(start.name, "unload", surplus))
        except LayerShuffleError as error:
            _log.warning("Host %s may hold more than its blocks: %s", start.name, error.cause)

    def _stop(self, name: str) -> None:
        """Cancel a running start of the host."""
        if task := self._starting.pop(name, None):
            task.cancel()

    async def _end(self, name: str) -> None:
        self._stop(name)
        await self._ended(name)

    async def _ended(self, name: str) -> None:
        """End the process after the current operation on the host."""
        async with self._lock_of(name):
            await self._end_process(name)

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _end_process(self, name: str) -> None:
        try:
            await self._call(name, self.backend.end(name))
            self.has_process(name, 0)
        except LayerShuffleError as error:
            _log.warning("The process of host %s may still run: %s", name, error.cause)

    async def _call(self, name: str, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work` with that host, within `start_ms`. Raises `LayerShuffleError`."""
        limit = self.router.limits.start_ms
        try:
            async with asyncio.timeout(limit / _MILLI):
                try:
                    return await work
                except LayerShuffleError:
                    raise
                except Exception as error:  # unexpected; the watch must continue
                    _log.exception("Work with host %s broke", name)
                    cause = f"Host {name} failed ({type(error).__name__}: {error})"
                    raise LayerShuffleError(cause) from error
        except TimeoutError as error:
            raise LayerShuffleError(
                f"Host {name} did not answer within {limit:g} ms", hint=_STATUS
            ) from error

    def has_process(self, name: str, pid: int) -> None:
        """Record the process id of `name`, if the host is still known; 0 for none."""
        if name in self.hosts:
            self.hosts[name] = replace(self.hosts[name], pid=pid)

    def hold(self, name: str, why: str) -> None:
        """Keep `name` from being started again until `readmit`."""
        self._stop(name)
        self.hosts[name] = replace(self.hosts[name], phase="held", why=why)

    def _gone(self, name: str, why: str) -> None:
        self.router.update(name, lambda host: replace(host, condition="gone", why=why))

    def _show(self, view: HostView) -> None:
        self.router.swarm = self.router.swarm.with_host(view)

    def is_up(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name].phase == "up"

    def record_of(self, name: str) -> HostRecord:
        """The record of `name`. Raises `UsageError` for a host that the swarm does not have."""
        if name not in self.hosts:
            raise UsageError(
                f"There is no host {name!r}", hint=f"hosts: {', '.join(self.hosts) or 'none'}"
            )
        return self.hosts[name]


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("The start of a host failed unexpectedly", exc_info=error)
