"""The gateway to a model: it carries out classifications, from their route to the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from fastapi import Query
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from layershuffle.gateway.brain.policy import (
    Cell,
    Route,
    cell_of,
    probabilities,
    side_by_side,
)
from layershuffle.gateway.brain.state import Outcome, State, Visited
from layershuffle.gateway.calibration.calibration import (
    NEVER,
    Expected,
    expected_accuracy,
    expected_when_asked,
)
from layershuffle.gateway.hosts.served_model import Classified, RemoteModel
from layershuffle.gateway.http.admission import BODY_HINT, Admission, GatewayLimits, Keys
from layershuffle.gateway.http.answers import Classification, Guess, Hop, Skipped, Times
from layershuffle.gateway.http.errors import CLIENT_GONE
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.text import counted
from layershuffle.images.pixels import image_batch

if TYPE_CHECKING:
    from layershuffle.gateway.hosts.coordinator import Coordinator
    from layershuffle.gateway.http.upkeep import Upkeep

_MAX_TOP = 1000
_KINDS = 1024  # of answers whose expected accuracy is kept
_MILLI = 1000.0
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OUTCOMES: Mapping[int, str] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "unanswered",
    HTTPStatus.TOO_MANY_REQUESTS: "busy",
    HTTPStatus.UNAUTHORIZED: "unauthorised",
    HTTPStatus.INTERNAL_SERVER_ERROR: "failed",
    CLIENT_GONE: "gone",
}


class Options(BaseModel):
    """The options of a request. An address holds text, which pydantic converts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    deadline_ms: float | None = Field(
        None, gt=0, description="Milliseconds until the answer must be sent."
    )
    min_blocks: int | None = Field(
        None,
        ge=1,
        description="Fewest blocks of an answer; with fewer, the request fails. Default: the "
        "request waits until its deadline for half of the accuracy, then answers with fewer.",
    )
    confidence: Annotated[float, Field(gt=0, le=1)] | Literal["off"] | None = Field(
        None,
        description="The chance of being right at which the request ends with fewer blocks; `off` "
        "runs all of them. Default: what lost at most 0.3 points of top-1 when it was measured.",
    )
    top: int = Field(5, ge=1, le=_MAX_TOP, description="Classes in the answer, at most.")


class Counters:
    """What became of requests and visits since the start; `metrics` shows it.

    `requests` counts classifications by outcome, `visits` those to every host by outcome.
    """

    def __init__(self, blocks: int) -> None:
        # Not by prometheus_client, which never forgets a label: hosts come and go.
        self.requests: Counter[str] = Counter()
        self.visits: dict[str, Counter[Outcome]] = {}
        self.seconds = Histogram(
            "layershuffle_request_seconds",
            "Time of answered requests.",
            buckets=_SECONDS,
            registry=None,
        )
        # One bucket for each number of blocks, so that nothing is rounded.
        self.blocks = Histogram(
            "layershuffle_blocks_used",
            "Blocks used by answers.",
            buckets=tuple(range(1, blocks + 1)),
            registry=None,
        )

    def count_answer(self, answer: Classification) -> None:
        """Count an answer."""
        self.requests["degraded" if answer.degraded else "answered"] += 1
        self.seconds.observe(answer.ms.total / _MILLI)
        self.blocks.observe(len(set(answer.blocks)))  # some may have run again

    def count_refusal(self, status: int) -> None:
        """Count a classification that ended with `status`."""
        self.requests[_OUTCOMES.get(status, "refused")] += 1

    def count_visit(self, hop: Visited, hosts: Collection[str]) -> None:
        """Count a visit to one of the `hosts` that the swarm knows."""
        if hop.host not in self.visits:
            self.keep(hosts)  # also here, for gateways whose metrics are never read
            self.visits[hop.host] = Counter()
        self.visits[hop.host][hop.outcome] += 1

    def keep(self, hosts: Collection[str]) -> None:
        """Drop the visits of hosts that have left, because spares come and go for years."""
        for host in self.visits.keys() - set(hosts):
            del self.visits[host]


@dataclass(eq=False)
class Gateway:
    """Answers requests by `remote_model`, as many at a time as the limits allow.

    `coordinator` knows the hosts of the model, and `model` is its name. `keys` and `local` are
    those of `Admission`. `upkeep` watches the files of the gateway. `min_accuracy` is the top-1 in
    percent that must be expected for /readyz. `decoder_threads` is the executor that decodes images
    (default: as many threads as the limits allow).
    """

    remote_model: RemoteModel
    coordinator: Coordinator
    _: KW_ONLY
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    keys: Keys = field(default_factory=Keys)
    local: bool = False
    model: str = ""
    upkeep: Upkeep | None = None
    min_accuracy: float | None = None
    decoder_threads: Executor | None = None

    def __post_init__(self) -> None:
        self.router = self.remote_model.router
        manifest = self.remote_model.model.manifest
        calibration = self.remote_model.calibration
        names = None if calibration is None else calibration.classes
        self.labels = tuple(manifest.class_names or names or map(str, range(manifest.classes)))
        self.admission = Admission(
            self.limits, clock=self.router.clock, keys=self.keys, local=self.local
        )
        most = self.limits.max_pixels
        self._decode = partial(image_batch, view=manifest.file_view, most_pixels=most)
        if calibration is not None:
            # A look-up takes 0.1 ms, and answers are of few kinds: each is looked up once.
            self._expected_in = lru_cache(_KINDS)(partial(expected_accuracy, calibration))
            self._expected_if_asked = lru_cache(_KINDS)(partial(expected_when_asked, calibration))
        self.counters = Counters(len(self.router.hosted))
        self.router.observers.append(self._count_visit)
        self._pool = self.decoder_threads or ThreadPoolExecutor(
            self.limits.decoders, thread_name_prefix="decoder"
        )

    def close(self) -> None:
        """End the decoder threads when their work is done."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _count_visit(self, hop: Visited, before: State, after: State | None) -> None:
        del before, after
        self.counters.count_visit(hop, self.router.swarm)

    async def respond(self, request: Request, options: Annotated[Options, Query()]) -> Response:
        """The response to an admitted request of POST /v1/classify. Raises as `classify` does."""
        answer, _ = await self.classify(request, options)
        self.counters.count_answer(answer)
        # As a response, or FastAPI would validate it once more.
        return Response(answer.model_dump_json(), media_type="application/json")

    async def classify(
        self, request: Request, options: Options
    ) -> tuple[Classification, tuple[int, int]]:
        """The answer to a request that was admitted, and (width, height) of its image.

        The deadline counts from the end of the body, and covers the waits for a decoder and for a
        walk, decoding, and the walk. Raises `HTTPError`, `NotAnswered`, `DataError`, `UsageError`.
        """
        self._check(options)
        confidence = self._confidence(options)
        clock = self.router.clock
        async with self.admission.received(request) as received:
            if not received.body:
                raise DataError("There is no image in the request", hint=BODY_HINT)
            begun = clock()
            deadline_ms = options.deadline_ms or self.router.limits.deadline_ms
            deadline = begun + deadline_ms / _MILLI
            image, size = await self.admission.compute(
                received.client,
                partial(self._decode, received.body),
                pool=self._pool,
                deadline=deadline,
                event="the image was decoded",
            )
            received.drop()
            async with self.admission.walking(received.client, deadline=deadline) as place:
                # No time-out here: the router ends a walk in time, to answer with the blocks that
                # ran.
                classified = await self.remote_model.classify(
                    image,
                    deadline=deadline,
                    min_blocks=options.min_blocks,
                    confidence=confidence,
                    place=place,
                )
        route = classified.route
        answer = classification(
            classified,
            labels=self.labels,
            top=options.top,
            expected=self._expected_of(route, options, confidence=confidence),
            total_ms=(clock() - begun) * _MILLI,
        )
        return answer, size

    def _check(self, options: Options) -> None:
        """Raises `UsageError` for more blocks than there are, and an impossible deadline."""
        most = len(self.router.hosted)
        if options.min_blocks is not None and options.min_blocks > most:
            raise UsageError(
                f"min_blocks is {options.min_blocks}, but at most {most} blocks can run",
                hint=f"ask for at most {most} (min_blocks; on a command line --min-blocks)",
            )
        if isinstance(options.confidence, float) and not self.remote_model.temperatures:
            raise UsageError(
                "How sure its answers are was never measured on this model",
                hint="run layershuffle swarm calibrate, or leave confidence out",
            )
        low = self.limits.min_deadline_ms
        high = self.router.limits.max_deadline_ms
        if options.deadline_ms is not None and not low <= options.deadline_ms <= high:
            raise UsageError(
                f"deadline_ms is {options.deadline_ms:g}", hint=f"ask for {low:g} to {high:g} ms"
            )

    def _confidence(self, options: Options) -> float | None:
        """The chance of being right at which a request may end; `None` if it runs all blocks."""
        calibration = self.remote_model.calibration
        sureness = None if calibration is None else calibration.sureness
        if options.confidence == "off" or sureness is None:
            return None
        return options.confidence or sureness.confidence

    def expected_now(self) -> tuple[Expected | None, str]:
        """The accuracy to expect if all reachable blocks run, or `None` and the reason."""
        router = self.router
        reachable = len(router.hosted) - len(router.swarm.lacking(router.hosted))
        if not reachable:
            return self._expected(None)
        rounds = router.rounds
        # Busy or fast hosts run one visit at a time, whatever the calibration allows.
        parallel = side_by_side(reachable, router.swarm, rounds=rounds, walks=router.walks + 1)
        return self._expected(replace(rounds.cell(reachable), parallel=parallel))

    def _expected_of(
        self, route: Route, options: Options, *, confidence: float | None
    ) -> tuple[Expected | None, str]:
        """The accuracy to expect of an answer by this route, or `None` and the reason."""
        if not route.order:
            return self._expected(None)
        cell = cell_of(route.steps)
        calibration = self.remote_model.calibration
        sureness = None if calibration is None else calibration.sureness
        if calibration is None or sureness is None or confidence is None:
            return self._expected(cell)
        least = options.min_blocks or sureness.least
        if least == len(self.router.hosted) or route.kept < least:
            return self._expected(cell)  # it could not end before these blocks had run
        if least != sureness.least:
            after = counted(least, "block")
            why = f"requests that may end after {after} were not measured, only {sureness.least}"
            return None, why
        expected = self._expected_if_asked(
            cell,
            confidence=confidence,
            sure=route.ending == "sure",
            again=len(route.order) > route.kept,
        )
        if expected is not None:
            return expected, ""
        sure = "sure" if route.ending == "sure" else "not sure"
        why = f"too few answers were {sure} after {route.kept} blocks when it was measured"
        if sureness.stop_at(confidence) is None:
            percent = f"{100 * confidence:g} %"
            why = f"no request ended at a chance of {percent} when it was measured"
        return None, why

    def _expected(self, cell: Cell | None) -> tuple[Expected | None, str]:
        """The accuracy to expect of answers in `cell`, or `None` and the reason."""
        if self.remote_model.calibration is None:
            return None, NEVER
        if cell is None:
            return None, "no block can be run"
        expected = self._expected_in(cell)
        why = f"{cell.kept} blocks were not measured with answers as late as these"
        return expected, "" if expected else why


def classification(
    classified: Classified,
    *,
    labels: Sequence[str],
    top: int,
    expected: tuple[Expected | None, str],
    total_ms: float,
) -> Classification:
    """The answer for the logits `[1, classes]` and the route of `classified`."""
    route = classified.route
    chances = probabilities(classified.logits[0], classified.temperature or 1.0)
    guesses: list[Guess] = []
    # Of equal ones the first, as torch takes.
    for index in np.argsort(-chances, kind="stable")[:top].tolist():
        chance = float(chances[index])
        guesses.append(Guess(label=labels[index], index=index, probability=chance))
    skipped: list[Skipped] = []
    # Sorted, so that two answers of one route are equal as text.
    for block, why in sorted(route.skipped.items()):
        skipped.append(Skipped(block=block, why=why))
    row, expected_why = expected
    return Classification(
        top=guesses,
        chance=None if classified.temperature is None else guesses[0].probability,
        depth=route.depth,
        fixed=route.fixed,
        blocks=list(route.order),
        versions=list(route.versions),
        skipped=skipped,
        degraded=route.degraded,
        ending=route.ending,
        route=[Hop.model_validate(hop) for hop in route.hops],
        expected=row,
        expected_why=expected_why,
        ms=Times(
            total=total_ms,
            stem=classified.stem_ms,
            swarm=classified.swarm_ms,
            head=classified.head_ms,
        ),
    )
