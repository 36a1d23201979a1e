"""Labelled requests to a server, for drills: images as PNG files, and results of the requests."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor, nn

from layershuffle.data import DataOptions, match_classes, open_data
from layershuffle.errors import UsageError
from layershuffle.image_view import uncropped_size
from layershuffle.models import class_names_of, file_view, name_outputs, num_classes_of
from layershuffle.swarm.client import AsyncSwarmClient, SwarmError
from layershuffle.swarm.drill import Ended, Reply

if TYPE_CHECKING:
    from layershuffle.swarm.service import Service

_TOO_MANY = 429
_PLENTY = 100_000.0  # requests per second
_RETRIES = 20  # times that a busy server is asked again


@dataclass(frozen=True, slots=True)
class Labelled:
    """An image file's bytes, and the index of its class."""

    image: bytes
    label: int


def labelled_images(model: nn.Module, data: str, *, count: int) -> tuple[Labelled, ...]:
    """The first test images of a data spec, at most `count`, as PNG files.

    They are resized to the size at which the model's preparation of images starts, so the server
    prepares them exactly as a calibration does. Raises `DataError` for data with other classes than
    the model's; `UsageError` for a `count` below 1.
    """
    if count < 1:
        raise UsageError(f"At least one request is needed, got {count}", hint="--requests 300")
    view = file_view(model)
    width, height = uncropped_size(view)
    # Without normalisation, because image files hold pixels.
    raw = replace(
        view,
        height=height,
        width=width,
        crop_pct=1.0,
        mean=(0.0,) * view.channels,
        std=(1.0,) * view.channels,
    )
    opened = open_data(data, raw, options=DataOptions(train=False, max_test=count))
    name_outputs(model, opened.classes, place="the model")  # the calibration has said it
    names = class_names_of(model)
    opened = match_classes(opened, names, outputs=num_classes_of(model), place="the model")
    split = opened.splits["test"]
    items = map(split.dataset.__getitem__, range(min(count, split.size)))
    return tuple(
        Labelled(_png(opened.finish(pixels[None])[0]), int(label)) for pixels, label in items
    )


def _png(image: Tensor) -> bytes:
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def load_client(
    client: AsyncSwarmClient,
    images: Sequence[Labelled],
    *,
    deadline_ms: float,
    patient: bool = False,
) -> Callable[[int], Awaitable[Reply]]:
    """A function for `run_drill` that sends image number i modulo the number of images.

    A `patient` client waits after a failure as long as the server asks (Retry-After), and a second
    if nothing answers, before its next request, as simulated clients do.
    """

    async def ask(number: int) -> Reply:
        labelled = images[number % len(images)]
        for _ in range(_RETRIES):
            # Restarted for every try, because a refusal is not part of the swarm's answer time.
            begun = time.perf_counter()
            try:
                # All blocks: the accuracy to expect is measured on answers that end by chance.
                answer = await client.classify(
                    labelled.image, deadline_ms=deadline_ms, confidence="off", top=1
                )
            except SwarmError as error:
                ms = (time.perf_counter() - begun) * 1000
                is_busy = error.status == _TOO_MANY
                if is_busy or patient:
                    await asyncio.sleep(error.retry_after or 1.0)
                if is_busy:
                    continue
                return Reply("failed", False, 0, ms)
            ms = (time.perf_counter() - begun) * 1000
            right = answer.top[0].index == labelled.label
            ended: Ended = "degraded" if answer.degraded else "answered"
            ended = "late" if ms > deadline_ms else ended
            blocks = len(set(answer.blocks))
            return Reply(ended, right, blocks, ms, answer.cell, answer.expected_why)
        return Reply("failed", False, 0, 0.0)

    return ask


def client_inside(service: Service) -> AsyncSwarmClient:
    """A client of the server of `service`, in this process and without a limit on its rate."""
    import httpx  # in the extra `swarm`, like the gateway

    from layershuffle.swarm.server.app import create_app
    from layershuffle.swarm.server.limits import GatewayLimits

    app = create_app(
        service.remote_model,
        calibration=service.calibration,
        limits=GatewayLimits(rate=_PLENTY, burst=_PLENTY),
        model=service.settings.model,
    )
    return AsyncSwarmClient("http://127.0.0.1", patience=0, transport=httpx.ASGITransport(app))
