"""The router against a scripted transport: what it visits, what it takes, and when it gives up."""

import asyncio
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clock import loop_time, run_virtual
from layershuffle.core.orders import ExecutionOrder
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import QUEUE, Cell, Rounds
from layershuffle.gateway.brain.state import Answer, HostState, Swarm, VisitError
from layershuffle.gateway.hosts.router import Router

LIMITS = Limits(reserve_ms=5, hop_floor_ms=60, suspect_ms=100, probe_ms=200)
START = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 2, 3)
DEAD = VisitError("dead", outcome="lost")
THREE = Rounds({kept: Cell(kept, parallel=3) for kept in range(1, 13)}, max_age=4)


def computed(block, state):
    """What scripted hosts compute: each block adds something that depends on the state."""
    return state + np.float32(0.1) * np.sin(state + np.float32(block))


def replayed(route, start=START):
    """The route's steps by the formula of `core.orders`, one after the other."""
    states = [start]
    for position, (block, version) in enumerate(route.steps):
        out = computed(block, states[version])
        states.append(out if version == position else states[-1] + (out - states[version]))
    return states[-1]


@dataclass
class Scripted:
    """A transport whose hosts behave as `acts` says, visit by visit; honest otherwise."""

    acts: dict[str, list] = field(default_factory=dict)
    calls: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)

    async def visit(self, visit, state, *, form="fp32"):
        self.calls.append((visit.host, visit.block))
        act = self.acts.get(visit.host, [])
        step = act.pop(0) if act else 0.0
        try:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
                return Answer(computed(visit.block, state), 0.1, 0.0)
            return Answer(step, 0.1, 0.0)
        except asyncio.CancelledError:
            self.cancelled.append(visit.host)
            raise


def routed(acts, hosts, *, depth=4, seconds=1.0, later=None, start=START, **options):
    """One request; the route, the transport, the router. Its state is that of its steps."""
    asked = {"min_blocks": options.pop("min_blocks", 1)}
    if "chance" in options:
        asked |= {"confidence": 0.9, "chance": options.pop("chance")}

    async def go():
        transport = Scripted(acts)
        router = Router(transport, depth=depth, clock=loop_time, **{"limits": LIMITS, **options})
        router.swarm = Swarm(
            HostState(name, frozenset(blocks), compute=0.001, link=0.001)
            for name, blocks in hosts.items()
        )
        if later is not None:
            asyncio.get_running_loop().call_later(*later[:1], later[1], router)
        state, route = await router.walk(start, deadline=router.clock() + seconds, **asked)
        await asyncio.sleep(1)  # what was cancelled comes to its end
        assert router.walks == 0
        assert all(view.waiting == 0 for view in router.swarm.values())
        assert (state == replayed(route, start)).all()
        return route, transport, router

    return run_virtual(go())


def outcomes(route):
    return [(hop.host, hop.outcome) for hop in route.hops]


def healthy(name):
    """The host is back."""
    return lambda router: router.update(name, lambda v: v._replace(condition="healthy", why=""))


# --- how sure an answer is ------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "ending", "kept"), [(0.0, "sure", 2), (0.1, "sure", 2)])
def test_a_walk_ends_when_it_is_sure(seconds, ending, kept):
    async def chance(state, blocks):
        await asyncio.sleep(seconds)
        return 0.95 if blocks >= 2 else 0.5

    route, _, _ = routed({}, {"a": range(4)}, chance=chance)
    assert (route.ending, route.kept) == (ending, kept)


def test_a_head_that_takes_longer_than_is_left_makes_no_answer_late():
    """It is asked after the first block, and the walk ends in time without its word."""

    async def chance(state, blocks):
        await asyncio.sleep(10)
        return 1.0

    route, _, _ = routed({}, {"a": range(4)}, chance=chance, seconds=1.0)
    assert (route.ending, route.kept) == ("deadline", 1)
    assert route.ms <= 1000


# --- one visit after the other --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "condition", "ms"),
    [
        ("lost", "gone", 0),
        ("wrong", "shut-out", 0),
        # Its first probe would decide, within 100 + 200 ms; nobody probes here.
        ("unavailable", "suspect", 300),
        ("late", "suspect", 300),
        ("failed", "suspect", 300),
    ],
)
def test_a_failing_host_is_skipped_and_named(outcome, condition, ms):
    route, _, router = routed(
        {"a": [VisitError("oops", outcome=outcome)]}, {"a": [0, 2], "b": [1, 3]}
    )
    assert (route.order, route.ending, route.ms) == ((1, 3), "unreachable", pytest.approx(ms))
    assert outcomes(route) == [("a", outcome), ("b", "answered"), ("b", "answered")]
    assert "oops" in route.skipped[0]
    assert set(route.skipped) == {0, 2}
    assert router.swarm["a"].condition == condition


@pytest.mark.parametrize(
    "wrong",
    [np.full((1, 2, 3), value, np.float32) for value in (np.nan, np.inf, 3e5)],
)
def test_wrong_answers_shut_a_host_out_and_leave_no_trace(wrong):
    route, _, router = routed({"a": [wrong]}, {"a": [0], "b": [1, 2, 3]})
    assert (route.order, route.hops[0].outcome) == ((1, 2, 3), "wrong")
    assert router.swarm["a"].condition == "shut-out"


def test_a_frozen_host_costs_its_limit_and_the_time_of_one_probe():
    route, transport, _ = routed({"a": [30.0]}, {"a": [0], "b": [1, 2, 3]})
    assert (route.ms, route.hops[0].ms) == (pytest.approx(60 + 300), pytest.approx(60))
    assert (route.hops[0].outcome, route.order) == ("late", (1, 2, 3))
    assert transport.cancelled == ["a"]


def test_a_slow_host_is_waited_for_beyond_its_limit():
    """It answers after 120 ms; its limit is 60, and the deadline 1 s."""
    hosts = {"a": [0], "b": [1, 2, 3]}
    route, _, router = routed({"a": [0.12]}, hosts, rounds=THREE)
    assert ("a", "late") in outcomes(route)
    assert (route.ending, route.order) == ("complete", (1, 2, 3, 0))
    assert router.swarm["a"].strikes == 0


@pytest.mark.parametrize(("first", "winner", "dropped"), [(0.1, "a", "b"), (30.0, "b", "a")])
def test_a_late_visit_is_hedged_and_the_first_answer_counts(first, winner, dropped):
    acts = {"a": [first], "b": [30.0 if winner == "a" else 0.01]}
    route, transport, _ = routed(acts, {"a": [0], "b": [0]}, depth=1)
    assert outcomes(route) == [("a", "late"), (winner, "answered")]
    assert transport.cancelled == [dropped]


@pytest.mark.parametrize("failure", ["lost", "unavailable"])
def test_a_hedge_that_fails_leaves_the_late_visit_in_the_race(failure):
    acts = {"a": [0.11], "b": [VisitError("why", outcome=failure)]}
    route, _, _ = routed(acts, {"a": [0], "b": [0]}, depth=1)
    assert outcomes(route) == [("a", "late"), ("b", failure), ("a", "answered")]
    assert route.ms == pytest.approx(110)


def test_a_host_that_swallowed_a_visit_is_asked_again_when_a_probe_has_cleared_it():
    options = {"depth": 2, "later": (0.2, healthy("a"))}
    route, transport, _ = routed({"a": [30.0]}, {"a": [0, 1]}, **options)
    assert outcomes(route) == [("a", "late"), ("a", "answered"), ("a", "answered")]
    assert (route.ending, route.ms) == ("complete", pytest.approx(200))
    assert transport.cancelled == ["a"]


def test_one_visit_strikes_once():
    """Late for the router first, then its own host says so as well."""

    class Expired(Scripted):
        async def visit(self, visit, state, *, form="fp32"):
            await asyncio.sleep(0.12)
            raise VisitError("old", outcome="late")

    async def go():
        router = Router(Expired(), depth=1, limits=LIMITS, clock=loop_time)
        router.swarm = Swarm([HostState("a", frozenset({0}), compute=0.001, link=0.001)])
        _, route = await router.walk(START, deadline=router.clock() + 0.3)
        return route, router.swarm["a"]

    route, host = run_virtual(go())
    assert (outcomes(route), host.strikes) == ([("a", "late")], 1)


def test_a_deadline_that_leaves_no_time_is_nobodys_fault():
    route, _, router = routed({"a": [0.03]}, {"a": [0]}, depth=1, seconds=0.008)
    assert [hop.outcome for hop in route.hops] == ["late"]
    assert (route.ending, router.swarm["a"].condition) == ("deadline", "healthy")


def test_the_answer_comes_before_the_deadline():
    """Every visit takes 55 ms; eight of them do not fit into 250 ms."""
    hosts = {name: [block] for block, name in enumerate("abcdefgh")}
    slow = LIMITS.model_copy(update={"hop_floor_ms": 5000.0, "hop_cap_ms": 5000.0})
    acts = {name: [0.055] * 9 for name in hosts}
    route, _, _ = routed(acts, hosts, depth=8, seconds=0.25, limits=slow)
    assert (route.ending, route.ms) == ("deadline", pytest.approx(245))
    assert 1 <= len(route.order) <= 4
    assert "deadline" in route.skipped[7]


# --- several visits under way ---------------------------------------------------------------------

SIX = {name: (2 * place, 2 * place + 1) for place, name in enumerate("abcdef")}


def slow_visits(names, seconds):
    return {name: [seconds] * 40 for name in names}


def ages(route):
    return [place - version for place, (_, version) in enumerate(route.steps)]


def test_a_round_takes_as_long_as_one_visit():
    """12 blocks on six hosts, 10 ms each, three at a time: four rounds."""
    route, _, _ = routed(slow_visits(SIX, 0.01), SIX, depth=12, rounds=THREE)
    assert (route.ending, route.ms) == ("complete", pytest.approx(40))
    assert sorted(route.order) == list(range(12))
    assert max(ages(route)) == 2, "two others ended before"


@pytest.mark.parametrize(("max_age", "asked"), [(11, 1), (2, 2)])
def test_a_slow_visit_holds_nobody_up_and_runs_again_if_it_is_too_old(max_age, asked):
    """a's block comes after 35 ms: until then two others are under way, and then three."""
    acts = slow_visits(SIX, 0.01) | {"a": [0.035, *[0.01] * 9]}
    rounds = Rounds(THREE.cells, max_age=max_age)
    route, transport, _ = routed(acts, SIX, depth=12, rounds=rounds)
    assert route.ending == "complete"
    assert sorted(route.order) == list(range(12))
    assert (max(ages(route)) >= 5) == (max_age == 11)
    assert max(ages(route)) <= max_age
    assert transport.calls.count(("a", 0)) == asked


def test_a_dead_host_costs_its_blocks_and_the_rest_runs_again():
    acts = slow_visits("ab", 0.01) | {"c": [DEAD]}
    rounds = Rounds({kept: Cell(kept, 3 if kept == 2 else 1, 2) for kept in (2, 3, 4)}, max_age=4)
    route, _, _ = routed(acts, {"a": [0], "b": [1], "c": [2, 3]}, rounds=rounds)
    assert (Counter(route.order), route.kept) == ({0: 3, 1: 3}, 2)
    assert (route.ending, set(route.skipped)) == ("unreachable", {2, 3})


def test_a_change_of_the_swarm_wakes_every_request_that_waits():
    """Two requests wait for a host that comes at 0.2 s, and one that comes at 0.4 s."""

    async def go():
        router = Router(Scripted(), depth=2, limits=LIMITS, clock=loop_time)
        away = [HostState(n, frozenset({b}), "suspect", retry_at=0.5) for b, n in enumerate("ab")]
        router.swarm = Swarm(away)
        for when, name in ((0.2, "a"), (0.4, "b")):
            asyncio.get_running_loop().call_later(when, healthy(name), router)
        walks = [router.walk(START, deadline=2.0, min_blocks=2) for _ in range(2)]
        return await asyncio.gather(*walks)

    for _, route in run_virtual(go()):
        assert (route.order, route.ms) == ((0, 1), pytest.approx(400))


@pytest.mark.parametrize(("act", "struck"), [(9.0, True), (0.01, False)])
@pytest.mark.parametrize("rounds", [THREE, QUEUE])
def test_a_host_that_falls_silent_is_blamed_though_the_deadline_is_near(act, struck, rounds):
    """To send a large state takes 1 ms here, and to take b's answer, just before the end, 5.

    Host a has far more time than is expected of it, so that its silence counts against it.
    """
    spent = 0.0

    def clock():
        nonlocal spent
        spent += 0.001 * (loop_time() == 0)
        return loop_time() + spent

    def take(hop, before, after):
        nonlocal spent
        spent += 0.005 * (hop.host == "b")

    async def go():
        transport = Scripted({"a": [act], "b": [0.079]})
        limits = Limits(reserve_ms=10)
        router = Router(transport, depth=4, limits=limits, rounds=rounds, clock=clock)
        router.observers.append(take)
        view = {"compute": 0.004, "link": 0.002}
        router.swarm = Swarm(
            [HostState("a", frozenset({0}), **view), HostState("b", frozenset({1}), **view)]
        )
        _, route = await router.walk(START, deadline=0.1)
        return route, router.swarm["a"].condition

    route, condition = run_virtual(go())
    assert route.ms <= 95
    wanted = "late" if struck else "answered"
    assert [hop.outcome for hop in route.hops if hop.host == "a"] == [wanted]
    assert condition == ("suspect" if struck else "healthy")


def test_a_cancelled_request_drops_its_visits():
    async def go():
        transport = Scripted(slow_visits(SIX, 0.01))
        router = Router(transport, depth=12, limits=LIMITS, rounds=THREE, clock=loop_time)
        router.swarm = Swarm(HostState(name, frozenset(blocks)) for name, blocks in SIX.items())
        walk = asyncio.ensure_future(router.walk(START, deadline=2.0))
        await asyncio.sleep(0.015)
        walk.cancel()
        await asyncio.gather(walk, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(transport.cancelled) == 3
        assert router.walks == 0
        assert all(view.waiting == 0 for view in router.swarm.values())

    run_virtual(go())


# --- what holds for every swarm -------------------------------------------------------------------

DEPTH = 6
NUMBER = ContextVar("number")
WRONG = np.full((1, 2, 3), np.nan, np.float32)
HURRIED = Limits(reserve_ms=10, hop_floor_ms=10, hop_cap_ms=12)
STEPS = 20_000
"""A request reads the clock less often than this, or it turns in a circle."""
# Hypothesis draws the first ones most: in time, or late and soon there.
TIMES = st.sampled_from([0.004, 0.02, 0.006, 0.03, 0.009, 0.015, 0.05, 9.0])
ACTS = st.lists(
    st.one_of(*[TIMES] * 3, st.sampled_from(["lost", "unavailable", "failed", WRONG])),
    min_size=6, max_size=12,
)  # fmt: skip
HOSTS = st.lists(
    st.tuples(
        st.sets(st.integers(0, DEPTH - 1), min_size=1, max_size=4),
        st.sampled_from([0.001, 0.002, 0.004, 0.02]),
        ACTS,
    ),
    min_size=2, max_size=8,
)  # fmt: skip
ROUNDS = st.builds(
    lambda ways, age: Rounds({k: Cell(k, *way) for k, way in enumerate(ways, 1)}, max_age=age),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=DEPTH, max_size=DEPTH),
    st.integers(0, 8),
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.1]),
        st.sampled_from([1.0, 0.2, 0.1, 0.03]),
        st.sampled_from([DEPTH, 1, 3]),
    ),
    min_size=1, max_size=3,
)  # fmt: skip
BACK = st.lists(st.tuples(st.sampled_from([0.02, 0.05, 0.1]), st.integers(0, 7)), max_size=6)


class Watched(Scripted):
    """Also notes hosts that a request asks for a block while they run it for this request."""

    def __init__(self, acts):
        super().__init__(acts)
        self.open, self.twice = Counter(), []

    async def visit(self, visit, state, *, form="fp32"):
        key = (NUMBER.get(), visit.host, visit.block)
        if self.open[key]:
            self.twice.append(key)
        self.open[key] += 1
        try:
            return await super().visit(visit, state)
        finally:
            self.open[key] -= 1


def answers(hosts, rounds, requests, back=(), *, limits=HURRIED):
    """The results of all requests, and the transport and router."""

    async def go():
        acts = {
            f"h{k}": [
                VisitError("why", outcome=act) if isinstance(act, str) else act for act in acts
            ]
            for k, (_, _, acts) in enumerate(hosts)
        }
        transport, reads = Watched(acts), Counter()

        def clock():
            reads["all"] += 1
            assert reads["all"] < STEPS, "a request turns in a circle"
            return loop_time()

        router = Router(transport, depth=DEPTH, limits=limits, rounds=rounds, clock=clock)
        views = [
            HostState(f"h{k}", frozenset(blocks), compute=compute, link=0.001)
            for k, (blocks, compute, _) in enumerate(hosts)
        ]
        router.swarm = Swarm(views)
        for when, number in back:
            host = views[number % len(views)]
            asyncio.get_running_loop().call_later(
                when, router.update, host.name, lambda _, host=host: host
            )

        async def asked(number, begin, seconds, min_blocks):
            NUMBER.set(number)
            await asyncio.sleep(begin)
            return await router.walk(
                START * (number + 1), deadline=loop_time() + seconds, min_blocks=min_blocks
            )

        results = await asyncio.gather(*(asked(k, *request) for k, request in enumerate(requests)))
        await asyncio.sleep(1)  # what was cancelled comes to its end
        return results, transport, router

    return run_virtual(go())


@given(HOSTS, ROUNDS, REQUESTS, BACK)
@settings(max_examples=200, deadline=None)
def test_requests_side_by_side_keep_the_rules(hosts, rounds, requests, back):
    """In time, replayed bit for bit, no block twice on one version or more often than it pays."""
    results, transport, router = answers(hosts, rounds, requests, back)
    cleared = {f"h{number % len(hosts)}" for _, number in back}
    assert {host for _, host, _ in transport.twice} <= cleared, "a late host was asked again"
    assert router.walks == 0
    assert all(view.waiting == 0 for view in router.swarm.values())
    for number, ((state, route), (_, seconds, _)) in enumerate(zip(results, requests, strict=True)):
        assert route.ms / 1000 <= max(0.0, seconds - HURRIED.reserve_ms / 1000) + 1e-9
        assert (state == replayed(route, START * (number + 1))).all()
        if route.order:
            # It refuses a block that runs twice on one version, and versions that are not there.
            ExecutionOrder(route.order, DEPTH, route.versions)
            passes = max((cell.passes for cell in rounds.cells.values()), default=1)
            assert max(Counter(route.order).values()) <= passes
        ages = [place - version for place, (_, version) in enumerate(route.steps)]
        assert max(ages, default=0) <= rounds.max_age
        answered = [hop.block for hop in route.hops if hop.outcome == "answered"]
        assert Counter(answered) == Counter(route.order), "an answer was lost"
        assert (route.ending == "complete") == (route.kept == DEPTH)
        late = {hop.block for hop in route.hops if hop.outcome == "late"}
        unasked = [b for b, why in route.skipped.items() if "not answer in time" in why]
        assert set(unasked) <= late, "a host that could run it was not asked"


@given(HOSTS, st.sampled_from([(), ("lost",), (9.0, "lost", WRONG)]), ROUNDS)
@settings(max_examples=100, deadline=None)
def test_every_reachable_block_runs_when_time_allows(hosts, faults, rounds):
    """Also when the first visits fail: what a healthy host holds has run, slow or not."""
    hosts = [
        (blocks, compute, [*faults[k : k + 1], *[0.001] * 40])
        for k, (blocks, compute, _) in enumerate(hosts)
    ]
    ((_, route),), _, router = answers(hosts, rounds, [(0.0, 1000.0, 1)], limits=LIMITS)
    usable = [view for view in router.swarm.values() if view.usable]
    assert {block for view in usable for block in view.blocks} <= set(route.order)
