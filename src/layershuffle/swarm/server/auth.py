"""Who may ask, and how often: API keys, a token bucket per client address. Pure but for `Rates`."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.errors import UsageError
from layershuffle.swarm.server.limits import GatewayLimits

_IPV6_NETWORK = 64  # one client commands as many addresses as it likes below such a prefix
_SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests a client may still make at once, as of the time `at` (seconds)."""

    tokens: float
    at: float


def take(bucket: Bucket | None, *, now: float, limits: GatewayLimits) -> tuple[Bucket, float]:
    """The bucket after a request, and the seconds to wait before it: 0 if it may be made now.

    A refused request takes nothing. `None` is a client not heard of: its bucket is full.
    """
    filled = limits.burst
    if bucket is not None:
        filled = min(limits.burst, bucket.tokens + max(0.0, now - bucket.at) * limits.rate)
    if filled >= 1:
        return Bucket(filled - 1, now), 0.0
    return Bucket(filled, now), (1 - filled) / limits.rate


class Rates:
    """The buckets of the clients heard of last; takes bounded memory."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, address: str, *, now: float) -> float:
        """Count a request of `address`; the seconds it has to wait, 0 if it may be made."""
        client = client_of(address)
        bucket, seconds = take(self._buckets.get(client), now=now, limits=self._limits)
        self._buckets[client] = bucket
        self._buckets.move_to_end(client)
        while len(self._buckets) > self._limits.max_clients:
            self._buckets.popitem(last=False)
        return seconds


def client_of(address: str) -> str:
    """What stands for a client: its IPv4 address, its IPv6 /64 network, else the text itself."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((int(known), _IPV6_NETWORK), strict=False))


class Keys:
    """The API keys that open the gateway; none means that it is open.

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

    def open_for(self, given: bytes | None) -> bool:
        """Whether `given` is one of the keys; takes as long for a wrong one as for a right one."""
        if not self._digests:
            return True
        if given is None:
            return False
        digest = _digest(given)
        found = False
        for known in self._digests:  # all of them, so that the time tells nothing
            found |= hmac.compare_digest(digest, known)
        return found


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
