"""Whole requests with several visits under way, over scripted hosts in virtual time."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from test_free import AGAIN, THREE
from test_policy import LIMITS, host
from test_router import Scripted

from clock import loop_time, run_virtual
from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm.messages import HostGone
from layershuffle.swarm.rounds import QUEUE, Rounds, Way
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm

START = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 2, 3)


def curved(blocks, state_before):
    """What scripted hosts compute here: each block adds something that depends on the state."""
    for block in blocks:
        state_before = state_before + np.float32(0.1) * np.sin(state_before + np.float32(block))
    return state_before


def replayed(route, start=START):
    """The route's steps by the formula of `core.orders`, one after the other."""
    states = [start]
    for position, (block, version) in enumerate(route.steps):
        out = curved((block,), states[version])
        newest = version == position
        states.append(out if newest else states[-1] + (out - states[version]))
    return states[-1]


class Curved(Scripted):
    """Hosts that compute `curved`."""

    compute = staticmethod(curved)


def walked(acts, hosts, *, rounds=THREE, depth=4, seconds=1.0, limits=LIMITS, views=None, **asked):
    async def go():
        transport = Curved(acts)
        router = Router(transport, depth=depth, limits=limits, rounds=rounds, clock=loop_time)
        router.swarm = Swarm(
            HostView(
                name,
                frozenset(blocks),
                **{"compute": 0.004, "link": 0.001, **(views or {}).get(name, {})},
            )
            for name, blocks in hosts.items()
        )
        after, route = await router.walk(START, deadline=router.clock() + seconds, **asked)
        await asyncio.sleep(1)  # what was cancelled comes to its end
        assert router.walks == 0
        assert all(view.waiting == 0 for view in router.swarm.values())
        return after, route, transport

    return run_virtual(go())


SIX = {name: (2 * place, 2 * place + 1) for place, name in enumerate("abcdef")}


def slow_visits(names, seconds):
    return {name: [seconds] * 40 for name in names}


def test_a_round_takes_as_long_as_one_visit():
    """12 blocks on six hosts, 10 ms each, three at a time: four rounds."""
    after, route, _ = walked(slow_visits(SIX, 0.01), SIX, depth=12)
    assert route.ms == pytest.approx(40)
    assert route.ending == "complete"
    assert sorted(route.order) == list(range(12))
    assert (after == replayed(route)).all()
    ages = [place - version for place, (_, version) in enumerate(route.steps)]
    assert max(ages) == 2, "two others ended before"
    order = ExecutionOrder(route.order, 12, route.versions)
    assert order.steps == route.steps


def test_a_slow_visit_holds_nobody_up_and_counts():
    """a's block comes after 35 ms: until then two others are under way, and then three."""
    acts = slow_visits(SIX, 0.01) | {"a": [0.035, *[0.01] * 9]}
    late = Rounds(otherwise=Way(3), max_age=11)
    after, route, _ = walked(acts, SIX, depth=12, rounds=late)
    assert route.ms == pytest.approx(50)
    assert route.ending == "complete"
    assert max(place - version for place, (_, version) in enumerate(route.steps)) >= 5
    assert (after == replayed(route)).all()


def test_what_comes_too_late_runs_again():
    acts = slow_visits(SIX, 0.01) | {"a": [0.035, *[0.01] * 9]}
    after, route, transport = walked(
        acts, SIX, depth=12, rounds=Rounds(otherwise=Way(3), max_age=2)
    )
    assert route.ending == "complete"
    assert sorted(route.order) == list(range(12))
    assert max(place - version for place, (_, version) in enumerate(route.steps)) <= 2
    assert (after == replayed(route)).all()
    assert transport.calls.count(("a", (0,))) == 2


def test_a_dead_host_costs_its_blocks_and_the_rest_runs_again():
    hosts = {"a": [0], "b": [1], "c": [2, 3]}
    acts = slow_visits("ab", 0.01) | {"c": [HostGone("dead")]}
    after, route, _ = walked(acts, hosts, rounds=AGAIN)
    assert Counter(route.order) == {0: 3, 1: 3}
    assert (route.ending, set(route.skipped)) == ("unreachable", {2, 3})
    assert (after == replayed(route)).all()
    assert route.kept == 2


def test_the_first_of_two_answers_counts():
    """a is late after 100 ms and answers after 130, b, which is asked then, after 140."""
    acts = {"a": [0.13], "b": [0.04], "c": [0.01]}
    after, route, transport = walked(acts, {"a": [0], "b": [0], "c": [1]}, depth=2)
    hops = [(hop.host, hop.outcome) for hop in route.hops]
    assert hops == [("c", "answered"), ("a", "late"), ("a", "answered")]
    assert (route.steps, route.ms) == (((1, 0), (0, 0)), pytest.approx(130))
    assert (after == replayed(route)).all()
    assert transport.cancelled == ["b"]


def test_late_answers_wait_for_several_blocks_in_one_visit():
    """One host is left, which runs 1 and 2 together: what comes meanwhile joins after them."""
    hosts = {"a": [0], "b": [1, 2, 3]}
    acts = {"a": [0.105], "b": [0.002, 0.09, 0.02]}
    after, route, _ = walked(acts, hosts, rounds=Rounds(otherwise=Way(2), max_age=9))
    assert route.ending == "complete"
    assert (after == replayed(route)).all()


def test_an_answer_in_hand_counts_when_several_blocks_are_late():
    """Host b is late with blocks 2 and 3 together while the answer with block 0 waits for them."""
    hosts = {"a": [0], "b": [1, 2, 3, 4]}
    acts = {"a": [0.15], "b": [0.09, 0.02, 9.0, 9.0]}
    rounds = Rounds(otherwise=Way(2), max_age=9)
    after, route, _ = walked(acts, hosts, depth=5, rounds=rounds, seconds=3)
    assert 0 in route.order
    assert (after == replayed(route)).all()


def test_a_change_of_the_swarm_wakes_every_request_that_waits():
    """The second request begins to wait between the change and the first one's next step."""

    async def go():
        router = Router(Curved({}), depth=4, limits=LIMITS, rounds=THREE, clock=loop_time)
        router.swarm = Swarm([host("a", 0)])
        first = asyncio.ensure_future(router.wait((), until=9.0, changes=True))
        first.add_done_callback(lambda _: times.append(loop_time()))
        await asyncio.sleep(0)
        router.swarm = Swarm([host("a", 0), host("b", 1)])
        await router.wait((), until=5.0, changes=True)
        await first
        times.append(loop_time())

    times = []
    run_virtual(go())
    assert times == [0.0, 5.0]


@pytest.mark.parametrize(("act", "struck"), [(9.0, True), (0.01, False)])
@pytest.mark.parametrize(("rounds", "order"), [(THREE, None), (QUEUE, None), (QUEUE, "0+1")])
def test_a_host_that_falls_silent_is_blamed_though_the_deadline_is_near(act, struck, rounds, order):
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
        transport = Curved({"a": [act], "b": [0.079]})
        router = Router(transport, depth=4, limits=LIMITS, rounds=rounds, clock=clock)
        router.observers.append(take)
        router.swarm = Swarm([host("a", 0), host("b", 1)])
        _, route = await router.walk(START, deadline=0.1, order=order)
        return route, router.swarm["a"].condition

    route, condition = run_virtual(go())
    assert route.ms <= 95
    assert [hop.outcome for hop in route.hops if hop.host == "a"] == [
        "late" if struck else "answered"
    ]
    assert condition == ("suspect" if struck else "healthy")


@pytest.mark.parametrize("rounds", [QUEUE, THREE])
def test_requests_side_by_side_do_not_mix(rounds):
    async def go():
        router = Router(
            Curved(slow_visits(SIX, 0.01)), depth=12, limits=LIMITS, rounds=rounds, clock=loop_time
        )
        router.swarm = Swarm(
            HostView(name, frozenset(blocks), compute=0.004, link=0.001)
            for name, blocks in SIX.items()
        )
        starts = [START * (k + 1) for k in range(5)]
        walks = [router.walk(start, deadline=router.clock() + 2) for start in starts]
        return starts, await asyncio.gather(*walks), router

    starts, results, router = run_virtual(go())
    for start, (after, route) in zip(starts, results, strict=True):
        assert (after == replayed(route, start)).all()
        assert route.ending == "complete"
    assert len({route.order for _, route in results}) > 1
    assert all(view.waiting == 0 for view in router.swarm.values())


def test_cancelling_a_request_drops_all_of_its_visits():
    async def go():
        transport = Curved(slow_visits(SIX, 9.0))
        router = Router(transport, depth=12, limits=LIMITS, rounds=THREE, clock=loop_time)
        router.swarm = Swarm(
            HostView(name, frozenset(blocks), compute=0.004, link=0.001)
            for name, blocks in SIX.items()
        )
        walk = asyncio.ensure_future(router.walk(START, deadline=router.clock() + 2))
        await asyncio.sleep(0.01)
        walk.cancel()
        await asyncio.gather(walk, return_exceptions=True)
        await asyncio.sleep(1)
        return transport, router

    transport, router = run_virtual(go())
    assert len(transport.cancelled) == 3
    assert router.walks == 0
    assert all(view.waiting == 0 for view in router.swarm.values())
