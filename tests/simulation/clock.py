"""An asyncio event loop in virtual time: its clock jumps to the next timer instead of waiting.

Code that awaits nothing but timers, tasks and futures runs on it unchanged, as fast as the
processor allows, and always in the same sequence.
"""

from __future__ import annotations

import asyncio
import math
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at time 0 and never sleeps.

    Use it with `asyncio.Runner(loop_factory=VirtualTimeLoop)`, and give `loop.time` to whatever
    needs a clock. It has no input or output: sockets and subprocesses are never ready, and the
    clock does not wait for threads. Raises `RuntimeError` when all tasks wait and no timer is set,
    where another loop would hang.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))
        self.jump(0.0)

    def time(self) -> float:
        """Seconds of virtual time since the loop was created."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
        # The base class runs every timer before now + resolution. The smallest step of a float
        # separates all events that differ; a fixed step would be rounded away at a late `now`, and
        # a timer of exactly `now` would never run.
        self._clock_resolution = math.ulp(self._now)


class _Jumping(selectors.SelectSelector):
    """A selector that moves the loop's clock to the next timer instead of sleeping until then."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(
                "All tasks wait, no timer is set, and virtual time has no input or output: "
                "nothing can happen any more"
            )
        self._loop.jump(max(0.0, timeout))
        return []
