"""What every engine of the swarm promises: one function per promise, each takes a `Rig`.

`test_ray_hosts.py` runs all of them over hosts in its own process, and over Ray. A rig has the
hosts "a" (blocks 0, 2), "b" and "c" (1, 3) of a pico model; nothing watches them but the check
itself. Some engines take long to start a host, so rigs are shared, and healed between checks.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import layershuffle as ls
from common import FAMILIES, images, logits_of, redraw
from layershuffle.swarm.bundle import Bundle, make_bundle
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.faults import Fault
from layershuffle.swarm.health import agrees
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Transport,
    Visit,
    VisitError,
    WorkExpired,
)
from layershuffle.swarm.placement import Places
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.remote_model import RemoteModel
from layershuffle.swarm.router import Router
from layershuffle.swarm.wire import Packet, pack, unpack

DEPTH = 4
BLOCKS = {"a": (0, 2), "b": (1, 3), "c": (1, 3)}
LIMITS = Limits(
    hop_floor_ms=400, hop_cap_ms=800, suspect_ms=100, probe_ms=800, canary_every_ms=300,
    watch_ms=100, start_ms=60_000, audit_share=0.0,
)  # fmt: skip
PLAN = SwarmPlan(
    model="pico",
    hosts={name: HostPlan(blocks=held) for name, held in BLOCKS.items()},
    limits=LIMITS,
)


def pico() -> nn.Module:
    """The model that is served."""
    return FAMILIES["timm-vit"].wrapped()


def sibling() -> nn.Module:
    """Another model of the same base, as far as a bundle is told so."""
    return redraw(pico(), seed=2).eval()


@dataclass
class Rig:
    """Hosts of one engine, a coordinator that does not watch, and what its checks measured."""

    places: Places
    transport: Transport
    coordinator: Coordinator
    model: nn.Module
    bundle: Bundle
    node: str
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def router(self) -> Router:
        return self.coordinator.router

    async def heal(self) -> None:
        """All hosts up with their blocks, and nothing wrong with them."""
        self.router.wire = "fp32"
        await asyncio.gather(*map(self._healed, BLOCKS))

    async def _healed(self, name: str) -> None:
        host, view = self.coordinator.hosts.get(name), self.router.swarm[name]
        if host is None or host.phase != "up" or not view.usable or view.waiting:
            await self.coordinator.start(name, BLOCKS[name], node=self.node)
        await self.places.misbehave(name, "none", factor=1.0)
        await self.visit(name, BLOCKS[name][0])  # what it still had to do is done
        self.router.update(name, lambda view: replace(view, compute=None, link=None))

    async def walk(self, seconds: float = 3.0, **asked: Any) -> tuple[np.ndarray, Any]:
        """One state through the swarm."""
        deadline = self.router.clock() + seconds
        return await self.router.walk(self.start, deadline=deadline, **asked)

    @property
    def start(self) -> np.ndarray:
        return self.bundle.canary.state

    def visit(self, host: str, *blocks: int, limit: float = 5.0) -> Awaitable[Answer]:
        """A visit that no router knows of."""
        return self.transport.visit(Visit(host, blocks, limit), pack(self.start, "fp32"))

    async def slow_down(self, host: str, seconds: float) -> None:
        """Each block takes about that long there from now on."""
        took = [(await self.visit(host, BLOCKS[host][0])).compute_ms / 1000 for _ in range(5)]
        factor = max(2.0, seconds / sorted(took)[2])
        await self.places.misbehave(host, "slow", factor=factor)

    @asynccontextmanager
    async def health(self):
        """Canaries and probes run beside the block."""
        running = asyncio.create_task(self.coordinator.health.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def rig_of(places: Places, transport: Transport) -> Rig:
    """A rig over an engine, its hosts not started yet."""
    model = pico()
    bundle = make_bundle(model)
    router = Router(transport, depth=DEPTH, limits=LIMITS)
    coordinator = Coordinator(PLAN, router=router, places=places, bundles={"pico": bundle})
    node = (await places.nodes())[0].id
    return Rig(places, transport, coordinator, model, bundle, node)


async def until(true: Callable[[], bool], seconds: float = 5.0) -> float:
    """Seconds until it is true; fails after `seconds`."""
    begun = time.monotonic()
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
    return time.monotonic() - begun


def run_blocks(model: nn.Module, start: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The state after these blocks in this process, one after the other."""
    with torch.no_grad():
        state = torch.from_numpy(start.copy())
        for block in order:
            state = ls.blocks_of(model)[block](state)
    return state.numpy()


# --- answers --------------------------------------------------------------------------------------


async def answers_equal_the_model_bit_for_bit(rig: Rig) -> None:
    batch = images(2)
    front = RemoteModel(copy.deepcopy(rig.model), rig.router)
    try:
        for order in (None, (3, 0, 2, 1), (2, 1), (1,)):
            asked = {} if order is None else {"order": order}
            deadline = rig.router.clock() + 5
            got = await front.classify(batch, deadline=deadline, **asked)
            assert order is None or got.route.order == order
            with torch.no_grad(), ls.running(rig.model, got.route.order):
                wanted = logits_of(rig.model(batch))
            error = (got.logits - wanted).abs().max()
            assert torch.equal(got.logits, wanted), f"{got.route.order}: max error {error:.1e}"
    finally:
        front.close()


async def answers_are_the_callers_own(rig: Rig) -> None:
    """Arrays that may be written to, and that nothing else looks at."""
    for wire in ("fp32", "fp16", "int8"):
        visit = Visit("a", (0, 2), 5.0)
        answer = await rig.transport.visit(visit, pack(rig.start, wire))
        for array in (answer.packet.values, answer.packet.scales):
            assert array is None or array.flags.writeable
        wanted = run_blocks(rig.model, unpack(pack(rig.start, wire)), (0, 2))
        tolerance = {"fp32": 0.0, "fp16": 2**-10, "int8": 1 / 127}[wire]
        assert agrees(unpack(answer.packet), wanted, tolerance=tolerance)
        answer.packet.values[:] = 0
    again = await rig.visit("a", 0)
    assert (unpack(again.packet) == run_blocks(rig.model, rig.start, (0,))).all()


async def visits_meet_in_batches(rig: Rig) -> None:
    """What waits for the same block runs through it together."""
    await rig.slow_down("a", 0.8)  # a busy machine has that long to send all of them
    first = asyncio.ensure_future(rig.visit("a", 0, limit=30.0))
    await asyncio.sleep(0.1)
    rest = [asyncio.ensure_future(rig.visit("a", 0, limit=30.0)) for _ in range(8)]
    await asyncio.sleep(0.05)
    await rig.places.misbehave("a", "none", factor=1.0)  # from the next turn on
    answers = await asyncio.gather(first, *rest)
    assert [answer.batch for answer in answers] == pytest.approx([1, *[8] * 8])
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
        await rig.transport.visit(Visit("a", (0,), 5.0), strange)
    assert "Traceback" not in failed.value.cause
    await rig.slow_down("a", 0.4)
    first = asyncio.ensure_future(rig.visit("a", 0, 2))
    await asyncio.sleep(0.05)
    with pytest.raises(WorkExpired):
        await rig.visit("a", 0, limit=0.1)
    await first


async def a_crash_is_told_at_once(rig: Rig) -> None:
    """Its process dies under a visit; later visits are told as well."""
    await rig.slow_down("a", 2.0)
    visit = asyncio.ensure_future(rig.visit("a", 0, 2, limit=20.0))
    await asyncio.sleep(0.3)
    assert not visit.done()
    begun = time.monotonic()
    await rig.coordinator.happen(Fault(0, "a", "crash"))
    with pytest.raises(HostGone):
        await visit
    rig.measured["crash_to_error_s"] = time.monotonic() - begun
    assert rig.measured["crash_to_error_s"] < 1.0
    with pytest.raises(HostGone):
        await rig.visit("a", 0)
    with pytest.raises(VisitError):  # told by a name of ours
        await rig.coordinator.happen(Fault(0, "a", "crash"))
    _, route = await rig.walk()
    assert set(route.skipped) == {0, 2}
    assert rig.router.swarm["a"].condition == "gone"


async def cancelled_work_is_dropped(rig: Rig) -> None:
    await rig.slow_down("a", 1.0)
    first = asyncio.ensure_future(rig.visit("a", 0, 2, limit=10.0))
    await asyncio.sleep(0.1)
    others = [asyncio.ensure_future(rig.visit("a", 2, limit=10.0)) for _ in range(5)]
    await asyncio.sleep(0.2)
    assert (await rig.places.info("a")).waiting >= 5
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert all(other.cancelled() for other in others)
    begun = time.monotonic()
    while (await rig.places.info("a")).waiting:
        assert time.monotonic() - begun < 0.5, "cancelled visits still wait"
    rig.measured["cancelled_gone_s"] = time.monotonic() - begun
    assert not first.done()
    first.cancel()


# --- failures of hosts ----------------------------------------------------------------------------


async def a_frozen_host_costs_one_hop_limit(rig: Rig) -> None:
    assert (await rig.walk())[1].ending == "complete"
    rig.places.freeze("a")
    try:
        begun = time.monotonic()
        after, route = await rig.walk(seconds=2.0)
        took = time.monotonic() - begun
        late = next(hop for hop in route.hops if hop.outcome == "late")
        rig.measured["freeze_hop_s"] = late.ms / 1000
        assert late.host == "a"
        assert late.ms <= LIMITS.hop_cap_ms + 100
        assert took < 1.5
        assert set(route.skipped) == {0, 2}
        assert (after == run_blocks(rig.model, rig.start, route.order)).all()
        _, quick = await rig.walk(seconds=2.0)
        assert all(hop.host != "a" for hop in quick.hops), "a suspect is left alone"
    finally:
        rig.places.thaw("a")
    async with rig.health():
        await until(lambda: rig.router.swarm["a"].usable)
    _, route = await rig.walk()
    assert route.ending == "complete"


async def a_cut_host_goes_on(rig: Rig) -> None:
    """Its process lives and computes; nothing reaches it, and nothing comes from it."""
    assert (await rig.walk())[1].ending == "complete"
    await rig.slow_down("a", 1.0)
    visit = asyncio.ensure_future(rig.visit("a", 0, limit=30.0))
    await asyncio.sleep(0.2)
    assert not visit.done()
    await rig.coordinator.happen(Fault(0, "a", "cut"))
    after, route = await rig.walk(seconds=2.0)
    assert set(route.skipped) == {0, 2}
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()
    asked = asyncio.ensure_future(rig.places.info("a"))
    await asyncio.sleep(1.5)
    assert not asked.done()
    assert not visit.done()
    begun = time.monotonic()
    await rig.coordinator.happen(Fault(0, "a", "rejoin"))
    await asyncio.gather(asked, visit)
    rig.measured["mended_to_answer_s"] = time.monotonic() - begun
    assert rig.measured["mended_to_answer_s"] < 0.5, "it was computed meanwhile"
    async with rig.health():
        await until(lambda: rig.router.swarm["a"].usable)
    assert (await rig.walk())[1].ending == "complete"
    await rig.coordinator.happen(Fault(0, "a", "cut"))
    await rig.coordinator.start("a", BLOCKS["a"], node=rig.node)
    await rig.visit("a", 0)  # a new process is not cut off


async def a_slow_host_is_a_last_resort(rig: Rig) -> None:
    """It answers, late but in time for its visits; requests that need nobody else leave it out."""
    await rig.slow_down("a", 0.06)
    for _ in range(3):
        await rig.walk(min_blocks=DEPTH)
    seen = rig.router.swarm["a"].compute
    assert seen is not None
    assert seen > 0.005, "its average says so"
    for host in "bc":  # whatever else this machine does: they set the pace, and a is no suspect
        rig.router.update(host, lambda view: replace(view, compute=0.001, link=0.001))
    rig.router.update("a", lambda view: replace(view, compute=0.06, condition="healthy"))
    _, route = await rig.walk(min_blocks=1)
    assert route.skipped == dict.fromkeys((0, 2), "host a is slow")
    after, whole = await rig.walk(min_blocks=DEPTH)
    assert whole.ending == "complete"
    assert (after == run_blocks(rig.model, rig.start, whole.order)).all()


async def a_wrong_host_is_shut_out_by_its_canary(rig: Rig) -> None:
    await rig.coordinator.happen(Fault(0, "a", "wrong"))
    async with rig.health():
        rig.measured["wrong_to_shut_out_s"] = await until(
            lambda: rig.router.swarm["a"].condition == "shut-out"
        )
        assert rig.router.swarm["a"].why.startswith("it failed its canary on block")
        after, route = await rig.walk()
        assert (after == run_blocks(rig.model, rig.start, route.order)).all()
        assert set(route.order) == {1, 3}
        await asyncio.sleep(0.4)
        assert rig.router.swarm["a"].condition == "shut-out", "no probe brings it back"
    await rig.coordinator.happen(Fault(0, "a", "rejoin"))
    await until(lambda: rig.router.swarm["a"].usable, 30)
    assert (await rig.walk())[1].ending == "complete"


async def an_audit_finds_a_liar(rig: Rig) -> None:
    """Nobody asks canaries: that two replicas disagree makes both answer theirs."""
    limits, rig.router.limits = rig.router.limits, LIMITS.model_copy(update={"audit_share": 1.0})
    try:
        await rig.coordinator.happen(Fault(0, "b", "wrong"))
        rig.router.update("c", lambda view: replace(view, link=1.0))  # so b is asked
        await rig.walk()
        await until(lambda: rig.router.swarm["b"].condition == "shut-out")
        assert rig.router.swarm["c"].usable
        assert rig.coordinator.health.disagreed == 1
    finally:
        rig.router.limits = limits


async def a_crashed_host_rejoins(rig: Rig) -> None:
    await rig.coordinator.happen(Fault(0, "a", "crash"))
    await until(lambda: rig.router.swarm["a"].usable)
    _, route = await rig.walk()
    assert set(route.skipped) == {0, 2}
    await rig.coordinator.happen(Fault(0, "a", "rejoin"))
    rig.measured["rejoin_s"] = await until(lambda: rig.router.swarm["a"].usable, 30)
    after, route = await rig.walk()
    assert route.ending == "complete"
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()


async def a_draining_host_ends_what_it_has(rig: Rig) -> None:
    await rig.slow_down("a", 0.2)
    under_way = asyncio.ensure_future(rig.visit("a", 0, 2))
    await asyncio.sleep(0.1)
    assert await rig.coordinator.drain("a")
    with pytest.raises(HostUnavailable, match="leaving"):
        await rig.visit("a", 0)
    answer = await under_way
    assert (unpack(answer.packet) == run_blocks(rig.model, rig.start, (0, 2))).all()
    _, route = await rig.walk()
    assert route.skipped == dict.fromkeys((0, 2), "host a is draining: it is leaving")


async def a_swap_loses_no_request(rig: Rig) -> None:
    other = sibling()
    donor = replace(make_bundle(other), lineage=rig.bundle.lineage)
    mixed = copy.deepcopy(rig.model)
    mixed_blocks = ls.blocks_of(mixed)
    mixed_blocks[2].load_state_dict(ls.blocks_of(other)[2].state_dict())
    seen, slowest = [], 0.0
    swapping = None
    async with rig.health():
        while swapping is None or not swapping.done() or not seen[-1]:
            after, route = await rig.walk()
            assert route.ending == "complete", route.skipped
            slowest = max(slowest, route.ms)
            old = (after == run_blocks(rig.model, rig.start, route.order)).all()
            new = (after == run_blocks(mixed, rig.start, route.order)).all()
            assert old != new
            seen.append(bool(new))
            if len(seen) == 10:
                swapping = asyncio.create_task(rig.coordinator.swap("a", 2, donor=donor))
        await swapping
        await asyncio.sleep(0.4)
        assert rig.router.swarm["a"].usable, "it is held to the new answers"
    assert seen == sorted(seen), "old answers first, then new ones"
    rig.measured["swap_slowest_request_ms"] = slowest
    del rig.coordinator._donors["a", 2]
    await rig.coordinator.start("a", BLOCKS["a"], node=rig.node)
    after, route = await rig.walk()
    assert (after == run_blocks(rig.model, rig.start, route.order)).all()


CHECKS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        answers_equal_the_model_bit_for_bit,
        answers_are_the_callers_own,
        visits_meet_in_batches,
        visits_fail_each_in_its_own_way,
        cancelled_work_is_dropped,
        a_frozen_host_costs_one_hop_limit,
        a_cut_host_goes_on,
        a_slow_host_is_a_last_resort,
        a_swap_loses_no_request,
        a_wrong_host_is_shut_out_by_its_canary,
        an_audit_finds_a_liar,
        a_crash_is_told_at_once,
        a_crashed_host_rejoins,
        a_draining_host_ends_what_it_has,
    )
}
