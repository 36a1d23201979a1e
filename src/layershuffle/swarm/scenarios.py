"""Scenarios: one part of a swarm breaks under load. Measures the answers and the time to recover.

Unlike the faults of a drill, which last until they are undone, the swarm has to repair everything
here by itself: killed processes are restarted, hosts that lie are shut out, and connections whose
clients do not read are closed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.chaos import FaultKind
from layershuffle.swarm.drill import Drill, DrillJudgement, Reply, ends_json, judged, run_drill
from layershuffle.text import counted, table

Scenario = Literal[
    "all-hosts", "all-but-one", "liar", "rare-liar", "canary-liar", "unread",
]  # fmt: skip
LIES: dict[Scenario, FaultKind] = {
    "liar": "wrong",
    "rare-liar": "wrong-rarely",
    "canary-liar": "wrong-but-canaries",
}
"""Scenarios in which one host lies, with the kind of fault."""
MAY_FAIL: tuple[Scenario, ...] = ("all-hosts",)
"""Scenarios after which no request can be answered for a while."""
_POLL = 0.1  # seconds


class Breakable(Protocol):
    """A running swarm with methods to break it and to check its health."""

    async def fault(self, host: str, kind: FaultKind) -> None:
        """Inject a fault into one host. Raises `LayerShuffleError` if that fails."""

    async def pipeline(self) -> Callable[[], bool]:
        """Open connections that send requests and never read. Returns a function that tells whether
        the server has closed all of them."""

    async def healthy(self) -> frozenset[str]:
        """The hosts that accept visits now; none while the gateway does not answer."""


@dataclass(frozen=True)
class ScenarioResult:
    """The result of one scenario; `whole`: seconds to recovery, `None` if it was not seen."""

    scenario: Scenario
    drill: Drill
    whole: float | None
    judgement: DrillJudgement | None

    @property
    def passed(self) -> bool:
        """Whether the swarm recovered, and lost no request that could have been answered."""
        lost = self.drill.share("failed", "late")
        return self.whole is not None and (self.scenario in MAY_FAIL or not lost)


async def play(
    scenario: Scenario,
    hosts: Sequence[str],
    *,
    swarm: Breakable,
    ask: Callable[[int], Awaitable[Reply]],
    requests: int,
    calibration: Calibration | None,
    within: float = 60.0,
    concurrency: int = 4,
) -> ScenarioResult:
    """Send `requests` requests, break the swarm after a quarter of them, and await its recovery.

    `requests` is at least 1. `within`: seconds after which the wait ends. Raises the errors of
    `swarm`.
    """
    watches: list[asyncio.Task[float]] = []

    async def asked(number: int) -> Reply:
        if number == requests // 4:
            begun = time.perf_counter()
            is_whole = await strike(scenario, hosts, swarm=swarm)
            watches.append(asyncio.create_task(_until(is_whole, begun, within=within)))
        return await ask(number)

    drill = await run_drill(asked, requests, concurrency=concurrency)
    (seconds,) = await asyncio.gather(*watches)
    verdict = judged(list(drill.replies.values()), calibration) if calibration else None
    return ScenarioResult(scenario, drill, None if math.isnan(seconds) else seconds, verdict)


async def strike(
    scenario: Scenario, hosts: Sequence[str], *, swarm: Breakable
) -> Callable[[], Awaitable[bool]]:
    """Break the swarm. Returns a function that tells whether it has recovered."""
    liar, everyone = hosts[-1], frozenset(hosts)

    async def all_healthy() -> bool:
        return await swarm.healthy() == everyone

    async def some_away() -> bool:
        return not await all_healthy()

    async def liar_is_out() -> bool:
        return liar not in await swarm.healthy()

    if scenario == "unread":
        closed = await swarm.pipeline()

        async def all_closed() -> bool:
            return closed()

        return all_closed
    if scenario in LIES:
        await swarm.fault(liar, LIES[scenario])
        return liar_is_out
    victims = hosts if scenario == "all-hosts" else hosts[1:]
    await asyncio.gather(*(swarm.fault(host, "kill") for host in victims))
    # A killed host may still count as healthy for a moment.
    await _until(some_away, time.perf_counter(), within=1.0)
    return all_healthy


async def _until(condition: Callable[[], Awaitable[bool]], begun: float, *, within: float) -> float:
    """Seconds from `begun` until the condition holds; NaN after `within` seconds."""
    while not await condition():
        if time.perf_counter() - begun > within:
            return math.nan
        await asyncio.sleep(_POLL)
    return time.perf_counter() - begun


def scenario_report(results: Sequence[ScenarioResult]) -> str:
    """The number of requests, and a row per scenario; shares in percent of the requests.

    `results`: one or more, each of equally many requests.
    """
    rows = [
        (
            result.scenario,
            *(f"{result.drill.share(end):.1f}" for end in ("failed", "late", "degraded")),
            *_accuracy(result.judgement),
            "not seen" if result.whole is None else f"{result.whole:.1f} s",
        )
        for result in results
    ]
    head = ("scenario", "% failed", "% late", "% in part", "% right", "expected", "whole after")
    notes = [
        f"{result.scenario}: {result.judgement.note}"
        for result in results
        if result.judgement and result.judgement.note
    ]
    # A column of equal numbers would make the table wider than 100 columns.
    heading = f"{counted(len(results[0].drill.replies), 'request')} in each scenario"
    return "\n".join([heading, table(head, rows), *notes])


def scenario_json(result: ScenarioResult) -> dict[str, object]:
    """A row of the table, for `json.dumps`; `whole_s`: seconds, `None` if it was not seen."""
    ends = ends_json(result.drill, result.judgement)
    return {
        "scenario": result.scenario,
        "passed": result.passed,
        **ends,
        "whole_s": result.whole,
    }


def _accuracy(judgement: DrillJudgement | None) -> tuple[str, str]:
    if judgement is None or not judgement.answers:
        return "-", "-"
    bounds = f"{judgement.expected:.1f} ({judgement.low:.1f} to {judgement.high:.1f})"
    return f"{judgement.top1:.1f}", bounds
