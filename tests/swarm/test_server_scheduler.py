"""One request among others: deadlines while it waits, places, clients that go away."""

import asyncio
import threading

import pytest
from gateway_site import (
    HOSTS,
    LIMITS,
    classify,
    made_up,
    picture,
    run,
    run_in_virtual_time,
    sent,
)

from clock import SkippingLoop
from common import DEPTH, SIZE
from layershuffle.swarm.messages import HostGone
from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.images import Decoder
from layershuffle.swarm.state import HostView
from pictures import file_of
from waiting import HANGS, until

FILE = file_of(picture())
# A deadline that no machine reaches by itself: a test moves the clock beyond it.
FAR_MS = 30_000


def test_the_time_left_is_used_before_an_answer_of_few_blocks():
    """Half of the accuracy takes two blocks. With one the request waits for the dead host until its
    deadline and is answered then; a request that names its own fewest gets no answer with less."""

    async def go(place):
        place.blocks.faults["b"] = HostGone("its process is dead")
        few = await place.classify(FILE, deadline_ms=1500)
        refused = await place.classify(FILE, deadline_ms=1500, min_blocks=2)
        content = await place.classify(FILE, deadline_ms=9000, min_blocks=1)
        swarm = (await place.client.get("/v1/swarm")).json()
        waiting = asyncio.ensure_future(place.classify(FILE, deadline_ms=9000))
        await until(lambda: place.router.walks)
        place.blocks.faults.clear()
        place.router.update("b", lambda host: HostView("b", host.blocks))
        return few, refused, content, swarm, await waiting

    hosts = {"a": {0}, "b": {1, 2, 3}}
    few, refused, content, swarm, waited = run_in_virtual_time(go, hosts, calibration=made_up())
    assert few.json()["blocks"] == [0]
    assert few.json()["expected"]["top1"] == 20.0
    assert few.json()["ms"]["total"] == pytest.approx(1500 - LIMITS.reserve_ms)
    assert refused.status_code == 503
    assert "1 of 4 blocks could be run, 2 are needed" in refused.json()["error"]["cause"]
    assert content.json()["blocks"] == [0]
    assert content.json()["ms"]["total"] == 0
    assert (swarm["expected"]["kept"], swarm["expected"]["orders_high"]) == (1, 26.0)
    assert sorted(waited.json()["blocks"]) == [0, 1, 2, 3]


def test_too_many_at_once():
    """One runs, one waits, further ones are refused; the deadline holds while waiting."""

    async def go(place):
        place.blocks.gate = asyncio.Event()
        first = asyncio.ensure_future(place.classify(FILE))
        await until(lambda: place.blocks.visits)
        waiting = [asyncio.ensure_future(place.classify(FILE, deadline_ms=1500)) for _ in range(2)]
        late, refused = sorted(await asyncio.gather(*waiting), key=lambda r: -r.status_code)
        place.blocks.gate.set()
        return await first, late, refused

    limits = GatewayLimits(running=1, waiting=1)
    first, late, refused = run_in_virtual_time(go, {"a": range(DEPTH)}, limits=limits)
    assert first.status_code == 200
    assert late.status_code == 503
    assert "before it was the request's turn" in late.json()["error"]["cause"]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"


class SlowDecoding:
    """Images as wide as `WIDTH` are decoded only when they may; `begun` are the widths so far."""

    WIDTH = 60

    def __init__(self, monkeypatch):
        self.free, self.begun = threading.Event(), []
        genuine = Decoder.decode

        def decode(decoder, image):
            self.begun.append(image.width)
            if image.width == self.WIDTH:
                assert self.free.wait(HANGS)
            return genuine(decoder, image)

        monkeypatch.setattr(Decoder, "decode", decode)

    async def outlasts_its_deadline(self):
        """Wait until a thread decodes, then move the clock beyond the deadline of its request."""
        await until(lambda: self.begun)
        asyncio.get_running_loop().skip(FAR_MS / 1000)


SLOW = file_of(picture(size=(SlowDecoding.WIDTH, 32)))
TOO_LATE = "The deadline passed before the image was decoded"


def test_the_wait_for_a_decoder_ends_at_the_deadline(monkeypatch):
    """A request behind one that decodes for long is refused in time, and is never decoded."""
    decoding = SlowDecoding(monkeypatch)

    async def go(place):
        first = asyncio.ensure_future(place.classify(SLOW, deadline_ms=FAR_MS))
        await until(lambda: decoding.begun)
        late = await place.classify(FILE, deadline_ms=100)
        decoding.free.set()  # only now: it did not wait for the first to be decoded
        return await first, late

    first, late = run(go, limits=GatewayLimits(decoders=1))
    assert first.status_code == 200
    assert decoding.begun == [SlowDecoding.WIDTH]
    assert late.status_code == 503
    assert late.json()["error"]["cause"] == TOO_LATE
    assert "a smaller image" in late.json()["error"]["hint"]
    assert late.headers["retry-after"]


def test_one_client_leaves_decoders_for_others(monkeypatch):
    """Also one that gives up at once and asks again."""
    decoding = SlowDecoding(monkeypatch)

    async def go(place):
        async with place.client_at("10.0.0.1") as greedy, place.client_at("10.0.0.2") as other:
            first = asyncio.ensure_future(classify(greedy, SLOW, deadline_ms=FAR_MS))
            await decoding.outlasts_its_deadline()
            late = [(await first).status_code]
            late += [(await classify(greedy, SLOW, deadline_ms=100)).status_code for _ in range(2)]
            answered = await classify(other, FILE)
            begun = list(decoding.begun)
            decoding.free.set()
            again = await classify(greedy, FILE)
        return late, begun, answered.status_code, again.status_code

    result = run(go, loop=SkippingLoop, limits=GatewayLimits(decoders=2))
    assert result == ([503] * 3, [SlowDecoding.WIDTH, SIZE], 200, 200)


def test_bodies_that_trickle_take_no_places():
    """One place, and a client whose bodies do not come: another is answered, the first refused."""

    async def go(place):
        begun, rest = asyncio.Event(), asyncio.Event()

        async def trickle():
            yield FILE[:100]
            begun.set()
            await rest.wait()

        async with place.client_at("10.0.0.1") as slow, place.client_at("10.0.0.2") as other:
            ask = slow.post("/v1/classify", content=trickle())
            trickling = asyncio.ensure_future(ask)
            await begun.wait()
            more = await classify(slow, FILE)
            answered = await classify(other, FILE)
            rest.set()
            return more, answered.status_code, (await trickling).status_code

    limits = GatewayLimits(running=1, waiting=0, client_requests=1)
    more, answered, trickled = run(go, limits=limits)
    assert (more.status_code, answered, trickled) == (429, 200, 422)
    assert "from your address are under way" in more.json()["error"]["cause"]
    assert more.headers["retry-after"] == "1"


def test_a_client_that_goes_away_ends_its_walk():
    async def go(place):
        place.blocks.gate = asyncio.Event()
        gone = asyncio.Event()
        call = asyncio.ensure_future(sent(place.app, "/v1/classify", FILE, leave=gone))
        await until(lambda: place.blocks.visits)
        gone.set()
        status = await call
        await until(lambda: place.blocks.cancelled)
        place.blocks.gate = None
        return status, (await place.classify(FILE)).status_code

    limits = GatewayLimits(running=1, waiting=0)  # the place of the first is free again
    assert run(go, HOSTS, limits=limits) == (499, 200)
