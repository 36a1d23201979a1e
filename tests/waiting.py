"""Waiting for a condition. The time limit is for tests that hang, and not a test of speed."""

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
