"""Held is loaded and tested: hosts that load nothing keep no block from others. Virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_site import VirtualHost, VirtualSite, virtual_gateway

from clock import run_virtual
from layershuffle.gateway.brain.assignment import (
    BlockFile,
    HostCapacity,
    Loading,
    Stay,
    assign,
    overdue,
    settled,
)
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.state import Visited
from waiting import until

LIMITS = Limits(load_ms=5000, load_bytes_per_second=1e6)
DEPTH = 12
FILES = [BlockFile(f"{number:064x}", 10) for number in range(DEPTH)]


async def all_held(site: VirtualSite, *, seconds: float) -> float:
    return await until(lambda: min(site.copies()) >= 1, seconds=seconds)


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize("memory", [10**9, 1 << 50])
def test_blocks_go_to_a_host_that_loads_them(mute: bool, memory: int) -> None:
    """Two hosts that load nothing were there first, and claim up to a petabyte."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            for name in ("full-1", "full-2"):
                VirtualHost(site, name, capacity=0, mute=mute, memory=memory, speed=1e6)
            await asyncio.sleep(1)
            VirtualHost(site, "good")
            waited = await all_held(site, seconds=30)
            # Five seconds, and a tenth for the bytes of a block, where nothing is said.
            assert waited < (5.5 if mute else 0.5)
            await asyncio.sleep(30)
            assert site.copies() == [1] * DEPTH
            for name in ("full-1", "full-2"):
                assert len(site.connected[name].assigned) == 1, "it still tries one"
                view = site.router.swarm[name]
                assert view.loading == frozenset()
                reason = "it has loaded none of the blocks" if mute else "no space left on device"
                assert reason in view.why
                assert "one at a time" in view.why

    run_virtual(main())


def test_a_host_keeps_what_it_has_loaded() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            small = VirtualHost(site, "small", capacity=3)
            await until(lambda: sum(site.copies()) == 3)
            VirtualHost(site, "good")
            await all_held(site, seconds=10)
            await asyncio.sleep(30)
            assert len(small.loaded) == 3
            assert sum(site.copies()) == DEPTH + 3
            assert "cannot load" in site.router.swarm["small"].why

    run_virtual(main())


def test_a_host_that_can_load_again_gets_all_its_blocks() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            host = VirtualHost(site, "pi", capacity=0)
            await asyncio.sleep(10)
            assert max(site.copies()) == 0
            host._capacity = 100
            host._load()
            await all_held(site, seconds=5)
            assert site.router.swarm["pi"].why == ""

    run_virtual(main())


def test_nobody_is_rid_of_its_failures_by_dialling_in_again() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            for _ in range(5):
                host = VirtualHost(site, "full", capacity=0)
                await asyncio.sleep(1)
                given = len(host.assigned)
                host.close(1001, "bye")
                await asyncio.sleep(1)
            assert given == 1

    run_virtual(main())


def test_hosts_that_come_and_go_keep_no_copy_from_hosts_that_stay() -> None:
    """Four are up for a third of a second, time and again; from the third time on they wait."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            steady = [VirtualHost(site, f"steady-{number}") for number in range(2)]
            await until(lambda: min(site.copies()) >= 2)
            for host in steady:
                assert len(host.assigned) == DEPTH

            async def comes_and_goes(name: str) -> None:
                for _ in range(40):
                    host = VirtualHost(site, name, speed=100.0)
                    await asyncio.sleep(0.35)
                    host.close(1001, "bye")
                    await asyncio.sleep(0.1)

            names = [f"restless-{number}" for number in range(4)]
            turns = [asyncio.create_task(comes_and_goes(name)) for name in names]
            await asyncio.sleep(5)
            for _ in range(100):
                await asyncio.sleep(0.1)
                for host in steady:
                    assert len(host.loaded) == DEPTH
                for name in names:
                    assert not site.router.swarm[name].blocks
            await asyncio.gather(*turns)
            # One that stays after all is given blocks again.
            host = VirtualHost(site, names[0], speed=100.0)
            assert "its last 40 connections ended soon" in site.router.swarm[names[0]].why
            await until(lambda: bool(host.loaded), seconds=60)
            assert site.router.swarm[names[0]].why == ""

    run_virtual(main())


def test_the_third_short_connection_gives_its_blocks_to_others_at_once() -> None:
    """Two are forgiven: the host comes back to its blocks. The third time it begins with none."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            for number in range(2):
                VirtualHost(site, f"steady-{number}")
            await until(lambda: min(site.copies()) >= 2)
            given: list[bool] = []
            for _ in range(4):
                host = VirtualHost(site, "restless", speed=100.0)
                given.append(bool(host.assigned))
                await asyncio.sleep(0.15)
                host.close(1001, "bye")
                await asyncio.sleep(0.1)
            assert given == [False, True, True, False]

    run_virtual(main())


def test_a_host_that_an_operator_readmits_does_not_wait() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            VirtualHost(site, "steady")
            await until(lambda: min(site.copies()) >= 1)
            for _ in range(6):
                VirtualHost(site, "pi")
                await asyncio.sleep(0.5)
                assert site.router.swarm["pi"].blocks
                site.coordinator.readmit("pi")
                await asyncio.sleep(0.5)

    run_virtual(main())


def test_a_host_that_comes_and_goes_is_given_blocks_while_some_are_missing() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            for _ in range(8):
                host = VirtualHost(site, "alone")
                assert await all_held(site, seconds=1) < 0.5
                host.close(1001, "bye")
                await asyncio.sleep(1)

    run_virtual(main())


def test_a_host_is_overdue_after_the_time_of_its_largest_block() -> None:
    """Five seconds, and two more for two million bytes at a million in a second."""
    blocks = [BlockFile("a", 10), BlockFile("b", 2_000_000), BlockFile("c", 1_000_000)]
    loading = Loading(since=100.0)
    assert not overdue(loading, blocks, now=106.999, limits=LIMITS)
    assert overdue(loading, blocks, now=107.001, limits=LIMITS)
    assert not overdue(loading, [], now=1e9, limits=LIMITS), "it has nothing to load"


@pytest.mark.parametrize(
    ("short", "pause"),
    [(0, 0.0), (2, 0.0), (3, 0.2), (4, 0.4), (5, 0.8), (11, 30.0), (10**9, 30.0)],
)
def test_a_pause_doubles_with_every_short_connection(short: int, pause: float) -> None:
    stay = Stay(100.0, short)
    limits = Limits(restart_ms=200, restart_max_ms=30_000)
    assert settled(stay, now=100.0 + pause + 0.001, limits=limits)
    assert pause == 0.0 or not settled(stay, now=100.0 + pause - 0.001, limits=limits)


@pytest.mark.parametrize("end", ["leaves", "is shut out"])
def test_a_host_that_is_away_has_loaded_nothing(end: str) -> None:
    """Others keep their blocks where a quick host ends as soon as it has loaded the first ones.

    It may come back for 0.3 seconds, but until then it serves none of them.
    """

    async def main() -> None:
        async with virtual_gateway(LIMITS, copies=1) as site:
            good = VirtualHost(site, "good")
            await all_held(site, seconds=10)
            for turn in range(4):
                name = f"quick-{turn}"
                quick = VirtualHost(site, name, speed=100.0)
                while not site.router.swarm[name].blocks:
                    await asyncio.sleep(0.001)
                assert len(good.assigned) == DEPTH, "until then nobody else has loaded one"
                if end == "leaves":
                    quick.close(1001, "bye")
                else:
                    hop = Visited(name, 0, "wrong", 1.0, why="it answered wrongly")
                    site.router.report(hop)
                for _ in range(10):
                    await asyncio.sleep(0.05)
                    assert len(good.assigned) == DEPTH
                    assert min(site.copies()) >= 1

    run_virtual(main())


def test_the_time_to_load_is_that_of_the_largest_block() -> None:
    limits = Limits(load_ms=1000, load_bytes_per_second=100)
    files = [BlockFile("a", 300), BlockFile("b", 200)]
    assert not overdue(Loading(10.0), files, now=13.9, limits=limits)
    assert overdue(Loading(10.0), files, now=14.0, limits=limits)
    assert not overdue(Loading(10.0), [], now=99.0, limits=limits)


@given(
    st.lists(
        st.tuples(st.frozensets(st.integers(0, 11)), st.frozensets(st.integers(0, 11))),
        min_size=1,
        max_size=5,
    )
)
def test_who_failed_counts_for_what_it_has_loaded(
    hosts: list[tuple[frozenset[int], frozenset[int]]],
) -> None:
    """A host with room for all holds all, whatever the failed ones claim; they try one each."""
    capacities = [HostCapacity("good", 120)]
    for number, (ready, failed) in enumerate(hosts):
        name = f"host-{number}"
        everything = frozenset(range(DEPTH))
        capacities.append(
            HostCapacity(name, 10**6, 1e6, blocks=everything, ready=ready, failed=failed)
        )
    held = assign(capacities, FILES)
    doubted = [capacity for capacity in capacities if capacity.failed]
    for capacity in doubted:
        assert capacity.ready <= held[capacity.name]
        assert len(held[capacity.name]) <= len(capacity.ready) + 1
    if len(doubted) == len(hosts):
        loaded = frozenset().union(*(capacity.ready for capacity in doubted))
        assert held["good"] | loaded == frozenset(range(DEPTH))
    again = [
        HostCapacity(d.name, d.memory, d.speed, blocks=held[d.name], ready=d.ready, failed=d.failed)
        for d in capacities
    ]
    assert assign(again, FILES) == held, "nothing moves while nothing changes"
