"""`layershuffle demo`: a page on which to take a model apart and watch it answer."""

from __future__ import annotations

import asyncio
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from layershuffle.cli.command import Command
from layershuffle.cli.words import MODEL
from layershuffle.ground.errors import UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.machine import collector_paused

if TYPE_CHECKING:
    from layershuffle.page.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class PageCommand(Command):
    """Show a model on a page: rearrange its blocks, and watch it answer.

    The model runs in this process, beside an ordinary one in the same order. The page is on this
    machine alone. Ctrl-C ends it.
    """

    model: Annotated[str | None, MODEL] = None
    """Directory of a fit, or any model spec (default: the shipped one, beside an ordinary one)."""
    ordinary: str | None = None
    """Ordinary model of the same size, to answer beside it."""
    data: str | None = None
    """Images whose test split gives the pictures: folder:DIR, hf:NAME_OR_DIR or torchvision:NAME
    (default: none; draw or open one)."""

    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000
    """Port of the page; 0 takes a free one."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> int:
        """Serve the page until Ctrl-C."""
        require("swarm", "starlette", "uvicorn", "fastapi")
        if self.model is None and (self.ordinary or self.data):
            raise UsageError("--ordinary and --data go with a model of yours", hint="give --model")
        with suppress(KeyboardInterrupt):
            asyncio.run(self._serve())
        return 0

    async def _serve(self) -> None:
        from layershuffle.gateway.http.listening import listening
        from layershuffle.page.app import demo_app

        # In a thread: importing torch takes seconds, and the page need not wait for it.
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))

        def end() -> None:
            loading.cancel()  # for the visitors who wait for the models

        demo = listening(demo_app(loading), port=self.port, on_end=end)
        async with demo as (listener, serving):
            self._announce(listener.url)
            await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_EXCEPTION)
            # Raise the error of the task that failed; else a page would wait forever for models.
            for task in (serving, loading):
                if task.done():
                    task.result()

    def _announce(self, url: str) -> None:
        print(f"The page is at {url} (Ctrl-C ends it)", flush=True)
        if self.browser:
            # In a thread: a browser for terminals would hold up the page that it shows.
            asyncio.get_running_loop().run_in_executor(None, webbrowser.open, url)

    def _load(self) -> Workbench:
        with collector_paused():
            from layershuffle.page.workbench import ORDINARY, OURS, open_workbench

            if self.model is None:
                return open_workbench(OURS, ordinary=ORDINARY)
            return open_workbench(self.model, ordinary=self.ordinary, data=self.data)
