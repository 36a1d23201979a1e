"""Which hosts to trust: canaries, probes and audits, over any transport.

canary  a stored input whose output is known, for each block; every host answers one now and then
probe   a canary for a suspect host; one that it passes in time makes the host healthy again
audit   replicas compute a share of the answered visits again, off the request's path; if the
        answers differ, all hosts that took part run all their canaries; if all pass, a third
        replica decides

A host that fails a canary, or that two others contradict, is shut out. It stays out until
`Coordinator.readmit` starts it anew. Nothing that a host does or answers ends the watch. The
decisions are pure functions; `HealthMonitor` carries them out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from layershuffle.draws import Stream
from layershuffle.swarm import policy, state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    State,
    Visit,
    Visited,
    VisitError,
    Wire,
    WorkExpired,
    pack,
    unpack,
)
from layershuffle.swarm.program import digest_of
from layershuffle.swarm.router import Router, unpacked
from layershuffle.swarm.state import HostView, Swarm

if TYPE_CHECKING:
    from layershuffle.swarm.bundle import Bundle

_TICK = 0.05  # seconds between looks at who is due
_AUDITS = 8  # under way at a time; what comes while there are more is not audited
_MILLI = 1000.0
# What rounding on the wire may add to a difference, relative to the largest value.
_ROUNDING: Mapping[Wire, float] = {"fp32": 0.0, "fp16": 2.0**-10, "int8": 1 / 127}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KnownAnswer:
    """What a block must answer: `start` and `output`, float32 `[1, tokens, width]`.

    Two hosts hold the same weights of a block if its `digest` is the same for both.
    """

    start: State
    output: State
    digest: str


def known_answers(bundle: Bundle, blocks: Sequence[int]) -> dict[int, KnownAnswer]:
    """What hosts with these blocks of `bundle` must answer."""
    canary = bundle.canary
    return {
        block: KnownAnswer(canary.state, canary.outputs[block], digest_of(bundle.tensors[block]))
        for block in blocks
    }


@dataclass(frozen=True, slots=True)
class Check:
    """A canary visit that is due: one block of one host, to be answered within `limit` seconds."""

    host: str
    block: int
    limit: float


Expectations = Mapping[str, Mapping[int, KnownAnswer]]


def due(
    swarm: Swarm,
    expectations: Expectations,
    *,
    asked: Mapping[str, tuple[float, int]],
    now: float,
    limits: Limits,
    names: Iterable[str] | None = None,
) -> tuple[Check, ...]:
    """The canary visits to make now, at most one per host.

    `asked`: when each host was last asked, and how often so far: its blocks take turns. Suspect
    hosts are asked when they may be probed, healthy and draining ones `canary_every_ms` after the
    last time. `names`: hosts to look at (default: all of `swarm`).
    """
    checks = []
    for host in swarm.values() if names is None else map(swarm.__getitem__, names):
        blocks = sorted(expectations.get(host.name, ()))
        last, times = asked.get(host.name, (-np.inf, 0))
        if blocks and _is_due(host, last, now=now, limits=limits):
            limit = patience(host, swarm, limits=limits)
            checks.append(Check(host.name, blocks[times % len(blocks)], limit))
    return tuple(checks)


def _is_due(host: HostView, last: float, *, now: float, limits: Limits) -> bool:
    if host.condition == "suspect":
        return state.probe_due(host, now=now)
    return host.condition in ("healthy", "draining") and (
        now >= last + limits.canary_every_ms / _MILLI
    )


def patience(host: HostView, swarm: Swarm, *, limits: Limits) -> float:
    """Seconds for a canary: `probe_ms`, more for a healthy host that has much to do."""
    probe = limits.probe_ms / _MILLI
    if not host.usable:
        return probe
    wanted = state.expected(host, 1, pace=swarm.pace(limits))
    return max(probe, policy.hop_limit(wanted, left=np.inf, limits=limits))


def agrees(answer: State, wanted: State, *, tolerance: float) -> bool:
    """Whether no value of `answer` is off by more than `tolerance` x the largest of `wanted`."""
    # NaN compares as false, so that it never agrees.
    return bool(np.abs(answer - wanted).max() <= tolerance * np.abs(wanted).max())


def replicas(
    hop: Visited, swarm: Swarm, *, expectations: Expectations, apart: Collection[str] = ()
) -> tuple[str, ...] | None:
    """For each block of an answered hop a usable host other than its own, with the same weights.

    It is the one with the least waiting, then the first by name, and none of those in `apart`. The
    result is `None` if a block has no such host.
    """
    chosen = []
    for block in hop.blocks:
        mine = expectations.get(hop.host, {}).get(block)
        others = [
            host
            for host in swarm.holders(block)
            if host.name not in (hop.host, *apart)
            and mine is not None
            and _same(expectations, host.name, block, mine)
        ]
        if not others:
            return None
        chosen.append(min(others, key=lambda host: (host.waiting, host.name)).name)
    return tuple(chosen)


def _same(expectations: Expectations, host: str, block: int, mine: KnownAnswer) -> bool:
    theirs = expectations.get(host, {}).get(block)
    return theirs is not None and theirs.digest == mine.digest


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A hop computed again: the host of each of its blocks, and the states after them."""

    hosts: tuple[str, ...]
    states: tuple[State, ...]


def odd_one(
    hop: Visited, after: State, *, second: Recomputed, third: Recomputed, tolerance: float
) -> str:
    """The host that two others contradict, given that `second` differs from `after`.

    `after` is the hop's own answer. Returns "" if all three differ. If the third agrees with the
    hop, the first block after which `second` and `third` differ tells which host of `second` is
    wrong.
    """
    same = partial(agrees, tolerance=tolerance)
    if same(second.states[-1], third.states[-1]):
        return hop.host
    if not same(after, third.states[-1]):
        return ""
    steps = zip(second.hosts, second.states, third.states, strict=True)
    return next(host for host, state, other in steps if not same(state, other))


class HealthMonitor:
    """Asks canaries and audits the hosts of `router`; what it learns goes into `router.swarm`.

    `seed` fixes which hops are audited, by their number. `audited` counts the hops that were
    computed again, `disagreed` those that came out differently. `doubts` counts how often these
    hosts differed without anybody being able to tell which of them was wrong. Use it from the
    router's event loop only.
    """

    def __init__(self, router: Router, *, seed: int = 0) -> None:
        self.router, self.seed = router, seed
        self.audited, self.disagreed = 0, 0
        self._expected: dict[str, dict[int, KnownAnswer]] = {}
        self._since: dict[str, float] = {}
        self.doubts: Counter[tuple[str, ...]] = Counter()
        self._asked: dict[str, tuple[float, int]] = {}
        self._next: dict[str, float] = {}
        self._alarms: list[tuple[float, str]] = []  # a heap; stale where `_next` says otherwise
        self._busy: set[str] = set()
        self._audits: set[asyncio.Task[None]] = set()
        self._hops = 0
        router.observers.append(self._observe)

    @property
    def traces(self) -> set[str]:
        """Names of the hosts that anything is kept of: a dropped one leaves no trace."""
        return {
            *self._expected,
            *self._since,
            *self._asked,
            *self._next,
            *(name for names in self.doubts for name in names),
        }

    def expect(self, host: str, answers: Mapping[int, KnownAnswer]) -> None:
        """From now on `host` must give these answers, beside those of its other blocks."""
        self._expected[host] = {**self._expected.get(host, {}), **answers}
        self._since[host] = self.router.clock()
        if host not in self._next:
            self._set_alarm(host, self.router.clock())

    def forget(self, host: str, blocks: Iterable[int]) -> dict[int, KnownAnswer]:
        """Stop asking `host` about `blocks`; returns the answers that it had to give."""
        answers = self._expected.get(host, {})
        return {block: answers.pop(block) for block in blocks if block in answers}

    def drop(self, host: str) -> None:
        """Forget everything about `host`, because it has left or begins anew."""
        for record in (self._expected, self._since, self._asked, self._next):
            record.pop(host, None)
        for names in [names for names in self.doubts if host in names]:
            del self.doubts[names]

    async def run(self) -> None:
        """Ask the hosts that are due for a canary, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = self.router.clock()
                checks = due(
                    self.router.swarm,
                    self._expected,
                    asked=self._asked,
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
        """Hosts that may be due, sorted: all suspects, and those whose alarm has gone off.

        A look at all of 10,000 hosts 20 times a second would cost more than all their canaries.
        """
        swarm, every = self.router.swarm, self.router.limits.canary_every_ms / _MILLI
        names = set(swarm.suspects)
        while self._alarms and self._alarms[0][0] <= now:
            time, name = heappop(self._alarms)
            if self._next.get(name) == time:
                self._set_alarm(name, now + every)  # moved again once it has answered
                if name in swarm:
                    names.add(name)
        return sorted(names)

    def _set_alarm(self, name: str, time: float) -> None:
        self._next[name] = time
        heappush(self._alarms, (time, name))

    async def check(
        self, host: str, *, blocks: Iterable[int] | None = None, limit: float | None = None
    ) -> str:
        """Run the canaries of `blocks` (default: all) now; returns what is wrong, "" if nothing.

        Each has `limit` seconds (default: the longest that a visit may take). A failure counts
        against the host as that of any visit does, and a wrong answer shuts it out.
        """
        limit = self.router.limits.hop_cap_ms / _MILLI if limit is None else limit
        for block in sorted(self._expected.get(host, {}) if blocks is None else blocks):
            if why := await self._canary(Check(host, block, limit)):
                return why
        return ""

    async def close(self) -> None:
        """Cancel the audits under way, and start no more."""
        if self._observe in self.router.observers:
            self.router.observers.remove(self._observe)
        for audit in self._audits:
            audit.cancel()
        await asyncio.gather(*self._audits, return_exceptions=True)

    async def _turn(self, check: Check) -> None:
        try:
            await self._canary(check)
        finally:
            self._busy.discard(check.host)
            if check.host in self._expected:
                times = self._asked.get(check.host, (0.0, 0))[1]
                now = self.router.clock()
                self._asked[check.host] = (now, times + 1)
                self._set_alarm(check.host, now + self.router.limits.canary_every_ms / _MILLI)

    async def _canary(self, check: Check) -> str:
        answer_key = self._expected.get(check.host, {}).get(check.block)
        if answer_key is None:
            return ""
        hop, answer = await self._ask(check, answer_key.start)
        if self._expected.get(check.host, {}).get(check.block) is not answer_key:
            return ""  # its weights were swapped meanwhile, so the answer says nothing
        tolerance = self.router.limits.tolerance
        if answer is not None and not agrees(answer, answer_key.output, tolerance=tolerance):
            hop = _wrong(hop, f"it failed its canary on block {check.block}")
        if hop.outcome != "answered":
            self.router.report(hop)
            return hop.why
        self.router.update(check.host, partial(state.probed, hop=hop, limits=self.router.limits))
        return ""

    async def _ask(self, check: Check, start: State) -> tuple[Visited, State | None]:
        """One visit outside of all requests, and its answer if that can be compared."""
        clock, visit = self.router.clock, Visit(check.host, (check.block,), check.limit)
        hop, begun = Visited(check.host, visit.blocks, "answered", 0.0), clock()
        # Always float32: what a narrower wire rounds is no fault of the host.
        asked = self.router.transport.visit(visit, pack(start, "fp32"))
        try:
            async with asyncio.timeout(check.limit):
                # `gather` hands over errors of every kind: nothing that a host does ends the watch.
                (answer,) = await asyncio.gather(asked, return_exceptions=True)
        except TimeoutError:
            answer = WorkExpired("it did not answer a canary in time")
        hop = replace(hop, ms=(clock() - begun) * _MILLI)
        if isinstance(answer, VisitError):
            return replace(hop, outcome=answer.outcome, why=answer.cause), None
        if isinstance(answer, BaseException):  # a defect of ours: the log gets the traceback
            _log.error("A canary of host %s broke", check.host, exc_info=answer)
            why = f"its canary broke ({type(answer).__name__}: {answer})"
            return replace(hop, outcome="failed", why=why), None
        after, fault = unpacked(answer, like=start)
        if fault:
            return _wrong(hop, fault), None
        return replace(
            hop, compute_ms=answer.compute_ms, queue_ms=answer.queue_ms, batch=answer.batch
        ), after

    def _observe(self, hop: Visited, before: State, after: State | None) -> None:
        if hop.outcome != "answered" or after is None:
            return
        self._hops += 1
        chance = Stream(self.seed, self._hops).chance(self.router.limits.audit_share)
        begun = self.router.clock() - hop.ms / _MILLI
        swapped = begun < self._since.get(hop.host, np.inf)  # it may have run on other weights
        if not chance or swapped or len(self._audits) >= _AUDITS:
            return
        chosen = replicas(hop, self.router.swarm, expectations=self._expected)
        if chosen is not None:
            task = asyncio.ensure_future(self._audit(hop, chosen, before[:1], after[:1]))
            self._audits.add(task)
            task.add_done_callback(self._audited)

    def _audited(self, task: asyncio.Task[None]) -> None:
        self._audits.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("An audit broke", exc_info=error)

    async def _audit(
        self, hop: Visited, chosen: tuple[str, ...], before: State, after: State
    ) -> None:
        """Compute the hop's first image again, block by block on the replicas, and compare."""
        wire = self.router.wire
        # What the hop's host saw, rounded by the wire.
        start = unpack(pack(before, wire))
        mine = self._weights_of([hop.host] * len(hop.blocks), hop)
        tolerance = self.router.limits.tolerance + _ROUNDING[wire]
        second = await self._again(hop, chosen, start)
        if second is None:
            return
        self.audited += 1
        if agrees(after, second.states[-1], tolerance=tolerance):
            return
        self.disagreed += 1
        names = sorted({hop.host, *chosen})
        # First the canaries, because a failed one needs no third host to decide.
        failed = any(await asyncio.gather(*map(self.check, names)))
        if failed or self._weights_of([hop.host] * len(hop.blocks), hop) != mine:
            return
        others = replicas(hop, self.router.swarm, expectations=self._expected, apart=chosen)
        third = None if others is None else await self._again(hop, others, start)
        odd = ""
        if third is not None:
            odd = odd_one(hop, after, second=second, third=third, tolerance=tolerance)
        if not odd:
            self._doubt(names, hop)
        elif self._weights_of([hop.host] * len(hop.blocks), hop) == mine:
            blocks = ", ".join(map(str, hop.blocks))
            why = f"it disagrees with two others over blocks {blocks}"
            self.router.report(_wrong(replace(hop, host=odd), why))

    async def _again(self, hop: Visited, hosts: tuple[str, ...], start: State) -> Recomputed | None:
        """The hop's blocks on `hosts`; `None` if a host fails or its weights change meanwhile."""
        weights, states = self._weights_of(hosts, hop), list[State]()
        limit = self.router.limits.hop_cap_ms / _MILLI
        for host, block in zip(hosts, hop.blocks, strict=True):
            before = states[-1] if states else start
            again, after = await self._ask(Check(host, block, limit), before)
            if after is None:
                self.router.report(again)
                return None
            states.append(after)
        return Recomputed(hosts, tuple(states)) if self._weights_of(hosts, hop) == weights else None

    def _weights_of(self, hosts: Sequence[str], hop: Visited) -> list[KnownAnswer | None]:
        """The expected answers of each host and block of the hop, which every swap replaces."""
        pairs = zip(hosts, hop.blocks, strict=True)
        return [self._expected.get(host, {}).get(block) for host, block in pairs]

    def _doubt(self, names: list[str], hop: Visited) -> None:
        """Count that these hosts differ and nobody can tell which is wrong.

        After `audit_strikes` such audits all of them become suspects.
        """
        blocks = ", ".join(map(str, hop.blocks))
        _log.warning("Hosts %s differ over blocks %s, and all pass their canaries", names, blocks)
        self.doubts[tuple(names)] += 1
        if self.doubts[tuple(names)] >= self.router.limits.audit_strikes:
            why = f"{' and '.join(names)} differ over blocks {blocks}, and no third host decides"
            for name in names:
                self.router.report(replace(hop, host=name, outcome="failed", why=why))


def _wrong(hop: Visited, why: str) -> Visited:
    return replace(hop, outcome="wrong", why=why)
