"""Whom to trust: canaries, probes and audits, over hosts that compute by a formula."""

import asyncio

import numpy as np
import pytest
from fake_hosts import DEPTH, QUICK, START, FakeHosts, answer_of, bundle_of, computed

from clock import loop_time, run_virtual
from layershuffle.swarm import state
from layershuffle.swarm.health import (
    HealthMonitor,
    Recomputed,
    agrees,
    due,
    known_answers,
    odd_one,
    patience,
    replicas,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visited
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm
from waiting import until

LIMITS = Limits(canary_every_ms=1000, probe_ms=500)


def known(*hosts):
    one = known_answers(bundle_of(1), [0, 1])
    return dict.fromkeys(hosts, one)


def test_who_is_due():
    held = frozenset({0, 1})
    swarm = Swarm(
        [
            HostView("fresh", held),
            HostView("gone", held, "gone"),
            HostView("late", held, "suspect", retry_at=11.0),
            HostView("now", held, "suspect", retry_at=9.0),
            HostView("old", held),
            HostView("out", held, "shut-out"),
            HostView("strange", held),
        ]
    )
    names = ("fresh", "gone", "late", "now", "old", "out")
    asked = {"fresh": (9.5, 4), "old": (8.9, 7), "now": (0.0, 2)}
    checks = due(swarm, known(*names), asked=asked, now=10.0, limits=LIMITS)
    assert [(check.host, check.block) for check in checks] == [("now", 0), ("old", 1)]
    assert checks[0].limit == 0.5


def test_a_busy_host_has_longer_for_a_canary():
    idle, busy = HostView("a", frozenset({0}), compute=0.02, link=0.0), None
    busy = state.sent(idle, 10)
    swarm = Swarm([idle])
    assert patience(idle, swarm, limits=LIMITS) == 0.5
    assert patience(busy, swarm, limits=LIMITS) == pytest.approx(4.0 * 0.02 * 11)


@pytest.mark.parametrize(("error", "fine"), [(0.0, True), (9e-4, True), (1.1e-3, False)])
def test_agreement_is_relative_to_the_largest_value(error, fine):
    wanted = np.array([[[0.0, -500.0]]], np.float32)
    assert agrees(wanted + np.float32(500 * error), wanted, tolerance=1e-3) == fine
    assert not agrees(np.full_like(wanted, np.nan), wanted, tolerance=1e-3)


def test_replicas_hold_the_same_weights():
    one, two = known_answers(bundle_of(1), [0, 1]), known_answers(bundle_of(2), [0, 1])
    swarm = Swarm(HostView(name, frozenset({0, 1})) for name in "abcd")
    hop = Visited("a", (1, 0), "answered", 1.0)
    assert replicas(hop, swarm, expectations={"a": one, "b": two, "c": one, "d": one}) == ("c", "c")
    assert replicas(hop, swarm, expectations={"a": one, "b": two, "c": {0: one[0]}}) is None
    all_same = dict.fromkeys("abcd", one)
    assert replicas(hop, swarm, expectations=all_same, apart=("b", "c")) == ("d", "d")
    assert replicas(hop, swarm, expectations=all_same, apart="bcd") is None
    busy = swarm.with_host(state.sent(swarm["c"], 3))
    assert replicas(hop, busy, expectations={"a": one, "c": one, "d": one}) == ("d", "d")


LONG = 5.0  # seconds of virtual time: every audit that has begun is over by then


def trusted(check, limits, blocks=(0, 1), hosts="ab"):
    """Run `check(health, hosts)` with hosts of the same blocks, nothing else running."""
    names = hosts

    async def go():
        hosts = FakeHosts()
        router = Router(hosts, depth=DEPTH, limits=limits, clock=loop_time)
        health = HealthMonitor(router, seed=0)
        bundle = bundle_of(1)
        for name in names:
            await hosts.start(name, node="")
            await hosts.call(
                name, "load", b"", blocks, *[bundle.tensors[block] for block in blocks]
            )
            router.swarm = router.swarm.with_host(HostView(name, frozenset(blocks)))
            health.expect(name, known_answers(bundle, blocks))
        await check(health, hosts)
        await health.close()

    run_virtual(go())


def hopped(health, name, after, blocks=(0,)):
    hop = Visited(name, blocks, "answered", 0.0)
    for observe in health.router.observers:
        observe(hop, START, after)


def test_an_audit_finds_the_host_that_lied():
    async def check(health, hosts):
        hosts.processes["a"].wrong = True
        hopped(health, "a", answer_of([0, 1]) * 1.5, blocks=(0, 1))
        await until(lambda: health.disagreed == 1)
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["b"].condition == "healthy"
        assert health.router.swarm["a"].why == "it failed its canary on block 0"

    trusted(check, Limits(audit_share=1.0))


def test_an_audit_finds_that_the_replica_lies():
    async def check(health, hosts):
        hosts.processes["b"].wrong = True
        hopped(health, "a", answer_of([0]))
        await until(lambda: health.router.swarm["b"].condition == "shut-out")
        assert health.router.swarm["a"].condition == "healthy"

    trusted(check, Limits(audit_share=1.0))


def test_hosts_that_no_canary_and_no_third_tells_apart_are_suspects_in_the_end(caplog):
    async def check(health, hosts):
        for strike in (1, 2, 3):
            assert all(host.usable for host in health.router.swarm.values())
            hopped(health, "a", answer_of([0]) + 5)
            await until(lambda strike=strike: health.doubts["a", "b"] == strike)
            assert caplog.text.count("pass their canaries") == strike
        for host in health.router.swarm.values():
            assert host.condition == "suspect"
            assert host.why == "a and b differ over blocks 0, and no third host decides"
        health.drop("b")
        assert not health.doubts

    trusted(check, Limits(audit_share=1.0))


OTHER = np.full_like(START, 3.0)


def lied(health, name, blocks=(0, 1)):
    """`name` answered a request wrongly, and passes its canaries."""
    hop = Visited(name, blocks, "answered", 0.0)
    after = computed(OTHER, blocks, dict.fromkeys(blocks, 1))
    for observe in health.router.observers:
        observe(hop, OTHER, after * 1.5)


def test_two_others_tell_a_liar_that_passes_its_canaries():
    async def check(health, hosts):
        lied(health, "a")
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["a"].why == "it disagrees with two others over blocks 0, 1"
        assert all(health.router.swarm[name].usable for name in "bc")
        assert (health.audited, health.disagreed) == (1, 1)

    trusted(check, Limits(audit_share=1.0), hosts="abc")


def test_a_third_tells_that_the_replica_lies():
    async def check(health, hosts):
        hosts.processes["b"].lies = True  # asked first; in its second block too
        hop = Visited("a", (0, 1), "answered", 0.0)
        for observe in health.router.observers:
            observe(hop, OTHER, computed(OTHER, (0, 1), {0: 1, 1: 1}))
        await until(lambda: health.router.swarm["b"].condition == "shut-out")
        assert all(health.router.swarm[name].usable for name in "ac")

    trusted(check, Limits(audit_share=1.0), hosts="abc")


def test_no_audit_judges_weights_that_were_swapped_meanwhile():
    async def check(health, hosts):
        health.expect("a", known_answers(bundle_of(1), [0]))
        hop = Visited("a", (0,), "answered", 50.0)  # sent before that
        for observe in health.router.observers:
            observe(hop, START, answer_of([0]) * 1.5)
        await asyncio.sleep(LONG)
        assert health.audited == 0
        lied(health, "a")
        hosts.freeze("c")
        await until(lambda: health.disagreed)
        health.forget("a", [0])
        health.expect("a", known_answers(bundle_of(1), [0]))
        hosts.thaw("c")
        await asyncio.sleep(LONG)
        assert all(host.usable for host in health.router.swarm.values())
        assert not health.doubts

    trusted(check, Limits(audit_share=1.0, hop_cap_ms=500), hosts="abc")


def test_no_hosts_are_doubted_for_weights_that_were_swapped_meanwhile():
    async def check(health, hosts):
        hosts.freeze("b")
        lied(health, "a")
        await asyncio.sleep(0.05)
        health.expect("a", known_answers(bundle_of(1), [0]))
        hosts.thaw("b")
        await asyncio.sleep(LONG)
        assert health.disagreed == 1
        assert not health.doubts

    trusted(check, Limits(audit_share=1.0))


def test_a_host_that_is_dropped_during_its_canary_is_not_remembered():
    async def check(health, hosts):
        hosts.freeze("a")
        running = asyncio.create_task(health.run())
        await asyncio.sleep(0.1)  # its first canary is under way
        health.drop("a")
        hosts.thaw("a")
        await asyncio.sleep(1.0)
        assert health.traces == {"b"}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, LIMITS)


@pytest.mark.parametrize(
    ("after", "second", "third", "odd"),
    [
        (9, (1, 2), (1, 2), "x"),
        (2, (1, 9), (1, 2), "q"),
        (2, (9, 8), (1, 2), "p"),
        (9, (1, 2), (1, 5), ""),
    ],
)
def test_the_odd_one_of_three(after, second, third, odd):
    def states(values):
        return tuple(START * value for value in values)

    hop = Visited("x", (0, 1), "answered", 1.0)
    one, two = Recomputed(("p", "q"), states(second)), Recomputed(("r", "r"), states(third))
    assert odd_one(hop, START * after, second=one, third=two, tolerance=1e-3) == odd


def test_audits_of_equal_answers_change_nothing_and_are_counted():
    async def check(health, hosts):
        hopped(health, "a", answer_of([0, 1]), blocks=(0, 1))
        hopped(health, "a", None)
        await until(lambda: health.audited == 1)
        assert health.disagreed == 0

    trusted(check, Limits(audit_share=1.0))


def test_audits_are_a_share_and_need_a_replica():
    async def check(health, hosts):
        async def share(n):
            for _ in range(n):
                hopped(health, "a", answer_of([0]))
                await asyncio.sleep(LONG)
            return health.audited

        count = await share(400)
        assert 60 <= count <= 100  # 0.2 of 400, 2.5 standard deviations
        health.drop("b")
        assert await share(40) == count

    trusted(check, Limits(audit_share=0.2))


def test_a_late_answer_to_a_probe_keeps_a_host_out():
    async def check(health, hosts):
        running = asyncio.create_task(health.run())
        hosts.freeze("a")
        await until(lambda: health.router.swarm["a"].condition == "suspect")
        await until(lambda: health.router.swarm["a"].strikes >= 2)
        assert health.router.swarm["a"].why == "it did not answer a canary in time"
        hosts.thaw("a")
        await until(lambda: health.router.swarm["a"].condition == "healthy")
        assert health.router.swarm["a"].compute == pytest.approx(1e-4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, QUICK.model_copy(update={"probe_ms": 50.0}))


def test_a_canary_of_weights_that_were_swapped_meanwhile_says_nothing():
    async def check(health, hosts):
        hosts.freeze("a")
        asking = asyncio.create_task(health.check("a", blocks=[0], limit=2.0))
        await asyncio.sleep(0)
        health.forget("a", [0])
        await hosts.call("a", "load", b"", [0], b"2")
        health.expect("a", known_answers(bundle_of(2), [0]))
        hosts.thaw("a")
        assert await asking == ""
        assert health.router.swarm["a"].condition == "healthy"
        assert await health.check("a") == ""

    trusted(check, LIMITS)


def test_an_audit_that_gets_no_answer_is_held_against_the_replica():
    async def check(health, hosts):
        hosts.kill("b")
        hopped(health, "a", answer_of([0]))
        await until(lambda: health.router.swarm["b"].condition == "gone")

    trusted(check, Limits(audit_share=1.0))
