"""Decides what a request does next: pure functions of its progress, the swarm and the time.

Any block that has not run may be next, on the host that is expected to answer first. A visit runs
one block. Several of them, each with the newest state, are in flight as far as `Rounds` allow, and
what a block adds is included when it arrives: no visit waits for another one. So every block reads
a state that is up to `parallel - 1` steps old. A late visit continues, and so does the request:
another host is asked for its block, and the first answer counts. A request has at most its equal
share of the usable hosts in flight, and sends further visits only to idle hosts, because side by
side is faster only while hosts would be idle.

A slow host is asked like any other: quick hosts go first, because they answer first, and its blocks
follow as long as they fit the deadline. If blocks are missing, those that ran run again, as far as
the calibration allows, in another pass, which begins when the pass before has ended.

The steps that ran form an order with versions (`core.orders`). Its `Cell` selects the measured
accuracy that belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layershuffle.core.orders import ExecutionOrder
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.state import (
    Outcome,
    Swarm,
    Visit,
    Visited,
    expected,
    first_probe_end,
    lag_of,
    may_return,
)
from layershuffle.ground.text import counted

_FAIR = 2.0
"""A limit is fair to the host if it is at least this many times the expected time."""
UNEXPLAINED = 1 << 16
"""`Cell.parallel` of answers that are too late for any number of visits in flight."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of answer: `kept` blocks, each run `passes` times, with `parallel` in flight."""

    kept: int
    passes: int = 1
    parallel: int = 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """How requests run: as the cell of so many reachable blocks says.

    `cells`: by the number of blocks; all others run one after the other, each once. `max_age`: the
    largest age, in versions, of a state whose answer still counts.
    """

    cells: Mapping[int, Cell] = field(default_factory=dict)
    max_age: int = 0

    def cell(self, reached: int) -> Cell:
        """How a request runs `reached` blocks."""
        return self.cells.get(reached, Cell(reached))


QUEUE = Rounds()
"""One block after the other, each once; every block reads the newest state."""


@dataclass(eq=False, slots=True)
class UnderWay:
    """A visit in flight, and the version of the state that it carries.

    `late`: its limit has passed, so the request does not wait for it; its answer still counts if it
    arrives before the end.
    """

    block: int
    version: int
    late: bool = False


@dataclass(eq=False, slots=True)
class RequestProgress:
    """The progress of a request that is to run `blocks`.

    `done`: blocks that ran, in order, and `versions`: the version of the state that each of them
    read. `deadline`: when the answer must be ready, in seconds of the router's clock. `min_blocks`:
    with fewer blocks the request waits, as long as it has time, for hosts that may come back.
    `under_way`: all visits in flight. `chance`: that the answer after the blocks in `done` is
    right; the request ends when it reaches `confidence`.
    """

    blocks: Sequence[int]
    deadline: float
    min_blocks: int = 1
    done: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    under_way: Sequence[UnderWay] = ()
    chance: float = 0.0
    confidence: float | None = None


Ending = Literal["complete", "sure", "deadline", "unreachable"]
WHOLE: tuple[Ending, ...] = ("complete", "sure")
"""Endings of requests that ran all the blocks that they should run."""


@dataclass(frozen=True)
class Route:
    """What became of a request in the swarm.

    `order`: the blocks that ran, in execution order; `versions`: the version of the state that each
    of them read (`core.orders`); `skipped`: the other blocks with the reasons. `ending`: complete,
    sure (the answer was as sure as asked for), deadline (the time was up) or unreachable (no
    healthy host held a missing block). `ms`: total milliseconds. `fixed`: how many first and last
    blocks of the model keep their place; stem and head run them, and no route has them.
    """

    depth: int
    order: tuple[int, ...]
    versions: tuple[int, ...]
    skipped: dict[int, str]
    hops: tuple[Visited, ...]
    ending: Ending
    ms: float
    fixed: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(block, version that it read) of every step."""
        return tuple(zip(self.order, self.versions, strict=True))

    @property
    def kept(self) -> int:
        """The number of different blocks that ran."""
        return len(set(self.order))

    @property
    def degraded(self) -> bool:
        """Whether the answer lacks blocks that it should have."""
        return self.ending not in WHOLE


@dataclass(slots=True)
class Wait:
    """No visit can start now, but one may be possible before `until`.

    Decide again when a visit in flight has ended and, if `for_hosts`, when the swarm has changed.
    """

    until: float
    for_hosts: bool = True


Action = Visit | Wait | Ending
"""An ending: the request ends with the blocks that ran."""


def decide(
    progress: RequestProgress,
    swarm: Swarm,
    *,
    now: float,
    limits: Limits,
    rounds: Rounds,
    walks: int = 1,
) -> Action:
    """The next action of a request, one of `walks` running requests.

    No visit's limit reaches beyond the deadline less the reserve, no block runs twice on one
    version, and none more often than `rounds` allow.
    """
    ran = set(progress.done)
    # Head and answer must still fit in after the last visit.
    ends = progress.deadline - limits.reserve_ms / 1000
    left = ends - now
    sure = progress.confidence is not None and progress.chance >= progress.confidence
    ended: Ending | None = None
    if len(ran) == len(progress.blocks):
        ended = "complete"
    elif sure and len(ran) >= progress.min_blocks:
        ended = "sure"
    elif left <= 0:
        ended = "deadline"
    if ended is not None:
        return ended
    busy = {visit.block for visit in progress.under_way if not visit.late}
    begun = ran | busy
    missing = [block for block in progress.blocks if block not in begun]
    copies = swarm.copies()
    first = [block for block in missing if copies[block]]
    if len(busy) >= side_by_side(len(begun) + len(first), swarm, rounds=rounds, walks=walks):
        return Wait(ends, for_hosts=False)
    visit = _first_answer(progress, swarm, first, copies=copies, left=left, limits=limits)
    if visit is None and not busy:
        # Its first probe decides whether a host that was late is slow or gone.
        hope = 0.0
        for block in missing:
            for host in swarm.held(block):
                hope = max(hope, first_probe_end(host, limits))
        if hope > now:
            return Wait(min(ends, hope))
    if visit is None and busy <= ran:
        passes = rounds.cell(len(ran)).passes
        again = _again(progress, copies, busy=busy, passes=passes)
        visit = _first_answer(progress, swarm, again, copies=copies, left=left, limits=limits)
    if visit is not None and visit.expected <= left:
        return visit
    # A visit that would be too late does not end the request while others may be in time.
    if busy:
        return Wait(ends)
    return "deadline" if visit else _nowhere(progress, swarm, missing, ends=ends, now=now)


def _nowhere(
    progress: RequestProgress, swarm: Swarm, missing: Sequence[int], *, ends: float, now: float
) -> Ending | Wait:
    """The action of a request that waits for no visit, if no usable host holds a missing block.

    With too few blocks it waits for the visits that it gave up, and for hosts that may come back.
    """
    if len(set(progress.done)) >= progress.min_blocks:
        return "unreachable"
    if progress.under_way:
        return Wait(ends)
    for block in missing:
        for host in swarm.held(block):
            if may_return(host, now=now, left=ends - now):
                return Wait(ends)
    return "unreachable"


def side_by_side(reached: int, swarm: Swarm, *, rounds: Rounds, walks: int) -> int:
    """The most visits in flight of one of `walks` requests that can reach so many blocks."""
    # More visits would only queue at busy hosts, and each has another state.
    most = min(rounds.cell(reached).parallel, swarm.usable_hosts // walks, reached)
    return max(1, most)


def counts(progress: RequestProgress, visit: UnderWay, *, max_age: int) -> bool:
    """Whether an answer to `visit` could still be added to the state.

    It cannot if its block has run since it began, or if its state is more than `max_age` versions
    old.
    """
    since = progress.done[visit.version :]
    return len(since) <= max_age and visit.block not in since


def _again(
    progress: RequestProgress, copies: Counter[int], *, busy: set[int], passes: int
) -> list[int]:
    """The blocks to run in the current pass, after the first, once the pass before is complete."""
    # A block that no host can run is left out of this pass, or the pass would never end.
    runs: Counter[int] = Counter()
    for block in progress.done:
        if block in busy or copies[block]:
            runs[block] += 1
    passed = min(runs.values(), default=passes)
    if passed >= passes:
        return []
    return [block for block, times in runs.items() if times == passed and block not in busy]


def _first_answer(
    progress: RequestProgress,
    swarm: Swarm,
    blocks: Sequence[int],
    *,
    copies: Counter[int],
    left: float,
    limits: Limits,
) -> Visit | None:
    """The visit for one of `blocks` that is expected to answer first, if any host may be asked.

    `copies`: the number of usable hosts of each block.
    """
    if not blocks:
        return None
    pace = swarm.pace(limits)
    alone = all(visit.late for visit in progress.under_way)
    offers = []
    for host in swarm.values():
        if not host.usable or host.blocks.isdisjoint(blocks):
            continue
        # Queueing behind others would gain nothing and delay another request.
        if alone or not host.waiting:
            # The name breaks ties, so the result is the same in every run.
            offers.append((expected(host, pace=pace), host.name, host))
    if not offers:
        return None
    seconds, name, host = min(offers)
    # The rarest block goes first, so that many hosts remain useful until the end.
    held = [block for block in blocks if block in host.blocks]
    block = min(held, key=lambda block: (copies[block], block))
    limit = hop_limit(seconds, lag=lag_of(host, pace), left=left, limits=limits)
    # If the deadline cut the limit short, lateness is not the host's fault.
    fair = limit < left or limit >= _FAIR * seconds
    return Visit(name, block, limit, budget=left, fair=fair, expected=seconds)


def hop_limit(seconds: float, *, lag: float, left: float, limits: Limits) -> float:
    """Seconds after which a visit expected to take `seconds` is late; never beyond `left`.

    `lag`: what visits may take beyond that, judged by recent ones (`state.lag_of`). The cap is for
    hosts that stopped answering; one that is known to be slow gets more time.
    """
    patience = max(limits.hop_factor * (seconds + lag), limits.hop_floor_ms / 1000)
    return min(patience, max(limits.hop_cap_ms / 1000, _FAIR * seconds), left)


def strikes(visit: Visit, outcome: Outcome, *, over: bool, again: bool) -> bool:
    """Whether a failed visit counts against its host.

    `over`: the visit's limit has passed. `again`: the visit has been counted already, so only the
    death of the host still counts. A visit that was late because of the deadline does not count.
    """
    if outcome == "lost":
        return True
    excused = outcome == "late" and not visit.fair and over
    return not again and not excused


def skipped(progress: RequestProgress, swarm: Swarm, *, ending: Ending) -> dict[int, str]:
    """Every block that did not run, with a reason for the user."""
    reasons: dict[int, str] = {}
    for block in progress.blocks:
        if block not in progress.done:
            reasons[block] = _reason(block, progress, swarm, ending=ending)
    return reasons


def _reason(block: int, progress: RequestProgress, swarm: Swarm, *, ending: Ending) -> str:
    if ending == "sure":
        return f"the answer was sure after {counted(len(set(progress.done)), 'block')}"
    hosts = swarm.held(block)
    if not hosts:
        return "no host holds it"
    if any(block in host.loading for host in hosts):
        return "its host is loading it"
    if not any(host.usable for host in hosts):
        return "; ".join(f"host {host.name} is {host.condition}: {host.why}" for host in hosts)
    if ending == "deadline":
        return "the deadline was near"
    return "its host did not answer in time"


# --- kinds of answers -----------------------------------------------------------------------------


def cell_of(steps: Sequence[tuple[int, int]]) -> Cell:
    """The cell of an answer with these steps (at least one): block, and version that it read.

    `parallel` is the smallest number of blocks in flight at which the ages of the states, summed
    over all steps, are at least those of this answer. A pass counts once all of its blocks ran.
    """
    kept = len(dict(steps))
    passes = 0
    age = 0
    ran = set[int]()
    for position, (block, version) in enumerate(steps):
        age += position - version
        ran.add(block)
        if len(ran) == kept:
            passes += 1
            ran.clear()
    for parallel in range(1, kept + 1):
        if age <= _age(len(steps), kept=kept, parallel=parallel):
            return Cell(kept, passes, parallel)
    # No number of blocks in flight explains such old states, and no calibration has such a cell.
    return Cell(kept, passes, UNEXPLAINED)


def _age(steps: int, *, kept: int, parallel: int) -> int:
    """Sum of the ages of the states over `steps` steps with `parallel` blocks always in flight."""
    return sum(min(position % kept, parallel - 1) for position in range(steps))


def overlapped(blocks: Sequence[int], cell: Cell, *, depth: int) -> ExecutionOrder:
    """The first `cell.kept` of `blocks`, run as `cell` describes, if all visits take equally long.

    Each pass begins with the newest state, so that no block runs twice on one version.
    """
    versions: list[int] = []
    for position in range(cell.passes * cell.kept):
        begin = position // cell.kept * cell.kept  # of its pass
        versions.append(max(begin, position + 1 - cell.parallel))
    return ExecutionOrder(tuple(blocks[: cell.kept]) * cell.passes, depth, tuple(versions))


def late_last(blocks: Sequence[int], age: int, *, depth: int) -> ExecutionOrder:
    """All of `blocks` one after the other, but the last one reads a state `age` versions old."""
    last = len(blocks) - 1
    return ExecutionOrder(tuple(blocks), depth, (*range(last), last - age))


# --- how sure an answer is ------------------------------------------------------------------------


def probabilities(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    """The probabilities `[..., classes]` of logits of that shape, in float64.

    With the temperature that was measured for so many blocks (`sureness`), the largest one is the
    chance that the answer is right. In float32 those of many classes would not add up to 1.

        chance = probabilities(logits, temperature).max(axis=-1)
    """
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]
