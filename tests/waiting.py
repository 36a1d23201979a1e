"""Waiting for something to become true: the bound is for what hangs, never a promise of speed."""

import asyncio

HANGS = 60.0
"""Seconds after which a wait has failed, also on a machine with ten other busy processes."""


async def until(condition, *, seconds=HANGS):
    """Seconds of the loop's clock until `condition()` is true; `TimeoutError` after `seconds`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
    return clock() - began
