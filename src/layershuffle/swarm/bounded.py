"""Work with a host that ends in time, one way or the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from layershuffle.errors import LayerShuffleError

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


async def bounded(work: Awaitable[_Result], *, host: str, limit_ms: float) -> _Result:
    """What `work` with that host brings, in time. Every failure is a `LayerShuffleError`."""
    try:
        async with asyncio.timeout(limit_ms / 1000):
            (found,) = await asyncio.gather(work, return_exceptions=True)
    except TimeoutError as error:
        raise LayerShuffleError(f"Host {host} did not answer within {limit_ms:g} ms") from error
    if not isinstance(found, BaseException):
        return found
    if not isinstance(found, LayerShuffleError):  # nobody foresaw it, so all of it is told
        _log.error("Work with host %s broke", host, exc_info=found)
        found = LayerShuffleError(f"Host {host} failed ({type(found).__name__}: {found})")
    raise found
