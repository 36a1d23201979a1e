"""The gateway's end of a host's WebSocket: uvicorn hands it the connection, after the request.

uvicorn's own class passes every message through a queue, a task and an ASGI app. That takes as long
as all else that the gateway does for a visit, so this one calls who receives it, and sends at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from layershuffle_host.wire import HOST_PATH, PING_SECONDS, PONG_SECONDS, Close, WireError

_MOST_REASON = 100  # bytes; a close frame holds 123


class Receiver(Protocol):
    """Who learns what comes by the connections of hosts. Nothing here may wait."""

    def opened(self, connection: HostConnection) -> None:
        """A host may say hello."""

    def received(self, connection: HostConnection, content: str | bytes) -> None:
        """A message has come. Raises `WireError` for one that ends the connection."""

    def ended(self, connection: HostConnection, why: str) -> None:
        """The connection has ended; said once."""


class HostConnection(asyncio.Protocol):
    """A connection that tells `receiver` what comes.

    `most_bytes`: of a message; `accepted` is called with the address of the other end.
    `unread_since`: since when, in seconds of the event loop, the host does not read what is sent;
    `None` while it does.
    """

    def __init__(
        self, receiver: Receiver, *, most_bytes: int, accepted: Callable[[Any], None]
    ) -> None:
        self._receiver, self._accepted = receiver, accepted
        self._wire = ServerProtocol(max_size=most_bytes)
        self._parts: list[Any] = []
        self._is_text, self._open = False, False
        self._asked_since: float | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self.address = ""
        self.unread_since: float | None = None

    def send(self, content: str | bytes) -> None:
        """Send a message; to a connection that is closing nothing is sent."""
        try:
            if isinstance(content, str):
                self._wire.send_text(content.encode())
            else:
                self._wire.send_binary(content)
        except InvalidState:
            return
        self._flush()

    def close(self, code: int, why: str) -> None:
        """Close the connection, with a reason that the host reads."""
        self._wire.fail(code, why.encode()[:_MOST_REASON].decode(errors="ignore"))
        self._flush()
        self._transport.close()
        self._end(why)

    # --- what uvicorn and the event loop call -----------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        self._accepted(peer)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._asked_since = None
        self._wire.receive_data(data)
        for event in self._wire.events_received():
            if isinstance(event, Frame):
                self._take(event)
            elif isinstance(event, Request):
                self._answer(event)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        del exc
        self._end("its connection has ended")

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.unread_since = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.unread_since = None

    def _answer(self, request: Request) -> None:
        if request.path.partition("?")[0] == HOST_PATH:
            response = self._wire.accept(request)
        else:
            response = self._wire.reject(HTTPStatus.NOT_FOUND, f"hosts dial in at {HOST_PATH}\n")
        self._wire.send_response(response)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self._open = True
            self._receiver.opened(self)
            self._ping()

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._parts, self._is_text = [frame.data], frame.opcode is Opcode.TEXT
        elif frame.opcode is Opcode.CONT:
            self._parts.append(frame.data)
        else:
            return  # answered by the library
        if not frame.fin or not self._open:
            return
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        try:
            self._receiver.received(self, str(content, "utf-8") if self._is_text else content)
        except (WireError, UnicodeDecodeError) as error:
            self._end(f"it breaks the protocol: {error}")
            self.close(Close.BROKEN, str(error))

    def _ping(self) -> None:
        """Ask for a sign of life; the first one asked for in vain may not be too old."""
        loop = asyncio.get_running_loop()
        # Not since the last sign: this loop may have stood still, and asked for none.
        if self._asked_since is None:
            self._asked_since = loop.time()
        elif loop.time() - self._asked_since >= PONG_SECONDS:
            self._end("it answers no pings")
            self._transport.abort()
            return
        self._wire.send_ping(b"")
        self._flush()
        self._pinging = loop.call_later(PING_SECONDS, self._ping)

    def _flush(self) -> None:
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    def _end(self, why: str) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self._open:
            self._open = False
            self._receiver.ended(self, why)
