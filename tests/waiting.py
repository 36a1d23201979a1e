"""Waiting for a condition. The time limit is for tests that hang, and not a test of speed."""

import asyncio
import re
import time

HANGS = 60.0
"""Seconds after which a wait has failed, also on a machine with ten other busy processes."""
STARTS = 300.0
"""The same for processes that import torch and start others."""


async def until(condition, *, seconds=HANGS):
    """Seconds of the loop's clock until `condition()` is true; `TimeoutError` after `seconds`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
    return clock() - began


def wait_for(ask, *, holds=bool, seconds=STARTS, trace=str):
    """The first answer of `ask()` that `holds`; `TimeoutError` after `seconds`.

    The text of the error is `trace(answer)` of the last answer.
    """
    end = time.monotonic() + seconds
    while not holds(answer := ask()):
        if time.monotonic() > end:
            raise TimeoutError(trace(answer))
        time.sleep(0.05)
    return answer


def wait_for_address(log, process):
    """The address that the `process` of `swarm up` prints into the file `log`.

    Raises `AssertionError` if the process ends, `TimeoutError` after `STARTS`.
    """

    def match():
        assert process.poll() is None, log.read_text()
        return re.search(r"answers at (\S+)", log.read_text())

    return wait_for(match, trace=lambda _: log.read_text())[1]
