"""The gateway to a model: it carries out classifications, from the first byte to the answer."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from layershuffle.gateway.brain.policy import side_by_side
from layershuffle.gateway.brain.rounds import Cell, cell_of
from layershuffle.gateway.calibration.calibration import NEVER, Expected, expected_accuracy
from layershuffle.gateway.hosts.remote_model import RemoteModel
from layershuffle.gateway.http.admission import Admission, GatewayLimits
from layershuffle.gateway.http.answers import Classification, classification
from layershuffle.gateway.http.images import image_batch
from layershuffle.gateway.http.keys import Keys
from layershuffle.ground.errors import UsageError

if TYPE_CHECKING:
    from layershuffle.gateway.hosts.coordinator import Coordinator
    from layershuffle.gateway.http.upkeep import Upkeep

_MAX_TOP = 1000
_MILLI = 1000.0


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
        names = None
        if (calibration := self.remote_model.calibration) is not None:
            names = calibration.classes
        self.labels = tuple(manifest.class_names or names or map(str, range(manifest.classes)))
        self.admission = Admission(
            self.limits, clock=self.router.clock, keys=self.keys, local=self.local
        )
        most = self.limits.max_pixels
        self._decode = partial(image_batch, view=manifest.file_view, most_pixels=most)
        self._pool = self.decoder_threads or ThreadPoolExecutor(
            self.limits.decoders, thread_name_prefix="decoder"
        )

    def close(self) -> None:
        """End the decoder threads when their work is done."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def classify(self, request: Request, options: Options) -> Classification:
        """The answer to a request that was admitted.

        The deadline counts from the end of the body, and covers the waits for a decoder and for a
        walk, decoding, and the walk. Raises `HTTPError`, `NotAnswered`, `DataError`, `UsageError`.
        """
        self._check(options)
        clock = self.router.clock
        async with self.admission.received(request) as received:
            begun = clock()
            deadline_ms = options.deadline_ms or self.router.limits.deadline_ms
            deadline = begun + deadline_ms / _MILLI
            image = await self.admission.compute(
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
                    confidence=self._confidence(options),
                    place=place,
                )
        route = classified.route
        return classification(
            classified,
            labels=self.labels,
            top=options.top,
            expected=self._expected(cell_of(route.steps) if route.order else None),
            total_ms=(clock() - begun) * _MILLI,
        )

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

    def _expected(self, cell: Cell | None) -> tuple[Expected | None, str]:
        """The accuracy to expect of answers in `cell`, or `None` and the reason."""
        if self.remote_model.calibration is None:
            return None, NEVER
        if cell is None:
            return None, "no block can be run"
        expected = expected_accuracy(self.remote_model.calibration, cell)
        why = f"{cell.kept} blocks were not measured with answers as late as these"
        return expected, "" if expected else why
