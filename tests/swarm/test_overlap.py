"""Requests with several visits under way: chosen cases by hand, and what holds for every swarm."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import DEPTH, HOSTS, LIMITS, host
from test_router import Scripted

from clock import loop_time, run_virtual
from layershuffle.orders import ExecutionOrder
from layershuffle.swarm import state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import HostGone, Visit, Visited
from layershuffle.swarm.overlap import counts, decide_overlap
from layershuffle.swarm.policy import Finish, Progress, UnderWay, Wait
from layershuffle.swarm.rounds import Rounds, Way
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm

THREE = Rounds(otherwise=Way(3), max_age=4)
AGAIN = Rounds({2: Way(2, 3)}, otherwise=Way(2), max_age=4)
START = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 2, 3)


def next_of(*hosts, rounds=THREE, now=0.0, walks=1, done=(), **progress):
    asked = Progress(**{"depth": 4, "deadline": 1.0, **progress}).after(done)
    return decide_overlap(asked, Swarm(hosts), now=now, limits=LIMITS, rounds=rounds, walks=walks)


def under_way(*visits):
    return tuple(UnderWay(host, blocks, version) for host, blocks, version in visits)


# --- decisions ------------------------------------------------------------------------------------

A, B, C = host("a", 0, 1), host("b", 2), host("c", 3)


def test_idle_hosts_get_a_block_each():
    assert next_of(A, B, C) == Visit("a", (0,), limit=0.1)
    a, b, c = (replace(one, waiting=1) for one in (A, B, C))
    assert next_of(a, B, C, under_way=under_way(("a", (0,), 0))).host == "b"
    assert next_of(a, b, C, under_way=under_way(("a", (0,), 0))).host == "c"
    two = under_way(("a", (0,), 0), ("c", (3,), 0))
    assert next_of(a, b, c, under_way=two) == Wait(0.99), "nobody is idle"


def test_no_more_are_under_way_than_may_be():
    three = under_way(("a", (0,), 0), ("b", (2,), 0), ("c", (3,), 0))
    assert next_of(A, B, C, under_way=three) == Wait(0.99, for_hosts=False)
    assert next_of(A, B, C, under_way=three[:2]).host == "a"
    late = tuple(replace(visit, waited=False) for visit in three[:1])
    assert next_of(A, B, C, under_way=(*late, *three[1:])) == Visit("a", (1,), limit=0.1)


def test_busy_swarms_run_one_visit_at_a_time_with_all_that_its_host_holds():
    quick = replace(A, compute=0.001)
    assert next_of(quick, B, C, walks=2) == Visit("a", (0, 1), limit=0.1)
    assert next_of(A, B, C, walks=2, under_way=under_way(("a", (0, 1), 0))) == Wait(
        0.99, for_hosts=False
    )
    assert next_of(host("a", 0, 1, 2, 3)) == Visit("a", (0, 1, 2, 3), limit=0.1), "one host"


def test_blocks_that_few_hold_go_first():
    assert next_of(A, host("b", 0, 2, 3), rounds=THREE).blocks == (1,)


def test_a_late_visit_is_repeated_elsewhere_alone():
    late = (UnderWay("a", (0,), 0, waited=False),)
    assert next_of(A, host("b", 0), done=(2, 3, 1), under_way=late).host == "b"
    assert next_of(A, done=(2, 3, 1), under_way=late) == Finish("unreachable")
    waiting = next_of(A, done=(2, 3, 1), under_way=late, min_blocks=4)
    assert waiting == Wait(0.99), "it has too few blocks, and the late answer may come"


def test_survivors_run_again_as_far_as_it_helps():
    """Two of four blocks: three passes; a pass begins when the one before has ended."""
    asked = {"rounds": AGAIN, "done": (0, 2)}
    hosts = host("a", 0), host("b", 2)
    assert next_of(*hosts, **asked).blocks == (0,)
    last_of_first = {"rounds": AGAIN, "done": (0,), "under_way": under_way(("b", (2,), 0))}
    assert next_of(*hosts, **last_of_first) == Wait(0.99)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2, 0)).blocks == (2,)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2) * 2).blocks == (0,)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2) * 3) == Finish("unreachable")
    back = next_of(*hosts, host("c", 3), rounds=AGAIN, done=(0, 2, 0))
    assert back.blocks == (3,), "a block that has not run goes before all others"
    assert next_of(*hosts, **asked, deadline=0.0159) == Finish("deadline")
    assert next_of(*hosts, **asked, most=2) == Finish("enough")
    assert next_of(hosts[0], rounds=AGAIN, done=(0, 2) * 2).blocks == (0,), "2 is gone"


def test_a_slow_host_takes_part_if_it_may_be_back_in_time():
    """Two quick blocks take 6 ms each, one under way at a time: 12 ms, and the slow host 11."""
    hosts = host("a", 0), host("b", 1), host("c", 2), host("d", 3, compute=0.009, link=0.002)
    limits = Limits(reserve_ms=10, slow_factor=2.0, slow_margin_ms=1.0)
    progress = Progress(4, 1.0).after((0,))
    two = Rounds(otherwise=Way(2), max_age=4)
    visit = decide_overlap(progress, Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert visit.host != "d", "only one round is left: 6 ms"
    visit = decide_overlap(Progress(4, 1.0), Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert (visit.host, visit.blocks, visit.waited) == ("d", (3,), False)
    ended = progress.after((1, 2))
    ended = replace(ended, under_way=(UnderWay("d", (3,), 0, waited=False),))
    found = decide_overlap(ended, Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert found == Finish("unreachable"), "nobody waits for it"


def test_what_still_counts():
    progress = Progress(6, 1.0).after((0, 1, 2))
    assert counts(progress, UnderWay("a", (3,), 1), max_age=2)
    assert not counts(progress, UnderWay("a", (3,), 0), max_age=2), "too old"
    assert not counts(progress, UnderWay("a", (2,), 1), max_age=2), "it ran meanwhile"
    assert counts(progress, UnderWay("a", (0,), 1), max_age=2), "its next pass"
    assert counts(progress, UnderWay("a", (3, 4), 3), max_age=2)
    assert not counts(progress, UnderWay("a", (3, 4), 2), max_age=2), "one sum, on its own state"


# --- whole requests -------------------------------------------------------------------------------


def curved(blocks, state_before):
    """What scripted hosts compute here: each block adds something that depends on the state."""
    for block in blocks:
        state_before = state_before + np.float32(0.1) * np.sin(state_before + np.float32(block))
    return state_before


def replayed(route, start=START):
    """The route's steps by the formula of `layershuffle.orders`, one after the other."""
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


def test_requests_side_by_side_do_not_mix():
    async def go():
        router = Router(
            Curved(slow_visits(SIX, 0.01)), depth=12, limits=LIMITS, rounds=THREE, clock=loop_time
        )
        router.swarm = Swarm(
            HostView(name, frozenset(blocks), compute=0.004, link=0.001)
            for name, blocks in SIX.items()
        )
        starts = [START * (k + 1) for k in range(5)]
        walks = [router.walk(start, deadline=router.clock() + 2) for start in starts]
        return starts, await asyncio.gather(*walks)

    starts, results = run_virtual(go())
    for start, (after, route) in zip(starts, results, strict=True):
        assert (after == replayed(route, start)).all()
        assert route.ending == "complete"


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


# --- what holds for every swarm -------------------------------------------------------------------

ROUNDS = st.builds(
    lambda parallel, passes, age: Rounds(otherwise=Way(parallel, passes), max_age=age),
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 8),
)  # fmt: skip
OUTCOMES = st.lists(
    st.tuples(
        st.sampled_from(["answered", "answered", "late", "lost", "wrong", "unavailable"]),
        st.floats(0, 3),
    ),
    min_size=60, max_size=60,
)  # fmt: skip


@given(HOSTS, OUTCOMES, ROUNDS, st.floats(0.02, 3.0), st.integers(0, DEPTH), st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_requests_end_in_time_and_run_no_block_too_often(
    hosts, fates, rounds, deadline, min_blocks, walks
):
    """Visits end in the order of their times; late ones go on, and may still count."""
    swarm = Swarm(
        HostView(f"h{i}", blocks, compute=compute, link=link, waiting=waiting)
        for i, (blocks, compute, link, waiting) in enumerate(hosts)
    )
    progress, now, calls, fates = Progress(DEPTH, deadline, min_blocks), 0.0, [], iter(fates)
    last_start = deadline - LIMITS.reserve_ms / 1000
    for _ in range(500):
        calls = [call for call in calls if counts(progress, call[1], max_age=rounds.max_age)]
        action = decide_overlap(
            replace(progress, under_way=tuple(view for _, view, _, _ in calls)),
            swarm, now=now, limits=LIMITS, rounds=rounds, walks=walks,
        )  # fmt: skip
        if isinstance(action, Finish):
            break
        if isinstance(action, Visit):
            assert action.limit > 0
            assert now + action.limit <= last_start + 1e-9
            assert set(action.blocks) <= swarm[action.host].blocks
            busy = {block for _, view, _, _ in calls if view.waited for block in view.blocks}
            assert not busy & set(action.blocks)
            view = UnderWay(action.host, action.blocks, len(progress.done), action.waited)
            outcome, share = next(fates, ("answered", 0.5))
            ends = now + action.limit * (share if outcome == "answered" else min(share, 1))
            calls.append((ends, view, outcome, now + action.limit))
            continue
        several = [call for call in calls if call[1].waited and len(call[1].blocks) > 1]
        events = [(call[0], "end", call) for call in several or calls]
        events += [(call[3], "late", call) for call in calls if call[1].waited]
        time, kind, call = min(
            events, key=lambda event: event[:2], default=(action.until, "", None)
        )
        if call is None or time > action.until:
            now = action.until
            continue
        now = max(now, time)
        _, view, outcome, limit = call
        calls.remove(call)
        if kind == "late":
            calls.append((call[0], replace(view, waited=False), outcome, limit))
            outcome = "late"
        hop = Visited(view.host, view.blocks, outcome, 1.0, 0.5, 0.1)
        if outcome == "answered":
            swarm = swarm.with_host(state.answered(swarm[hop.host], hop, limits=LIMITS))
            progress = progress.after(view.blocks, version=view.version)
        else:
            swarm = swarm.with_host(state.failed(swarm[hop.host], hop, now=now, limits=LIMITS))
    else:
        raise AssertionError("the request did not end")
    assert now <= max(last_start, 0.0) + 1e-9
    if progress.done:
        # It refuses a block that runs twice on one version, and versions that are not there.
        ExecutionOrder(progress.done, DEPTH, progress.versions)
        assert max(Counter(progress.done).values()) <= rounds.otherwise.passes
    ages = [place - version for place, version in enumerate(progress.versions)]
    assert max(ages, default=0) <= rounds.max_age
    assert (action.ending == "complete") == (len(set(progress.done)) == DEPTH)
