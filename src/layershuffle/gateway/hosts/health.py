"""Canaries, probes and audits of hosts, over any transport.

canary  a random state through one block; every host gets one from time to time
probe   a canary for a suspect host; if it passes in time, the host is healthy again
audit   a share of the answered visits are computed again here, off the request's path (`Habit`
        chooses them). All of the first ones of every process are, and these count only then

The correct answer is computed by the block in this process, from the files that the hosts fetch
(`Reference`). So a host that answers wrongly is shut out even if no other host holds its blocks. It
stays out until `Coordinator.readmit` restarts it. Nothing that a host does or answers ends the
watch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from layershuffle.gateway.brain import policy, state
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import HostState, State, Swarm, Visit, Visited, VisitError
from layershuffle.gateway.hosts.connections import rounded
from layershuffle.gateway.hosts.router import Router, refuse_odd
from layershuffle.ground.errors import ModelFileError

_TICK = 0.05  # seconds between checks of which hosts are due
_AUDITS = 8  # at a time; further visits of known hosts are not audited meanwhile
_REMIND = 60.0  # seconds between two lines of the log on files that are gone
_MILLI = 1000.0
_NOISE = 0.1  # in a canary, as a share of the spread of a real state
# The largest difference due to rounding to these numbers, relative to the largest value.
ROUNDING: Mapping[Wire, float] = {"fp32": 0.0, "fp16": 2.0**-10, "int8": 1 / 127}
_TINY = 1e-12
_WEIGHT = 0.05  # of the newest visit in a host's habits
_KNOWN = 20  # visits after which oddness is judged; new hosts are audited anyway
_NARROW = 0.01  # least spread, because after two equal answers any third one would be odd
_FIRST_BOUND = 4.0
_STEP = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference for hosts that hold a block: the block itself, in this process.

    `compute` returns the state after the block, float32 `[1, tokens, width]`. `sample` is a
    typical input of the block; `digest` is that of the weights; `rounding`: the largest difference
    between processors, relative to the largest value.
    """

    sample: State
    compute: Callable[[State], Coroutine[None, None, State]]
    digest: str
    rounding: float = 0.0


@dataclass(eq=False, slots=True)
class HostRecord:
    """What the health check knows of a host: its blocks, the number of its canaries, whether one is
    under way, and the time from which the next one is due."""

    blocks: dict[int, Reference]
    asked: int = 0
    busy: bool = False
    due: float = 0.0


@dataclass(frozen=True, eq=False)
class _Question:
    """The question to a block until the time `expires`, and the expected answer."""

    start: State
    output: asyncio.Future[State]
    expires: float


def question_like(sample: State, generator: np.random.Generator) -> State:
    """A random state that looks like `sample`: its tokens in another order, and a little noise."""
    tokens = generator.permutation(sample, axis=1)
    # A sample of equal values has no spread, but two questions must never be the same.
    noise = _NOISE * (sample.std() or 1.0) * generator.standard_normal(sample.shape)
    return (tokens + noise).astype(np.float32)


def patience(host: HostState, swarm: Swarm, *, limits: Limits) -> float:
    """Seconds for a canary: `probe_ms`, or more for a healthy host with much work."""
    probe = limits.probe_ms / _MILLI
    if not host.usable:
        return probe
    pace = swarm.pace(limits)
    seconds = state.expected(host, pace=pace)
    lag = state.lag_of(host, pace)
    return max(probe, policy.hop_limit(seconds, lag=lag, left=np.inf, limits=limits))


def agrees(answer: State, expected: State, *, tolerance: float) -> bool:
    """Whether all values of `answer` are within `tolerance` x the largest value of `expected`."""
    # Comparisons with NaN are false, so NaN never agrees.
    return bool(np.abs(answer - expected).max() <= tolerance * np.abs(expected).max())


def measures(before: State, after: State) -> tuple[float, float]:
    """Length of the change relative to the state (natural logarithm), and its direction.

    The direction is the cosine of the angle between state and change, over all values of the state.
    """
    start = before.ravel()
    added = after.ravel() - start
    # Not by `linalg.norm`, which takes four times as long for a small state.
    length = math.sqrt(start.dot(start))
    growth = math.sqrt(added.dot(added))
    ratio = math.log((growth + _TINY) / (length + _TINY))
    return ratio, float(start.dot(added)) / (growth * length + _TINY)


@dataclass(eq=False, slots=True)
class Habit:
    """What the visits of one process were like, and which of them to audit.

    A random audit of 2 % of the visits catches a host that lies in one visit of a hundred once in
    5,000 visits. But its false answers rarely look like its other ones, so half of the audits go to
    visits that are odd by two cheap measures of what the blocks added to the state. Oddness proves
    nothing: only the audit, which computes the visit again, does.

    `passed`: those that passed an audit; the more, the more it is trusted. `bound` is the oddness
    above which a visit is audited; it adapts to the share of audits.
    """

    visits: int = 0
    passed: int = 0
    centre: list[float] = field(default_factory=lambda: [0.0, 0.0])
    spread: list[float] = field(default_factory=lambda: [0.0, 0.0])
    bound: float = _FIRST_BOUND

    def audits(
        self, before: State, after: State, *, share: float, chance: np.random.Generator
    ) -> bool:
        """Whether the visit with these states `[1, tokens, width]` around it is audited.

        In the long run a fraction `share` of visits is, drawn from the secret generator `chance`;
        if it is small, half of these are chosen for their oddness, and none if it is 1.
        """
        for_oddness = share * (1 - share) / 2
        odd = self._is_odd(before, after, share=for_oddness)
        # Always drawn, so the answers of one host do not shift the draws of others.
        drawn = bool(chance.random() < max(share - for_oddness, 1 / (1 + self.passed)))
        return drawn or odd

    def _is_odd(self, before: State, after: State, *, share: float) -> bool:
        """Whether a visit is among the oddest; updates the statistics."""
        self.visits += 1
        # The first visits have equal weights, or the very first would dominate for long.
        weight = max(_WEIGHT, 1 / self.visits)
        oddness = 0.0
        for at, value in enumerate(measures(before, after)):
            off = abs(value - self.centre[at])
            oddness = max(oddness, off / max(self.spread[at], _NARROW))
            self.centre[at] += weight * (value - self.centre[at])
            self.spread[at] += weight * (off - self.spread[at])
        if self.visits <= _KNOWN:
            return False
        odd = oddness > self.bound
        # Steps up and down balance where a fraction `share` of the visits lies above.
        self.bound *= 1 + _STEP if odd else (1 + _STEP) ** (-share / (1 - share))
        return odd


class HealthMonitor:
    """Sends canaries to the hosts of `router` and audits them; it updates `router.swarm`.

    `seed` determines which hops are audited and the states of canaries (default: a secret number,
    because a host that could foresee audits would lie in between). `audited` counts the hops that
    were computed again, `disagreed` those with a different result. Use it from the router's event
    loop only.
    """

    def __init__(self, router: Router, *, seed: int | None = None) -> None:
        self.router = router
        self.audited = 0
        self.disagreed = 0
        self._chance = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
        self._records: dict[str, HostRecord] = {}
        self._habits: dict[str, Habit] = {}
        self._questions: dict[tuple[int, str], _Question] = {}
        # Also of hosts that have left: an answer may be the last that they sent.
        self._references: dict[int, Reference] = {}
        self._audits: set[asyncio.Task[bool]] = set()
        self._computing = asyncio.Semaphore(_AUDITS)
        self._told = -math.inf
        router.observers.append(self._observe)
        router.second_opinion = self._second_opinion

    def expect(self, host: str, blocks: Mapping[int, Reference]) -> None:
        """Check these blocks of `host` too, from now on."""
        if host not in self._records:
            self._records[host] = HostRecord({}, due=self.router.clock())
        self._records[host].blocks.update(blocks)
        self._references.update(blocks)

    def forget(self, host: str, blocks: Iterable[int]) -> None:
        """Stop checking `blocks` of `host`."""
        if host in self._records:
            for block in blocks:
                self._records[host].blocks.pop(block, None)

    def drop(self, host: str) -> None:
        """Forget everything about `host`, because it left or restarted."""
        self._records.pop(host, None)
        self._habits.pop(host, None)

    async def run(self) -> None:
        """Send canaries to the hosts that are due, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for visit in self.due(self.router.clock()):
                    record = self._records[visit.host]
                    record.busy = True
                    # Not by its name: the host may have left before the task begins.
                    group.create_task(self._turn(visit, record))
                await asyncio.sleep(_TICK)

    def due(self, now: float) -> list[Visit]:
        """The canaries to send now, at most one to each host, whose blocks take turns.

        Suspect hosts are asked when they may be probed, healthy and draining ones `canary_every_ms`
        after the last canary.
        """
        swarm = self.router.swarm
        limits = self.router.limits
        visits = []
        for name, record in sorted(self._records.items()):
            host = swarm.get(name)
            if host is None or record.busy or not record.blocks:
                continue
            if host.condition in ("healthy", "draining"):
                is_due = now >= record.due
            else:
                is_due = state.probe_due(host, now=now)
            if is_due:
                block = sorted(record.blocks)[record.asked % len(record.blocks)]
                visits.append(Visit(name, block, patience(host, swarm, limits=limits)))
        return visits

    async def close(self) -> None:
        """Cancel running audits and computations, and start no more audits."""
        if self._observe in self.router.observers:
            self.router.observers.remove(self._observe)
            self.router.second_opinion = lambda *_: None
        tasks: list[asyncio.Future[Any]] = [*self._audits]
        tasks += [question.output for question in self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(self, visit: Visit, record: HostRecord) -> None:
        try:
            await self.canary(visit)
        finally:
            record.busy = False
            record.asked += 1
            record.due = self.router.clock() + self.router.limits.canary_every_ms / _MILLI

    async def canary(self, visit: Visit) -> str:
        """Test a block of a host now; returns why it has not passed, or "" if it has.

        A failure counts against the host as for any visit, and a wrong answer shuts it out.
        """
        reference = self._reference_of(visit.host, visit.block)
        if reference is None:
            return ""
        question = self._question(visit.block, reference)
        try:
            # Shielded, because the canaries of other hosts wait for it as well.
            expected = await asyncio.shield(question.output)
        except ModelFileError as error:  # somebody removed the files, which is no host's fault
            now = self.router.clock()
            if now - self._told >= _REMIND:
                self._told = now
                _log.error("A block of a host cannot be tested, so it is not used: %s", error)
            return error.cause
        tolerance = self.router.limits.tolerance + reference.rounding
        hop = await self._ask(visit, question.start, expected=expected, tolerance=tolerance)
        if self._reference_of(visit.host, visit.block) is not reference:
            return ""  # it got other weights meanwhile, so the answer proves nothing
        if hop.outcome == "answered":
            self.router.update(
                visit.host, partial(state.probed, hop=hop, limits=self.router.limits)
            )
        else:
            self.router.report(hop)
        return hop.why

    def _question(self, block: int, reference: Reference) -> _Question:
        """The current question for the block; its answer may still be being computed.

        All hosts of the block share it until it expires, so many hosts cost this process no more
        than one. A healthy host is asked less often. A suspect may get the same question again, but
        never learns the answer.
        """
        now = self.router.clock()
        key = (block, reference.digest)
        question = self._questions.get(key)
        if question is None or now >= question.expires:
            start = question_like(reference.sample, self._chance)
            expires = now + self.router.limits.canary_every_ms / _MILLI
            question = _Question(start, asyncio.ensure_future(reference.compute(start)), expires)
            live = {key: other for key, other in self._questions.items() if now < other.expires}
            self._questions = {**live, key: question}
        return question

    async def _ask(
        self, visit: Visit, start: State, *, expected: State, tolerance: float
    ) -> Visited:
        """Make one visit outside of any request, whose answer is known."""
        router = self.router
        begun = self.router.clock()
        hop = Visited(visit.host, visit.block, "answered", 0.0)
        try:
            async with asyncio.timeout(visit.limit):
                # Always float32, because rounding by a narrower wire is not the fault of the host.
                answer = await router.transport.visit(visit, start)
            ms = (router.clock() - begun) * _MILLI
            refuse_odd(answer, before=start, ms=ms)
            if not agrees(answer.state, expected, tolerance=tolerance):
                raise VisitError(f"it failed its canary on block {visit.block}", outcome="wrong")
            return hop._replace(
                ms=ms, compute_ms=answer.compute_ms, queue_ms=answer.queue_ms, batch=answer.batch
            )
        except TimeoutError:
            failure = VisitError("it did not answer a canary in time", outcome="late")
        except VisitError as error:
            failure = error
        # Unexpected; nothing that a host does may end the watch.
        except Exception as error:  # noqa: BLE001 -- it is logged, and counts as a failure
            _log.exception("A canary of host %s broke", visit.host)
            cause = f"its canary broke ({type(error).__name__}: {error})"
            failure = VisitError(cause, outcome="failed")
        ms = (router.clock() - begun) * _MILLI
        return hop._replace(outcome=failure.outcome, why=failure.cause, ms=ms)

    def _observe(self, hop: Visited, before: State, after: State | None) -> None:
        share = self.router.limits.audit_share
        if after is None or not share:
            return
        habit = self._habits.setdefault(hop.host, Habit())
        chosen = habit.audits(before, after, share=share, chance=self._chance)
        reference = self._reference_of(hop.host, hop.block)
        # The first visits were computed again before they counted.
        known = habit.passed >= self.router.limits.first_audits
        if chosen and known and reference is not None and len(self._audits) < _AUDITS:
            self._begin_audit(hop, reference, before, after, habit=habit)

    def _second_opinion(
        self, hop: Visited, before: State, after: State
    ) -> asyncio.Future[bool] | None:
        """Whether a visit of a new process, computed again here, has the same result; `None` for a
        process that is known.

        The gateway has an opinion itself, so nobody can agree on a lie with another new host, and a
        block that nobody else holds is used.
        """
        limits = self.router.limits
        habit = self._habits.setdefault(hop.host, Habit())
        reference = self._reference_of(hop.host, hop.block) or self._references.get(hop.block)
        if not limits.audit_share or habit.passed >= limits.first_audits or reference is None:
            return None
        return self._begin_audit(hop, reference, before, after, habit=habit)

    def _begin_audit(
        self, hop: Visited, reference: Reference, before: State, after: State, *, habit: Habit
    ) -> asyncio.Task[bool]:
        task = asyncio.ensure_future(self._audit(hop, reference, before, after, habit=habit))
        self._audits.add(task)
        task.add_done_callback(self._audited)
        return task

    def _audited(self, task: asyncio.Task[bool]) -> None:
        self._audits.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("An audit broke", exc_info=error)

    async def _audit(
        self, hop: Visited, reference: Reference, before: State, after: State, *, habit: Habit
    ) -> bool:
        """Compute the state after the hop again in this process; whether it is the same."""
        wire = self.router.wire
        # The input of the hop's host, rounded by the wire.
        received = rounded(before, wire)
        async with self._computing:  # those of new hosts wait for their turn
            expected = await reference.compute(received)
        if wire != "fp32":
            expected = before + (expected - received)  # the router adds to its own state
        self.audited += 1
        tolerance = self.router.limits.tolerance + reference.rounding + ROUNDING[wire]
        agreed = agrees(after, expected, tolerance=tolerance)
        self.disagreed += not agreed
        # If the process restarted or got other weights meanwhile, it did not give this answer.
        if self._reference_of(hop.host, hop.block) is not reference:
            return agreed
        if agreed:
            habit.passed += 1
        else:
            why = f"it answered wrongly for block {hop.block}"
            self.router.report(hop._replace(outcome="wrong", why=why))
        return agreed

    def _reference_of(self, host: str, block: int) -> Reference | None:
        return self._records[host].blocks.get(block) if host in self._records else None
