"""One connection of the data channel: who may talk on it, and its bytes cut into frames.

`channel` has both ends of it. Credentials are those of the swarm: its token, and its certificates
where it has some.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.frames import FRAME_BYTES, HEAD_BYTES, BrokenFrame, Bytes, Head, read_head
from layershuffle.text import one_line

_STAGE = 1 << 14  # bytes; below them a frame is short
_PROOFS = 64  # longest tail before the peer has proved itself
# A cable that is cut sends no word. After these the kernel ends the connection, as soon as Ray
# would call the member dead (`ray_config.SYSTEM_CONFIG`).
_SILENCE_S, _SILENT_PROBES = 1, 3


@dataclass(frozen=True)
class Credentials:
    """What a member of the swarm proves itself by: the token, and the contexts of its TLS."""

    token: bytes
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


def credentials_in(variables: Mapping[str, str]) -> Credentials:
    """The credentials that `ray_config.environment` names in these variables.

    Raises `LayerShuffleError` if they name no token, or a file that cannot be read.
    """
    try:
        token = Path(variables["RAY_AUTH_TOKEN_PATH"]).read_bytes().strip()
        if variables.get("RAY_USE_TLS") != "1":
            return Credentials(token)
        certificate, key, authority = (
            variables[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")
        )
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            # Of both sides, as Ray has it: whoever has no certificate of the swarm gets no word.
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
            contexts.append(context)
        return Credentials(token, *contexts)
    except KeyError as error:
        raise LayerShuffleError(f"The variable {error} of the swarm is not set") from error
    except OSError as error:  # ssl's own errors as well
        raise LayerShuffleError(
            f"The token or a certificate cannot be read ({one_line(error)})"
        ) from error


def proof_of(token: bytes, side: bytes, *, host: str, nonces: bytes) -> bytes:
    """32 bytes that only a holder of the token can make for these random numbers.

    `side`: who makes it, the gateway or the host of this name.
    """
    # The side, or a proof could be sent back to who made it; the host, or one host's number could
    # be had signed for another.
    return hmac.digest(token, b"layershuffle channel " + side + host.encode() + nonces, "sha256")


class Stream(asyncio.BufferedProtocol):
    """Cuts what comes over a connection into frames, which go to `receive`.

    Memory for a tail is taken only after its head was checked, and a long one is read straight into
    it. Until `trusted`, tails are as long as a proof at most. `lost` gets the reason when the
    connection has ended, once; `made` is called when it begins.
    """

    def __init__(
        self,
        receive: Callable[[Head, bytearray], None],
        *,
        made: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._receive, self._made, self._lost = receive, made, lost
        self._transport: asyncio.Transport | None = None
        # Short frames come whole in one read: two reads, and two turns of the loop, cost more.
        self._stage, self._staged = memoryview(bytearray(_STAGE)), 0
        self._head: Head | None = None
        self._tail = bytearray()
        self._rest = memoryview(b"")  # of the tail, if it is being read straight into its memory
        self._why = ""
        self.trusted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls it once."""
        self._transport = cast("asyncio.Transport", transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            _end_when_silent(connection)
        self._made()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        del sizehint
        return self._rest if self._rest else self._stage[self._staged :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        try:
            if not self._rest:
                self._staged += nbytes
                self._cut()
                return
            self._rest = self._rest[nbytes:]
            if not self._rest and self._head is not None:
                self._hand_over(self._head, self._tail)
        except BrokenFrame as error:
            self.abort(f"it sent {error.cause}")

    def _cut(self) -> None:
        """Hand over the whole frames on the stage. What is left of a tail is read next, straight
        into its memory, and what is left of a head stays."""
        begin, end = 0, self._staged
        while end - begin >= HEAD_BYTES:
            most = FRAME_BYTES if self.trusted else _PROOFS
            head = read_head(self._stage[begin : begin + HEAD_BYTES], most=most)
            begin += HEAD_BYTES
            here = min(head.length, end - begin)
            tail = bytearray(head.length)
            tail[:here] = self._stage[begin : begin + here]
            begin += here
            if here < head.length:
                self._head, self._tail, self._rest = head, tail, memoryview(tail)[here:]
                break
            self._hand_over(head, tail)
        self._stage[: end - begin] = self._stage[begin:end]
        self._staged = end - begin

    def _hand_over(self, head: Head, tail: bytearray) -> None:
        self._head, self._tail = None, bytearray()
        self._receive(head, tail)

    def eof_received(self) -> None:
        """The peer has closed its side; asyncio then closes ours."""
        # A half frame is worth nothing: what waited for it hears that the connection ended.
        self._why = self._why or "it closed the connection"

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio calls it once."""
        self._transport = None
        self._lost(self._why or (one_line(error) if error else "the connection ended"))

    @property
    def open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, parts: Iterable[Bytes]) -> None:
        """Send the parts of a frame. A peer that lets too much lie unread is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # `lost` has said so, or will
        if transport.get_write_buffer_size() > FRAME_BYTES:
            self.abort("it does not read what it is sent")
            return
        parts = list(parts)
        # What is short goes in one call of the system: that costs more than a copy.
        if sum(map(len, parts)) <= _STAGE:
            parts = [b"".join(parts)]
        for part in parts:
            transport.write(part)

    def abort(self, why: str) -> None:
        """End the connection at once, for this reason."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()


def _end_when_silent(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _SILENCE_S,
        "TCP_KEEPINTVL": _SILENCE_S,
        "TCP_KEEPCNT": _SILENT_PROBES,
        "TCP_USER_TIMEOUT": _SILENT_PROBES * _SILENCE_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them, other systems some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
