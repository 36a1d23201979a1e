"""A host that doubles states behind a data channel on the loopback network, and a link to it."""

import asyncio
from concurrent.futures import Future
from contextlib import asynccontextmanager

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.channel import ChannelLink, ChannelServer, Credentials
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostUnavailable,
    pack,
    unpack,
)
from waiting import HANGS

LIMITS = Limits(channel_ms=1000 * HANGS, suspect_ms=20, suspect_max_ms=40)
HASTY = LIMITS.model_copy(update={"channel_ms": 300})  # for peers that stay silent
CREDENTIALS = Credentials(b"token")
STATE = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
WIRES = ("fp32", "fp16", "int8")


class DoublingHost:
    """Doubles states; block 9 waits for `let_go`, 8 and 6 are refused, 7 is a defect."""

    name = "a"

    def __init__(self):
        self.begun, self.waiting, self.budgets = 0, [], []

    @property
    def dropped(self):
        return sum(visit.cancelled() for visit, _ in self.waiting)

    def begin(self, blocks, packet, *, budget_ms):
        self.begun += 1
        self.budgets.append(budget_ms)
        if 8 in blocks:
            raise HostUnavailable("Host a does not hold block 8")
        if 6 in blocks:
            raise UsageError("odd")
        visit = Future()
        if 7 in blocks:
            visit.set_exception(KeyError("oops"))
        elif 9 in blocks:
            self.waiting.append((visit, packet))
        else:
            visit.set_result(doubled(packet))
        return visit

    def let_go(self):
        for visit, packet in self.waiting:
            visit.set_result(doubled(packet))


def doubled(packet):
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
