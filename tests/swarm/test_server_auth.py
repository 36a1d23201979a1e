"""API keys, and fairness between clients: their rate against a slow count, their threads."""

import numpy as np
import pytest
from starlette.requests import Request

from layershuffle.errors import UsageError
from layershuffle.swarm.server import doors
from layershuffle.swarm.server.admission import Admission, GatewayLimits, client_of
from layershuffle.swarm.server.doors import Keys, Rate

KEY = "a-key-of-some-length"


def test_keys_compare_in_constant_time(monkeypatch):
    """Every comparison is hmac's, of digests of one length, and all keys are compared."""
    compared = []
    genuine = doors.hmac.compare_digest

    def spy(first, second):
        compared.append((len(first), len(second)))
        return genuine(first, second)

    monkeypatch.setattr(doors.hmac, "compare_digest", spy)
    keys = Keys([KEY, KEY + "2", KEY + "3"])
    assert keys.accept(KEY.encode())
    assert not keys.accept(b"x")
    assert compared == [(32, 32)] * 6
    assert Keys([]).accept(None)
    assert not keys.accept(None)
    with pytest.raises(UsageError, match="at least 16 characters"):
        Keys(["short"])


def test_other_machines_need_a_key():
    for host in ("0.0.0.0", "example.org"):
        with pytest.raises(UsageError, match="without an API key"):
            doors.check_address(host, keyed=False, public=False)
    for host, keyed, public in [
        ("0.0.0.0", True, False), ("0.0.0.0", False, True), ("127.0.0.1", False, False),
        ("::1", False, False), ("localhost", False, False), ("127.8.8.8", False, False),
    ]:  # fmt: skip
        doors.check_address(host, keyed=keyed, public=public)


def test_keys_in_clear_bring_a_warning():
    for host, keyed, encrypted in [
        ("10.0.0.1", False, False), ("10.0.0.1", True, True), ("127.0.0.1", True, False),
    ]:  # fmt: skip
        assert doors.in_clear(host, keyed=keyed, encrypted=encrypted) == ""
    warning = doors.in_clear("10.0.0.1", keyed=True, encrypted=False)
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


def test_only_so_many_clients_are_remembered():
    admission = Admission(GatewayLimits(max_clients=10), clock=lambda: 0.0)

    def client(address):
        return admission.client(Request({"type": "http", "client": (address, 1)}))

    first = client("10.0.0.1")
    assert client("::ffff:10.0.0.1") is first
    for number in range(9):
        client(f"10.1.0.{number}")
    assert client("10.0.0.1") is first
    for number in range(10):
        client(f"10.1.0.{number}")
    assert client("10.0.0.1") is not first
