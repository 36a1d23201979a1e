"""Send labelled images to a swarm, and judge its answers by what they say to expect."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from layershuffle.gateway.calibration.calibration import Expected, expected_interval
from layershuffle.gateway.client.client import AsyncSwarmClient, SwarmError
from layershuffle.ground.stats import mean, quantile

_NOT_TAKEN = (401, 422)
_TOO_MANY = 429

Ended = Literal["answered", "degraded", "late", "failed"]
"""How a request ended.

answered: all blocks ran, in time. degraded: in time, with blocks missing. late: after its deadline.
failed: no answer.
"""
ENDED: tuple[Ended, ...] = get_args(Ended)


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Labelled:
    """An image file's bytes, and the index of its class."""

    image: bytes
    label: int


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request ended, whether its class was right, and the milliseconds that it took.

    `expected`: what its answer said of answers like it, if there is one and it knew.
    """

    ended: Ended
    right: bool
    ms: float
    expected: Expected | None = None


Ask = Callable[[int], Awaitable[Reply]]
"""Sends the request with a number."""


def asking(
    client: AsyncSwarmClient,
    images: Sequence[Labelled],
    *,
    deadline_ms: float,
    patient: bool,
) -> Ask:
    """A function that sends image number i modulo the number of images. All blocks are to run.

    A `patient` client waits after a failure as long as the gateway asks (Retry-After), and a second
    if nothing answers, before its next request, as simulated clients do. The function raises
    `SwarmError` for what the gateway does not take (401, 422): the swarm did not fail.
    """

    async def ask(number: int) -> Reply:
        labelled = images[number % len(images)]
        while True:
            # Restarted for every try, because a refusal is not part of the swarm's answer time.
            begun = time.perf_counter()
            try:
                answer = await client.classify(
                    labelled.image, deadline_ms=deadline_ms, confidence="off", top=1
                )
            except SwarmError as error:
                if error.status in _NOT_TAKEN:
                    raise
                ms = (time.perf_counter() - begun) * 1000
                if patient or error.status == _TOO_MANY:
                    await asyncio.sleep(error.retry_after or 1.0)
                if error.status == _TOO_MANY:
                    continue
                return Reply("failed", False, ms)
            ms = (time.perf_counter() - begun) * 1000
            ended: Ended = "degraded" if answer.degraded else "answered"
            if ms > deadline_ms:
                ended = "late"
            right = answer.top[0].index == labelled.label
            return Reply(ended, right, ms, answer.expected)

    return ask


async def sent(
    ask: Ask,
    requests: int,
    *,
    events: Mapping[int, Callable[[], Awaitable[None]]] | None = None,
    concurrency: int = 4,
) -> list[Reply]:
    """The replies to requests 0, 1, ..., of which up to `concurrency` are under way at a time.

    `events` has what happens before the requests with its numbers, while others go on. Raises the
    errors of these events.
    """
    numbers = iter(range(requests))
    replies = list[Reply]()

    async def work() -> None:
        for number in numbers:
            if events is not None and number in events:
                await events[number]()
            replies.append(await ask(number))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            # If one of them raised, all is over, and the others must send no more.
            worker.cancel()
    return replies


# --- results --------------------------------------------------------------------------------------


def ends_and_times(replies: Sequence[tuple[Ended, float]]) -> dict[str, float]:
    """How requests ended, in percent, and quantiles of the milliseconds that they took.

    `replies`: how each ended, and after how many milliseconds. Failed ones count, because clients
    waited for them, too.
    """
    times = [ms for _, ms in replies]
    ended = Counter(end for end, _ in replies)
    figures: dict[str, float] = {"requests": len(replies)}
    for end in ENDED:
        figures[end] = 100.0 * ended[end] / len(replies)
    figures["ms_median"] = quantile(times, 0.5)
    figures["ms_p95"] = quantile(times, 0.95)
    figures["ms_p99"] = quantile(times, 0.99)
    figures["ms_longest"] = quantile(times, 1.0)
    return figures


@dataclass(frozen=True, slots=True)
class AnswerAccuracy:
    """Top-1 in percent over `answers` answers, and what they said to expect of them.

    That is `expected` on average, with the interval from `low` to `high`.
    """

    answers: int
    top1: float
    expected: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """What was expected, and whether the accuracy lies outside, for a table."""
        outside = "" if self.low <= self.top1 <= self.high else ", outside"
        return f"{self.expected:.1f} ({self.low:.1f} to {self.high:.1f}){outside}"


def judged(replies: Sequence[Reply]) -> AnswerAccuracy | None:
    """The accuracy of the answers and its interval; `None` if there is nothing to compare.

    Each answer counts with the accuracy that it said to expect; those that knew none do not count.
    """
    expected: list[Expected] = []
    right: list[bool] = []
    for reply in replies:
        # Late answers count, because their classes are right or wrong, too.
        if reply.expected is not None:
            expected.append(reply.expected)
            right.append(reply.right)
    if not expected:
        return None
    top1, low, high = expected_interval(expected)
    return AnswerAccuracy(len(expected), 100 * mean(right), top1, low, high)


COLUMNS = ("failed", "late", "in part", "ms", "99 %", "right", "expected")


def cells(replies: Sequence[Reply], accuracy: AnswerAccuracy | None) -> tuple[str, ...]:
    """What became of requests, for a table with `COLUMNS`; shares in percent."""
    figures = ends_and_times([(reply.ended, reply.ms) for reply in replies])
    return (
        f"{figures['failed']:.1f}",
        f"{figures['late']:.1f}",
        f"{figures['degraded']:.1f}",
        f"{figures['ms_median']:.0f}",
        f"{figures['ms_p99']:.0f}",
        "-" if accuracy is None else f"{accuracy.top1:.1f}",
        "-" if accuracy is None else accuracy.text,
    )
