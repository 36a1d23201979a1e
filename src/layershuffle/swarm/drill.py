"""A drill: parts of a swarm fail under load. How do the requests end, and how soon is it whole?

`faults.SCENARIOS` says what fails. Where the swarm has to recover by itself (killed processes are
started again, liars are shut out), the time counts from the failure; where the failure lasts until
it is mended, from then. The answers are compared with what the calibration lets expect of each.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from PIL import Image
from torch import Tensor, nn

from layershuffle.data import DataOptions, open_data
from layershuffle.errors import LayerShuffleError
from layershuffle.image_view import uncropped_size
from layershuffle.models import file_view
from layershuffle.scoring import matched
from layershuffle.stats import mean, quantile
from layershuffle.swarm.calibration import Calibration, expected_at, expected_over
from layershuffle.swarm.client import AsyncSwarmClient, SwarmError
from layershuffle.swarm.faults import SCENARIOS, FaultKind, Scenario, ScenarioName
from layershuffle.swarm.rounds import Cell
from layershuffle.swarm.server.operating import Operator
from layershuffle.text import counted, table

_MOST_IMAGES = 1000
_NOT_TAKEN, _TOO_MANY = (401, 422), 429
_POLL = 0.1  # seconds between looks at the hosts
_RECOVERY = 60.0  # seconds after which a recovery is no longer waited for
# Longer than the longest pause (`Limits.restart_max_ms`) and the start after it
# (`Limits.start_ms`), so that hosts of a slow machine that are starting are not given up.
_BACK = 180.0


Ended = Literal["answered", "degraded", "late", "failed"]
"""answered: all blocks ran, in time. degraded: in time, with blocks missing. late: after its
deadline. failed: no answer."""
ENDED: tuple[Ended, ...] = get_args(Ended)


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Labelled:
    """An image file's bytes, and the index of its class."""

    image: bytes
    label: int


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request ended, whether the class was right, milliseconds, and how the blocks ran.

    `cell` is that of its answer, if there is one; `chance`: that it is right, as it says itself, of
    requests that end when they are sure.
    """

    ended: Ended
    right: bool
    ms: float
    cell: Cell | None = None
    chance: float | None = None


def labelled_images(model: nn.Module, data: str, *, count: int) -> tuple[Labelled, ...]:
    """The first test images of a data spec, at most `count` and 1,000, as PNG files.

    They are resized to the size at which the model's preparation of images starts, so the server
    prepares them exactly as a calibration does. Raises `DataError` for data with other classes than
    the model's.
    """
    view = file_view(model)
    width, height = uncropped_size(view)
    # Without normalisation, because image files hold pixels.
    zeros, ones = (0.0,) * view.channels, (1.0,) * view.channels
    raw = replace(view, height=height, width=width, crop_pct=1.0, mean=zeros, std=ones)
    count = min(count, _MOST_IMAGES)
    opened = open_data(data, raw, options=DataOptions(train=False, max_test=count))
    opened = matched(model, opened, name="the model")
    split = opened.splits["test"]
    items = map(split.dataset.__getitem__, range(min(count, split.size)))
    return tuple(Labelled(_png(opened.finish(x[None])[0]), int(label)) for x, label in items)


def _png(image: Tensor) -> bytes:
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


Ask = Callable[[int], Awaitable[Reply]]


def asking(
    client: AsyncSwarmClient,
    images: Sequence[Labelled],
    *,
    deadline_ms: float,
    patient: bool,
    confidence: float | None = None,
) -> Ask:
    """A function that sends image number i modulo the number of images.

    `confidence`: the chance of being right at which requests end; `None`: all blocks run. Raises
    `SwarmError` for what the gateway does not take (401, 422): the swarm did not fail.

    A `patient` client waits after a failure as long as the server asks (Retry-After), and a second
    if nothing answers, before its next request, as simulated clients do.
    """

    async def ask(number: int) -> Reply:
        labelled = images[number % len(images)]
        while True:
            # Restarted for every try, because a refusal is not part of the swarm's answer time.
            begun = time.perf_counter()
            try:
                answer = await client.classify(
                    labelled.image, deadline_ms=deadline_ms, confidence=confidence or "off", top=1
                )
            except SwarmError as error:
                if error.status in _NOT_TAKEN:
                    raise
                ms = (time.perf_counter() - begun) * 1000
                if patient or error.status == _TOO_MANY:
                    await asyncio.sleep(error.retry_after or 1.0)
                if error.status != _TOO_MANY:
                    return Reply("failed", False, ms)
                continue
            ms = (time.perf_counter() - begun) * 1000
            ended: Ended = "degraded" if answer.degraded else "answered"
            right = answer.top[0].index == labelled.label
            ended = "late" if ms > deadline_ms else ended
            chance = None if confidence is None else answer.chance
            return Reply(ended, right, ms, answer.cell, chance)

    return ask


async def sent(
    ask: Ask,
    requests: int,
    *,
    before: Mapping[int, Callable[[], Awaitable[None]]] | None = None,
    concurrency: int = 4,
) -> list[Reply]:
    """The replies to requests 0, 1, ..., of which up to `concurrency` are under way at a time.

    `before`: what happens before the requests with these numbers, while others go on. Raises what
    that raises.
    """
    numbers, replies = iter(range(requests)), list[Reply]()

    async def work() -> None:
        for number in numbers:
            if before is not None and number in before:
                await before[number]()
            replies.append(await ask(number))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            # If one of them raised, the drill is over, and the others must send no more.
            worker.cancel()
    return replies


# --- results --------------------------------------------------------------------------------------


def ends_and_times(replies: Sequence[tuple[Ended, float]]) -> dict[str, float]:
    """How requests ended, in percent, and the milliseconds within which half of them did, and more.

    `replies`: how each ended, and after how many milliseconds. Failed ones count, because clients
    waited for them, too.
    """
    ms, ended = [ms for _, ms in replies], Counter(end for end, _ in replies)
    within = {"median": 0.5, "p95": 0.95, "p99": 0.99, "longest": 1.0}
    return {
        "requests": len(replies),
        **{end: 100.0 * ended[end] / len(replies) for end in ENDED},
        **{f"ms_{name}": quantile(ms, share) for name, share in within.items()},
    }


@dataclass(frozen=True, slots=True)
class DrillJudgement:
    """Top-1 over `answers` answers in percent, and the interval in which the calibration lets
    expect it."""

    answers: int
    top1: float
    expected: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """What was to be expected, for a table."""
        outside = "" if self.low <= self.top1 <= self.high else ", outside"
        return f"{self.expected:.1f} ({self.low:.1f} to {self.high:.1f}){outside}"


def judged(replies: Sequence[Reply], calibration: Calibration | None) -> DrillJudgement | None:
    """The accuracy of the answers beside its interval; `None` if there is nothing to compare.

    Each answer counts with the accuracy of the way in which its blocks ran
    (`calibration.expected_over`); those that ran in a way that was not measured do not count. Of
    requests that end when they are sure, each counts with its own chance: the easy ones end first.
    """
    if calibration is None:
        return None
    # Late answers count, because their classes are right or wrong, too.
    answers = [(r, r.cell) for r in replies if r.cell and expected_at(calibration, r.cell)]
    if not answers:
        return None
    expected, low, high = expected_over(calibration, [cell for _, cell in answers])
    if chances := [reply.chance for reply, _ in answers if reply.chance is not None]:
        more = 100 * mean(chances) - expected
        expected, low, high = expected + more, low + more, min(100.0, high + more)
    top1 = 100 * mean([reply.right for reply, _ in answers])
    return DrillJudgement(len(answers), top1, expected, low, high)


@dataclass(frozen=True)
class Played:
    """The results of one scenario. `whole`: seconds to recovery, `None` if it was not seen."""

    scenario: ScenarioName
    replies: Sequence[Reply]
    whole: float | None
    judgement: DrillJudgement | None

    @property
    def passed(self) -> bool:
        """Whether the swarm recovered, and lost no request that could have been answered."""
        # Without any host no request can be answered for a while.
        lost = self.scenario != "all" and any(r.ended in ("failed", "late") for r in self.replies)
        return self.whole is not None and not lost

    def as_json(self) -> dict[str, object]:
        """The figures of the report, for `json.dumps`, by the names that a simulation has."""
        kept = [reply.cell.kept for reply in self.replies if reply.cell]
        return {
            "scenario": self.scenario,
            "passed": self.passed,
            **ends_and_times([(reply.ended, reply.ms) for reply in self.replies]),
            "mean_blocks": mean(kept) if kept else None,
            "accuracy": None if self.judgement is None else asdict(self.judgement),
            "whole_s": self.whole,
        }


COLUMNS = ("failed", "late", "in part", "ms", "99 %", "right", "expected")


def cells(replies: Sequence[Reply], judgement: DrillJudgement | None) -> tuple[str, ...]:
    """What became of requests, for a table with `COLUMNS`; shares in percent."""
    figures = ends_and_times([(reply.ended, reply.ms) for reply in replies])
    return (
        *(f"{figures[end]:.1f}" for end in ("failed", "late", "degraded")),
        *(f"{figures[ms]:.0f}" for ms in ("ms_median", "ms_p99")),
        *(("-", "-") if judgement is None else (f"{judgement.top1:.1f}", judgement.text)),
    )


def report(results: Sequence[Played]) -> str:
    """A row for each scenario; `results`: one or more."""
    rows = [
        (
            result.scenario,
            *cells(result.replies, result.judgement),
            "not seen" if result.whole is None else f"{result.whole:.1f} s",
        )
        for result in results
    ]
    # Their numbers hardly differ, and a column more would make the table wider than 100 columns.
    least = counted(min(len(result.replies) for result in results), "request")
    heading = f"{least} or more in each scenario; shares in percent"
    return f"{heading}\n{table(('', *COLUMNS, 'whole after'), rows)}"


# --- the drill ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Breaks the swarm of `operator`, whose own hosts are `hosts`; `client` asks its gateway.

    `ask` sends request number i of `requests`. `calibration`: that of the images.
    """

    hosts: Sequence[str]
    operator: Operator
    client: AsyncSwarmClient
    ask: Ask
    requests: int
    calibration: Calibration
    concurrency: int = 4

    async def play(self, name: ScenarioName) -> Played:
        """Break the swarm after a quarter of the requests, await its recovery, and mend the rest.

        Raises `LayerShuffleError` if a fault is impossible, or if hosts stay away.
        """
        scenario, quarter = SCENARIOS[name], self.requests // 4
        victims, orders = scenario.victims(self.hosts), list[asyncio.Future[Any]]()
        watches = list[asyncio.Task[float | None]]()

        async def breaking() -> None:
            begun = time.perf_counter()
            orders.extend(self._order(host, scenario.kind) for host in victims)
            # Their threads go on if this drill ends: mending comes after them.
            await asyncio.shield(asyncio.gather(*orders))
            if not scenario.lasts:
                watches.append(asyncio.create_task(self._recovery(scenario, victims, begun)))

        async def mending() -> None:
            watches.append(asyncio.create_task(self._mended(victims, orders)))

        before = {quarter: breaking} | ({3 * quarter: mending} if scenario.lasts else {})
        try:
            replies = await sent(
                self.ask, self.requests, before=before, concurrency=self.concurrency
            )
            (watch,) = watches
            # A host that lies now and then is found only while requests go on.
            while not watch.done():
                replies.append(await self.ask(len(replies)))
            whole = watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            # Also where it lasts, if the requests ended before it was mended.
            await self._mended(victims, orders)
        return Played(name, replies, whole, judged(replies, self.calibration))

    async def _recovery(
        self, scenario: Scenario, victims: Sequence[str], begun: float
    ) -> float | None:
        """Seconds since `begun` until the swarm has recovered by itself, if it does."""
        if scenario.kind == "kill":
            # A killed host may still count as healthy for a moment.
            await self._until(lambda healthy: healthy != {*self.hosts}, within=1.0)
            recovered = await self._until(lambda now: now >= {*self.hosts}, within=_RECOVERY)
        else:
            recovered = await self._until(lambda now: not now & {*victims}, within=_RECOVERY)
        return time.perf_counter() - begun if recovered else None

    async def _mended(self, victims: Sequence[str], orders: Sequence[asyncio.Future[Any]]) -> float:
        """Bring the victims back; returns the seconds that it took. Raises `LayerShuffleError` for
        those that stay away, after all others were seen to."""
        begun = time.perf_counter()
        # A fault that is still on its way would otherwise hit after its own mending.
        await asyncio.shield(asyncio.gather(*orders, return_exceptions=True))
        # All at once: hosts that start one after the other would each have to be waited for.
        rejoins = (self._order(host, "rejoin") for host in victims)
        for result in await asyncio.gather(*rejoins, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if not await self._until(lambda now: now >= {*victims}, within=_BACK):
            raise LayerShuffleError(
                f"{', '.join(victims)} did not all come back within {_BACK:g} s",
                hint="layershuffle swarm status says why, layershuffle swarm readmit HOST starts "
                "a host again",
            )
        return time.perf_counter() - begun

    def _order(self, host: str, kind: FaultKind) -> asyncio.Future[Any]:
        # The operator's client blocks, and the requests must go on meanwhile.
        return asyncio.ensure_future(
            asyncio.to_thread(self.operator.command, "fault", host=host, kind=kind)
        )

    async def _until(self, true: Callable[[frozenset[str]], bool], *, within: float) -> bool:
        """Whether this comes to be true of the healthy hosts within so many seconds."""
        end = time.perf_counter() + within
        while time.perf_counter() <= end:
            with suppress(LayerShuffleError):  # the gateway does not answer
                swarm = await self.client.swarm()
                if true(frozenset(h.name for h in swarm.hosts if h.condition == "healthy")):
                    return True
            await asyncio.sleep(_POLL)
        return False
