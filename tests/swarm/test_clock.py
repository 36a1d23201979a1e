"""The event loop in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from layershuffle.swarm.simulation.clock import VirtualTimeLoop


def run(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def test_timers_fire_at_their_time_and_a_year_passes_at_once():
    async def main():
        loop, seen = asyncio.get_running_loop(), []

        async def at(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, loop.time()))

        times = [31_536_000.0, 0.0, 0.3, 0.1, 1e5, 0.1 + 1e-10]
        await asyncio.gather(*map(at, times))
        assert [asked for asked, _ in seen] == sorted(times)
        assert all(now == pytest.approx(asked, rel=1e-12) for asked, now in seen)
        return loop.jumps

    began = time.process_time()
    assert run(main()) == 4 + 365  # asyncio looks a day ahead at most; sleep(0) sets no timer
    assert time.process_time() - began < 5


def test_timeouts_end_what_waits():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(40):
                await asyncio.Event().wait()
        return loop.time()

    assert run(main()) == 40


def test_a_deadlock_raises():
    async def main():
        await asyncio.sleep(3)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run(main())
