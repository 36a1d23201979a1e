"""Places that are shared between clients, against what the rule says."""

import asyncio

import pytest

from layershuffle.gateway.hosts.places import Places, Shares


def test_the_shares_of_clients_that_come_one_after_the_other():
    """Half, a quarter, an eighth; what one gives back, all may take."""
    shares = Shares(32)
    for client, most in (("a", 16), ("b", 8), ("c", 4), ("d", 2), ("e", 1)):
        while shares.fits(client):
            shares.take(client)
        assert shares.held(client) == most
    assert shares.free == 1
    assert shares.fits("f")
    shares.give_back("a", 16)
    assert shares.held("a") == 0
    assert shares.fits("b", 8)
    assert not shares.fits("b", 10)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_few_places_are_given_all_the_same(capacity):
    shares = Shares(capacity)
    for client in range(capacity):
        assert shares.fits(str(client))
        shares.take(str(client))
    assert not shares.fits("another")


async def settled():
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_is_next():
    """The client with the fewest places; among those the one that waits longest."""

    async def go():
        places = Places(2, waiting=8)
        turns, held = [], {}

        async def work(client):
            held.setdefault(client, []).append(await places.take(client))
            turns.append(client)

        tasks = [asyncio.ensure_future(work(client)) for client in ("a", "b", "a", "a", "c", "b")]
        await settled()
        assert turns == ["a", "b"]
        for client in ("a", "b", "c", "a"):
            held[client].pop().leave()
            await settled()
        assert turns == ["a", "b", "a", "c", "b", "a"]
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_whoever_gives_up_takes_no_place_along():
    """Also where the turn comes at the same time."""

    async def go():
        places = Places(1, waiting=4)
        first = await places.take("a")
        waiting = [asyncio.ensure_future(places.take(client)) for client in ("b", "c", "d")]
        await settled()
        waiting[0].cancel()
        first.leave()
        waiting[1].cancel()  # it has just got the place
        await settled()
        place = await asyncio.wait_for(waiting[2], 60)
        place.leave()
        place.leave()
        assert await places.again("f", seconds=0)
        assert not await places.again("f", seconds=0)
        assert [task.cancelled() for task in waiting] == [True, True, False]

    asyncio.run(go())


def test_a_bounded_number_waits():
    async def go():
        places = Places(1, waiting=2)
        first = await places.take("a")
        assert places.has_room("a")
        waiting = asyncio.ensure_future(places.take("a"))
        await settled()
        assert not places.has_room("a"), "it waits, and leaves one for others"
        assert places.has_room("b")
        other = asyncio.ensure_future(places.take("b"))
        await settled()
        assert not places.has_room("c")
        first.leave()
        for task in (waiting, other):
            (await task).leave()
        assert places.has_room("c")

    asyncio.run(go())
