"""Canaries, probes and audits of hosts, over any transport.

canary  a random state through one block; every host gets one from time to time
probe   a canary for a suspect host; if it passes in time, the host is healthy again
audit   a share of the answered visits, and the first ones of every process, are computed again
        here, off the request's path (`audits` chooses them)

The correct answer is computed by the block in this process, from the files that the hosts fetch
(`Reference`).
So a host that answers wrongly is shut out even if no other host holds its blocks. It stays out
until `Coordinator.readmit` restarts it. Nothing that a host does or answers ends the watch. The
decisions are pure functions; `HealthMonitor` carries them out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from layershuffle.swarm import policy, state
from layershuffle.swarm.audits import AuditDraw
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.members import rounded
from layershuffle.swarm.messages import (
    Outcome,
    State,
    Visit,
    Visited,
    VisitError,
    Wire,
    WorkExpired,
)
from layershuffle.swarm.router import TOO_LONG, Router, fault_of
from layershuffle.swarm.state import HostView, Swarm

_TICK = 0.05  # seconds between checks of which hosts are due
_AUDITS = 8  # at a time; further visits are not audited meanwhile
_MILLI = 1000.0
_NOISE = 0.1  # in a canary, as a share of the spread of a real state
# The largest difference due to rounding on the wire, relative to the largest value.
_ROUNDING: Mapping[Wire, float] = {"fp32": 0.0, "fp16": 2.0**-10, "int8": 1 / 127}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference for hosts that hold a block: the block itself, in this process.

    `compute` returns the state after the block, float32 `[images, tokens, width]`. `sample` is a
    typical input of the block, of one image; `digest` is that of the weights.
    """

    sample: State
    compute: Callable[[State], Coroutine[None, None, State]]
    digest: str


def question_like(sample: State, generator: np.random.Generator) -> State:
    """A random state that looks like `sample`: its tokens in another order, and a little noise."""
    tokens = generator.permutation(sample, axis=1)
    # A sample of equal values has no spread, but two questions must never be the same.
    noise = _NOISE * (sample.std() or 1.0) * generator.standard_normal(sample.shape)
    return (tokens + noise).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Check:
    """A canary that is due: one block of one host, to be answered within `limit` seconds."""

    host: str
    block: int
    limit: float


Expectations = Mapping[str, Mapping[int, Reference]]


def due(
    swarm: Swarm,
    expectations: Expectations,
    *,
    canaries: Mapping[str, tuple[float, int]],
    now: float,
    limits: Limits,
    names: Iterable[str],
) -> tuple[Check, ...]:
    """The canary visits to make now to the hosts `names`, at most one for each.

    `canaries`: the time and number of each host's canaries, because its blocks take turns. Suspect
    hosts are asked when they may be probed, healthy and draining ones `canary_every_ms` after the
    last canary.
    """
    checks = []
    for host in map(swarm.__getitem__, names):
        blocks = sorted(expectations.get(host.name, ()))
        last, times = canaries.get(host.name, (-np.inf, 0))
        if host.condition == "suspect":
            is_due = state.probe_due(host, now=now)
        else:
            live = host.condition in ("healthy", "draining")
            is_due = live and now >= last + limits.canary_every_ms / _MILLI
        if blocks and is_due:
            limit = patience(host, swarm, limits=limits)
            checks.append(Check(host.name, blocks[times % len(blocks)], limit))
    return tuple(checks)


def patience(host: HostView, swarm: Swarm, *, limits: Limits) -> float:
    """Seconds for a canary: `probe_ms`, or more for a healthy host with much work."""
    probe = limits.probe_ms / _MILLI
    if not host.usable:
        return probe
    pace = swarm.pace(limits)
    seconds, lag = state.expected(host, pace=pace), state.lag_of(host, pace)
    return max(probe, policy.hop_limit(seconds, lag=lag, left=np.inf, limits=limits))


def agrees(answer: State, expected: State, *, tolerance: float) -> bool:
    """Whether all values of `answer` are within `tolerance` x the largest value of `expected`."""
    # Comparisons with NaN are false, so NaN never agrees.
    return bool(np.abs(answer - expected).max() <= tolerance * np.abs(expected).max())


@dataclass(frozen=True, eq=False)
class Question:
    """The question to a block until the time `expires`, and the expected answer."""

    start: State
    output: asyncio.Future[State]
    expires: float


class HealthMonitor:
    """Sends canaries to the hosts of `router` and audits them; it updates `router.swarm`.

    `seed` determines which hops are audited and the states of canaries (default: a secret number,
    because a host that could foresee audits would lie in between). `audited` counts the hops that
    were computed again, `disagreed` those with a different result. Use it from the router's event
    loop only.
    """

    def __init__(self, router: Router, *, seed: int | None = None) -> None:
        self.router = router
        self.audited, self.disagreed = 0, 0
        self._chance = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
        self._expected: dict[str, dict[int, Reference]] = {}
        self._draw = AuditDraw(self._chance)
        self._questions: dict[tuple[int, str], Question] = {}
        self._canaries: dict[str, tuple[float, int]] = {}
        self._next: dict[str, float] = {}
        self._alarms: list[tuple[float, str]] = []  # a heap; stale where `_next` says otherwise
        self._busy: set[str] = set()
        self._audits: set[asyncio.Task[None]] = set()
        router.observers.append(self._observe)

    def expect(self, host: str, blocks: Mapping[int, Reference]) -> None:
        """Check these blocks of `host` too, from now on."""
        self._expected[host] = {**self._expected.get(host, {}), **blocks}
        if host not in self._next:
            self._set_alarm(host, self.router.clock())

    def forget(self, host: str, blocks: Iterable[int]) -> None:
        """Stop checking `blocks` of `host`."""
        expected = self._expected.get(host, {})
        self._expected[host] = {b: r for b, r in expected.items() if b not in set(blocks)}

    def drop(self, host: str) -> None:
        """Forget everything about `host`, because it left or restarted."""
        for record in (self._expected, self._canaries, self._next):
            record.pop(host, None)
        self._draw.drop(host)

    async def run(self) -> None:
        """Send canaries to the hosts that are due, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = self.router.clock()
                checks = due(
                    self.router.swarm,
                    self._expected,
                    canaries=self._canaries,
                    now=now,
                    limits=self.router.limits,
                    names=self._alarmed(now),
                )
                for check in checks:
                    if check.host not in self._busy:
                        self._busy.add(check.host)
                        group.create_task(self._turn(check))
                await asyncio.sleep(_TICK)

    def _alarmed(self, now: float) -> list[str]:
        """Hosts that may be due, sorted: all suspects, and those whose alarm time has passed.

        Checking all of 10,000 hosts 20 times a second would cost more than all their canaries.
        """
        swarm, every = self.router.swarm, self.router.limits.canary_every_ms / _MILLI
        names = set(swarm.suspects)
        while self._alarms and self._alarms[0][0] <= now:
            time, name = heappop(self._alarms)
            if self._next.get(name) == time:
                self._set_alarm(name, now + every)  # set again once it has answered
                if name in swarm:
                    names.add(name)
        return sorted(names)

    def _set_alarm(self, name: str, time: float) -> None:
        self._next[name] = time
        heappush(self._alarms, (time, name))

    async def close(self) -> None:
        """Cancel running audits and computations, and start no more audits."""
        if self._observe in self.router.observers:
            self.router.observers.remove(self._observe)
        tasks: list[asyncio.Future[Any]] = [*self._audits]
        tasks += [question.output for question in self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(self, check: Check) -> None:
        try:
            await self.canary(check)
        finally:
            self._busy.discard(check.host)
            if check.host in self._expected:
                times = self._canaries.get(check.host, (0.0, 0))[1]
                now = self.router.clock()
                self._canaries[check.host] = (now, times + 1)
                self._set_alarm(check.host, now + self.router.limits.canary_every_ms / _MILLI)

    async def canary(self, check: Check) -> str:
        """Carry out a check now; returns the fault, or "" without one.

        A failure counts against the host as for any visit, and a wrong answer shuts it out.
        """
        reference = self._expected.get(check.host, {}).get(check.block)
        if reference is None:
            return ""
        question = self._question(check.block, reference)
        # Shielded, because the canaries of other hosts wait for it as well.
        expected = await asyncio.shield(question.output)
        hop, answer = await self._ask(check, question.start)
        if self._expected.get(check.host, {}).get(check.block) is not reference:
            return ""  # it got other weights meanwhile, so the answer proves nothing
        tolerance = self.router.limits.tolerance
        if answer is not None and not agrees(answer, expected, tolerance=tolerance):
            hop = _wrong(hop, f"it failed its canary on block {check.block}")
        if hop.outcome != "answered":
            self.router.report(hop)
            return hop.why
        self.router.update(check.host, partial(state.probed, hop=hop, limits=self.router.limits))
        return ""

    def _question(self, block: int, reference: Reference) -> Question:
        """The current question for the block; its answer may still be being computed.

        All hosts of the block share it until it expires, so many hosts cost this process no more
        than one. A healthy host is asked less often. A suspect may get the same question again, but
        never learns the answer.
        """
        now, key = self.router.clock(), (block, reference.digest)
        question = self._questions.get(key)
        if question is None or now >= question.expires:
            start = question_like(reference.sample, self._chance)
            expires = now + self.router.limits.canary_every_ms / _MILLI
            question = Question(start, asyncio.ensure_future(reference.compute(start)), expires)
            live = {key: other for key, other in self._questions.items() if now < other.expires}
            self._questions = {**live, key: question}
        return question

    async def _ask(self, check: Check, start: State) -> tuple[Visited, State | None]:
        """Make one visit outside of any request; also returns its answer if it can be compared."""
        clock, visit = self.router.clock, Visit(check.host, check.block, check.limit)
        hop, begun = Visited(check.host, check.block, "answered", 0.0), clock()
        # Always float32, because rounding by a narrower wire is not the fault of the host.
        visiting = self.router.transport.visit(visit, start)
        try:
            async with asyncio.timeout(check.limit):
                answer = await visiting
        except TimeoutError:
            late = WorkExpired("it did not answer a canary in time")
            hop = hop._replace(outcome=late.outcome, why=late.cause)
        except VisitError as error:
            hop = hop._replace(outcome=error.outcome, why=error.cause)
        # Unexpected; nothing that a host does may end the watch.
        except Exception as error:  # noqa: BLE001 -- it is logged, and counts as a failure
            _log.exception("A canary of host %s broke", check.host)
            why = f"its canary broke ({type(error).__name__}: {error})"
            hop = hop._replace(outcome="failed", why=why)
        hop = hop._replace(ms=(clock() - begun) * _MILLI)
        if hop.outcome != "answered":
            return hop, None
        if fault := fault_of(answer, before=start, ms=hop.ms):
            outcome: Outcome = "failed" if fault == TOO_LONG else "wrong"
            return hop._replace(outcome=outcome, why=fault), None
        return hop._replace(
            compute_ms=answer.compute_ms, queue_ms=answer.queue_ms, batch=answer.batch
        ), answer.state

    def _observe(self, hop: Visited, before: State, after: State | None) -> None:
        share = self.router.limits.audit_share
        if hop.outcome != "answered" or after is None or not share:
            return
        if len(after) > 1:
            row = int(self._chance.integers(len(after)))  # one image stands for all of them
            before, after = before[row : row + 1], after[row : row + 1]
        chosen = self._draw.chosen(hop.host, before=before, after=after, share=share)
        if not chosen or len(self._audits) >= _AUDITS:
            return
        reference = self._reference_of(hop)
        if reference is not None:
            task = asyncio.ensure_future(self._audit(hop, reference, before, after))
            self._audits.add(task)
            task.add_done_callback(self._audited)

    def _audited(self, task: asyncio.Task[None]) -> None:
        self._audits.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("An audit broke", exc_info=error)

    async def _audit(self, hop: Visited, reference: Reference, before: State, after: State) -> None:
        """Compute the state after the hop again in this process, and compare."""
        wire = self.router.wire
        # The input of the hop's host, rounded by the wire.
        received = rounded(before, wire)
        expected = await reference.compute(received)
        if wire != "fp32":
            expected = before + (expected - received)  # the router adds to its own state
        self.audited += 1
        tolerance = self.router.limits.tolerance + _ROUNDING[wire]
        # If the process restarted or got other weights meanwhile, it did not give this answer.
        same = self._reference_of(hop) is reference
        agreed = agrees(after, expected, tolerance=tolerance)
        self.disagreed += not agreed
        if not same:
            return
        if agreed:
            self._draw.passed(hop.host)
        else:
            self.router.report(_wrong(hop, f"it answered wrongly for block {hop.block}"))

    def _reference_of(self, hop: Visited) -> Reference | None:
        return self._expected.get(hop.host, {}).get(hop.block)


def _wrong(hop: Visited, why: str) -> Visited:
    return hop._replace(outcome="wrong", why=why)
