"""The page in a real browser: a server in a thread of this process, and Debian's chromium."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_site import started

from layershuffle.gateway.http.listening import listening
from waiting import HANGS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, NARROW = {"width": 1600, "height": 1000}, {"width": 360, "height": 780}


def served(
    making: Callable[[], AbstractAsyncContextManager[Any]],
) -> AbstractContextManager[str]:
    """The address of the app of `making`, which is entered and served in a thread with a loop."""

    async def serving(tell: Callable[[str], None]) -> None:
        async with making() as app, listening(app) as (listener, _):
            tell(f"http://127.0.0.1:{listener.port}")
            await asyncio.Event().wait()

    return started(serving)


# By the formula of WCAG 2: (lighter + 0.05) / (darker + 0.05) of relative luminances, for all text
# against the nearest ground above it. Colours are painted, because they may come as oklch().
READABLE = 4.5
CONTRASTS = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const part = paint(colour)[i] / 255;
    return sum + weight * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (paint(colour)[3] === 255) return colour;
    }
    return "#fff";
  };
  const ratios = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    if (!own.length || !element.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
    ratios[own[0].data.trim()] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return ratios;
}"""

# Of what the visitor did not do: moves within half a second of an input do not count for browsers.
# A section that moves by a line scores 0.005 or more, and a page is called good below 0.1. A run in
# some thirty on a busy machine saw a move of 0.0004, a few words that nobody could name afterwards.
SHIFTS = """
window.shifts = [];
const name = (node) => node?.id || node?.className || node?.data || node?.nodeName;
const box = ({ x, y, width, height }) => [x, y, width, height].map(Math.round).join(" ");
new PerformanceObserver((list) => {
  for (const { hadRecentInput, sources, startTime, value } of list.getEntries()) {
    if (hadRecentInput || value < 0.001) continue;
    for (const { node, previousRect, currentRect } of sources) {
      const what = `${name(node)} in ${name(node?.parentNode)}`;
      const move = `from ${box(previousRect)} to ${box(currentRect)}`;
      window.shifts.push(`${startTime.toFixed(0)} ms: ${what} ${move}`);
    }
  }
}).observe({ type: "layout-shift", buffered: true });
"""


@dataclass
class Visit:
    """A tab on the page, with its errors and foreign requests, of which there must be none."""

    page: Any
    address: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of an element."""
        text: str = self.page.inner_text(selector)
        return text

    def order(self) -> str:
        """The order in the field below the strip."""
        value: str = self.page.input_value("#order")
        return value

    def faint(self) -> dict[str, float]:
        """The texts on the page whose contrast is below that of WCAG 2, AA, with their contrast."""
        ratios: dict[str, float] = self.page.evaluate(CONTRASTS)
        return {text: ratio for text, ratio in ratios.items() if ratio < READABLE}

    def shifts(self) -> list[str]:
        """What moved by itself on the page, in pixels as the browser reports it: `x y width height`
        before and after."""
        shifts: list[str] = self.page.evaluate("() => window.shifts")
        return shifts

    def swipe(self, box: dict[str, float], end: tuple[float, float]) -> None:
        """Move a finger from the middle of `box` to `end`."""
        touch = self.page.context.new_cdp_session(self.page)
        begin = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        places = [
            tuple(a + (b - a) * step / 4 for a, b in zip(begin, end, strict=True))
            for step in range(5)
        ]
        for kind, (x, y) in zip(["touchStart", *["touchMove"] * 4], places, strict=True):
            points = [{"x": x, "y": y}]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    def settled(self) -> None:
        """Wait for the answer and the test pictures of the current order."""
        self.page.locator(".answer.waiting").first.wait_for(state="hidden")
        self.page.locator("#status", has_text="test pictures").wait_for()

    def answered(self) -> None:
        """Wait for the answer of the swarm to the picture that is shown."""
        self.page.locator("#answer.waiting").wait_for(state="hidden")
        self.page.locator("#status", has_text="The swarm answers").wait_for()


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
    """A tab on the page, closed at the end; checks for errors and foreign requests."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    context.set_default_timeout(1000 * HANGS)
    tab = context.new_page()
    seen, origin = Visit(tab, address), address.partition("#")[0].rstrip("/")
    tab.on("pageerror", lambda error: seen.errors.append(str(error)))
    tab.on("console", lambda line: line.type == "error" and seen.errors.append(line.text))
    tab.on(
        "request",
        lambda asked: asked.url.startswith(origin) or seen.foreign.append(asked.url),
    )
    tab.add_init_script(SHIFTS)
    tab.goto(address)
    yield seen
    context.close()
    assert (seen.errors, seen.foreign) == ([], [])
