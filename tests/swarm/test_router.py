"""The router against a scripted transport: what it visits, what it takes, and when it gives up."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from clock import loop_time, run_virtual
from layershuffle.swarm.expectations import rounds_of
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Packet,
    WorkExpired,
    pack,
    unpack,
)
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm

LIMITS = Limits(reserve_ms=5, hop_floor_ms=60, suspect_ms=100)
START = np.zeros((1, 2, 3), np.float32)


def after(blocks, start=START):
    """What scripted hosts compute: block b takes s to 2 s + b + 1, so the order shows."""
    for block in blocks:
        start = 2 * start + block + 1
    return start


@dataclass
class Scripted:
    """A transport whose hosts behave as `acts` says, visit by visit; honest otherwise."""

    acts: dict[str, list] = field(default_factory=dict)
    calls: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    compute = staticmethod(after)

    async def visit(self, visit, packet):
        self.calls.append((visit.host, visit.blocks))
        act = self.acts.get(visit.host, [])
        step = act.pop(0) if act else 0.0
        try:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
                return Answer(
                    pack(self.compute(visit.blocks, unpack(packet)), packet.wire), 0.1, 0.0
                )
            return Answer(step, 0.1, 0.0)
        except asyncio.CancelledError:
            self.cancelled.append(visit.host)
            raise


def routed(acts, hosts, *, depth=4, seconds=1.0, later=None, limits=LIMITS, **asked):
    """One request; the state, the route, the transport, the router."""
    routing = asked.pop("routing", "order-free")

    async def go():
        transport = Scripted(acts)
        router = Router(transport, depth=depth, limits=limits, routing=routing, clock=loop_time)
        router.swarm = Swarm(
            HostView(name, frozenset(blocks), compute=0.001, link=0.001)
            for name, blocks in hosts.items()
        )
        if later is not None:
            asyncio.get_running_loop().call_later(*later[:1], later[1], router)
        state, route = await router.walk(START, deadline=router.clock() + seconds, **asked)
        await asyncio.sleep(0)
        return state, route, transport, router

    return run_virtual(go())


def test_a_healthy_swarm_runs_every_block_once():
    state, route, transport, router = routed({}, {"a": [0, 2], "b": [1, 3]})
    assert route.order == (0, 2, 1, 3)
    assert (state == after(route.order)).all()
    assert (route.ending, route.degraded, route.skipped) == ("complete", False, {})
    assert [hop.outcome for hop in route.hops] == ["answered"] * 2
    assert transport.calls == [("a", (0, 2)), ("b", (1, 3))]
    assert all(host.waiting == 0 for host in router.swarm.values())


@pytest.mark.parametrize(
    ("error", "outcome", "condition"),
    [
        (HostGone("dead"), "lost", "gone"),
        (HostUnavailable("full"), "unavailable", "suspect"),
        (WorkExpired("old"), "late", "suspect"),
        (HostFailed("oops"), "failed", "suspect"),
    ],
)
def test_a_failing_host_is_skipped_and_named(error, outcome, condition):
    state, route, _, router = routed({"a": [error]}, {"a": [0, 2], "b": [1, 3]})
    assert route.order == (1, 3)
    assert (state == after((1, 3))).all()
    assert [hop.outcome for hop in route.hops] == [outcome, "answered"]
    assert route.ending == "unreachable"
    assert set(route.skipped) == {0, 2}
    assert error.cause in route.skipped[0]
    assert router.swarm["a"].condition == condition


@pytest.mark.parametrize(
    "wrong", [np.full((1, 2, 3), np.nan, np.float32), np.zeros((1, 2, 4), np.float32)]
)
def test_wrong_answers_shut_a_host_out_and_leave_no_trace(wrong):
    state, route, _, router = routed({"a": [Packet("fp32", wrong)]}, {"a": [0], "b": [1, 2, 3]})
    assert (state == after((1, 2, 3))).all()
    assert router.swarm["a"].condition == "shut-out"
    assert route.hops[0].outcome == "wrong"


def test_a_frozen_host_costs_its_hop_limit_and_no_more():
    _, route, transport, _ = routed({"a": [30.0]}, {"a": [0], "b": [1, 2, 3]})
    assert route.ms == route.hops[0].ms == pytest.approx(60)
    assert route.hops[0].outcome == "late"
    assert route.order == (1, 2, 3)
    assert transport.cancelled == ["a"], "nobody holds its block: the visit is dropped"


@pytest.mark.parametrize("asked", [{}, {"order": (0, 1)}, {"routing": "replicated-sequential"}])
def test_a_late_visit_is_hedged_and_the_first_answer_counts(asked):
    """Host a answers after its limit, the replica b never: a's answer is taken."""
    state, route, transport, _ = routed(
        {"a": [0.1], "b": [30.0]}, {"a": [0, 1], "b": [0, 1]}, depth=2, **asked
    )
    assert [(hop.host, hop.outcome) for hop in route.hops] == [("a", "late"), ("a", "answered")]
    assert (state == after((0, 1))).all()
    assert route.ending == "complete"
    assert transport.cancelled == ["b"]


@pytest.mark.parametrize("asked", [{}, {"order": (0, 1)}, {"routing": "replicated-sequential"}])
def test_a_replica_that_answers_first_wins(asked):
    hosts = {"a": [0, 1], "b": [0, 1]}
    state, route, transport, _ = routed({"a": [30.0]}, hosts, depth=2, **asked)
    assert [(hop.host, hop.outcome) for hop in route.hops] == [("a", "late"), ("b", "answered")]
    assert (state == after((0, 1))).all()
    assert transport.cancelled == ["a"]


def test_a_hedge_that_fails_leaves_the_late_visit_in_the_race():
    acts = {"a": [0.11], "b": [HostGone("dead")], "c": [30.0]}
    state, route, _, _ = routed(acts, {"a": [0], "b": [0], "c": [0]}, depth=1)
    assert [(hop.host, hop.outcome) for hop in route.hops] == [
        ("a", "late"), ("b", "lost"), ("a", "answered"),
    ]  # fmt: skip
    assert (state == after((0,))).all()


def test_the_only_holder_is_waited_for_beyond_its_hop_limit():
    """It answers after 120 ms, its limit is 60, the deadline 1 s: nobody else could do it."""
    _, route, _, router = routed({"a": [0.12]}, {"a": [0, 1]}, depth=2)
    assert [(hop.host, hop.outcome) for hop in route.hops] == [("a", "late"), ("a", "answered")]
    assert route.ending == "complete"
    assert route.ms == pytest.approx(120)
    assert router.swarm["a"].strikes == 1


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"order": (0, 1)}, {"routing": "order-free-serial"}, {"routing": "sequential"},
        {"routing": "replicated-sequential"},
    ],
)  # fmt: skip
def test_a_host_that_swallowed_a_visit_is_asked_again_when_a_probe_has_cleared_it(asked):
    def clear(router):
        router.update("a", lambda host: replace(host, condition="healthy", why=""))

    acts, hosts = {"a": [30.0]}, {"a": [0, 1]}
    state, route, transport, _ = routed(acts, hosts, depth=2, later=(0.2, clear), **asked)
    assert [(hop.host, hop.outcome) for hop in route.hops] == [("a", "late"), ("a", "answered")]
    assert (state == after((0, 1))).all()
    assert (route.ending, route.ms) == ("complete", pytest.approx(200))
    assert transport.cancelled == ["a"]


def test_a_queue_reads_the_newest_state_also_if_older_ones_were_allowed():
    """Without a calibration a state may be two versions old, but a model may not add to it."""
    rounds = rounds_of(None)
    assert rounds.max_age > 0

    async def go():
        transport = Scripted({"a": [0.11], "b": [0.03], "c": [0.04], "d": [0.05]})
        router = Router(transport, depth=4, limits=LIMITS, clock=loop_time, rounds=rounds)
        router.swarm = Swarm(
            HostView(name, frozenset({block}), compute=0.001, link=0.001)
            for block, name in enumerate("abcd")
        )
        return await router.walk(START, deadline=router.clock() + 1)

    state, route = run_virtual(go())
    assert route.versions is None
    assert (state == after(route.order)).all()


def test_a_late_answer_counts_when_its_hedge_fails_at_once():
    acts = {"a": [0.12], "b": [HostUnavailable("full")]}
    _, route, _, _ = routed(acts, {"a": [0, 1], "b": [0, 1]}, depth=2)
    assert [hop.outcome for hop in route.hops] == ["late", "unavailable", "answered"]
    assert route.ending == "complete"
    assert route.ms == pytest.approx(120)


def test_a_pipeline_waits_for_its_late_host_and_fails_without_it():
    hosts = {"a": [0, 1], "b": [2, 3]}
    _, route, _, _ = routed({"b": [0.12]}, hosts, routing="sequential")
    assert route.order == (0, 1, 2, 3)
    _, route, _, _ = routed({"b": [30.0]}, hosts, routing="sequential", seconds=0.3)
    assert (route.ending, route.order) == ("lost", (0, 1))
    assert route.ms == pytest.approx(295)  # the reserve is kept back


def test_one_visit_strikes_once():
    """Late for the router first, then its own host says so as well."""

    class Expired(Scripted):
        async def visit(self, visit, packet):
            await asyncio.sleep(0.12)
            raise WorkExpired("old")

    async def go():
        router = Router(Expired(), depth=1, limits=LIMITS, clock=loop_time)
        router.swarm = Swarm([HostView("a", frozenset({0}), compute=0.001, link=0.001)])
        _, route = await router.walk(START, deadline=router.clock() + 0.3)
        return route, router.swarm["a"]

    route, host = run_virtual(go())
    assert [hop.outcome for hop in route.hops] == ["late"]
    assert host.strikes == 1


def test_a_deadline_that_leaves_no_time_is_nobodys_fault():
    """Ten blocks take 10 ms; the host is given 13 and takes longer."""
    _, route, _, router = routed({"a": [0.03]}, {"a": range(10)}, depth=10, seconds=0.018)
    assert [hop.outcome for hop in route.hops] == ["late"]
    assert (route.ending, router.swarm["a"].condition) == ("deadline", "healthy")


def test_many_images_do_not_make_hosts_suspect():
    """16 images at 6 ms each: past the floor of 60 ms, but within four times what is expected."""

    async def go():
        router = Router(
            Scripted({"a": [0.096], "b": [0.096]}), depth=2, limits=LIMITS, clock=loop_time
        )
        router.swarm = Swarm(
            HostView(name, frozenset({block}), compute=0.006, link=0.0)
            for block, name in enumerate("ab")
        )
        start = np.repeat(START, 16, axis=0)
        _, route = await router.walk(start, deadline=router.clock() + 2)
        return route, router.swarm

    route, swarm = run_virtual(go())
    assert [hop.outcome for hop in route.hops] == ["answered"] * 2
    assert {hop.images for hop in route.hops} == {16}
    assert all(host.usable for host in swarm.values())


@pytest.mark.parametrize("factor", [1e6, np.inf])
def test_a_host_that_answers_nonsense_does_not_shut_others_out(factor):
    """Far too large: a is wrong. Not finite after another host's work: b may be honest."""
    huge = Packet("fp32", np.full((1, 2, 3), 3e5, np.float32))
    broken = Packet("fp32", np.full((1, 2, 3), np.nan, np.float32))
    acts = {"a": [huge if factor == 1e6 else 0.0], "b": [broken]}
    _, _, _, router = routed(acts, {"a": [0], "b": [1]}, depth=2)
    if factor == 1e6:
        assert router.swarm["a"].condition == "shut-out"
        assert router.swarm["b"].condition == "shut-out", "its state came from the stem alone"
    else:
        assert router.swarm["a"].condition == "healthy"
        assert router.swarm["b"].condition == "suspect"


def test_the_answer_comes_before_the_deadline():
    """Every visit of a host takes 55 ms; eight of them do not fit into 250 ms."""
    hosts = {name: [block] for block, name in enumerate("abcdefgh")}
    acts = {name: [0.055] * 9 for name in hosts}
    slow = LIMITS.model_copy(update={"hop_floor_ms": 5000.0, "hop_cap_ms": 5000.0})
    _, route, _, _ = routed(acts, hosts, depth=8, seconds=0.25, limits=slow)
    assert route.ms == pytest.approx(245)
    assert route.ending == "deadline"
    assert 1 <= len(route.order) <= 4
    assert "deadline" in route.skipped[7]


def test_too_few_blocks_wait_for_a_host_that_comes_back():
    def back(router):
        router.update("a", lambda host: HostView("a", host.blocks))

    acts = {"a": [HostUnavailable("full")]}
    _, route, _, _ = routed(acts, {"a": [0, 1], "b": [2, 3]}, min_blocks=3, later=(0.15, back))
    assert sorted(route.order) == [0, 1, 2, 3]
    assert route.ms == pytest.approx(150)


def test_too_few_blocks_wait_for_the_next_process_of_a_dead_host():
    def back(router):
        router.update("a", lambda host: HostView("a", host.blocks))

    hosts, dead = {"a": [0, 1], "b": [2, 3]}, HostGone("dead")
    _, route, _, _ = routed({"a": [dead]}, hosts, min_blocks=3, later=(0.4, back))
    assert sorted(route.order) == [0, 1, 2, 3]
    assert route.ms == pytest.approx(400)
    _, route, _, _ = routed({"a": [dead]}, hosts, min_blocks=3, seconds=0.6)
    assert (route.order, route.ending) == ((2, 3), "deadline")
    _, route, _, _ = routed({"a": [dead]}, hosts, min_blocks=2, later=(0.4, back))
    assert (route.order, route.ms) == ((2, 3), 0)


def test_too_few_blocks_end_at_the_deadline():
    acts = {"a": [HostUnavailable("full")]}
    _, route, _, _ = routed(acts, {"a": [0, 1], "b": [2, 3]}, min_blocks=3, seconds=0.2)
    assert route.ending == "deadline"
    assert len(route.order) == 2


def test_a_pipeline_is_lost_with_its_host():
    _, route, _, _ = routed(
        {"b": [HostGone("dead")]}, {"a": [0, 1], "b": [2, 3]}, routing="sequential"
    )
    assert route.ending == "lost"
    assert route.order == (0, 1)


def test_an_order_asked_for_is_kept():
    state, route, transport, _ = routed({}, {"a": [0, 2], "b": [1, 3]}, order=(2, 0, 3))
    assert route.order == (2, 0, 3)
    assert (state == after((2, 0, 3))).all()
    assert route.skipped == {1: "the requested order leaves it out"}
    assert not route.degraded
    assert transport.calls == [("a", (2, 0)), ("b", (3,))]
