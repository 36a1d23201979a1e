"""The bodies of requests: read under limits on size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request

from layershuffle.swarm.server.errors import Refused, busy
from layershuffle.swarm.server.limits import GatewayLimits

_MILLI = 1000.0
_MAX_DIGITS = 18  # of a Content-Length that is worth reading as a number


@dataclass
class Budget:
    """Bytes that all bodies together may take."""

    free: int

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One body's part, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.free += share.taken


@dataclass
class Share:
    """What one body has taken of a budget."""

    budget: Budget
    taken: int = 0

    def take(self, count: int) -> None:
        """Take `count` bytes; raises `Refused` (429) if that many are not free."""
        if count > self.budget.free:
            raise busy("The bodies of other requests fill the memory")
        self.budget.free -= count
        self.taken += count


async def read_body(request: Request, *, limits: GatewayLimits, share: Share) -> bytes:
    """The whole body. Raises `Refused`: 413 as soon as it is too large, 408 if it takes too long,
    429 if `share` has no room for it."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:_MAX_DIGITS]) > limits.max_body_bytes:
        raise _too_large(limits)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_ms / _MILLI):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_body_bytes:
                    raise _too_large(limits)
                share.take(len(chunk))
                chunks.append(chunk)
    except TimeoutError as error:
        raise Refused(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not come in within {limits.body_ms / _MILLI:g} s",
            hint="send smaller images",
        ) from error
    return b"".join(chunks)


def _too_large(limits: GatewayLimits) -> Refused:
    return Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than {limits.max_body_bytes} bytes",
        hint="send fewer or smaller images",
    )
