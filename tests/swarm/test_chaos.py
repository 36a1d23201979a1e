"""Injected failures: lists of faults by seed, and wrappers that break hosts."""

import asyncio

import numpy as np
import pytest

from clock import loop_time, run_virtual
from layershuffle.errors import UsageError
from layershuffle.swarm.chaos import (
    KINDS,
    ChaosTransport,
    Fault,
    check_faults,
    crashes,
    crashes_text,
    one_of_each_fault,
)
from layershuffle.swarm.messages import Answer, Visit, WorkExpired

HOSTS = ["a", "b", "c", "d", "e", "f"]


# --- lists of faults ------------------------------------------------------------------------------


def test_crashes_hit_a_share_of_the_hosts_once_each():
    faults = crashes(HOSTS, share=1 / 3, requests=1000, seed=0)
    assert len({fault.host for fault in faults}) == len(faults) == 2
    assert all(100 <= fault.at < 900 for fault in faults)
    assert faults == crashes(HOSTS, share=1 / 3, requests=1000, seed=0)
    assert faults != crashes(HOSTS, share=1 / 3, requests=1000, seed=1)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)


def test_a_share_of_few_hosts_is_said_as_a_number():
    assert crashes_text(
        crashes(HOSTS[:4], share=0.34, requests=50, seed=0), share=0.34, hosts=4
    ) == ("1 of 4 hosts dies (--kill 0.34, rounded down)")
    for share in (0.0, -1.0, 1.5):
        with pytest.raises(UsageError, match="share of hosts to kill"):
            crashes(HOSTS, share=share, requests=50, seed=0)


def test_every_host_is_hit_by_some_seed():
    hit = {f.host for seed in range(30) for f in crashes(HOSTS, share=0.2, requests=50, seed=seed)}
    assert hit == set(HOSTS)


def test_one_of_each_fault_has_every_kind_and_mends_it():
    faults = one_of_each_fault(HOSTS, requests=120, seed=3)
    troubles = [fault for fault in faults if fault.kind != "rejoin"]
    assert [fault.kind for fault in troubles] == [kind for kind in KINDS if kind != "rejoin"]
    assert [fault.at for fault in troubles] == [5 + 20 * i for i in range(6)]
    for trouble, mend in zip(faults[::2], faults[1::2], strict=True):
        assert (mend.kind, mend.host, mend.at) == ("rejoin", trouble.host, trouble.at + 10)


def test_too_few_requests_for_one_of_each_fault():
    with pytest.raises(UsageError, match="24 or more"):
        one_of_each_fault(HOSTS, requests=20, seed=0)


def test_unknown_hosts_are_refused():
    with pytest.raises(UsageError, match="no host 'z' to crash"):
        check_faults([Fault(0, "z", "crash")], HOSTS)


# --- wrappers -------------------------------------------------------------------------------------

STATE = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)


class Doubling:
    """A transport whose hosts take 20 ms to double a state."""

    async def visit(self, visit, state, *, form="fp32"):
        await asyncio.sleep(0.02)
        return Answer(2 * state, 20.0, 3.0)


def visit_through(transport, *, limit=5.0):
    return transport.visit(Visit("a", 0, limit), STATE)


def test_a_whole_transport_adds_nothing():
    async def go():
        answer = await visit_through(ChaosTransport(Doubling()))
        assert (answer.state == 2 * STATE).all()
        assert (answer.compute_ms, answer.queue_ms, loop_time()) == (20.0, 3.0, pytest.approx(0.02))

    run_virtual(go())


def test_a_slow_host_computes_ten_times_as_long_and_one_visit_at_a_time():
    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "slow")
        answers = await asyncio.gather(*(visit_through(transport) for _ in range(3)))
        assert loop_time() == pytest.approx(3 * 0.2)
        assert [answer.compute_ms for answer in answers] == [200.0] * 3
        assert [answer.queue_ms for answer in answers] == pytest.approx([3.0, 203.0, 403.0])
        first, *late = [visit_through(transport, limit=0.1) for _ in range(2)]
        results = await asyncio.gather(first, *late, return_exceptions=True)
        assert isinstance(results[0], Answer)
        assert isinstance(results[1], WorkExpired)
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
