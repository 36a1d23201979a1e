"""Models in this process that answer in the orders that visitors of the page try.

Unlike a swarm, they also report how many test pairs are correct in an order, because a hundred
pairs are one small batch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from starlette.requests import Request
from torch import Tensor, nn

from layershuffle.bundled import asset
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.stack import depth_of, running, wrap
from layershuffle.core.tensors import logits_of
from layershuffle.data.class_names import numbered
from layershuffle.data.transforms import PixelFinish
from layershuffle.errors import UsageError
from layershuffle.models import class_names_of, file_view, load, num_classes_of
from layershuffle.models.files import weights_digest
from layershuffle.swarm.calibration import Calibration, calibration_path, read_calibration
from layershuffle.swarm.expectations import NEVER, UNMEASURED, expected_of_named
from layershuffle.swarm.server.admission import Admission, Client
from layershuffle.swarm.server.images import PAIR, Decoder, pair_names, takes_pairs
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.requests import image_in

Role = Literal["ours", "ordinary"]
OURS, ORDINARY = "bundled:digits-swarm", "bundled:digits-ordinary"
_SECONDS = 10.0  # that an answer for the page may take
_TOP = 5
MAX_PASSES = 8
"""Most steps of an order, in multiples of the depth: one visitor must not occupy the models."""
_SCORES = 256  # orders whose scores are remembered
_MILLI = 1000.0
_T = TypeVar("_T")


class Workbench:
    """Answers of `models`, by role; all have the same depth, image size and number of classes.

    `names`: the name of each role's model on the page; `calibration`: that of the model in the
    role "ours". Raises `UsageError` for models that differ.
    """

    def __init__(
        self,
        models: Mapping[Role, nn.Module],
        *,
        names: Mapping[str, str],
        calibration: Calibration | None = None,
    ) -> None:
        self.models = {role: wrap(model).eval() for role, model in models.items()}
        self.names = dict(names)
        first = next(iter(self.models.values()))
        self.depth, self.view = depth_of(first), file_view(first)
        self.labels = class_names_of(first) or numbered(num_classes_of(first))
        kinds = {(depth_of(m), file_view(m), num_classes_of(m)) for m in self.models.values()}
        if len(kinds) > 1:
            raise UsageError("The models of the page differ in depth, image size or classes")
        self.calibration = calibration
        self.has_pairs = takes_pairs(self.view, class_names_of(first) or ())
        self._decoder = Decoder(self.view, GatewayLimits())
        self._scores = lru_cache(_SCORES)(self._score)
        # Two, so that an answer does not wait for another user's hundred pairs.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="workbench")

    async def answer(
        self, request: Request, *, order: str, admission: Admission
    ) -> dict[str, object]:
        """Every model's most probable classes for the image in the body, with the time of its
        forward in milliseconds.

        Raises `HTTPError`, `UsageError` for an invalid order, `DataError` for an image that cannot
        be read, `NotAnswered` if it takes too long.
        """
        steps = read_order(order, depth=self.depth)
        answers = await self._run(
            admission, request, lambda body, check: self._answer(image_in(body), steps, check)
        )
        return {"order": str(steps), "answers": answers}

    async def score(
        self, request: Request, *, order: str, admission: Admission
    ) -> dict[str, object]:
        """How many test pairs every model classifies correctly in an order.

        Raises as `answer` does, and `UsageError` if the model takes other images.
        """
        steps = read_order(order, depth=self.depth)
        if not self.has_pairs:
            raise UsageError("The test pairs are not images for this model")
        right = await self._run(admission, request, lambda *_: self._scores(steps))
        return {"order": str(steps), "right": right, "of": len(pair_names())}

    async def _run(
        self,
        admission: Admission,
        request: Request,
        work: Callable[[bytes, Callable[[], None]], _T],
    ) -> _T:
        """`work(body, check)` in a thread, among the requests of the API and bounded like them."""

        async def run(client: Client, body: bytes) -> _T:
            return await admission.compute(
                client,
                partial(work, body),
                pool=self._pool,
                deadline=admission.clock() + _SECONDS,
                event="the models had answered",
            )

        return await admission.carry(request, run)

    def _answer(
        self, file: bytes, order: ExecutionOrder, check: Callable[[], None]
    ) -> dict[str, object]:
        batch = torch.from_numpy(self._decoder.batch(file, check=check))
        answers: dict[str, object] = {}
        for role in self.models:
            begun = time.perf_counter()
            logits = self._logits(role, batch, order)
            ms = (time.perf_counter() - begun) * _MILLI
            # In float64: in float32 the probabilities of many classes do not add up to 1.
            best = logits[0].double().softmax(dim=-1).topk(min(_TOP, logits.shape[-1]))
            ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top = [{"label": self.labels[i], "probability": chance} for i, chance in ranked]
            answers[role] = {"top": top, "ms": ms, **self._expected(role, order)}
        return answers

    def _score(self, order: ExecutionOrder) -> dict[str, int]:
        batch = PixelFinish(self.view)(pair_pixels())
        labels = torch.tensor([self.labels.index(name) for name in pair_names()])
        guesses = {role: self._logits(role, batch, order).argmax(-1) for role in self.models}
        return {role: int((guess == labels).sum()) for role, guess in guesses.items()}

    def _logits(self, role: Role, batch: Tensor, order: ExecutionOrder) -> Tensor:
        model = self.models[role]
        with torch.inference_mode(), running(model, order):
            logits: Tensor = logits_of(model(batch))
        return logits

    def _expected(self, role: Role, order: ExecutionOrder) -> dict[str, object]:
        """The accuracy to expect of an answer, or why it is not known."""
        if role != "ours":
            return {"expected": None, "why": ""}
        if self.calibration is None:
            return {"expected": None, "why": NEVER}
        expected = expected_of_named(self.calibration, order)
        if expected is None:
            return {"expected": None, "why": UNMEASURED}
        return {"expected": asdict(expected), "why": ""}


def read_order(text: str, *, depth: int) -> ExecutionOrder:
    """The order that a visitor names. Raises `UsageError` for an invalid one, and for too many
    steps."""
    order = order_of(text, depth)
    if len(order) > MAX_PASSES * depth:
        raise UsageError(
            f"{len(order)} steps are too many", hint=f"take {MAX_PASSES * depth} at most"
        )
    return order


def digits_workbench() -> Workbench:
    """A workbench of the bundled model and of the ordinary one that was refined for as long."""
    calibration = read_calibration(calibration_path(OURS), weights=weights_digest(load(OURS)))
    return workbench_of(OURS, calibration=calibration)


def workbench_of(model: str, *, calibration: Calibration | None) -> Workbench:
    """A workbench of the model with this spec, and of the bundled ordinary one if it has the same
    depth."""
    models: dict[Role, nn.Module] = {"ours": load(model), "ordinary": load(ORDINARY)}
    names = {"ours": model, "ordinary": ORDINARY}
    if depth_of(models["ours"]) != depth_of(models["ordinary"]):
        del models["ordinary"], names["ordinary"]
    return Workbench(models, names=names, calibration=calibration)


def pair_pixels() -> Tensor:
    """The packaged test pairs, uint8 `[n, 1, 12, 20]`; the sheet has them row by row."""
    _, height, width = PAIR
    with Image.open(asset("page", "pairs.png")) as image:
        sheet = torch.from_numpy(np.array(image.convert("L")))
    return sheet.unfold(0, height, height).unfold(1, width, width).reshape(-1, *PAIR)
