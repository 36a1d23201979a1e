"""Requests side by side over hosts that fail, fall silent and come back: what always holds."""

import asyncio
from collections import Counter
from contextvars import ContextVar

from hypothesis import given, settings
from hypothesis import strategies as st
from test_router import START, Scripted, replayed

from clock import loop_time, run_virtual
from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import HostFailed, HostGone, HostUnavailable
from layershuffle.swarm.rounds import Rounds, Way
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm

DEPTH = 6
NUMBER = ContextVar("number")
LIMITS = Limits(reserve_ms=10, hop_floor_ms=10, hop_cap_ms=12)
STEPS = 20_000
"""A request reads the clock less often than this, or it turns in a circle."""
# Hypothesis draws the first ones most: in time, or late and soon there.
TIMES = st.sampled_from([0.004, 0.02, 0.006, 0.03, 0.009, 0.015, 0.05, 9.0])
ACTS = st.lists(
    st.one_of(TIMES, TIMES, TIMES, st.sampled_from([HostGone, HostUnavailable, HostFailed])),
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
    lambda ways, parallel, age, tied: Rounds(
        dict(enumerate(ways, 1)), otherwise=Way(parallel), max_age=age, tied=tied
    ),
    st.lists(st.builds(Way, st.integers(1, 4), st.integers(1, 3)), max_size=DEPTH),
    st.integers(2, 4), st.integers(0, 8), st.sampled_from([None, (0, 0, 0, 3, 3, 5)]),
)  # fmt: skip
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


def answers(hosts, rounds, requests, back):
    """Every request's start, seconds allowed, result, and the transport and router."""

    async def go():
        acts = {
            f"h{k}": [act if isinstance(act, float) else act("why") for act in acts]
            for k, (_, _, acts) in enumerate(hosts)
        }
        transport, reads = Watched(acts), Counter()

        def clock():
            reads["all"] += 1
            assert reads["all"] < STEPS, "a request turns in a circle"
            return loop_time()

        router = Router(transport, depth=DEPTH, limits=LIMITS, rounds=rounds, clock=clock)
        views = [
            HostView(f"h{k}", frozenset(blocks), compute=compute, link=0.001)
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
@settings(max_examples=150, deadline=None)
def test_requests_side_by_side_keep_the_rules(hosts, rounds, requests, back):
    """In time, replayed bit for bit, no block twice on one version or more often than it pays."""
    results, transport, router = answers(hosts, rounds, requests, back)
    cleared = {f"h{number % len(hosts)}" for _, number in back}
    assert {host for _, host, _ in transport.twice} <= cleared, "a late host was asked again"
    assert router.walks == 0
    assert all(view.waiting == 0 for view in router.swarm.values())
    for number, ((state, route), (_, seconds, _)) in enumerate(zip(results, requests, strict=True)):
        assert route.ms / 1000 <= max(0.0, seconds - LIMITS.reserve_ms / 1000) + 1e-9
        assert (state == replayed(route, START * (number + 1))).all()
        if route.order:
            # It refuses a block that runs twice on one version, and versions that are not there.
            ExecutionOrder(route.order, DEPTH, route.versions)
            passes = max(way.passes for way in (*rounds.ways.values(), rounds.otherwise))
            assert max(Counter(route.order).values()) <= passes
        ages = [place - version for place, (_, version) in enumerate(route.steps)]
        assert max(ages, default=0) <= rounds.max_age
        answered = [hop.block for hop in route.hops if hop.outcome == "answered"]
        assert Counter(answered) == Counter(route.order), "an answer was lost"
        assert (route.ending == "complete") == (route.kept == DEPTH)
        late = {hop.block for hop in route.hops if hop.outcome == "late"}
        unasked = [b for b, why in route.skipped.items() if "not answer in time" in why]
        assert set(unasked) <= late, "a host that could run it was not asked"
