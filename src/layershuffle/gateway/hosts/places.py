"""A bounded number of places, shared fairly between the clients that want them.

A client may take as much as is free, beside what it holds: of 32 places the first client gets at
most 16, the second 8, the third 4, and a few stay free for whoever comes next. As clients end their
work, all come to have equally many. (Choudhury and Hahne 1998, "Dynamic queue length thresholds for
shared-memory packet switches".)
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Shares:
    """`capacity` units of anything, of which every client holds a number.

    shares = Shares(4)
    assert shares.fits("a", 2)
    shares.take("a", 2)
    assert not shares.fits("a")  # 2 are free, and it holds as many
    """

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._held: dict[str, int] = {}

    def held(self, client: str) -> int:
        """How many units a client holds."""
        return self._held.get(client, 0)

    def fits(self, client: str, amount: int = 1) -> bool:
        """Whether a client may take so many more units."""
        return self.held(client) + amount <= self.free

    def take(self, client: str, amount: int = 1) -> None:
        """Give a client so many units, which `fits` has allowed."""
        self.free -= amount
        self._held[client] = self.held(client) + amount

    def give_back(self, client: str, amount: int = 1) -> None:
        """Take so many units from a client."""
        self.free += amount
        left = self.held(client) - amount
        if left:
            self._held[client] = left
        else:
            self._held.pop(client, None)


class Places:
    """Places for work, and who waits for one. For one event loop.

    `waiting`: most that may wait, shared by the same rule; `None` for any number. A place that is
    free goes to the client that holds the fewest, and among those to the one that waits longest.
    """

    def __init__(self, capacity: int, *, waiting: int | None = None) -> None:
        self._places = Shares(capacity)
        self._waiting = None if waiting is None else Shares(waiting)
        # In the order in which the clients began to wait, or had their last turn.
        self._queues: dict[str, list[asyncio.Future[None]]] = {}

    def has_room(self, client: str) -> bool:
        """Whether a client may have a place now, or wait for one."""
        return self._places.fits(client) or self._waiting is None or self._waiting.fits(client)

    async def take(self, client: str) -> HeldPlace:
        """A place for a client, as soon as it is its turn. Ask `has_room` before."""
        place = HeldPlace(self, client)
        if self._places.fits(client):
            self._places.take(client)
            return place
        if self._waiting is not None:
            self._waiting.take(client)
        try:
            await self._turn(client)
        finally:
            if self._waiting is not None:
                self._waiting.give_back(client)
        return place

    def release(self, client: str) -> None:
        """A place of a client is free again."""
        self._places.give_back(client)
        while True:
            fitting = [waiting for waiting in self._queues if self._places.fits(waiting)]
            if not fitting:
                return
            first = min(fitting, key=self._places.held)
            queue = self._queues.pop(first)
            turn = queue.pop(0)
            if queue:
                self._queues[first] = queue  # behind the others
            if not turn.done():  # cancelled, and its task does not run yet
                turn.set_result(None)
                self._places.take(first)

    async def again(self, client: str, *, seconds: float) -> bool:
        """Take a place for a client that has left one; false if none is free within `seconds`.

        However many wait: it is a request that runs already.
        """
        if self._places.fits(client):
            self._places.take(client)
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._turn(client)
            return True
        return False

    async def _turn(self, client: str) -> None:
        """Wait until the client has been given a place."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, []).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            queue = self._queues.get(client, [])
            if turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._queues[client]
            elif not turn.cancelled():
                self.release(client)  # its turn came at the same time
            raise


class HeldPlace:
    """A place of a client, which may be left while nothing is under way, and taken again."""

    def __init__(self, places: Places, client: str) -> None:
        self._places = places
        self._client = client
        self._held = True

    def leave(self) -> None:
        """Let others have it; nothing happens if they have it already."""
        if self._held:
            self._held = False
            self._places.release(self._client)

    async def come_back(self, *, seconds: float) -> None:
        """Take a place again, but do not wait for it longer than so many seconds."""
        if not self._held:
            self._held = await self._places.again(self._client, seconds=seconds)
