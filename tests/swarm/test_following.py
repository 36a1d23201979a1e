"""The request that a page follows, while it walks over scripted hosts in virtual time."""

import asyncio
from contextlib import suppress

import pytest
from test_policy import LIMITS, THREE
from test_router import SIX, START, Scripted, slow_visits

from clock import loop_time, run_virtual
from layershuffle.swarm.messages import HostGone
from layershuffle.swarm.router import Router
from layershuffle.swarm.server.live import REST, Following
from layershuffle.swarm.state import HostView, Swarm


def watched(acts, hosts, go, *, depth=4, limits=LIMITS, **options):
    """`go(router, following)` over scripted hosts that are expected to take 5 ms."""

    async def run():
        router = Router(Scripted(acts), depth=depth, limits=limits, clock=loop_time, **options)
        router.swarm = Swarm(
            HostView(name, frozenset(blocks), compute=0.004, link=0.001)
            for name, blocks in hosts.items()
        )
        router.watcher = following = Following(loop_time, depth=depth)
        return await go(router, following)

    return run_virtual(run())


def begin(router, seconds=1.0):
    """A request under way."""
    return asyncio.create_task(router.walk(START, deadline=router.clock() + seconds))


def times(walk):
    """Host, blocks, begin, end and outcome of every visit."""
    return [
        (v["host"], v["blocks"], round(v["begun"]), v["ended"] and round(v["ended"]), v["outcome"])
        for v in walk["visits"]
    ]


def test_a_request_is_seen_visit_by_visit_while_it_walks():
    """One visit after the other, 10 ms each: after 25 ms two are over and one is under way."""

    async def go(router, following):
        assert following.described(router.clock()) is None
        walking = begin(router)
        await asyncio.sleep(0.025)
        halfway = following.described(router.clock())
        moving = following.moving(router.clock())
        _, route = await walking
        return halfway, moving, following.described(router.clock()), route

    hosts = {name: (block,) for block, name in enumerate("abcd")}
    halfway, moving, end, route = watched(slow_visits(hosts, 0.01), hosts, go)
    assert moving
    assert [visit[2:] for visit in times(halfway)] == [
        (0, 10, "answered"),
        (10, 20, "answered"),
        (20, None, ""),
    ]
    assert (halfway["blocks"], halfway["over"], round(halfway["ms"])) == (2, False, 25)
    assert (end["blocks"], end["over"], end["answered"], round(end["ms"])) == (4, True, True, 40)
    assert [(visit["host"], visit["blocks"]) for visit in end["visits"]] == [
        (hop.host, (hop.block,)) for hop in route.hops
    ]


def test_visits_side_by_side_overlap_in_time():
    async def go(router, following):
        walking = begin(router)
        await asyncio.sleep(0.005)
        early = following.described(router.clock())
        await walking
        return early

    early = watched(slow_visits(SIX, 0.01), SIX, go, depth=12, rounds=THREE)
    assert [visit[2:] for visit in times(early)] == [(0, None, "")] * 3


def test_late_lost_and_given_up_visits_are_told_apart():
    """a is late after 100 ms, b is gone: the blocks that only they hold are skipped.

    The visit to a is given up when c has answered 10 ms later, because its state is too old then.
    """

    async def go(router, following):
        walking = begin(router, seconds=0.6)
        await asyncio.sleep(0.5)
        waiting = following.described(router.clock())
        await walking
        await asyncio.sleep(0.01)
        return waiting, following.described(router.clock())

    acts = {"a": [5.0] * 9, "b": [HostGone("its process is gone")] * 9, "c": [0.01] * 9}
    waiting, end = watched(acts, {"a": (0,), "b": (1,), "c": (2, 3)}, go)
    late = next(visit for visit in waiting["visits"] if visit["host"] == "a")
    assert (late["outcome"], late["late"], late["ended"]) == ("late", True, 110)
    lost = next(visit for visit in waiting["visits"] if visit["host"] == "b")
    assert (lost["outcome"], lost["why"]) == ("lost", "its process is gone")
    assert end["over"]
    assert {skip["block"] for skip in end["skipped"]} == {0, 1}
    assert all(visit["ended"] is not None for visit in end["visits"])


def test_a_late_answer_that_counts_is_an_answer_that_was_late():
    async def go(router, following):
        await begin(router)
        return following.described(router.clock())

    end = watched({"a": [0.2]}, {"a": (0,)}, go, depth=1)
    assert times(end) == [("a", (0,), 0, 200, "answered")]
    assert (end["visits"][0]["late"], end["blocks"]) == (True, 1)


def test_one_request_is_followed_to_its_end_and_rests_before_the_newest():
    async def go(router, following):
        seen = []

        def number():
            return following.described(router.clock())["number"]

        await asyncio.gather(begin(router), begin(router), begin(router))
        seen.append(number())
        await asyncio.sleep(REST / 2)
        seen.append(number())
        await asyncio.sleep(REST)
        seen.append(number())
        await asyncio.sleep(REST)
        walking = begin(router)
        await asyncio.sleep(0)
        seen.append(number())
        await walking
        return seen

    hosts = {name: (block,) for block, name in enumerate("abcd")}
    assert watched(slow_visits(hosts, 0.01), hosts, go) == [1, 1, 3, 4]


def test_a_request_that_was_cancelled_is_over_and_makes_room():
    async def go(router, following):
        walking = begin(router)
        await asyncio.sleep(0.005)
        walking.cancel()
        with suppress(asyncio.CancelledError):
            await walking
        await asyncio.sleep(0)
        cancelled = following.described(router.clock())
        await asyncio.sleep(REST)
        await begin(router)
        return cancelled, following.described(router.clock())

    hosts = {name: (block,) for block, name in enumerate("abcd")}
    cancelled, after = watched(slow_visits(hosts, 0.01), hosts, go)
    assert (cancelled["over"], cancelled["answered"]) == (True, False)
    assert [visit["outcome"] for visit in cancelled["visits"]] == ["dropped"]
    assert (after["number"], after["answered"]) == (2, True)


def test_a_request_that_ended_unwatched_does_not_stay_in_sight():
    """The last viewer leaves while it walks; the next viewer sees the next request."""

    async def go(router, following):
        walking = begin(router)
        await asyncio.sleep(0.005)
        router.watcher = None
        following.forget()
        await walking
        router.watcher = following
        before = following.described(router.clock())
        await begin(router)
        return before, following.described(router.clock())

    hosts = {name: (block,) for block, name in enumerate("abcd")}
    before, after = watched(slow_visits(hosts, 0.01), hosts, go)
    assert before is None
    assert (after["number"], after["answered"]) == (2, True)


def test_nothing_of_a_request_is_kept_once_it_is_over():
    """Its states would be megabytes each."""

    async def go(router, following):
        await asyncio.gather(begin(router), begin(router))
        return [(way.walk, way.calls) for way in following._requests()]

    hosts = {"a": (0, 1), "b": (2, 3)}
    assert watched({}, hosts, go) == [(None, {})] * 2


@pytest.mark.parametrize("watch", [True, False])
def test_watching_changes_nothing_of_what_is_walked(watch):
    async def go(router, following):
        if not watch:
            router.watcher = None
        _, route = await begin(router)
        return route.order, route.ms, following.version

    order, ms, version = watched(slow_visits(SIX, 0.01), SIX, go, depth=12, rounds=THREE)
    assert (sorted(order), ms) == (list(range(12)), pytest.approx(40))
    assert (version > 0) == watch
