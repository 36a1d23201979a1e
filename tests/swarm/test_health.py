"""Canaries, probes and audits, over hosts that compute by a formula."""

import asyncio
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from fake_hosts import DEPTH, QUICK, START, FakeHosts, answer_of, computed, references_of

from clock import loop_time, run_virtual
from layershuffle.swarm import state
from layershuffle.swarm.health import (
    Check,
    HealthMonitor,
    Reference,
    agrees,
    due,
    patience,
    question_like,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visited
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm
from waiting import until

LIMITS = Limits(canary_every_ms=1000, probe_ms=500)


def known(*hosts):
    return dict.fromkeys(hosts, references_of(1, [0, 1]))


def traces(health):
    """Names of the hosts about which anything is stored."""
    draw = health._draw
    stores = health._expected, health._canaries, health._next, draw._passed, draw._habits
    return set().union(*stores)


def test_which_hosts_are_due():
    blocks = frozenset({0, 1})
    swarm = Swarm(
        [
            HostView("fresh", blocks),
            HostView("gone", blocks, "gone"),
            HostView("late", blocks, "suspect", retry_at=11.0),
            HostView("now", blocks, "suspect", retry_at=9.0),
            HostView("old", blocks),
            HostView("out", blocks, "shut-out"),
            HostView("strange", blocks),
        ]
    )
    names = ("fresh", "gone", "late", "now", "old", "out")
    canaries = {"fresh": (9.5, 4), "old": (8.9, 7), "now": (0.0, 2)}
    checks = due(swarm, known(*names), canaries=canaries, now=10.0, limits=LIMITS, names=swarm)
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


def test_questions_differ_and_look_like_what_blocks_get():
    generator = np.random.default_rng(0)
    sample = generator.normal([1.0, -3.0, 9.0], [0.1, 1.0, 5.0], (1, 64, 3)).astype(np.float32)
    first, second = (question_like(sample, generator) for _ in range(2))
    assert first.dtype == np.float32
    assert not (first == second).any()
    for question in (first, second):
        assert question.mean(axis=1) == pytest.approx(sample.mean(axis=1), abs=0.25)
        assert question.std() == pytest.approx(sample.std(), rel=0.02)
    flat = np.zeros((1, 2, 3), np.float32)
    assert (question_like(flat, generator) != question_like(flat, generator)).any()


LONG = 5.0  # seconds of virtual time: every audit that has begun is over by then


def trusted(check, limits, blocks=(0, 1), hosts="ab"):
    """Run `check(health, hosts)` with hosts of the same blocks, nothing else running."""
    names = hosts

    async def go():
        hosts = FakeHosts()
        router = Router(hosts, depth=DEPTH, limits=limits, clock=loop_time)
        health = HealthMonitor(router, seed=0)
        for name in names:
            hosts.add(name, blocks)
            router.swarm = router.swarm.with_host(HostView(name, frozenset(blocks)))
            health.expect(name, references_of(1, blocks))
        await check(health, hosts)
        await health.close()

    run_virtual(go())


def hopped(health, name, after):
    hop = Visited(name, 0, "answered", 0.0)
    for observe in health.router.observers:
        observe(hop, START, after)


@pytest.mark.parametrize("hosts", ["a", "ab", "abc"])
def test_an_audit_finds_who_lied_without_asking_anybody(hosts):
    """With any number of holders of the block, even if the others are frozen."""

    async def check(health, fakes):
        for name in hosts:
            fakes.freeze(name)
        hopped(health, "a", answer_of([0]) * 1.5)
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["a"].why == "it answered wrongly for block 0"
        assert all(health.router.swarm[name].usable for name in hosts[1:])
        assert (health.audited, health.disagreed) == (1, 1)

    trusted(check, Limits(audit_share=1.0), hosts=hosts)


def test_a_lie_about_any_image_of_a_batch_is_found():
    """One image of each audited visit is computed again, drawn anew each time."""

    async def check(health, hosts):
        before = np.concatenate([START, 2 * START, 3 * START])
        after = computed(before, [0], {0: 1})
        after[2] += 1
        for _ in range(20):
            for observe in health.router.observers:
                observe(Visited("a", 0, "answered", 0.0, images=3), before, after)
            await asyncio.sleep(LONG)
            if health.disagreed:
                break
        assert health.router.swarm["a"].condition == "shut-out"

    trusted(check, Limits(audit_share=1.0))


def test_a_host_that_is_dropped_during_its_canary_is_not_remembered():
    async def check(health, hosts):
        hosts.freeze("a")
        running = asyncio.create_task(health.run())
        await asyncio.sleep(0.1)  # its first canary is under way
        health.drop("a")
        hosts.thaw("a")
        await asyncio.sleep(1.0)
        assert traces(health) == {"b"}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, LIMITS)


def test_an_audit_of_the_process_before_says_nothing_for_the_new_one():
    """The first visit of every process is audited for certain, whatever the one before did."""

    async def check(health, hosts):
        for audited in range(8):
            hopped(health, "a", answer_of([0]))
            health.drop("a")  # while the audit runs
            await until(lambda passed=audited: health.audited == passed + 1)
            assert "a" not in traces(health)
            health.expect("a", references_of(1, [0]))
            await asyncio.sleep(0.001)

    trusted(check, Limits(audit_share=1e-9))


def test_audits_are_a_share():
    async def check(health, hosts):
        for _ in range(400):
            hopped(health, "a", answer_of([0]))
            hopped(health, "a", None)  # nothing to compare
            await asyncio.sleep(LONG)
        # Equal answers are never odd, which leaves the random audits: 0.2 less 0.2 x 0.8 / 2.
        assert 29 <= health.audited <= 67  # 0.12 of 400, 3 standard deviations
        assert health.disagreed == 0

    trusted(check, Limits(audit_share=0.2))


def test_every_host_gets_a_new_canary_each_time():
    """Hosts of one block share a question, so that many cost the gateway no more than one."""

    async def check(health, hosts):
        asked, visit = [], hosts.visit

        async def noted(call, state):
            asked.append((call.host, call.block, state.tobytes()))
            return await visit(call, state)

        health.router.transport = SimpleNamespace(visit=noted)
        running = asyncio.create_task(health.run())
        await asyncio.sleep(10.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(asked) == len(set(asked)) >= 2 * 10
        assert len({question for *_, question in asked}) <= len(asked) / 2 + 1

    trusted(check, LIMITS)


def test_hosts_that_are_due_together_share_one_computation():
    """One of the waiting canaries is cancelled; the others still get what it began."""

    async def check(health, hosts):
        computations = []

        async def compute(state):
            computations.append(state)
            await asyncio.sleep(0.1)
            return computed(state, [0], {0: 1})

        shared = {0: Reference(START, compute, "shared")}
        for name in "abc":
            health.expect(name, shared)
        first, *others = [asyncio.create_task(health.canary(Check(name, 0, 1.0))) for name in "abc"]
        await asyncio.sleep(0.05)
        first.cancel()
        assert await asyncio.gather(*others) == ["", ""]
        assert len(computations) == 1

    trusted(check, LIMITS, hosts="abc")


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_a_liar_that_knows_its_canaries_is_out_within_200_requests(names):
    """At 2 % of audited visits, every block on one, two or three hosts, one of which lies."""
    limits = QUICK.model_copy(update={"audit_share": 0.02})

    async def check(health, hosts):
        hosts.processes["a"].lies, router = 1.0, health.router
        requests = 0
        while router.swarm["a"].condition != "shut-out":
            # All at once, so that every host of a block gets some of them.
            walks = (router.walk(START, deadline=loop_time() + 1.0) for _ in range(10))
            await asyncio.gather(*walks)
            requests += 10
            assert requests <= 200
        assert all(router.swarm[name].usable for name in names[1:])

    trusted(check, limits, blocks=(0, 1, 2, 3), hosts=names)


def test_a_host_that_lies_now_and_then_is_out_by_the_share_of_audits():
    """A lie in 1 % of the visits, 2 % of which are audited: random audits would take 5,000 of them
    in the mean, but the first lie after its habits are known looks odd."""

    async def visits_of(seed):
        router = Router(FakeHosts(), depth=DEPTH, limits=Limits(audit_share=0.02), clock=loop_time)
        health, chance = HealthMonitor(router, seed=seed), np.random.default_rng(seed + 100)
        router.swarm = router.swarm.with_host(HostView("a", frozenset({0})))
        health.expect("a", references_of(1, [0]))
        for visits in count(1):
            hopped(health, "a", answer_of([0]) * (1.5 if chance.random() < 0.01 else 1.0))
            await asyncio.sleep(0.001)
            if router.swarm["a"].condition == "shut-out":
                return visits

    async def go():
        return [await visits_of(seed) for seed in range(8)]

    mean = np.mean(run_virtual(go()))
    # 20 visits, then 100 to a lie in the mean: 1 of 1,000 sums of 8 such waits lies above.
    assert mean < 20 + 100 * 2.5


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
        asking = asyncio.create_task(health.canary(Check("a", 0, 2.0)))
        await asyncio.sleep(0)
        hosts.processes["a"].weights[0] = 2
        health.expect("a", references_of(2, [0]))
        hosts.thaw("a")
        assert await asking == ""
        assert health.router.swarm["a"].condition == "healthy"
        assert await health.canary(Check("a", 0, 1.0)) == ""

    trusted(check, LIMITS)
