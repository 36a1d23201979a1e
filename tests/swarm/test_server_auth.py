"""API keys, and fairness between clients: their rate against a slow count, their threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from gateway_site import run

from layershuffle.errors import UsageError
from layershuffle.swarm.server import keys as keys_of
from layershuffle.swarm.server import tls
from layershuffle.swarm.server.admission import Client, Clients
from layershuffle.swarm.server.errors import HTTPError
from layershuffle.swarm.server.keys import Keys, Rate
from layershuffle.swarm.server.limits import GatewayLimits, client_of
from layershuffle.swarm.server.run import serve
from waiting import until

KEY = "a-key-of-some-length"


def test_keys_compare_in_constant_time(monkeypatch):
    """Every comparison is hmac's, of digests of one length, and all keys are compared."""
    compared = []
    genuine = keys_of.hmac.compare_digest

    def spy(first, second):
        compared.append((len(first), len(second)))
        return genuine(first, second)

    monkeypatch.setattr(keys_of.hmac, "compare_digest", spy)
    keys = Keys([KEY, KEY + "2", KEY + "3"])
    assert keys.accept(KEY.encode())
    assert not keys.accept(b"x")
    assert compared == [(32, 32)] * 6
    assert Keys([]).accept(None)
    assert not keys.accept(None)
    with pytest.raises(UsageError, match="at least 16 characters"):
        Keys(["short"])


def test_other_machines_need_a_key():
    async def go(place):
        with pytest.raises(UsageError, match="without an API key"):
            await serve(place.app, host="0.0.0.0", port=0)
        with pytest.raises(UsageError, match="without an API key"):
            await serve(place.app, host="example.org", port=0)

    run(go)
    for host, keyed, public in [
        ("0.0.0.0", True, False), ("0.0.0.0", False, True), ("127.0.0.1", False, False),
        ("::1", False, False), ("localhost", False, False), ("127.8.8.8", False, False),
    ]:  # fmt: skip
        tls.check_address(host, keyed=keyed, public=public)


def test_keys_in_clear_bring_a_warning():
    for host, keyed, encrypted in [
        ("10.0.0.1", False, False), ("10.0.0.1", True, True), ("127.0.0.1", True, False),
    ]:  # fmt: skip
        assert tls.in_clear(host, keyed=keyed, encrypted=encrypted) == ""
    warning = tls.in_clear("10.0.0.1", keyed=True, encrypted=False)
    assert warning.startswith(
        "API keys, images and answers are sent to and from 10.0.0.1 unencrypted"
    )


def test_the_rate_against_a_slow_count():
    """Requests at random times: the client gets through what a plain token bucket lets through."""
    client = Rate(5, 3)
    rng = np.random.default_rng(0)
    now, tokens, passed, waits = 100.0, 3.0, 0, 0
    for gap in rng.exponential(0.1, 500):
        now += gap
        tokens = min(3.0, tokens + gap * 5)
        wait = client.wait(now)
        assert (wait == 0) == (tokens >= 1)
        if wait:
            waits += 1
            assert wait == pytest.approx((1 - tokens) / 5)
        else:
            tokens -= 1
            passed += 1
    assert 100 < passed <= 3 + 5 * (now - 100)
    assert waits > 100


def test_a_clock_that_steps_back_gives_nothing():
    client = Rate(1, 1)
    assert client.wait(10.0) == 0
    assert client.wait(5.0) == 6


def test_addresses_of_one_client():
    assert client_of("10.0.0.1") == client_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_of("10.0.0.2") != client_of("10.0.0.1")
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff") == "2001:db8::/64"
    assert client_of("2001:db8:0:1::1") != client_of("2001:db8::1")
    assert client_of("unix") == "unix"


def test_memory_is_bounded_and_busy_clients_stay():
    clients = Clients(GatewayLimits(max_clients=10, rate=0.001, burst=1))
    with clients.request_of("10.0.0.1") as busy:
        assert busy.rate.wait(0.0) == 0
        for number in range(100):
            clients.at(f"10.1.0.{number}")
        assert len(clients) == 10
        assert clients.at("10.0.0.1") is busy
    for number in range(100):
        clients.at(f"10.1.0.{number}")
    assert len(clients) == 10
    assert clients.at("10.0.0.1") is not busy
    assert clients.at("10.1.0.99") is clients.at("10.1.0.99")


def test_requests_under_way_are_bounded():
    clients = Clients(GatewayLimits(client_requests=1))
    with clients.request_of("::ffff:10.0.0.1"):
        with pytest.raises(HTTPError) as error, clients.request_of("10.0.0.1"):
            pass
        assert error.value.status == 429
        with clients.request_of("10.0.0.2"):
            pass
    with clients.request_of("10.0.0.1"):
        pass


def test_a_client_is_busy_while_a_thread_decodes_for_it():
    """Also when nobody waits for the thread any more; its place is free once it ends."""
    begun, free = threading.Event(), threading.Event()

    def work():
        begun.set()
        free.wait()

    async def go():
        client = Client(GatewayLimits(decoders=2))
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
            stack.callback(free.set)
            first = asyncio.ensure_future(client.compute(pool, work))
            await until(begun.is_set)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not client.idle
            second = asyncio.ensure_future(client.compute(pool, lambda: "second"))
            await asyncio.sleep(0)
            assert client.threads == 1  # half of the decoders, the second waits
            free.set()
            assert await second == "second"
            await until(lambda: client.idle)

    asyncio.run(go())
