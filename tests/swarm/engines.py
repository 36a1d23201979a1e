"""The contract of all engines of the swarm: one function per property, which takes a `Rig`.

`test_ray_hosts.py` runs all of them over hosts in its own process, and over Ray. A rig has the
hosts "a" (blocks 0, 2), "b" and "c" (1, 3) of a pico model; nothing watches them but the check
itself. Some engines take long to start a host, so rigs are shared, and healed between checks.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from pico_hosts import check_side_by_side, replay_error
from torch import nn

import layershuffle as ls
from common import FAMILIES, images
from layershuffle.swarm.bundle import Bundle, make_bundle
from layershuffle.swarm.chaos import Fault, FaultInjector
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.health import agrees
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Packet,
    Visit,
    VisitError,
    WorkExpired,
    pack,
    unpack,
    unpack_answer,
)
from layershuffle.swarm.placement import HostBackend
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.policy import ROUTINGS
from layershuffle.swarm.remote_model import RemoteModel
from layershuffle.swarm.rounds import QUEUE
from layershuffle.swarm.router import Router
from waiting import HANGS, until

DEPTH = 4
BLOCKS = {"a": (0, 2), "b": (1, 3), "c": (1, 3)}
MANY = 200_000  # turns of a host: it is busy for minutes
# A hop limit that an idle host meets beside ten other busy processes; each silent host costs one.
LIMITS = Limits(
    hop_floor_ms=1500, hop_cap_ms=3000, suspect_ms=100, probe_ms=3000, canary_every_ms=300,
    watch_ms=100, start_ms=60_000, audit_share=0.0,
)  # fmt: skip
PLAN = SwarmPlan(
    model="pico",
    hosts={name: HostPlan(blocks=blocks) for name, blocks in BLOCKS.items()},
    limits=LIMITS,
)


def pico() -> nn.Module:
    """The model that is served."""
    return FAMILIES["timm-vit"].wrapped()


@dataclass
class Rig:
    """Hosts of one engine, a coordinator that does not watch, and measurements of the checks."""

    faults: FaultInjector
    coordinator: Coordinator
    model: nn.Module
    bundle: Bundle
    ray: Any | None
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def router(self) -> Router:
        return self.coordinator.router

    @property
    def start(self) -> np.ndarray:
        return self.bundle.sample

    async def inject(self, kind: str, host: str = "a") -> None:
        await self.faults.inject(Fault(0, host, kind))

    async def heal(self) -> None:
        """Bring all hosts up with their blocks, and without faults."""
        self.router.wire, self.router.rounds = "fp32", QUEUE
        await asyncio.gather(*map(self._healed, BLOCKS))

    async def _healed(self, name: str) -> None:
        host, view = self.coordinator.record_of(name), self.router.swarm[name]
        if host.phase != "up" or not view.usable or view.waiting:
            await self.begin_anew(name)
        self.faults.heal(name)
        await self.visit(name, BLOCKS[name][0])  # what it still had to do is done
        # Statistics of an earlier check must not decide which hosts are visited.
        fresh = {"compute": None, "link": None, "lag": None, "batch": 1.0}
        self.router.update(name, lambda view: replace(view, **fresh))

    async def begin_anew(self, name: str) -> float:
        """Start another process for the host. Returns the seconds until it is up."""
        await self.coordinator.readmit(name)
        return await until(lambda: self.router.swarm[name].usable)

    async def walk(self, seconds: float = HANGS, **asked: Any) -> tuple[np.ndarray, Any]:
        """Walk one state through the swarm."""
        deadline = self.router.clock() + seconds
        return await self.router.walk(self.start, deadline=deadline, **asked)

    async def whole(self) -> None:
        """Walk until an answer is complete and no host is suspect, which busy cores delay."""
        async with asyncio.timeout(HANGS), self.health():
            while (await self.walk())[1].ending != "complete" or self.router.swarm.suspects:
                await asyncio.sleep(0.01)

    def visit(self, host: str, block: int, *, limit: float = HANGS) -> Awaitable[Answer]:
        """A visit outside of the router."""
        return self.router.transport.visit(Visit(host, block, limit), pack(self.start, "fp32"))

    @asynccontextmanager
    async def busy(self, host: str):
        """Inside the context the host is busy, and nothing else gets a turn.

        A visit of more images than a batch may have, through the first block again and again: the
        oldest visit goes first, and nothing fits beside it.
        """
        images = np.repeat(self.start, LIMITS.max_batch + 1, axis=0)
        long = Visit(host, (BLOCKS[host][0],) * MANY, HANGS)
        visit = asyncio.ensure_future(self.router.transport.visit(long, pack(images, "fp32")))
        try:
            while not (await self.faults.backend.inner.call(host, "info")).computing:
                assert not visit.done()
            yield
        finally:
            visit.cancel()
            await asyncio.gather(visit, return_exceptions=True)

    async def waiting(self, host: str, count: int) -> None:
        """Wait until `count` visits wait at the host, by its own report, despite cuts."""
        times = 0
        while times < 3:  # between two turns the visit that keeps it busy is counted too
            info = await self.faults.backend.inner.call(host, "info")
            times = times + 1 if info.waiting == count else 0

    @asynccontextmanager
    async def health(self):
        """Canaries and probes run beside the block."""
        running = asyncio.create_task(self.coordinator.health.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def rig_of(hosts: HostBackend, *, ray: Any | None = None) -> Rig:
    """A rig over an engine, with its hosts up."""
    model = pico()
    bundle = make_bundle(model)
    router = Router(hosts.transport, depth=DEPTH, limits=LIMITS)
    coordinator = Coordinator(PLAN, router=router, backend=hosts, bundle=bundle)
    watch = asyncio.create_task(coordinator.run())
    try:
        # Time for a start that is given up after `start_ms`, and another one.
        assert await coordinator.ready(within=2 * HANGS) == ()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return Rig(FaultInjector(coordinator, ray=ray), coordinator, model, bundle, ray)


def run_blocks(model: nn.Module, start: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The state after these blocks in this process, one after the other."""
    with torch.no_grad():
        state = torch.from_numpy(start.copy())
        for block in order:
            state = ls.blocks_of(model)[block](state)
    return state.numpy()


# --- answers --------------------------------------------------------------------------------------


async def answers_equal_the_model_bit_for_bit(rig: Rig) -> None:
    batch, remote = images(2), RemoteModel(copy.deepcopy(rig.model), rig.router)
    for routing in ROUTINGS:
        rig.router.routing = routing
        got = await remote.classify(batch, deadline=rig.router.clock() + HANGS)
        assert replay_error(rig.model, batch, got) == 0, got.route
    rig.router.routing = "order-free"
    remote.close()


async def blocks_side_by_side_equal_the_model_bit_for_bit(rig: Rig) -> None:
    """Replayed in one process from the steps that the answer names; of a host that died: below."""
    await check_side_by_side(rig.model, rig.router, reached=4)


async def answers_are_the_callers_own(rig: Rig) -> None:
    """Arrays are writable and not shared."""
    for wire in ("fp32", "fp16", "int8"):
        visit = Visit("a", 0, HANGS)
        answer = await rig.router.transport.visit(visit, pack(rig.start, wire))
        for array in (answer.packet.values, answer.packet.scales):
            assert array is None or array.flags.writeable
        wanted = run_blocks(rig.model, unpack(pack(rig.start, wire)), (0,))
        tolerance = {"fp32": 0.0, "fp16": 2**-10, "int8": 1 / 127}[wire]
        after = unpack_answer(answer.packet, before=unpack(pack(rig.start, wire)))
        assert agrees(after, wanted, tolerance=tolerance)
        answer.packet.values[:] = 0
    again = await rig.visit("a", 0)
    assert (unpack(again.packet) == run_blocks(rig.model, rig.start, (0,))).all()


async def visits_meet_in_batches(rig: Rig) -> None:
    """Visits that wait for the same block run together."""
    async with rig.busy("a"):
        visits = [asyncio.ensure_future(rig.visit("a", 0)) for _ in range(8)]
        await rig.waiting("a", 8)
    answers = await asyncio.gather(*visits)
    assert [answer.batch for answer in answers] == pytest.approx([8] * 8)
    wanted = run_blocks(rig.model, rig.start, (0,))
    for answer in answers:
        assert agrees(unpack(answer.packet), wanted, tolerance=1e-5)


# --- failures of visits ---------------------------------------------------------------------------


async def visits_fail_each_in_its_own_way(rig: Rig) -> None:
    with pytest.raises(HostUnavailable, match="nobody"):
        await rig.visit("nobody", 0)
    with pytest.raises(HostUnavailable, match="does not hold block 1"):
        await rig.visit("a", 1)
    strange = Packet("fp32", np.zeros((1, 3, 3), np.float32))
    with pytest.raises(HostFailed, match="shape") as failed:
        await rig.router.transport.visit(Visit("a", 0, HANGS), strange)
    assert "Traceback" not in failed.value.cause
    async with rig.busy("a"):
        with pytest.raises(WorkExpired):
            await rig.visit("a", 0, limit=0.1)


async def a_crash_is_told_at_once_and_the_host_rejoins(rig: Rig) -> None:
    """Its process dies during a visit; later visits also fail at once, until it restarts.

    Blocks side by side go on without it: of each other's answers none is lost or wrong.
    """
    async with rig.busy("a"):
        visit = asyncio.ensure_future(rig.visit("a", 0))
        await rig.waiting("a", 1)
        began = rig.router.clock()
        await rig.inject("crash")
        with pytest.raises(HostGone):
            await visit
        rig.measured["crash_to_error_s"] = rig.router.clock() - began
    with pytest.raises(HostGone):
        await rig.visit("a", 0)
    with pytest.raises(VisitError):  # told by a name of ours
        await rig.inject("crash")
    _, route = await rig.walk()
    assert set(route.skipped) == {0, 2}
    assert rig.router.swarm["a"].condition == "gone"
    # As if nobody had asked since: blocks side by side find out by themselves.
    rig.router.update("a", lambda view: replace(view, condition="healthy"))
    steps = ((1, 0), (3, 0), (1, 2))
    await check_side_by_side(rig.model, rig.router, reached=2, steps=steps)
    assert rig.router.swarm["a"].condition == "gone"
    await rig.inject("rejoin")
    rig.measured["rejoin_s"] = await until(lambda: rig.router.swarm["a"].usable)
    after, route = await rig.walk()
    assert route.ending == "complete"
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()


async def cancelled_work_is_dropped(rig: Rig) -> None:
    async with rig.busy("a"):
        visits = [asyncio.ensure_future(rig.visit("a", 0)) for _ in range(5)]
        await rig.waiting("a", 5)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        assert all(visit.cancelled() for visit in visits)
        await rig.waiting("a", 0)


# --- failures of hosts ----------------------------------------------------------------------------


async def a_frozen_host_costs_one_hop_limit(rig: Rig) -> None:
    await rig.whole()
    await rig.inject("freeze")
    after, route = await rig.walk()
    (late,) = [hop for hop in route.hops if hop.outcome != "answered"]
    rig.measured["freeze_hop_s"] = late.ms / 1000
    assert (late.host, late.outcome) == ("a", "late")
    assert late.ms >= LIMITS.hop_floor_ms - 1
    assert set(route.skipped) == {0, 2}
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()
    _, quick = await rig.walk()
    assert all(hop.host != "a" for hop in quick.hops), "a suspect is left alone"
    rig.faults.heal("a")
    await rig.whole()


async def a_cut_host_goes_on(rig: Rig) -> None:
    """Its process lives and computes, but no message reaches or leaves it."""
    await rig.whole()
    async with rig.busy("a"):
        visit = asyncio.ensure_future(rig.visit("a", 0))
        await rig.waiting("a", 1)
        await rig.inject("cut")
    await rig.waiting("a", 0)  # computed, and nobody heard of it
    after, route = await rig.walk()
    assert set(route.skipped) == {0, 2}
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()
    asked = asyncio.ensure_future(rig.faults.backend.call("a", "info"))
    await rig.faults.backend.inner.call("a", "info")  # past the cut it answers, though asked later
    await rig.faults.backend.transport.inner.visit(Visit("a", 0, HANGS), pack(rig.start, "fp32"))
    assert not asked.done()
    assert not visit.done()
    await rig.inject("rejoin")
    await asyncio.gather(asked, visit)
    await rig.whole()


async def a_wrong_host_is_shut_out_by_its_canary(rig: Rig) -> None:
    await rig.inject("wrong")
    async with rig.health():
        rig.measured["wrong_to_shut_out_s"] = await until(
            lambda: rig.router.swarm["a"].condition == "shut-out"
        )
        assert rig.router.swarm["a"].why.startswith("it failed its canary on block")
        after, route = await rig.walk()
        assert (after == run_blocks(rig.model, rig.start, route.order)).all()
        assert set(route.order) == {1, 3}
    await rig.inject("cut")  # the process that takes its place is neither wrong nor cut off
    await rig.inject("rejoin")
    await until(lambda: rig.router.swarm["a"].usable)
    await rig.whole()


async def an_audit_finds_a_liar(rig: Rig) -> None:
    """Without canaries: its visit is computed again here."""
    limits, rig.router.limits = rig.router.limits, LIMITS.model_copy(update={"audit_share": 1.0})
    try:
        await rig.inject("wrong", "b")
        rig.router.update("b", lambda view: replace(view, link=0.001))
        rig.router.update("c", lambda view: replace(view, link=1.0))  # so b is asked
        _, route = await rig.walk()
        assert [hop.outcome for hop in route.hops if hop.host == "b"] == ["answered"]
        await until(lambda: rig.router.swarm["b"].condition == "shut-out")
        assert rig.router.swarm["c"].usable
        assert rig.coordinator.health.disagreed == 1
    finally:
        rig.router.limits = limits


async def a_draining_host_ends_what_it_has(rig: Rig) -> None:
    async with rig.busy("a"):
        under_way = asyncio.ensure_future(rig.visit("a", 0))
        await rig.waiting("a", 1)
        assert await rig.coordinator.drain("a")
        late = asyncio.ensure_future(rig.visit("a", 0))  # on its way when the drain began
    for visit, blocks in ((under_way, (0, 2)), (late, (0,))):
        answer = await visit
        assert (unpack(answer.packet) == run_blocks(rig.model, rig.start, blocks)).all()
    assert await rig.coordinator.health.check("a") == ""
    _, route = await rig.walk()
    assert route.skipped == dict.fromkeys((0, 2), "host a is draining: it is leaving")


CHECKS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        answers_equal_the_model_bit_for_bit,
        blocks_side_by_side_equal_the_model_bit_for_bit,
        answers_are_the_callers_own,
        visits_meet_in_batches,
        visits_fail_each_in_its_own_way,
        cancelled_work_is_dropped,
        a_frozen_host_costs_one_hop_limit,
        a_cut_host_goes_on,
        a_wrong_host_is_shut_out_by_its_canary,
        an_audit_finds_a_liar,
        a_crash_is_told_at_once_and_the_host_rejoins,
        a_draining_host_ends_what_it_has,
    )
}
