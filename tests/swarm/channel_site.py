"""A host that doubles states behind a data channel on the loopback network, and a link to it."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.channel import ChannelLink, ChannelServer
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostUnavailable,
    pack,
    unpack,
)
from layershuffle.swarm.stream import Credentials
from waiting import HANGS

LIMITS = Limits(channel_ms=300, suspect_ms=20, suspect_max_ms=40)
CREDENTIALS = Credentials(b"token")
STATE = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
WIRES = ("fp32", "fp16", "int8")


class DoublingHost:
    """Doubles states; block 9 waits until it is let go, block 8 fails, block 7 is a defect."""

    name = "a"

    def __init__(self):
        self.gate, self.begun, self.dropped = asyncio.Event(), 0, 0
        self.budgets = []

    async def visit(self, blocks, packet, *, budget_ms):
        self.begun += 1
        self.budgets.append(budget_ms)
        try:
            if 9 in blocks:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        if 8 in blocks:
            raise HostUnavailable("Host a does not hold block 8")
        if 7 in blocks:
            raise KeyError("oops")
        if 6 in blocks:
            raise UsageError("odd")
        return Answer(pack(2 * unpack(packet), packet.wire), 1.0, 0.0)


@asynccontextmanager
async def served(credentials=CREDENTIALS, limits=LIMITS, **asked):
    """A server with its host, and a link to it."""
    host = DoublingHost()
    server = ChannelServer(host, credentials=credentials, limits=limits)
    address = await server.open("127.0.0.1")
    link = ChannelLink("a", address, **{"credentials": credentials, "limits": limits, **asked})
    try:
        await link.tried()
        yield server, host, link
    finally:
        await link.close()
        server.close()


def visit(link, *blocks, wire="fp32", budget_ms=1e6):
    return asyncio.ensure_future(link.visit(blocks, pack(STATE, wire), budget_ms=budget_ms))


def run(check):
    async def bounded():
        async with asyncio.timeout(HANGS):
            await check()

    asyncio.run(bounded())
