"""Pure functions that choose the next action of a request whose steps are fixed.

The client named them, or they are the blocks of a pipeline in sequential order. Steps may form
rounds or passes, or read older states. Each step runs as soon as the state that it reads exists, so
the blocks of a round run side by side. A visit carries one block, or several that run one after the
other on one host if no other step reads the states between them.

A pipeline skips no step. Other requests skip a step if no fast host can run it, but one can run a
later step; if that fails, the skipped step may still run. Versions count the steps that ran, so the
steps that ran form an order again. A step that now equals an earlier one (the same block on the
same state) is skipped too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visit
from layershuffle.swarm.policy import (
    FREE,
    Finish,
    Moment,
    RequestProgress,
    Routing,
    UnderWay,
    Wait,
    nowhere,
)
from layershuffle.swarm.state import HostView, Swarm


@dataclass(frozen=True, slots=True)
class Steps:
    """The progress of the steps of a request, by position.

    `ran`: the number of steps that ran before each position, up to the first one that is not over;
    the others were skipped. `answered`: later positions with an answer. `under_way`: position and
    visit of all steps in flight.
    """

    order: ExecutionOrder
    ran: tuple[int, ...] = (0,)
    answered: frozenset[int] = frozenset()
    under_way: tuple[tuple[int, UnderWay], ...] = ()

    @property
    def over(self) -> int:
        """The first position that is not over, which is also the newest version of the order."""
        return len(self.ran) - 1

    def after(self, count: int, *, ran: bool) -> Steps:
        """The steps after the next `count` of them ran or were skipped."""
        more = [self.ran[-1] + ran * number for number in range(1, count + 1)]
        return replace(self, ran=(*self.ran, *more))

    def reopened(self, position: int = 0) -> Steps:
        """The steps without the last skips, as far back as `position`.

        A skip is final once a later step has run.
        """
        return replace(self, ran=self.ran[: max(self.ran.index(self.ran[-1]), position) + 1])

    def version_of(self, position: int) -> int:
        """The version that this step reads, counted in steps that ran."""
        return self.ran[self.order.steps[position][1]]

    def is_repeated(self, position: int) -> bool:
        """Whether another step runs the same block on the same state.

        Such a step has run, is in flight, or is an earlier one that may still run. `ExecutionOrder`
        refuses such orders, but they can arise if the steps between two are skipped.
        """
        steps, over = self.order.steps, self.over
        block, read = steps[position]
        # The versions of the order that are the same state; usually there is only one.
        same = [v for v in (read - 1, read + 1) if 0 <= v <= over and self.ran[v] == self.ran[read]]
        if not same:
            return False
        begun = self.answered | {at for at, _ in self.under_way}
        return any(
            other != position
            and others_block == block
            and version <= over
            and self.ran[version] == self.ran[read]
            and (self._did_run(other) if other < over else other < position or other in begun)
            for other, (others_block, version) in enumerate(steps)
        )

    def _did_run(self, position: int) -> bool:
        return self.ran[position + 1] > self.ran[position]

    def ready(self) -> Iterator[int]:
        """Positions without an answer whose input state exists and that are not over."""
        for position, (_, version) in enumerate(self.order.steps):
            if position >= self.over >= version and position not in self.answered:
                yield position


@dataclass(frozen=True, slots=True)
class Ask:
    """Make this visit, which begins with the step at `position`."""

    position: int
    visit: Visit


@dataclass(frozen=True, slots=True)
class PassOver:
    """Skip the first step that is not over, until a later step has run or nothing is in flight."""


def decide_step(
    progress: RequestProgress,
    steps: Steps,
    *,
    swarm: Swarm,
    now: float,
    limits: Limits,
    routing: Routing = "order-free",
) -> Ask | PassOver | Wait | Finish:
    """The next action of a request with these steps.

    No visit's limit reaches beyond the deadline less the reserve, so a request ends. A host is
    asked for a step again only if its visit was late and a probe has cleared it since.
    """
    visits = tuple(visit for _, visit in steps.under_way)
    moment = Moment(replace(progress, under_way=visits), swarm, now=now, limits=limits)
    if steps.over == len(steps.order):
        return Finish("complete" if steps.ran[-1] == steps.over else "unreachable")
    free = routing in FREE
    if moment.left <= 0:
        # A pipeline gives no partial answers (decision 010).
        return Finish("deadline" if free else "lost")
    if steps.is_repeated(steps.over):
        return PassOver()
    return _free_step(moment, steps) if free else _pipeline_step(moment, steps, routing=routing)


def _pipeline_step(moment: Moment, steps: Steps, *, routing: Routing) -> Ask | Wait | Finish:
    """The next step of a pipeline, on the block's first holder or on any replica."""
    position, swarm = steps.over, moment.swarm
    block = steps.order.blocks[position]
    if any(visit.waited for _, visit in steps.under_way):
        return Wait(moment.ends, for_hosts=False)
    if routing == "sequential":
        # The first holder by name is the only host of its stage, even if it is not usable.
        usable = [host for name in swarm.held(block)[:1] if (host := swarm[name]).usable]
    else:
        usable = moment.compared((block,))
    if not usable:
        return nowhere(moment, [block], free=False)
    host = min(usable, key=lambda host: (host.waiting, host.compute or 0.0, host.name))
    return Ask(position, moment.visit(host, stretch(steps.order, position, held=host.blocks)))


def _free_step(moment: Moment, steps: Steps) -> Ask | PassOver | Wait | Finish:
    """The next action of a request that may skip steps."""
    progress, left = moment.progress, moment.left
    order, over = steps.order, steps.over
    waited = {position for position, visit in steps.under_way if visit.waited}
    ready = [p for p in steps.ready() if p not in waited and not steps.is_repeated(p)]
    rest = [p for p in range(over, len(order)) if p not in ready and p not in steps.answered]
    ran = {*progress.done, *(order.blocks[position] for position in steps.answered)}
    enough = len(ran) >= progress.min_blocks
    # Slow hosts are a last resort for a request that waits for no visit and has too few blocks.
    for slow in (False,) if waited or enough else (False, True):
        too_long = False
        for position in ready:
            ask = _ask(moment, steps, position=position, slow=slow)
            if ask is not None and ask.visit.expected <= left:
                return ask
            too_long = too_long or ask is not None
        # Visits in flight may make other steps ready, and a host of a ready step may come back.
        if waited:
            return Wait(moment.ends, for_hosts=bool(ready))
        if too_long:
            return Finish("deadline")
        if any(_holders(moment, order.blocks[position], slow=slow) for position in rest):
            return PassOver()
    if enough:
        return Finish("unreachable")
    # Only steps that are not over are left to run.
    missing = [order.blocks[position] for position in (*ready, *rest)]
    return nowhere(moment, missing, free=True)


def _holders(moment: Moment, block: int, *, slow: bool) -> list[HostView]:
    """Usable hosts of the block; only fast ones unless `slow`.

    A host whose visit was late is usable again only if a probe has cleared it since.
    """
    hosts = moment.compared((block,))
    return [host for host in hosts if slow or not moment.is_slow(host)]


def _ask(moment: Moment, steps: Steps, *, position: int, slow: bool) -> Ask | None:
    """The visit for the step to the host that is expected to answer first, if there is one."""
    hosts = _holders(moment, steps.order.blocks[position], slow=slow)
    stretches = ((host, stretch(steps.order, position, held=host.blocks)) for host in hosts)
    # Cut before they are compared, so that a visit fits the time left if any does.
    offer = moment.first((host, moment.cut_to_fit(host, blocks)) for host, blocks in stretches)
    return None if offer is None else Ask(position, moment.visit(*offer))


def stretch(order: ExecutionOrder, position: int, *, held: frozenset[int]) -> tuple[int, ...]:
    """The blocks from `position` on that a host with the blocks `held` may run in one visit.

    Each reads the output of the one before, and no other step may: only the last state comes back.
    """
    steps, read = order.steps, order.last_readers()
    end = position + 1
    if steps[position][1] == position:
        while (
            end < len(steps) and steps[end][1] == end and end not in read and steps[end][0] in held
        ):
            end += 1
    return order.blocks[position:end]
