"""Who may ask, and what a client may take: keys, deadlines, places, clients that
go away."""

import asyncio
import os
import threading
import tracemalloc
from contextlib import AsyncExitStack, suppress

import httpx
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
from starlette.requests import Request

from clock import SkippingLoop
from common import DEPTH, SIZE
from layershuffle.gateway.brain.state import HostState, VisitError
from layershuffle.gateway.http import admission
from layershuffle.gateway.http.admission import (
    Admission,
    GatewayLimits,
    HTTPError,
    Keys,
    client_name,
)
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.secrets import is_loopback, read_secret
from layershuffle.ground.errors import UsageError
from layershuffle.images import pixels
from pictures import file_of
from refusals import refuses
from waiting import HANGS, until

KEY, OTHER = "a-key-of-some-length", "another-key-of-some-length"


def opens(keys, authorization):
    """Whether keys let in a request with this header."""
    headers = [(b"authorization", authorization.encode())]
    with suppress(HTTPError):
        keys.check(Request({"type": "http", "headers": headers}), cause="no", hint="no")
        return True
    return False


def test_keys_compare_in_constant_time(monkeypatch):
    """Every comparison is hmac's, of digests of one length, and all keys are compared."""
    compared = []
    genuine = admission.hmac.compare_digest

    def spy(first, second):
        compared.append((len(first), len(second)))
        return genuine(first, second)

    monkeypatch.setattr(admission.hmac, "compare_digest", spy)
    keys = Keys([KEY, KEY + "2", KEY + "3"])
    assert opens(keys, f"Bearer {KEY}")
    assert not opens(keys, "Bearer x")
    assert compared == [(32, 32)] * 6
    assert not opens(keys, f"Basic {KEY}")
    assert not opens(Keys([]), "Bearer ")


def test_which_addresses_this_machine_alone_reaches():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "example.org", "10.0.0.1", "::")))


def test_addresses_of_one_client():
    assert client_name("10.0.0.1") == client_name("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_name("10.0.0.2") != client_name("10.0.0.1")
    assert client_name("2001:db8::1") == client_name("2001:db8::ffff") == "2001:db8::/64"
    assert client_name("2001:db8:0:1::1") != client_name("2001:db8::1")
    assert client_name("unix") == "unix"


@pytest.mark.parametrize(
    "line",
    [f"{KEY} 5/day", "a-short-key", "schl\u00fcssel-der-lang-ist", "a-key-of-some-length\0"],
)
def test_lines_of_a_key_file_that_are_none(tmp_path, line):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"\ufeff{OTHER}\n{line}\n")
    with refuses(UsageError, keys):
        Keys(file=keys)
    keys.write_text(f"\ufeff{OTHER}\n")  # some editors put a byte order mark there
    assert opens(Keys(file=keys), f"Bearer {OTHER}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(
    ("owner", "mode", "taken"),
    [(0, 0o400, True), (0, 0o440, False), (1000, 0o440, True), (1000, 0o444, False)],
)
def test_secrets_as_kubernetes_mounts_them(tmp_path, owner, mode, taken):
    """They belong to another user, and the group may read them."""
    path = tmp_path / "token"
    path.write_text("a token")
    path.chmod(mode)
    os.chown(path, owner, 0)
    if taken:
        assert read_secret(path, what="token", hint="") == "a token"
    else:
        with pytest.raises(UsageError, match="Other users may read"):
            read_secret(path, what="token", hint="")


# --- requests among others ------------------------------------------------------------------------

FILE = file_of(picture())
# A deadline that no machine reaches by itself: a test moves the clock beyond it.
FAR_MS = 30_000


def test_the_time_left_is_used_before_an_answer_of_few_blocks():
    """Half of the accuracy takes two blocks. With one the request waits for the dead host until its
    deadline and is answered then; a request that names its own fewest gets no answer with less."""

    async def go(place):
        place.blocks.faults["b"] = VisitError("its process is dead", outcome="lost")
        few = await place.classify(FILE, deadline_ms=1500)
        refused = await place.classify(FILE, deadline_ms=1500, min_blocks=2)
        content = await place.classify(FILE, deadline_ms=9000, min_blocks=1)
        swarm = (await place.client.get("/v1/swarm")).json()
        waiting = asyncio.ensure_future(place.classify(FILE, deadline_ms=9000))
        visits = place.blocks.visits
        await until(lambda: place.blocks.visits > visits)
        place.blocks.faults.clear()
        place.router.update("b", lambda host: HostState("b", host.blocks))
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
        genuine = pixels.upright

        def decode(image):
            self.begun.append(image.width)
            if image.width == self.WIDTH:
                assert self.free.wait(HANGS)
            return genuine(image)

        monkeypatch.setattr(pixels, "upright", decode)

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
        async with place.client_at("10.0.0.2") as other:  # it waits in the pool, not for a place
            late = await classify(other, FILE, deadline_ms=100)
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


def test_a_body_is_in_memory_once_until_its_image_is_decoded():
    async def go():
        left = 8

        async def receive():
            nonlocal left
            left -= 1
            if left < 0:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bytes(1 << 20), "more_body": left > 0}

        request = Request({"type": "http", "headers": [], "client": ("10.0.0.1", 1)}, receive)
        admission = Admission(GatewayLimits(), clock=asyncio.get_running_loop().time)
        before, _ = tracemalloc.get_traced_memory()
        async with admission.received(request) as received:
            taken = tracemalloc.get_traced_memory()[0] - before
            size = len(received.body)
            received.drop()
            return size, taken, tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        size, taken, left = asyncio.run(go())
    finally:
        tracemalloc.stop()
    assert size == 8 << 20
    assert taken < 12 << 20
    assert left < 1 << 20, "its image is decoded"


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
        status, _ = await call
        await until(lambda: place.blocks.cancelled)
        place.blocks.gate = None
        answered = (await place.classify(FILE)).status_code
        return status, answered, place.app.state.gateway.counters.requests

    limits = GatewayLimits(running=1, waiting=0)  # the place of the first is free again
    assert run(go, HOSTS, limits=limits) == (499, 200, {"gone": 1, "answered": 1})


# --- places that are held by what does not move ---------------------------------------------------


async def ask_from(place, address, **options):
    """The status of an answer to a client at this address, and its seconds."""
    begun = asyncio.get_running_loop().time()
    async with place.client_at(address) as client:
        answer = await classify(client, FILE, **options)
    return answer.status_code, asyncio.get_running_loop().time() - begun


def test_requests_that_wait_for_a_host_shut_nobody_out():
    """48 requests of one address wait for a block that no host has, and hold no place. Another
    address is answered at once; and they are, as soon as the host is there."""

    async def go(place):
        place.router.update("c", lambda host: host._replace(condition="gone", retry_at=1e9))
        waiting = [
            asyncio.ensure_future(ask_from(place, "10.0.0.1", min_blocks=DEPTH, deadline_ms=FAR_MS))
            for _ in range(48)
        ]
        # They ran all other blocks.
        await until(lambda: place.blocks.visits == 48 * (DEPTH - 1) and not place.router.walks)
        before = place.blocks.visits
        others = [await ask_from(place, f"10.0.0.{number}") for number in (2, 2, 3)]
        visits = place.blocks.visits - before
        assert not any(call.done() for call in waiting)
        place.router.update("c", lambda host: HostState("c", host.blocks))
        return others, visits, await asyncio.gather(*waiting)

    limits = {"limits": GatewayLimits(running=4, waiting=64)}
    swarm = LIMITS.model_copy(update={"max_deadline_ms": FAR_MS})
    others, visits, answers = run_in_virtual_time(go, HOSTS, swarm=swarm, **limits)
    assert others == [(200, 0.0)] * 3
    assert visits == 3 * (DEPTH - 1)
    assert [status for status, _ in answers] == [200] * 48


def test_a_visit_that_is_given_up_holds_no_place():
    """A host that stands still and answers nothing: its visits are late, and nothing else runs."""

    async def go(place):
        place.blocks.gate = asyncio.Event()
        stuck = asyncio.ensure_future(ask_from(place, "10.0.0.1", min_blocks=DEPTH))
        await until(lambda: place.router.walks)
        await until(lambda: not place.router.walks)
        place.blocks.gate.set()
        other = await ask_from(place, "10.0.0.2", min_blocks=1)
        return other, (await stuck)[0]

    swarm = LIMITS.model_copy(update={"hop_floor_ms": 50, "hop_cap_ms": 100})
    other, stuck = run_in_virtual_time(
        go, {"a": set(range(DEPTH))}, swarm=swarm, limits=GatewayLimits(running=1, waiting=0)
    )
    assert other[0] in (200, 503)
    assert stuck in (200, 503)


def test_a_free_place_goes_to_the_address_with_the_fewest():
    """One address takes half of the places and waits for more; whoever comes is next."""

    async def go(place):
        place.blocks.gate = asyncio.Event()
        done = []

        async def ask(address):
            await ask_from(place, address)
            done.append(address)

        greedy = [asyncio.ensure_future(ask("10.0.0.1")) for _ in range(8)]
        await until(lambda: place.blocks.visits == 2)
        others = [asyncio.ensure_future(ask(f"10.0.0.{number}")) for number in (2, 3)]
        await until(lambda: place.blocks.visits == 4)
        place.blocks.gate.set()
        await asyncio.gather(*greedy, *others)
        return done

    done = run(go, {"a": set(range(DEPTH))}, limits=GatewayLimits(running=4, waiting=12))
    assert len(done) == 10
    assert {"10.0.0.2", "10.0.0.3"} <= set(done[:6])


def test_requests_that_wait_when_the_gateway_ends_are_told_so():
    """In JSON, with Retry-After; those that come meanwhile are, too."""

    async def go(place):
        place.router.update("c", lambda host: host._replace(condition="gone", retry_at=1e9))
        admission = place.app.state.gateway.admission
        url = "/v1/classify?min_blocks=4&deadline_ms=30000"
        async with AsyncExitStack() as stack:
            listener, _ = await stack.enter_async_context(
                listening(place.app, on_end=admission.end)
            )
            base = f"http://127.0.0.1:{listener.port}"
            client = httpx.AsyncClient(base_url=base, timeout=HANGS)
            waiting = [asyncio.ensure_future(client.post(url, content=FILE)) for _ in range(2)]
            await until(lambda: admission.open == 2 and not place.router.walks)
        return [await answer for answer in waiting]

    for answer in run(go, HOSTS, swarm=LIMITS.model_copy(update={"max_deadline_ms": 30_000})):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["cause"] == "The gateway ends"
