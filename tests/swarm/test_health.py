"""Canaries, probes and audits, over hosts that compute by a formula."""

import asyncio
import math
import random
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from clock import loop_time, run_virtual
from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.state import Answer, HostState, Swarm, Visit, Visited
from layershuffle.gateway.hosts.health import (
    Habit,
    HealthMonitor,
    Reference,
    agrees,
    measures,
    patience,
    question_like,
)
from layershuffle.gateway.hosts.router import Router
from waiting import until

DEPTH = 4
START = np.ones((1, 2, 3), np.float32)
LIMITS = Limits(canary_every_ms=1000, probe_ms=500)
QUICK = Limits(suspect_ms=20, canary_every_ms=60, probe_ms=200, hop_floor_ms=60, audit_share=0.0)


def computed(start, block, weight=1):
    return (2 * start + (10 * weight + block)).astype(np.float32)


async def _compute(block, weight, state):
    await asyncio.sleep(0)
    return computed(state, block, weight)


def references_of(weight, blocks):
    """What hosts with these blocks should answer; the weights are digits."""
    return {
        block: Reference(START, partial(_compute, block, weight), f"{weight} {block}")
        for block in blocks
    }


@dataclass
class Fake:
    """One process: its blocks, their weights, and the share of its answers to requests that are
    false; canaries are answered rightly, as if it knew them."""

    blocks: tuple
    weight: int = 1
    lies: float = 0.0
    thawed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeHosts:
    """Processes as objects, and their transport."""

    def __init__(self):
        self.processes, self.chance = {}, random.Random(0)

    def add(self, name, blocks):
        self.processes[name] = Fake(blocks)
        self.thaw(name)

    def freeze(self, name):
        self.processes[name].thawed.clear()

    def thaw(self, name):
        self.processes[name].thawed.set()

    async def visit(self, visit, state, *, form="fp32"):
        process = self.processes[visit.host]
        await process.thawed.wait()
        await asyncio.sleep(0.001)  # else the clock would stand still while requests go on
        after = computed(state, visit.block, process.weight)
        # Only the router says how long its request has left: a hint that no real host gets.
        wrong = visit.budget is not None and self.chance.random() < process.lies
        return Answer(after * np.float32(1.5 if wrong else 1), 0.1, 0.0)


# --- canaries -------------------------------------------------------------------------------------


def test_which_hosts_are_due():
    """Suspects from their `retry_at` on; those that serve, and those that leave, each second."""
    blocks = frozenset({0, 1})
    views = [
        HostState("fresh", blocks), HostState("gone", blocks, "gone"),
        HostState("late", blocks, "suspect", retry_at=11.0),
        HostState("leaving", blocks, "draining"),
        HostState("now", blocks, "suspect", retry_at=9.0), HostState("out", blocks, "shut-out"),
    ]  # fmt: skip
    router = Router(FakeHosts(), depth=DEPTH, limits=LIMITS, clock=lambda: 0.0)
    router.swarm = Swarm([*views, HostState("strange", blocks)])
    health = HealthMonitor(router, seed=0)
    for view in views:
        health.expect(view.name, references_of(1, blocks))
    dues = [health.due(now) for now in (-1.0, 10.0, 11.0)]
    assert [[visit.host for visit in due] for due in dues] == [
        [], ["fresh", "leaving", "now"], ["fresh", "late", "leaving", "now"],
    ]  # fmt: skip
    assert {visit.limit for visit in dues[1]} == {0.5}
    health.forget("now", blocks)
    assert [visit.host for visit in health.due(11.0)] == ["fresh", "late", "leaving"]


def test_a_busy_host_has_longer_for_a_canary():
    idle, busy = HostState("a", frozenset({0}), compute=0.02, link=0.0), None
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


def trusted(check, limits, blocks=(0, 1), hosts="ab"):
    """Run `check(health, hosts)` with hosts of the same blocks, nothing else running."""
    names = hosts

    async def go():
        hosts = FakeHosts()
        router = Router(hosts, depth=DEPTH, limits=limits, clock=loop_time)
        health = HealthMonitor(router, seed=0)
        for name in names:
            hosts.add(name, blocks)
            router.put(HostState(name, frozenset(blocks)))
            health.expect(name, references_of(1, blocks))
        await check(health, hosts)
        await health.close()

    run_virtual(go())


def hopped(health, name, after):
    """Tell of an answer, as the router does."""
    hop = Visited(name, 0, "answered", 0.0)
    health.router.second_opinion(hop, START, after)
    for observe in health.router.observers:
        observe(hop, START, after)


@pytest.mark.parametrize("hosts", ["a", "ab", "abc"])
def test_an_audit_finds_who_lied_without_asking_anybody(hosts):
    """With any number of holders of the block, even if the others are frozen."""

    async def check(health, fakes):
        for name in hosts:
            fakes.freeze(name)
        hopped(health, "a", computed(START, 0) * 1.5)
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["a"].why == "it answered wrongly for block 0"
        assert all(health.router.swarm[name].usable for name in hosts[1:])
        assert (health.audited, health.disagreed) == (1, 1)

    trusted(check, Limits(audit_share=1.0), hosts=hosts)


@pytest.mark.parametrize(("rounding", "outcome"), [(0.0, "shut-out"), (1 / 127, "healthy")])
def test_other_processors_round_int8_otherwise(rounding, outcome):
    async def check(health, hosts):
        reference = replace(references_of(1, [0])[0], rounding=rounding)
        health.expect("a", {0: reference})
        hopped(health, "a", computed(START, 0) * np.float32(1.005))
        await until(lambda: health.audited == 1)
        await asyncio.sleep(0.1)
        assert health.router.swarm["a"].condition == outcome

    trusted(check, Limits(audit_share=1.0), hosts="a")


def test_a_host_that_is_dropped_during_its_canary_is_not_remembered():
    async def check(health, hosts):
        hosts.freeze("a")
        running = asyncio.create_task(health.run())
        await asyncio.sleep(0.1)  # its first canary is under way
        health.drop("a")
        hosts.thaw("a")
        await asyncio.sleep(1.0)
        assert {visit.host for visit in health.due(loop_time() + 9)} == {"b"}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, LIMITS)


def test_a_host_that_leaves_before_its_canary_begins_ends_no_watch():
    async def check(health, hosts):
        due = health.due

        def leaving(now):
            asyncio.get_running_loop().call_soon(health.drop, "a")
            return due(now)

        health.due = leaving
        running = asyncio.create_task(health.run())
        await asyncio.sleep(1.0)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, LIMITS)


def test_an_audit_of_the_process_before_says_nothing_for_the_new_one():
    """The first visit of every process is audited for certain, whatever the one before did."""

    async def check(health, hosts):
        for audited in range(8):
            hopped(health, "a", computed(START, 0))
            health.drop("a")  # while the audit runs
            await until(lambda passed=audited: health.audited == passed + 1)
            health.expect("a", references_of(1, [0]))
            await asyncio.sleep(0.001)

    trusted(check, Limits(audit_share=1e-9))


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
        assert {(host, block) for host, block, _ in asked} == {(h, b) for h in "ab" for b in (0, 1)}
        assert len({question for *_, question in asked}) <= len(asked) / 2 + 1

    trusted(check, LIMITS)


def test_hosts_that_are_due_together_share_one_computation():
    """One of the waiting canaries is cancelled; the others still get what it began."""

    async def check(health, hosts):
        computations = []

        async def compute(state):
            computations.append(state)
            await asyncio.sleep(0.1)
            return computed(state, 0)

        shared = {0: Reference(START, compute, "shared")}
        for name in "abc":
            health.expect(name, shared)
        first, *others = [asyncio.create_task(health.canary(Visit(name, 0, 1.0))) for name in "abc"]
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
        router.put(HostState("a", frozenset({0})))
        health.expect("a", references_of(1, [0]))
        for visits in count(1):
            hopped(health, "a", computed(START, 0) * (1.5 if chance.random() < 0.01 else 1.0))
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
        asking = asyncio.create_task(health.canary(Visit("a", 0, 2.0)))
        await asyncio.sleep(0)
        hosts.processes["a"].weight = 2
        health.expect("a", references_of(2, [0]))
        hosts.thaw("a")
        assert await asking == ""
        assert health.router.swarm["a"].condition == "healthy"
        assert await health.canary(Visit("a", 0, 1.0)) == ""

    trusted(check, LIMITS)


# --- which visits are audited ---------------------------------------------------------------------

SHARE, LATER = 0.02, 400  # visits in which a new host is audited more often


def visits(count, *, seed=0):
    """States before and after blocks that add a third of the state's length, more or less."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        before = draw.standard_normal((1, 5, 8)).astype(np.float32)
        added = draw.standard_normal((1, 5, 8)) - 0.2 * before
        size = 0.33 * draw.lognormal(0, 0.3) * np.linalg.norm(before) / np.linalg.norm(added)
        yield before, (before + size * added).astype(np.float32)


def drawn(pairs, *, share=SHARE, seed=1):
    """Which of the visits of one host are audited, all of them rightly answered."""
    habit, chance = Habit(), np.random.default_rng(seed)
    for before, after in pairs:
        audited = habit.audits(before, after, share=share, chance=chance)
        habit.passed += audited
        yield audited


def test_measures_are_length_and_direction():
    before = np.array([[[3.0, 4.0]]], np.float32)
    ratio, cosine = measures(before, before + np.array([0.0, 2.0], np.float32))
    assert ratio == pytest.approx(math.log(2 / 5))
    assert cosine == pytest.approx(4 / 5)
    ratio, cosine = measures(before, -before)
    assert (ratio, cosine) == (pytest.approx(math.log(2)), pytest.approx(-1))
    assert np.isfinite(measures(before, before)).all()
    assert np.isfinite(measures(0 * before, before)).all()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_as_many_visits_are_audited_as_may_be(share):
    later = list(drawn(visits(6000), share=share))[LATER:]
    noise = 4 * math.sqrt(share * (1 - share) / len(later))
    assert np.mean(later) == pytest.approx(share, abs=noise + 0.1 * share)


def test_a_share_of_one_is_all_and_equal_answers_are_never_odd():
    assert all(drawn(visits(200), share=1.0))
    (pair,) = visits(1)
    later = list(drawn([pair] * 6000))[LATER:]
    assert np.mean(later) == pytest.approx(SHARE / 2, abs=4 * math.sqrt(SHARE / 2 / len(later)))


LIES = {
    "the opposite": lambda before, after: -after,
    "noise": lambda before, after: after + 10 * np.float32(after.std()) * np.sign(before + 1),
    "nothing done": lambda before, after: before,
    "zeros": lambda before, after: 0 * after,
    "five times as much": lambda before, after: before + 5 * (after - before),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_first_rare_lie_is_audited(lie):
    """After 500 honest visits, in 40 hosts; a random audit of 2 % would see one of them."""
    caught = 0
    for seed in range(40):
        *honest, (before, after) = visits(501, seed=seed)
        caught += [*drawn([*honest, (before, LIES[lie](before, after))], seed=seed)][-1]
    assert caught >= 36
