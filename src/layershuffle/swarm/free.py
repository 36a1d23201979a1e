"""Pure functions that choose the next action of a request in free order.

One visit at a time carries all blocks that its host holds and that have not run. As far as `rounds`
allows, several visits are in flight. Each then carries one block and the newest state, and what the
block adds is included when it arrives. No visit waits for another one. A late visit continues, and
so does the request: another holder is asked for its block, and the first answer counts.

Running blocks side by side helps only while hosts would be idle. So a request has at most its equal
share of the usable hosts in flight, and sends further visits only to idle hosts. It also helps only
if a block takes long compared with the way to its host: otherwise one visit for all blocks of a
host is as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visit
from layershuffle.swarm.policy import (
    Action,
    Finish,
    Moment,
    Offer,
    RequestProgress,
    UnderWay,
    Wait,
    nowhere,
)
from layershuffle.swarm.rounds import Rounds
from layershuffle.swarm.state import HostView, Swarm, sent

_PAYS = 0.8
"""Largest share of the time that visits side by side may take. They are more visits, each of which
costs the router some time and slows the others a little."""
_LEAST = 1e-6  # seconds
MOST_BESIDE = 8
"""Visits in flight for which a request does not wait. Each holds a state."""


def counts(progress: RequestProgress, visit: UnderWay, *, max_age: int) -> bool:
    """Whether an answer to `visit` could still be added to the state.

    It cannot if one of its blocks has run since it began, or if its state is too old. A visit of
    several blocks returns a single sum, which fits only the state that the visit began with.
    """
    since = progress.done[visit.version :]
    if len(visit.blocks) > 1:
        return not since
    return len(since) <= max_age and visit.blocks[0] not in since


def decide_free(
    progress: RequestProgress,
    swarm: Swarm,
    *,
    now: float,
    limits: Limits,
    rounds: Rounds,
    walks: int = 1,
) -> Action:
    """The next action of a request in free order, one of `walks` running requests.

    No visit's limit reaches beyond the deadline less the reserve, no block runs twice on one
    version, and none more often than `rounds` allows. Places that share weights are not in flight
    together, unless the request does not wait for one of them.
    """
    moment = Moment(progress, swarm, now=now, limits=limits)
    left = moment.left
    ran, enough = set(progress.done), max(progress.most or progress.depth, progress.min_blocks)
    most = min(progress.depth, enough)
    if len(ran) >= most or left <= 0:
        whole = len(ran) == progress.depth
        return Finish("complete" if whole else "enough" if len(ran) >= most else "deadline")
    waited = [visit for visit in progress.under_way if visit.waited]
    busy = {block for visit in waited for block in visit.blocks}
    request = _FreeRequest(moment, alone=not waited)
    blocks = range(progress.depth)
    width = 1
    if not rounds.as_a_queue:
        reached = [b for b in blocks if b in ran or b in busy or request.may_run(b)]
        way = rounds.way(len(reached), enough=most)
        # Side by side needs more visits for the same blocks, which costs throughput on busy hosts.
        width = max(1, min(way.parallel, swarm.usable_hosts // walks, rounds.different(reached)))
    # The answer of a visit of several blocks fits only its own state, so no other may join it.
    if waited and (len(waited) >= width or len(busy) > len(waited)):
        return Wait(moment.ends, for_hosts=False)
    occupied = rounds.with_twins(busy)
    first = [b for b in blocks if b not in ran and b not in busy and swarm.usable(b)]
    ready = [b for b in first if b not in occupied]
    visit = request.visit(ready, room=most - len(ran | busy), width=width)
    # A place that waits for its twin belongs to this pass, so the next pass cannot begin yet.
    if visit is None and busy <= ran and len(ready) == len(first):
        passes = rounds.way(len(ran), enough=most).passes
        again = _again(progress, request, busy=busy, passes=passes)
        again = [block for block in again if block not in occupied]
        visit = request.visit(again, room=len(again), width=width)
    if visit is not None and visit.expected <= left:
        return visit
    # A visit that would be too late does not end the request while others may be in time. Nor does
    # the request end, while it has too few blocks, before the visits that it gave up.
    if waited or (progress.under_way and len(ran) < progress.min_blocks):
        return Wait(moment.ends)
    if visit is not None:
        return Finish("deadline")
    missing = [block for block in blocks if block not in ran]
    return nowhere(moment, missing, free=True)


def visits_at_once(
    progress: RequestProgress,
    swarm: Swarm,
    *,
    now: float,
    limits: Limits,
    rounds: Rounds,
    walks: int = 1,
) -> int:
    """The number of visits that this request, which has none in flight, would begin at `now`.

    It is 1 where the request would run one visit after the other, and 0 without a usable host.
    The arguments are those of `decide_free`.
    """
    count = 0
    while isinstance(
        visit := decide_free(progress, swarm, now=now, limits=limits, rounds=rounds, walks=walks),
        Visit,
    ):
        swarm = swarm.with_host(sent(swarm[visit.host], len(visit.blocks)))
        begun = UnderWay(visit.host, visit.blocks, len(progress.done), waited=visit.waited)
        progress = replace(progress, under_way=(*progress.under_way, begun))
        count += visit.waited
    return count


def _again(
    progress: RequestProgress, request: _FreeRequest, *, busy: set[int], passes: int
) -> list[int]:
    """The blocks to run in the current pass, after the first, once the pass before is complete."""
    runs = Counter(progress.done)
    # A block that no host can run is left out of this pass, or the pass would never end.
    runs = Counter({b: times for b, times in runs.items() if b in busy or request.may_run(b)})
    passed = min(runs.values(), default=passes)
    if passed >= passes:
        return []
    return [block for block, times in runs.items() if times == passed and block not in busy]


class _FreeRequest:
    """Finds the next host for a request. `alone`: it waits for no visit in flight."""

    def __init__(self, moment: Moment, *, alone: bool) -> None:
        self.moment, self.alone, progress = moment, alone, moment.progress
        self.enough = len(set(progress.done)) >= progress.min_blocks
        # A late visit does not count: if its host is usable again, a probe has cleared it.
        self._asked = {
            (visit.host, block)
            for visit in progress.under_way
            if not visit.late
            for block in visit.blocks
        }

    def may_run(self, block: int) -> bool:
        """Whether a host may be asked for `block`; a slow one only while blocks are too few."""
        swarm = self.moment.swarm
        return any(
            self._open(swarm[name], block)
            and not (self.enough and self.moment.is_slow(swarm[name]))
            for name in swarm.usable(block)
        )

    def visit(self, blocks: Sequence[int], *, room: int, width: int) -> Visit | None:
        """The visit for at most `room` of `blocks` that is expected to answer first, if any.

        `width`: the number of visits that may be in flight.
        """
        if not blocks or room < 1:
            return None
        moment = self.moment
        offers = [
            (host, offered)
            for host in moment.compared(blocks)
            if (offered := tuple([b for b in blocks if b in host.blocks and self._open(host, b)]))
        ]
        quick = [offer for offer in offers if not moment.is_slow(offer[0])]
        if not quick:
            # Slow hosts are a last resort for requests that have too few blocks.
            return self._first(offers, room=room) if self.alone and not self.enough else None
        if (slow := self._beside(offers, quick, width=width)) is not None:
            return slow
        if self.alone and not self._pays(quick, room=room, width=width):
            return self._first(quick, room=room)
        # The rarest block goes first, so that many hosts remain useful until the end.
        rarest = [
            (host, (min(work, key=lambda block: (len(moment.swarm.usable(block)), block)),))
            for host, work in quick
            # Queueing behind others would gain nothing and delay another request.
            if self.alone or not host.waiting
        ]
        return self._first(rarest, room=1)

    def _open(self, host: HostView, block: int) -> bool:
        return (host.name, block) not in self._asked

    def _first(self, offers: Sequence[Offer], *, room: int) -> Visit | None:
        # Cut before they are compared, so that a visit fits the time left if any does.
        cut = self.moment.cut_to_fit
        offer = self.moment.first((host, cut(host, work[:room])) for host, work in offers)
        return None if offer is None else self.moment.visit(*offer)

    def _pays(self, offers: Sequence[Offer], *, room: int, width: int) -> bool:
        """Whether single blocks side by side are clearly faster than one visit for all blocks."""
        expected = self.moment.expected
        single = sorted(expected(host, 1) for host, _ in offers)[:width]
        counts = [(host, min(len(work), room)) for host, work in offers]
        several = min(expected(host, count) / count for host, count in counts)
        # No visit waits for another one, so the rates of the hosts add up. A host may have reported
        # that it takes no time at all.
        side_by_side = 1 / sum(1 / max(seconds, _LEAST) for seconds in single)
        return len(single) > 1 and side_by_side <= _PAYS * several

    def _beside(
        self, offers: Sequence[Offer], quick: Sequence[Offer], *, width: int
    ) -> Visit | None:
        """A visit to an idle slow host that may return before the fast hosts are done.

        It is for a block that no fast host holds. The request does not wait for it.
        """
        moment, progress = self.moment, self.moment.progress
        # On a busy swarm such visits would cost the other requests more than they gain here.
        if width == 1:
            return None
        # Another visit would displace the oldest one, whose host would have worked in vain.
        if sum(not visit.waited for visit in progress.under_way) >= MOST_BESIDE:
            return None
        quick_blocks = {block for _, work in quick for block in work}
        each = moment.pace.link + moment.pace.compute
        rest = ceil(len(quick_blocks) / width) * each * progress.images
        under_way = {block for visit in progress.under_way for block in visit.blocks}
        for host, offered in offers:
            blocks = [b for b in offered if b not in quick_blocks and b not in under_way]
            if blocks and not host.waiting:
                visit = moment.visit(host, (blocks[0],))
                if visit.expected <= min(rest, moment.left):
                    return replace(visit, waited=False)
        return None
