"""Tabs of a real browser as hosts, beside a gateway and a host in this process.

A picture of the page goes to the directory of the environment variable PAGE_PICTURES, if it is set.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dial_site import TOKEN, Site, digits, gateway, hosting, replayed, states
from page_site import CHROMIUM
from starlette.applications import Starlette

from exported import SHIPPED
from layershuffle.export import export_model
from layershuffle.gateway.brain.state import VisitError
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.http import files
from layershuffle.gateway.http.files import join_routes
from layershuffle.ground.extras import install_line
from once import once
from waiting import HANGS

PHONE = {"width": 390, "height": 700}
CLOSE = 1e-4  # between ONNX Runtime here and in a browser


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the wheel of browser/, whose build brings ONNX Runtime from npm."""

    def make(place: Path) -> None:
        words = [sys.executable, "-m", "hatchling", "build", "-d", str(place), "-t", "wheel"]
        done = subprocess.run(
            words, cwd=repository / "browser", capture_output=True, text=True, check=False
        )
        if "npm does not give" in done.stderr:
            pytest.skip("npm is not there, or does not give onnxruntime-web")
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "browser", make, room="package")


@pytest.fixture(scope="module")
def runtime(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of ONNX Runtime that the wheel installs."""
    place = tmp_path_factory.mktemp("runtime")
    shutil.unpack_archive(next(wheel.glob("*.whl")), place, "zip")
    return place / "layershuffle_browser" / "ort"


@asynccontextmanager
async def browsing(
    runtime: Path, *, model: ServedModel | None = None
) -> AsyncIterator[tuple[Site, Callable[..., Awaitable[Any]]]]:
    """A gateway with the page, and what opens a tab as a host; no tab may see an error."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; scripts/check installs it where it may")
    errors = list[str]()
    async with gateway(model=model) as site, api.async_playwright() as play:
        site.app = Starlette(routes=[*site.connected.routes(), *join_routes(runtime)])
        address = f"{site.url.replace('ws', 'http', 1)}/join"
        browser = await play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        context = await browser.new_context(viewport=PHONE, color_scheme="light")
        context.set_default_timeout(1000 * HANGS)

        async def tab(token: str = TOKEN) -> Any:
            page = await context.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda line: line.type == "error" and errors.append(line.text))
            page.on("request", lambda asked: address[:-5] in asked.url or errors.append(asked.url))
            await page.goto(f"{address}#{token}")
            return page

        yield site, tab
        await browser.close()
    assert errors == []


def ready(site: Site) -> set[int]:
    """The blocks that tabs have loaded."""
    tabs = [host for name, host in site.connected.items() if name.startswith("tab-")]
    return {block for host in tabs for block in host.ready}


def test_a_tab_computes_what_onnxruntime_computes(runtime: Path) -> None:
    async def work() -> None:
        async with browsing(runtime) as (site, tab):
            page = await tab()
            await site.until(lambda: len(ready(site)) == site.model.depth, seconds=HANGS)
            (name,) = site.connected
            for block in range(site.model.depth):
                state = states(1 + block % 3, seed=block)
                wanted = await digits().compute(block, state)
                assert np.abs(await site.ask(name, block, state) - wanted).max() <= CLOSE
            # An error of half a step of the numbers in which state and answer travel.
            for form, most in (("fp16", 2e-3), ("int8", 3e-2)):
                got = await site.ask(name, block, state, form=form)
                assert 0 < np.abs(got - wanted).max() <= most * np.abs(wanted).max()
            # Many at once, some of which run together.
            many = [(v % 2, states(1 + v % 3, seed=v)) for v in range(40)]
            answers = await asyncio.gather(*(site.ask(name, *each) for each in many))
            for (block, state), got in zip(many, answers, strict=True):
                assert np.abs(got - await digits().compute(block, state)).max() <= CLOSE
            with pytest.raises(VisitError) as refused:
                await site.ask(name, 99, states())
            assert refused.value.outcome == "unavailable"
            assert await page.text_content("#name") == name
            await page.locator("#held", has_text="12").wait_for()
            await page.locator("#state", has_text="is a host").wait_for()
            assert await page.evaluate("() => location.hash") == ""
            assert await page.evaluate("() => crossOriginIsolated")
            if pictures := os.environ.get("PAGE_PICTURES"):
                await page.wait_for_timeout(1000)
                await page.screenshot(
                    path=Path(pictures) / "phone.png",
                    clip={"x": 0, "y": 0, "width": PHONE["width"], "height": 370},
                )
            # A state that is none ends the connection, and the tab dials again with its blocks.
            first = site.connected[name]
            with pytest.raises(VisitError) as refused:
                await site.ask(name, 0, states() * np.float32(np.nan))
            assert refused.value.outcome == "lost"
            await site.until(lambda: site.connected.get(name) not in (None, first))
            second = site.connected[name]
            assert len(second.hello["held"]) == 1 + site.model.depth
            # It leaves when a phone freezes it, and comes back with it.
            await page.evaluate("() => document.dispatchEvent(new Event('freeze'))")
            await site.until(lambda: name not in site.connected)
            assert second.draining
            await page.evaluate("() => document.dispatchEvent(new Event('resume'))")
            await site.until(lambda: len(ready(site)) == site.model.depth, seconds=HANGS)
            (third,) = site.connected.values()
            await page.evaluate("() => window.dispatchEvent(new Event('pagehide'))")
            await site.until(lambda: third.draining)

    asyncio.run(work())


def test_a_tab_gives_each_image_of_a_batch_what_it_would_get_alone(
    runtime: Path, tmp_path: Path
) -> None:
    """In int8 the images of a batch would share a scale."""
    export_model(SHIPPED, tmp_path / "files", precision="int8", data="digit-pairs?test=20")

    async def work() -> None:
        async with browsing(runtime, model=ServedModel(tmp_path / "files")) as (site, tab):
            await tab()
            await site.until(lambda: 1 in ready(site), seconds=HANGS)
            (name,) = site.connected
            state = states(3) * np.float32([[[1]], [[9]], [[81]]])
            together = await site.ask(name, 1, state)
            for image in range(3):
                alone = await site.ask(name, 1, state[image : image + 1])
                np.testing.assert_array_equal(together[image], alone[0])

    asyncio.run(work())


def test_another_token_and_a_file_that_was_changed_are_said(
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    digest = digits().weights[3].digest
    content = digits().files[digest].read_bytes()
    (tmp_path / "changed").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    async def work() -> None:
        async with browsing(runtime) as (site, tab):
            page = await tab("another")
            await page.locator("#why", has_text="Now: another token:").wait_for()
            await page.close()
            page = await tab("")
            await page.locator("#why", has_text="The address lacks the token").wait_for()
            with monkeypatch.context() as patch:
                patch.setitem(digits().files, digest, tmp_path / "changed")
                await tab()
                refused = "cannot load block 3: a file is not the one of its digest"
                await site.until(lambda: refused in caplog.text, seconds=HANGS)
                await site.until(lambda: len(ready(site)) == site.model.depth - 1, seconds=HANGS)
                assert 3 not in ready(site)
            # It tries again until the file is whole.
            await site.until(lambda: 3 in ready(site), seconds=HANGS)

    asyncio.run(work())


def test_nothing_is_lost_while_tabs_come_and_go(runtime: Path, tmp_path: Path) -> None:
    async def work() -> None:
        # A third of the model fits into the host, so tabs hold the rest at least.
        room = {"memory": 4 * bytes_of_a_block(), "cache": tmp_path}
        async with browsing(runtime) as (site, tab), hosting(site.url, **room):
            tabs = [await tab(), await tab()]

            def twice() -> bool:
                return min(site.copies()) >= 2

            await site.until(twice, seconds=HANGS)
            assert len(ready(site)) == site.model.depth
            blocks = list[int]()

            async def ask(number: int) -> None:
                start = states(seed=number)
                after, route = await site.walk(start)
                assert np.abs(after - await replayed(start, route)).max() <= CLOSE
                blocks.append(len(route.steps))

            async def come_and_go() -> None:
                for _ in range(2):  # both
                    await tabs.pop(0).close()
                    tabs.append(await tab())
                    await site.until(twice, seconds=HANGS)

            moving = asyncio.create_task(come_and_go())
            while len(blocks) < 150 or not moving.done():
                await asyncio.gather(*(ask(len(blocks) + client) for client in range(4)))
            await moving
            # Every block has another holder, so a tab that goes takes none from an answer.
            assert np.mean(blocks) >= 11.5

    asyncio.run(work())


def bytes_of_a_block() -> int:
    """The bytes of the weights of one block."""
    return max(file.size for file in digits().weights)


def test_the_wheel_has_three_files_of_npm_and_their_licence(wheel: Path, runtime: Path) -> None:
    names = ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm.gz", "ort.wasm.min.mjs"]
    assert sorted(path.name for path in runtime.iterdir()) == names
    (path,) = wheel.glob("*.whl")
    assert path.stat().st_size < 5e6
    (licence,) = runtime.parent.parent.rglob("LICENSE.onnxruntime")
    assert "Microsoft Corporation" in licence.read_text()


def answers(place: Path | None, path: str, **headers: str) -> httpx.Response:
    """What the routes of the page answer."""

    async def ask() -> httpx.Response:
        wire = httpx.ASGITransport(app=Starlette(routes=join_routes(place)))
        async with httpx.AsyncClient(transport=wire, base_url="http://gateway") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_the_files_of_the_page_are_its_own(runtime: Path) -> None:
    packed = answers(runtime, "/join/ort-wasm-simd-threaded.wasm")
    assert packed.headers["content-type"] == "application/wasm"
    assert packed.content[:4] == b"\0asm"
    again = answers(
        runtime,
        "/join/ort-wasm-simd-threaded.wasm",
        **{"if-none-match": packed.headers["etag"]},
    )
    assert (again.status_code, again.content) == (304, b"")
    policy = answers(runtime, "/join").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src 'self' 'wasm-unsafe-eval'" in policy
    assert answers(runtime, "/join/..%2Fpage.css").status_code == 404


@pytest.mark.parametrize("editable", [False, True])
def test_without_its_files_the_page_says_what_brings_them(
    monkeypatch: pytest.MonkeyPatch, *, editable: bool
) -> None:
    monkeypatch.setattr(files, "installed", lambda _: editable)
    answer = answers(None, "/join")
    assert answer.status_code == 501
    line = "python browser/hatch_build.py" if editable else install_line("browser")
    assert line in answer.text
