"""A whole swarm: an exported model, its hosts, the router, and the model that answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from layershuffle.gateway.brain.assignment import COPIES
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.hosts.connections import ConnectedHosts
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.router import Router
from layershuffle.gateway.hosts.served_model import RemoteModel, ServedModel
from layershuffle.gateway.hosts.shut_out import ShutOut

_PAUSE = 0.5  # seconds before a watch that broke begins again
_log = logging.getLogger(__name__)


@asynccontextmanager
async def running_service(
    model: ServedModel,
    *,
    token: str,
    copies: int = COPIES,
    wire: Wire = "fp32",
    limits: Limits | None = None,
    shut_out: ShutOut | None = None,
) -> AsyncIterator[tuple[Coordinator, RemoteModel]]:
    """The swarm of `model`, without hosts, and the model that answers by it. Hosts dial in to the
    routes of the coordinator's `connected`, and know `token`. `shut_out`: hosts that stay out."""
    connected = ConnectedHosts(model, token=token)
    router = Router(
        connected,
        depth=model.depth,
        fixed=model.manifest.fixed,
        limits=limits or Limits(),
        wire=wire,
    )
    coordinator = Coordinator(
        model, router=router, connected=connected, copies=copies, shut_out=shut_out
    )
    remote_model = RemoteModel(model, router, calibration=model.calibration)
    try:
        async with background(_keep_watch(coordinator)):
            yield coordinator, remote_model
    finally:
        await coordinator.close()
        # In a thread, because it waits for stems and heads that still compute.
        await asyncio.to_thread(remote_model.close)


@asynccontextmanager
async def background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """`works` run until the end of the block. The first error of one ends the block, and is the
    block's."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904 -- it has its own cause


async def _keep_watch(coordinator: Coordinator) -> None:
    while True:
        try:
            await coordinator.run()
        except Exception as error:  # noqa: BLE001 -- logged with its traceback
            _log.error("The watch of hosts failed and is started again", exc_info=error)
        # With a pause, because an error that repeats at once would fill the log.
        await asyncio.sleep(_PAUSE)
