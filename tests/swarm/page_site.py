"""The page in a real browser: a server in a thread of this process, Debian's chromium before it."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_site import listening

from layershuffle.swarm.server.limits import GatewayLimits

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, NARROW = {"width": 1600, "height": 1000}, {"width": 360, "height": 780}


@contextmanager
def served(make: Callable[[], Any], *, leave: Callable[[], Any] | None = None) -> Iterator[str]:
    """The address of the app of `make`, which is called and served in a thread with a loop, on
    which `leave` is awaited in the end."""
    address: list[str] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with listening(await make(), GatewayLimits()) as (_, port):
            address.append(f"http://127.0.0.1:{port}")
            ready.set()
            await asyncio.to_thread(end.wait)
        if leave is not None:
            await leave()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()  # or a failure at the start would be waited for

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        yield address[0]
    finally:
        end.set()
        thread.join()


@dataclass
class Visit:
    """A tab on the page, and what a visitor must never see: errors and foreign requests."""

    page: Any
    address: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """What an element says."""
        text: str = self.page.inner_text(selector)
        return text

    def order(self) -> str:
        """The order in the field below the strip."""
        value: str = self.page.input_value("#order")
        return value

    def settled(self) -> None:
        """Wait until both the answer and the test pairs of the present order are there."""
        self.page.locator(".answer.waiting").first.wait_for(state="hidden")
        self.page.locator("#status", has_text="test pairs").wait_for()


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; scripts/check installs it where it may")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def visit(browser: Any, address: str, **options: Any) -> Iterator[Visit]:
    """A tab on the page, closed in the end; it saw no error and asked nobody else."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    tab = context.new_page()
    seen = Visit(tab, address)
    tab.on("pageerror", lambda error: seen.errors.append(str(error)))
    tab.on("console", lambda line: line.type == "error" and seen.errors.append(line.text))
    tab.on(
        "request",
        lambda asked: asked.url.startswith(address) or seen.foreign.append(asked.url),
    )
    tab.goto(address)
    yield seen
    context.close()
    assert (seen.errors, seen.foreign) == ([], [])
