"""API keys, and the addresses on which a gateway may listen without them."""

import pytest
from gateway_site import run

from layershuffle.errors import UsageError
from layershuffle.swarm.server import auth
from layershuffle.swarm.server.auth import Keys
from layershuffle.swarm.server.run import serve

KEY = "a-key-of-some-length"


def test_keys_compare_in_constant_time(monkeypatch):
    """Every comparison is hmac's, of digests of one length, and all keys are compared."""
    compared = []
    genuine = auth.hmac.compare_digest

    def spy(first, second):
        compared.append((len(first), len(second)))
        return genuine(first, second)

    monkeypatch.setattr(auth.hmac, "compare_digest", spy)
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
        auth.check_address(host, keyed=keyed, public=public)


def test_keys_in_clear_bring_a_warning():
    for host, keyed, encrypted in [
        ("10.0.0.1", False, False), ("10.0.0.1", True, True), ("127.0.0.1", True, False),
    ]:  # fmt: skip
        assert auth.in_clear(host, keyed=keyed, encrypted=encrypted) == ""
    warning = auth.in_clear("10.0.0.1", keyed=True, encrypted=False)
    assert warning.startswith("API keys, images and answers travel to and from 10.0.0.1 in clear")
