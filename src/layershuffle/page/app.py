"""The app of the demo's page.

It imports no torch, so the page is served before its models are loaded; requests that need them
wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from layershuffle.gateway.http.admission import Admission, GatewayLimits
from layershuffle.gateway.http.errors import HTTPError, answer_plainly
from layershuffle.gateway.http.files import HEADERS, file_routes
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import LayerShuffleError

if TYPE_CHECKING:
    from layershuffle.page.workbench import Workbench

_SECONDS = 10.0  # that an answer may take
_T = TypeVar("_T")


def demo_app(
    loading: asyncio.Future[Workbench], *, limits: GatewayLimits | None = None
) -> Starlette:
    """The app of the page for the models of a workbench, which may not be loaded yet."""
    # Local, so that pages of other sites cannot keep the models busy.
    admission = Admission(limits or GatewayLimits(), clock=time.monotonic, local=True)

    async def workbench() -> Workbench:
        # Waited for from outside: a visitor who leaves must not end the loading for all others, and
        # the log would have a traceback for each who waits when Ctrl-C ends it.
        await asyncio.wait([loading])
        if loading.cancelled():
            raise HTTPError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The demo ended before its models were loaded",
                hint="start layershuffle demo again, and load this page again",
            )
        return loading.result()

    async def send_facts(request: Request) -> Response:
        await admission.admit(request)
        return JSONResponse((await workbench()).facts(), headers=HEADERS)

    async def send_pairs(request: Request) -> Response:
        await admission.admit(request)
        sheet, names = (await workbench()).sheet
        if request.url.path.endswith("png"):
            return Response(sheet, headers=HEADERS, media_type="image/png")
        return JSONResponse(names, headers=HEADERS)

    async def computed(request: Request, bench: Workbench, question: Callable[[bytes], _T]) -> _T:
        """The answer to a question about the body of a request, from a thread of the workbench."""
        async with admission.received(request) as received:
            return await admission.compute(
                received.client,
                partial(question, received.body),
                pool=bench.pool,
                deadline=admission.clock() + _SECONDS,
                event="the models had answered",
            )

    async def send_picture(request: Request) -> Response:
        await admission.admit(request)
        bench = await workbench()
        file = await computed(request, bench, bench.picture)
        return Response(file, headers=HEADERS, media_type="image/png")

    async def send_answer(request: Request) -> Response:
        await admission.admit(request)
        bench = await workbench()
        order = bench.order(request.query_params.get("order", ""))
        question = bench.answers if request.url.path.endswith("answer") else bench.scores
        answer: dict[str, Any] = await computed(request, bench, partial(question, order))
        return JSONResponse({"order": str(order), **answer}, headers=HEADERS)

    paths: list[Path] = []
    for path in asset("page").iterdir():
        if not path.name.startswith("pairs."):
            paths.append(path)
    return Starlette(
        routes=[
            Route("/page/facts", send_facts),
            Route("/page/pairs.png", send_pairs),
            Route("/page/pairs.json", send_pairs),
            Route("/page/picture", send_picture, methods=["POST"]),
            Route("/page/answer", send_answer, methods=["POST"]),
            Route("/page/score", send_answer, methods=["POST"]),
            *file_routes("/", "/page", paths=paths),
        ],
        exception_handlers={LayerShuffleError: answer_plainly, ClientDisconnect: answer_plainly},
    )
