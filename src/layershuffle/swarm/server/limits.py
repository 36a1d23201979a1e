"""Limits on what the gateway accepts. Plain data, no torch."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from layershuffle.settings import Positive, Settings
from layershuffle.swarm.limits import Milliseconds

_IPV6_PREFIX = 64  # one client may use every address below such a prefix


class GatewayLimits(Settings):
    """Bounds on what clients send, and how often. `Limits` bounds how long the swarm tries."""

    max_body_bytes: Positive = 16 << 20
    """Largest body; counted while it arrives, because its announced length may be wrong."""
    body_ms: Milliseconds = 15_000.0
    """Longest time that a body may take to arrive."""
    held_bytes: Positive = 256 << 20
    """Most bytes of bodies in memory at one time, over all requests."""
    max_pixels: Positive = 25_000_000
    """Most pixels of an image, checked before it is decoded, and again for what it is resized to.
    25 million are 75 MB once decoded."""
    decoders: Positive = 2
    """Most images that are decoded at one time; at most half of them of one client."""

    min_deadline_ms: Milliseconds = 50.0
    """Shortest deadline that a request may ask for; the longest is the swarm's own limit."""

    running: Positive = 32
    """Most requests that walk the swarm at one time."""
    waiting: Annotated[int, Field(ge=0)] = 64
    """Most further requests, complete with their bodies, that may wait for their turn; clients of
    others are told to try later."""
    connections: Positive = 512
    """Most open connections; further ones are closed at once."""
    head_ms: Milliseconds = 10_000.0
    """Longest time from the opening of a connection, and from every answer, to the next request's
    complete head; also the longest time of a TLS handshake."""

    # A quarter of the connections, and half of the requests that may run or wait: no single address
    # can take every place.
    client_connections: Positive = 128
    """Open connections of one client address ..."""
    client_requests: Positive = 48
    """... and its requests under way, counted from their heads on."""

    rate: Annotated[float, Field(gt=0)] = 100.0
    """Requests per second that one client address may make in the long run ..."""
    burst: Annotated[float, Field(ge=1)] = 200.0
    """... and how many at once after a pause."""
    # Bounded, because an attacker may come from ever new addresses.
    max_clients: Positive = 10_000
    """Most client addresses whose rates are remembered; the longest idle is forgotten first."""


def client_of(address: str) -> str:
    """The name of a client: its IPv4 address, its IPv6 /64 network, else the text itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else parsed
    return str(mapped or ipaddress.ip_network((int(parsed), _IPV6_PREFIX), strict=False))
