"""The Python clients, blocking and not, against a gateway in this process."""

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
from gateway_site import HOSTS, file_of, picture, site

from common import DEPTH
from layershuffle.errors import UsageError
from layershuffle.swarm.client import AsyncSwarmClient, SwarmClient, SwarmError
from layershuffle.swarm.messages import HostGone
from layershuffle.swarm.state import Swarm

KEY = "a-key-of-some-length"
URL = "http://gateway"


class Bridge(httpx.BaseTransport):
    """Requests of a blocking client, answered by an app on another thread's event loop."""

    def __init__(self, app, loop):
        self.inner, self.loop = httpx.ASGITransport(app=app), loop

    def handle_request(self, request):
        return asyncio.run_coroutine_threadsafe(self._handle(request), self.loop).result(30)

    async def _handle(self, request):
        response = await self.inner.handle_async_request(request)
        return httpx.Response(
            response.status_code, headers=response.headers, content=await response.aread()
        )


@contextmanager
def blocking(**options):
    """(client, site) with the gateway in a thread of its own."""
    started, done, found = threading.Event(), asyncio.Event(), []

    async def serve():
        async with site(**options) as place:
            found.extend([place, asyncio.get_running_loop()])
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert started.wait(120)
    place, loop = found
    try:
        with SwarmClient(URL, api_key=KEY, transport=Bridge(place.app, loop)) as client:
            yield client, place
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)


def test_every_kind_of_image(tmp_path):
    image = picture(3)
    path = tmp_path / "a.png"
    path.write_bytes(file_of(image))
    with blocking(keys=[KEY]) as (client, _):
        asked = {"order": [2, 0], "top_k": 2, "deadline_ms": 5000.0, "min_blocks": 2}
        answers = [
            client.classify(one, **asked) for one in (image, path, str(path), path.read_bytes())
        ]
        several = client.classify([image, path], order="2,0")
    assert all(answer.images == answers[0].images for answer in answers)
    assert answers[0].blocks == [2, 0]
    assert len(answers[0].images[0].top) == 2
    assert len(several.images) == 2
    assert several.images[0] == several.images[1]


def test_swarm_and_health():
    with blocking(keys=[KEY], model="pico") as (client, place):
        client.classify(picture())
        swarm, health = client.swarm(), client.health()
        place.router.swarm = Swarm()
        ill = client.health()
    assert swarm.model == "pico"
    assert {host.name: set(host.blocks) for host in swarm.hosts} == HOSTS
    assert swarm.counters == {"answered": 1}
    assert (health.ok, health.reachable_blocks) == (True, DEPTH)
    assert (ill.ok, ill.reachable_blocks) == (False, 0)


def test_errors_are_the_gateways_own_words():
    with blocking(keys=[KEY]) as (client, place):
        with pytest.raises(SwarmError, match="cannot be read") as unread:
            client.classify(b"no image")
        place.blocks.faults["b"] = HostGone("its process is dead")
        with pytest.raises(SwarmError) as few:
            client.classify(picture(), min_blocks=4)
        stranger = SwarmClient(URL, transport=client._http._transport)
        with pytest.raises(SwarmError) as closed:
            stranger.swarm()
    assert unread.value.status == 422
    assert unread.value.hint == "send JPEG, PNG, WEBP or BMP"
    assert (few.value.status, few.value.retry_after) == (503, 1.0)
    assert "3 of 4 blocks could be run" in str(few.value)
    assert "Where: http://gateway/v1/classify." in str(few.value)
    assert closed.value.status == 401
    assert closed.value.hint.startswith("send it as")


def test_the_async_client_is_the_same():
    async def go():
        async with site(keys=[KEY]) as place:
            transport = httpx.ASGITransport(app=place.app)
            async with AsyncSwarmClient(URL, api_key=KEY, transport=transport) as client:
                answer = await client.classify([picture(1), picture(2)], order=[1, 3])
                swarm, health = await client.swarm(), await client.health()
                with pytest.raises(SwarmError) as error:
                    await client.classify(picture(), order="1,1")
            return answer, swarm, health, error.value

    answer, swarm, health, error = asyncio.run(go())
    assert answer.blocks == [1, 3]
    assert len(answer.images) == 2
    assert len(swarm.hosts) == health.usable_hosts == 3
    assert error.cause == "A block stands twice in the order"


def answering(handler):
    return SwarmClient(URL, transport=httpx.MockTransport(handler))


def test_what_is_no_gateway():
    def refuse(request):
        raise httpx.ConnectError("Connection refused")

    def sleep(request):
        raise httpx.ReadTimeout("")

    cases = {
        "cannot be reached (Connection refused)": refuse,
        "did not answer in time": sleep,
        "(HTTP 200) is not one of": lambda request: httpx.Response(200, text="<html>"),
        "(HTTP 502) is not one of": lambda request: httpx.Response(502, text="Bad Gateway"),
        "(HTTP 302) is not one of": lambda request: httpx.Response(302, headers={"location": "/"}),
    }
    for words, handler in cases.items():
        with answering(handler) as client, pytest.raises(SwarmError) as error:
            client.health()
        assert words in error.value.cause
        assert error.value.hint


def test_wrong_use():
    with answering(lambda request: httpx.Response(500)) as client:
        for wrong, words in [([], "no image"), (3, "int is not an image"), ("/no/file", "read")]:
            with pytest.raises(UsageError, match=words):
                client.classify(wrong)
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://[::", ""):
        with pytest.raises(UsageError, match="not the address of a gateway"):
            SwarmClient(url)


def test_the_client_needs_no_torch():
    code = (
        "import sys, layershuffle.swarm.client; "
        "sys.exit(bool({'torch', 'fastapi', 'scipy', 'timm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
