"""The transport of tests that breaks hosts: slow, cut off, behind a bad link, lying."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from clock import loop_time, run_virtual
from layershuffle.gateway.brain.state import Answer, Visit
from simulation.chaos import ChaosTransport

STATE = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)


class Doubling:
    """A transport whose hosts take 20 ms to double a state."""

    async def visit(self, visit, state, *, form="fp32"):
        await asyncio.sleep(0.02)
        return Answer(2 * state, 20.0, 3.0)


def visit_through(transport):
    return transport.visit(Visit("a", 0, 5.0), STATE)


def test_a_slow_host_computes_ten_times_as_long_and_one_visit_at_a_time():
    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "slow")
        answers = await asyncio.gather(*(visit_through(transport) for _ in range(3)))
        assert loop_time() == pytest.approx(3 * 0.2)
        assert [answer.compute_ms for answer in answers] == [200.0] * 3
        assert [answer.queue_ms for answer in answers] == pytest.approx([3.0, 203.0, 403.0])
        transport.heal("a")
        assert (await visit_through(transport)).compute_ms == 20.0

    run_virtual(go())


def test_wrong_answers_are_finite_false_and_the_same_for_equal_states():
    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "wrong")
        first, second = [(await visit_through(transport)).state for _ in range(2)]
        assert np.isfinite(first).all()
        assert (first == second).all()
        assert np.abs(first - 2 * STATE).mean() > 2 * STATE.std()
        transport.heal("a")
        assert ((await visit_through(transport)).state == 2 * STATE).all()

    run_virtual(go())


def test_a_cut_host_computes_and_nobody_hears_of_it():
    async def go():
        transport = ChaosTransport(Doubling())
        before = asyncio.create_task(visit_through(transport))
        await asyncio.sleep(0.01)
        transport.break_host("a", "cut")
        after = asyncio.create_task(visit_through(transport))
        await asyncio.sleep(10)
        assert not before.done()
        assert not after.done()
        transport.heal("a")
        healed = loop_time()
        await before
        assert loop_time() == healed, "it was computed meanwhile"
        await after
        assert loop_time() - healed == pytest.approx(0.02)

    run_virtual(go())


def test_a_bad_link_delays_each_way_and_sends_again_what_it_lost():
    """Of n messages 0.8 n arrive at once; one that is lost k times is 2 k delays later."""

    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "lossy")
        times = []
        for _ in range(2000):
            begun = loop_time()
            await visit_through(transport)
            times.append(loop_time() - begun)
        extra = (np.array(times) - 0.42) / 0.4  # messages lost, on both ways
        assert np.abs(extra - extra.round()).max() < 1e-6
        assert extra.min() == pytest.approx(0, abs=1e-6)
        # Two geometric draws: 2 x 0.2 / 0.8 losses in the mean, with a variance of 0.625.
        assert abs(extra.mean() - 0.5) < 4 * np.sqrt(0.625 / 2000)
        transport.heal("a")
        begun = loop_time()
        await visit_through(transport)
        assert loop_time() - begun == pytest.approx(0.02)

    run_virtual(go())


@pytest.mark.parametrize(
    ("kind", "request_lies", "canary_lies"),
    [("wrong", 400, 400), ("wrong-but-canaries", 400, 0), ("wrong-rarely", 4, 0)],
)
def test_three_kinds_of_liars(kind, request_lies, canary_lies):
    async def honest(visit, state, *, form="fp32"):
        return Answer(state, 1.0, 0.0)

    async def lies(budget):
        transport = ChaosTransport(SimpleNamespace(visit=honest))
        transport.break_host("a", kind)
        visit = Visit("a", 0, 1.0, budget=budget)
        answers = [await transport.visit(visit, STATE) for _ in range(400)]
        return sum(bool((answer.state != STATE).any()) for answer in answers)

    # 4 of 400 in the mean; 1 of 1,000 draws lies beyond 12.
    assert abs(asyncio.run(lies(2.0)) - request_lies) <= (8 if request_lies == 4 else 0)
    assert asyncio.run(lies(None)) == canary_lies
