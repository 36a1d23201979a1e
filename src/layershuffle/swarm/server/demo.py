"""The page for models in this process, without a swarm, as `layershuffle demo` serves it.

The page is served at once; requests that need the models wait until they are loaded.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.server.page import HEADERS, Answering, PageFacts, page_routes

if TYPE_CHECKING:
    from layershuffle.swarm.server.workbench import Workbench


def demo_app(loading: asyncio.Future[Workbench]) -> Starlette:
    """The app of the page; `loading` is its workbench, which may not be loaded yet."""

    async def answering() -> Workbench:
        # Shielded, because a visitor who leaves must not end the loading for all others.
        return await asyncio.shield(loading)

    async def facts(request: Request) -> PageFacts:
        del request
        return facts_of(await answering())

    async def admit(request: Request) -> None:
        address = request.client.host if request.client else ""
        (await answering()).clients.admit(address, now=time.monotonic())

    async def inside() -> Answering:
        return await answering()

    app = Starlette(
        routes=page_routes(facts=facts, answering=inside, admit=admit),
        exception_handlers={LayerShuffleError: _answer_error},
    )
    app.state.keyed = False
    return app


def facts_of(workbench: Workbench) -> PageFacts:
    """The page's facts on the models of a workbench."""
    return PageFacts(
        depth=workbench.depth,
        width=workbench.view.width,
        height=workbench.view.height,
        pairs=workbench.has_pairs,
        inside=list(workbench.models),
        models=workbench.names,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    # Imported here: it needs torch, which is loaded by the time that anything can fail.
    from layershuffle.swarm.server.errors import answer_to

    del request
    answer = answer_to(error)
    answer.headers.update(HEADERS)
    return answer
