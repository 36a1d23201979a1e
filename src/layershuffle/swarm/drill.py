"""A drill: requests and injected faults on any engine, and their results.

`run_drill` sends the requests and injects the faults; `judged` compares the answers with what the
calibration predicts for each answer, from the number of blocks that it used.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Literal, Protocol, get_args

from layershuffle.errors import UsageError
from layershuffle.stats import quantile
from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.chaos import Fault
from layershuffle.swarm.expectations import expected_at, expected_over
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.rounds import Cell
from layershuffle.text import counted, table

Ended = Literal["answered", "degraded", "failed", "late"]


class Engine(Protocol):
    """An object that injects faults into the hosts of a running swarm."""

    async def inject(self, fault: Fault) -> None:
        """Inject the fault. Raises `LayerShuffleError` if the engine cannot."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one request: how it ended, whether the class was right, blocks, milliseconds.

    degraded: answered with blocks missing. late: answered after its deadline. failed: no answer.
    `cell`: how the blocks ran (default: one after the other, each once). `unjudged`: why the swarm
    knows no accuracy to expect of the answer, as of blocks of another model; "" if it does.
    """

    ended: Ended
    right: bool
    blocks: int
    ms: float
    cell: Cell | None = None
    unjudged: str = ""


@dataclass
class Drill:
    """The results: replies by request number, and the faults injected, with their seconds."""

    replies: dict[int, Reply] = field(default_factory=dict)
    fired: list[tuple[Fault, float]] = field(default_factory=list)

    def share(self, *ended: Ended) -> float:
        """Share of the requests that ended in one of these ways, in percent."""
        count = sum(reply.ended in ended for reply in self.replies.values())
        return 100.0 * count / max(1, len(self.replies))

    def quantile(self, q: float) -> float:
        """Milliseconds below which a share `q` of all requests ended (nearest rank)."""
        # Failed requests count, because clients waited for them too.
        return quantile([reply.ms for reply in self.replies.values()], q)


async def run_drill(
    ask: Callable[[int], Awaitable[Reply]],
    requests: int,
    *,
    faults: Sequence[Fault] = (),
    engine: Engine | None = None,
    concurrency: int = 4,
) -> Drill:
    """Send requests 0, 1, ... with up to `concurrency` at a time; each fault before its request.

    A fault affects requests under way; new ones wait until the engine has injected it, which for a
    rejoin takes until the host is back. `ask(number)` returns a `Reply` for a request that fails
    and never raises. Raises what the engine raises.
    """
    drill, numbers, pending = Drill(), iter(range(requests)), list(faults)
    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            # One lock for both, so a fault happens just before its request.
            async with turn:
                number = next(numbers, None)
                if number is None:
                    return
                while pending and pending[0].at <= number:
                    await happened(pending.pop(0))
            drill.replies[number] = await ask(number)

    async def happened(fault: Fault) -> None:
        assert engine is not None, "faults need an engine"
        begun = time.perf_counter()
        await engine.inject(fault)
        drill.fired.append((fault, time.perf_counter() - begun))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            # If one of them raised, the drill is over, and the others must send no more.
            worker.cancel()
    return drill


@dataclass(frozen=True, slots=True)
class DrillJudgement:
    """Accuracy over the answers of a drill (percent) against the calibration's interval.

    `answers`: the number of judged answers; `unjudged`: of others, most of them for `why`.
    """

    answers: int
    top1: float
    expected: float
    low: float
    high: float
    unjudged: int = 0
    why: str = ""

    @property
    def inside(self) -> bool:
        """Whether the accuracy lies in the calibration's interval."""
        return self.low <= self.top1 <= self.high

    @property
    def note(self) -> str:
        """How many answers were not judged, and why; "" if all were."""
        if not self.unjudged:
            return ""
        return f"accuracy of {counted(self.unjudged, 'answer')} not judged: {self.why}"


def judged(replies: Sequence[Reply], calibration: Calibration) -> DrillJudgement:
    """The accuracy of the answers, and the interval in which it should lie.

    Each answer counts with the accuracy of the way in which its blocks ran
    (`expectations.expected_over`); those that ran in a way that was not measured, or through blocks
    that were not (`Reply.unjudged`), do not count.
    """
    # Late answers count, because their classes are right or wrong, too.
    ran = {reply: reply.cell or Cell(reply.blocks) for reply in replies if reply.ended != "failed"}
    unjudged = {
        reply: reply.unjudged or f"{counted(cell.kept, 'block')} so late were not measured"
        for reply, cell in ran.items()
        if reply.unjudged or expected_at(calibration, cell) is None
    }
    answers = [reply for reply in replies if reply in ran and reply not in unjudged]
    reasons = Counter(unjudged[reply] for reply in replies if reply in unjudged)
    unknown = reasons.total(), max(reasons, key=reasons.__getitem__, default="")
    if not answers:
        return DrillJudgement(0, math.nan, math.nan, math.nan, math.nan, *unknown)
    expected, low, high = expected_over(calibration, [ran[reply] for reply in answers])
    right = sum(reply.right for reply in answers)
    return DrillJudgement(len(answers), 100 * right / len(answers), expected, low, high, *unknown)


def calibrated_data(calibration: Calibration | None, *, model: str) -> str:
    """The data spec of the calibration. Raises `UsageError` for `None`."""
    if calibration is None:
        raise UsageError(
            "The model was never calibrated, so it is not known which images it is for",
            place=model,
            hint="name some (--data SPEC), or calibrate it: layershuffle swarm calibrate "
            f"{quote(model)} --data SPEC",
        )
    return calibration.data


def why_not_judged(calibration: Calibration | None, *, data: str) -> str:
    """Why the accuracy on `data` cannot be compared with the calibration; "" if it can."""
    if calibration is None:
        return "the model was never calibrated"
    if calibration.data != data:
        return f"the calibration is one on {calibration.data}, and these images are {data}"
    return ""


def drill_report(drill: Drill, *, judgement: DrillJudgement | str, routing: Routing) -> str:
    """A report: how the requests ended, and the accuracy beside its interval.

    `judgement`: a text is the reason why the accuracy is not judged.
    """
    names: dict[Ended, str] = {"answered": "answered in full"}
    cells = [
        (names.get(ended, ended), f"{drill.share(ended):.1f} %")
        for ended in ("answered", "degraded", "failed", "late")
    ]
    lines = [
        f"{routing}, {counted(len(drill.replies), 'request')}",
        table(("", "requests"), cells),
    ]
    half, most = drill.quantile(0.5), drill.quantile(0.99)
    lines.append(f"milliseconds: half within {half:.0f}, 99 % within {most:.0f}")
    if isinstance(judgement, str):
        return "\n".join([*lines, f"accuracy not judged: {judgement}"])
    if judgement.answers:
        verdict = "inside" if judgement.inside else "OUTSIDE"
        of = f"{judgement.answers:,} answers" if judgement.unjudged else "the answers"
        lines.append(
            f"accuracy of {of}: {judgement.top1:.1f} %, {verdict} what the calibration lets "
            f"expect: {judgement.expected:.1f} % ({judgement.low:.1f} to {judgement.high:.1f})"
        )
    if judgement.note:
        lines.append(judgement.note)
    return "\n".join(lines)


def ends_json(drill: Drill, judgement: DrillJudgement | None) -> dict[str, object]:
    """The results of the requests of a drill, for `json.dumps`; shares and accuracy in percent.

    `accuracy` is `None` where it was not judged, as JSON has no NaN; `accuracy_why` says why it was
    not, of some answers or all.
    """
    judged_by = judgement if judgement is not None and judgement.answers else None
    replied = bool(drill.replies)
    return {
        "requests": len(drill.replies),
        "percent": {end: drill.share(end) for end in get_args(Ended)},
        "ms": {
            "median": drill.quantile(0.5) if replied else None,
            "p99": drill.quantile(0.99) if replied else None,
        },
        "accuracy": judged_by and {**asdict(judged_by), "inside": judged_by.inside},
        "accuracy_why": "" if judgement is None else judgement.why,
    }


def drill_json(
    drill: Drill, *, judgement: DrillJudgement | str, routing: Routing
) -> dict[str, object]:
    """The content of `drill_report`, for `json.dumps`."""
    why = {"accuracy_why": judgement} if isinstance(judgement, str) else {}
    return {
        "routing": routing,
        **ends_json(drill, None if isinstance(judgement, str) else judgement),
        **why,
        "faults": [{**asdict(fault), "seconds": seconds} for fault, seconds in drill.fired],
    }
