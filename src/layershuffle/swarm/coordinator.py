"""The coordinator: starts block hosts where machines are, watches them, and tells the router.

A thin shell around `placement.reconcile`. What runs the processes is a `Places`: Ray
(`ray_engine.RayHosts`), or objects in this process. Used from the router's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm import state
from layershuffle.swarm.faults import SLOW_FACTOR, Fault
from layershuffle.swarm.health import Health, Known
from layershuffle.swarm.placement import Action, Hosted, Node, Refill, Start, reconcile
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.program import digest_of
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView

if TYPE_CHECKING:
    from layershuffle.swarm.bundle import Bundle
    from layershuffle.swarm.host import HostInfo, Misbehaviour

_Result = TypeVar("_Result")
_MILLI = 1000.0
_POLL = 0.02  # seconds between looks at whether a draining host is empty
_log = logging.getLogger(__name__)


class Places(Protocol):
    """Where hosts' processes run. Everything raises `LayerShuffleError` where it fails."""

    async def nodes(self) -> Sequence[Node]:
        """The living machines."""

    async def start(self, name: str, *, node: str) -> HostInfo:
        """A process for `name` on that machine; may be one that holds blocks already."""

    async def load(self, name: str, program: bytes, *, tensors: Mapping[int, bytes]) -> None:
        """Give it blocks."""

    async def unload(self, name: str, blocks: Sequence[int]) -> None:
        """Take blocks from it."""

    async def info(self, name: str) -> HostInfo:
        """What it holds and does."""

    async def drain(self, name: str) -> None:
        """It takes no new visits."""

    async def end(self, name: str) -> None:
        """End its process, if there is one."""

    async def misbehave(self, name: str, kind: Misbehaviour, *, factor: float) -> None:
        """For drills: "slow", "wrong" or "none"."""

    def kill(self, name: str) -> None:
        """For drills: its process dies."""

    def freeze(self, name: str) -> None:
        """For drills: it falls silent."""

    def thaw(self, name: str) -> None:
        """Undo `freeze`."""


class Coordinator:
    """Brings the hosts of `plan` up and keeps them so; `run` does it, until cancelled.

    `bundles`: by model, as `plan` names them: the plan's own and its donors'. Implements
    `drill.Engine`.
    """

    def __init__(
        self,
        plan: SwarmPlan,
        *,
        router: Router,
        places: Places,
        bundles: Mapping[str, Bundle],
        seed: int = 0,
    ) -> None:
        self.plan, self.router, self.places = plan, router, places
        self.health = Health(router, seed=seed)
        self.base = bundles[plan.model]
        self.hosts: dict[str, Hosted] = {}
        self._donors = {
            (name, block): checked_donor(bundles[model], self.base, block=block)
            for name, host in plan.hosts.items()
            for block, model in host.donors.items()
        }
        self._starting: dict[str, asyncio.Task[None]] = {}
        for name, host in plan.hosts.items():
            self._show(HostView(name, frozenset(host.blocks), "gone", "it has not come yet"))

    async def run(self) -> None:
        """Watch machines and hosts, ask canaries, start what is missing; until cancelled."""
        health = asyncio.create_task(self.health.run())
        try:
            while not health.done():
                await self._look()
                await asyncio.sleep(self.router.limits.watch_ms / _MILLI)
            health.result()
        finally:
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)

    async def ready(self, *, within: float) -> tuple[str, ...]:
        """Wait until all hosts of the plan are up, or `within` seconds; those that are not.

        `run` is to run beside it.
        """
        clock = self.router.clock
        end = clock() + within
        while missing := [name for name in self.plan.hosts if not self._is_up(name)]:
            if clock() >= end:
                break
            await asyncio.sleep(_POLL)
        return tuple(missing)

    async def close(self) -> None:
        """End all hosts."""
        await self.health.close()
        for name in [*self.hosts]:
            await self._end(name)

    # --- what operators do ------------------------------------------------------------------------

    async def drain(self, name: str) -> bool:
        """`name` takes no new visits; whether those it has are over when this returns.

        Waits at most as long as a request may take.
        """
        self._known_host(name)
        self._hold(name, "it is leaving")
        self.router.update(name, state.draining)
        end = self.router.clock() + self.router.limits.max_deadline_ms / _MILLI
        await self._bounded(self.places.drain(name), name)
        while self.router.swarm[name].waiting and self.router.clock() < end:
            await asyncio.sleep(_POLL)
        return not self.router.swarm[name].waiting

    async def leave(self, name: str) -> None:
        """Drain `name`, then end its process; it stays away until `readmit`."""
        await self.drain(name)
        await self._end(name)
        self._gone(name, "it has left")

    async def readmit(self, name: str) -> None:
        """End the process of `name` and start a new one, in the background: shut-out, drained,
        left and dead hosts come back that way.
        """
        host = self._known_host(name)
        await self._end(name)
        self._gone(name, "it is starting")
        self._begin(Start(name, host.node, host.blocks))

    async def swap(self, name: str, block: int, *, donor: Bundle) -> None:
        """`block` of the host `name` comes from `donor` from now on; no request is lost.

        Raises `UsageError` for a donor that is no sibling, or a block that is not held there;
        `LayerShuffleError` if the host does not answer the donor's canary: then it is shut out.
        """
        if block not in self._known_host(name).blocks:
            raise UsageError(f"Host {name} does not hold block {block}")
        checked_donor(donor, self.base, block=block)
        tensors = {block: donor.tensors[block]}
        before = self.health.forget(name, [block])
        try:
            await self._bounded(self.places.load(name, donor.program, tensors=tensors), name)
        except LayerShuffleError:
            self.health.expect(name, before)  # if it took the block all the same, this finds out
            raise
        self._donors[name, block] = donor
        self.health.expect(name, known_of(donor, [block]))
        if why := await self.health.check(name, blocks=[block]):
            raise LayerShuffleError(f"Host {name} took block {block}, but {why}")

    async def happen(self, fault: Fault) -> None:
        """Make the fault happen; see `faults.Fault`. A crashed host stays dead until rejoin."""
        name = fault.host
        self._known_host(name)
        if fault.kind == "crash":
            self._hold(name, "it crashed")
            self.places.kill(name)
        elif fault.kind in ("freeze", "cut"):  # to the router both are silence
            self.places.freeze(name)
        elif fault.kind == "leave":
            await self.leave(name)
        elif fault.kind in ("slow", "wrong"):
            await self.places.misbehave(name, fault.kind, factor=SLOW_FACTOR)
        elif self.hosts[name].phase == "up" and self.router.swarm[name].condition != "shut-out":
            self.places.thaw(name)
            await self.places.misbehave(name, "none", factor=1.0)
        else:
            await self.readmit(name)

    # --- how hosts come and go --------------------------------------------------------------------

    async def start(self, name: str, blocks: Sequence[int], *, node: str) -> None:
        """Start the host `name` now, and wait for it. Raises `LayerShuffleError` if it fails."""
        await self._end(name)
        self._begin(Start(name, node, frozenset(blocks)))
        await self._starting[name]
        if not self._is_up(name):
            raise LayerShuffleError(f"Host {name} does not come up: {self.hosts[name].why}")

    async def _look(self) -> None:
        try:
            nodes = await self.places.nodes()
        except LayerShuffleError as error:
            _log.warning("The swarm's machines are not known now: %s", error.cause)
            return
        for task in self._starting.values():
            if task.done() and not task.cancelled():
                task.result()  # raises what nobody expected
        for host in [*self.hosts.values()]:
            if host.phase == "up" and self.router.swarm[host.name].condition == "gone":
                await self._end(host.name)
                self.hosts[host.name] = replace(host, phase="dead", retry_at=self.router.clock())
        for action in reconcile(
            self.plan,
            nodes,
            hosts=self.hosts,
            now=self.router.clock(),
            depth=self.router.depth,
        ):
            await self._do(action)

    async def _do(self, action: Action) -> None:
        if isinstance(action, Start):
            self._begin(action)
        elif isinstance(action, Refill):
            self._begin(Start(action.name, self.hosts[action.name].node, action.blocks))
        else:
            await self._end(action.name)
            self._gone(action.name, action.why)
            del self.hosts[action.name]
            if action.name not in self.plan.hosts:
                self.router.swarm = self.router.swarm.without(action.name)
        _log.info("%s", action)

    def _begin(self, start: Start) -> None:
        before = self.hosts.get(start.name)
        tries = before.tries if before is not None and before.node == start.node else 0
        self.hosts[start.name] = Hosted(start.name, start.node, start.blocks, tries=tries)
        self._starting[start.name] = asyncio.create_task(self._bring_up(start))

    async def _bring_up(self, start: Start) -> None:
        """Process, blocks, canaries; only then is the router told."""
        name, limits = start.name, self.router.limits
        try:
            why = await self._bounded(self._filled(start), name)
        except LayerShuffleError as error:
            why = error.cause
        host = self.hosts[name]
        if not why:
            self.hosts[name] = replace(host, phase="up", tries=0, why="")
            self._show(HostView(name, start.blocks))
            return await self._trim(start)
        _log.warning("Host %s does not come up: %s", name, why)
        await self._end_process(name)
        pause = min(limits.suspect_ms * 2**host.tries, limits.suspect_max_ms) / _MILLI
        retry_at = self.router.clock() + pause
        self.hosts[name] = replace(
            host, phase="dead", retry_at=retry_at, tries=min(host.tries + 1, 32), why=why
        )
        self._gone(name, why)

    async def _filled(self, start: Start) -> str:
        """What is wrong with the host once it runs and holds its blocks; "" if nothing."""
        name = start.name
        info = await self.places.start(name, node=start.node)
        sources = {block: self._donors.get((name, block), self.base) for block in start.blocks}
        self.health.forget(name)
        for bundle in {id(one): one for one in sources.values()}.values():
            mine = sorted(block for block, one in sources.items() if one is bundle)
            known = await asyncio.to_thread(known_of, bundle, mine)
            missing = [block for block in mine if info.blocks.get(block) != known[block].digest]
            if missing:
                tensors = {block: bundle.tensors[block] for block in missing}
                await self.places.load(name, bundle.program, tensors=tensors)
            self.health.expect(name, known)
        return await self.health.check(name, limit=self.router.limits.start_ms / _MILLI)

    async def _trim(self, start: Start) -> None:
        """Take from an adopted host what it holds beyond its blocks."""
        try:
            info = await self._bounded(self.places.info(start.name), start.name)
            if strange := sorted(set(info.blocks) - start.blocks):
                await self._bounded(self.places.unload(start.name, strange), start.name)
        except LayerShuffleError as error:
            _log.warning("Host %s may hold more than its blocks: %s", start.name, error.cause)

    async def _end(self, name: str) -> None:
        task = self._starting.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._end_process(name)

    async def _end_process(self, name: str) -> None:
        try:
            await self._bounded(self.places.end(name), name)
        except LayerShuffleError as error:
            _log.warning("The process of host %s may still run: %s", name, error.cause)

    async def _bounded(self, work: Awaitable[_Result], name: str) -> _Result:
        limit = self.router.limits.start_ms
        try:
            async with asyncio.timeout(limit / _MILLI):
                return await work
        except TimeoutError as error:
            raise LayerShuffleError(f"Host {name} did not answer within {limit:g} ms") from error

    def _hold(self, name: str, why: str) -> None:
        self.hosts[name] = replace(self.hosts[name], phase="held", why=why)

    def _gone(self, name: str, why: str) -> None:
        self.router.update(name, lambda host: replace(host, condition="gone", why=why))

    def _show(self, view: HostView) -> None:
        self.router.swarm = self.router.swarm.with_host(view)

    def _is_up(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name].phase == "up"

    def _known_host(self, name: str) -> Hosted:
        if name not in self.hosts:
            raise UsageError(
                f"There is no host {name!r}", hint=f"hosts: {', '.join(self.hosts) or 'none'}"
            )
        return self.hosts[name]


def checked_donor(donor: Bundle, base: Bundle, *, block: int) -> Bundle:
    """`donor`, if its `block` may stand in for that of `base`. Raises `UsageError` if not."""
    from layershuffle.swarm.bundle import check_sibling  # imports the model libraries

    check_sibling(base, donor)
    if block not in donor.tensors:
        raise UsageError(f"The donor's bundle has no block {block}")
    return donor


def known_of(bundle: Bundle, blocks: Sequence[int]) -> dict[int, Known]:
    """What hosts of these blocks of `bundle` are held to."""
    canary = bundle.canary
    return {
        block: Known(canary.state, canary.outputs[block], digest_of(bundle.tensors[block]))
        for block in blocks
    }
