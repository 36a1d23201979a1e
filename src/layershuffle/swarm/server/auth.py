"""Who may ask: API keys, and the addresses on which a server without keys may listen. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from layershuffle.errors import UsageError

_SHORTEST_KEY = 16


class Keys:
    """The API keys that open the gateway; without any it is open to everybody.

    Raises `UsageError` for keys that are short enough to be guessed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if any(len(key) < _SHORTEST_KEY for key in keys):
            raise UsageError(
                f"An API key has at least {_SHORTEST_KEY} characters",
                hint='make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
            )
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: bytes | None) -> bool:
        """Whether `key` is one of the keys; a wrong key takes as long as a right one."""
        if not self._digests:
            return True
        if key is None:
            return False
        # Digests have one length, and the loop never ends early: neither the length of a key, nor
        # its first letters, nor its place in the list change the time of the comparison.
        digest, matches = _digest(key), False
        for valid in self._digests:
            matches |= hmac.compare_digest(digest, valid)
        return matches


def key_in(authorization: str | None, x_api_key: str | None) -> bytes | None:
    """The key in `Authorization: Bearer KEY`, else in `X-API-Key: KEY`, else `None`."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode("latin-1", "replace")
    return None if x_api_key is None else x_api_key.strip().encode("latin-1", "replace")


def check_address(host: str, *, keyed: bool, public: bool) -> None:
    """Raises `UsageError` if the gateway would listen to other machines without an API key."""
    if keyed or public or is_loopback(host):
        return
    raise UsageError(
        f"The gateway would listen on {host}, where other machines reach it, without an API key",
        hint="give it an API key, listen on 127.0.0.1, or say that it is to be public",
    )


def in_clear(host: str, *, keyed: bool, encrypted: bool) -> str:
    """A warning if keys would travel where others may read them, else ""."""
    if encrypted or not keyed or is_loopback(host):
        return ""
    return (
        f"API keys, images and answers travel to and from {host} in clear: whoever can listen on "
        "the way can read them, and use the keys. Give the gateway a certificate "
        "(--https-certificate, --https-key), or use a network that nobody else can listen to"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or "localhost"."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
