"""The gateway's end of the hosts' wire: who has dialled in, and the visits to them.

`docs/host-protocol.md` specifies it. Every port of the gateway has the WebSockets of hosts, and
the files of the model by their SHA-256. Nothing that a host sends is believed before
`layershuffle_host.wire` has checked it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from websockets import http11
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import Answer, Outcome, State, Visit, VisitError
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.ground.text import printable
from layershuffle_host import wire
from layershuffle_host.wire import Close, Dtype, Header, Kind, Why, WireError

HELLO_SECONDS = 5.0
STALLED_SECONDS = 4.0
"""A host that has read nothing for so long is dropped."""
_MOST_REASON = 100  # bytes; a close frame holds 123
_MOST_SENT = 4096  # visits of one host, with those that nobody waits for any more
_GOING_AWAY = 1001  # of WebSocket
_PIECE = 1 << 14  # bytes whose frames are taken before those of the next ones are read
_MOST_EMPTY = 16  # frames that say nothing, between two pings: a host pings and answers one
_QUIET = 10.0  # seconds between two lines of the log on hosts that are refused
_MILLI = 1000.0
DTYPES: Mapping[Wire, Dtype] = {"fp32": Dtype.FLOAT32, "fp16": Dtype.FLOAT16, "int8": Dtype.INT8}
_REFUSALS: Mapping[Why, Outcome] = {
    Why.UNKNOWN_BLOCK: "unavailable",
    Why.FULL: "unavailable",
    Why.LATE: "late",
    Why.FAILED: "failed",
    Why.DRAINING: "unavailable",
}
_log = logging.getLogger(__name__)


def rounded(state: State, form: Wire) -> State:
    """The state that a host receives of one that travels as `form`."""
    header = Header(Kind.VISIT, DTYPES[form], 0, 0, len(state))
    tokens, width = state.shape[1:]
    return wire.state_in(wire.frame(header, state), header, shape=(tokens, width))


@dataclass(eq=False, slots=True)
class _Sent:
    """A visit under way, also one that nobody waits for any more. `before`: its state, where the
    answer is what the block added."""

    header: Header
    before: State | None
    answer: asyncio.Future[Answer]


@dataclass(eq=False, slots=True)
class ConnectedHost:
    """A host that is connected. `hello`: what it said of itself; `assigned`: blocks to hold;
    `ready`: those that it has loaded; `draining`: it leaves."""

    name: str
    hello: Mapping[str, Any]
    connection: HostConnection
    assigned: frozenset[int] = frozenset()
    ready: set[int] = field(default_factory=set)
    draining: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)


class HostWatcher(Protocol):
    """Learns what hosts do. Nothing here may wait."""

    def joined(self, host: ConnectedHost) -> None:
        """A host said hello; it holds nothing yet."""

    def loaded(self, host: ConnectedHost, block: int) -> None:
        """It has loaded a block that it is to hold."""

    def failed(self, host: ConnectedHost, block: int, *, why: str) -> None:
        """It could not load a block. It tries again."""

    def leaving(self, host: ConnectedHost) -> None:
        """It takes no more visits, and leaves once it has answered."""

    def left(self, host: ConnectedHost, why: str) -> None:
        """Its connection has ended."""


class ConnectedHosts(Mapping[str, ConnectedHost]):
    """The hosts of a swarm by name, and how visits reach them (`router.Transport`).

    `tokens`: hosts have to know one of them, `token` at first; `most_bytes`: of the largest message
    of a host, an answer of one image, which anybody may fill before saying hello. Use it from one
    event loop only.
    """

    def __init__(self, model: ServedModel, *, token: str) -> None:
        self.tokens: tuple[str, ...] = (token,)
        self._model = model
        self._shape = model.shape
        tokens, width = model.shape
        self.most_bytes = max(wire.MAX_TEXT_BYTES, wire.HEADER.size + 4 * tokens * width)
        self._hosts: dict[str, ConnectedHost] = {}
        self._numbers = count(1)
        self._connections: dict[HostConnection, ConnectedHost | None] = {}
        self._refused_at = -_QUIET
        self.watcher: HostWatcher | None = None

    def __getitem__(self, name: str) -> ConnectedHost:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def token(self) -> str:
        """The token that new hosts are given."""
        return self.tokens[0]

    def knows(self, token: str) -> bool:
        """Whether this is one of the tokens; a wrong one takes as long as a right one."""
        matches = [hmac.compare_digest(token.encode(), valid.encode()) for valid in self.tokens]
        return any(matches)

    def routes(self) -> list[BaseRoute]:
        """The ASGI routes of hosts: the files. Their connections pass ASGI by."""
        return [Route(f"{wire.FILE_PATH}{{digest}}", self._file)]

    # --- visits -----------------------------------------------------------------------------------

    def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> asyncio.Future[Answer]:
        """The host's answer; see `router.Transport`."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        host = self._hosts.get(visit.host)
        if host is None:
            why = f"Host {visit.host} is not connected"
            answer.set_exception(VisitError(why, outcome="lost"))
            return answer
        number = next(self._numbers) % (1 << 32)
        micros = min(int(_MILLI * visit.budget_ms), (1 << 32) - 1)
        header = Header(Kind.VISIT, DTYPES[form], visit.block, number, len(state), 0, micros)
        host.sent[number] = sent = _Sent(header, None if form == "fp32" else state, answer)
        if sent.before is not None:
            # What nobody waits for any more may stay for long, and states are large.
            answer.add_done_callback(lambda _: setattr(sent, "before", None))
        oldest = next(iter(host.sent))
        if len(host.sent) > _MOST_SENT and host.sent[oldest].answer.done():
            del host.sent[oldest]
        self._send(host, wire.frame(header, state))
        return answer

    def assign(self, name: str, blocks: Collection[int]) -> None:
        """Tell a host which blocks to hold from now on."""
        host = self._hosts[name]
        host.assigned = frozenset(blocks)
        host.ready &= host.assigned
        entries = [self._model.entry(block) for block in sorted(host.assigned)]
        self._send(host, wire.text_of("assign", blocks=entries))

    def cut(self, name: str) -> None:
        """End the connection of a host, which may dial in again."""
        if name in self._hosts:
            why = "the gateway has cut its connection"
            self._hosts[name].connection.close(_GOING_AWAY, why)

    def close(self) -> None:
        """End all connections."""
        for connection in list(self._connections):
            connection.close(_GOING_AWAY, "the gateway ends")

    def _send(self, host: ConnectedHost, content: str | bytes) -> None:
        since = host.connection.unread_since
        if since is not None and asyncio.get_running_loop().time() - since > STALLED_SECONDS:
            host.connection.close(_GOING_AWAY, f"it has read nothing for {STALLED_SECONDS:g} s")
        else:
            host.connection.send(content)

    # --- what their connections call --------------------------------------------------------------

    def opened(self, connection: HostConnection) -> None:
        """A host may say hello."""
        self._connections[connection] = None
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._no_hello, connection)

    def received(self, connection: HostConnection, content: str | bytes) -> None:
        """A message has come. Raises `WireError` for one that ends the connection."""
        host = self._connections[connection]
        if host is None:
            self._greeted(connection, content)
        elif isinstance(content, str):
            self._told(host, wire.message_in(content))
        else:
            self._answered(host, content)

    def ended(self, connection: HostConnection, why: str) -> None:
        """The connection has ended. Every connection calls this once."""
        host = self._connections.pop(connection)
        if host is None or self._hosts.get(host.name) is not host:
            return
        del self._hosts[host.name]
        for sent in host.sent.values():
            if not sent.answer.done():
                cause = f"Host {host.name} has gone: {why}"
                sent.answer.set_exception(VisitError(cause, outcome="lost"))
        if self.watcher is not None:
            self.watcher.left(host, why)

    def _no_hello(self, connection: HostConnection) -> None:
        if self._connections.get(connection, connection) is None:
            self._refuse(connection, Close.NO_HELLO, f"no hello within {HELLO_SECONDS:g} s")

    def _greeted(self, connection: HostConnection, content: str | bytes) -> None:
        """Take a host by the first message of its connection, or refuse it."""
        try:
            hello = wire.message_in(content if isinstance(content, str) else "")
        except WireError as error:
            return self._refuse(connection, Close.BROKEN, str(error))
        if hello["type"] != "hello":
            return self._refuse(connection, Close.BROKEN, "the first message is no hello")
        if why := wire.version_refused(hello["protocol"]):
            return self._refuse(connection, Close.VERSION, why)
        if not self.knows(hello["token"]):
            why = "another token: copy the host-token of this gateway"
            return self._refuse(connection, Close.BAD_TOKEN, why)
        name = hello["name"]
        if (before := self._hosts.get(name)) is not None:
            if before.hello["instance"] != hello["instance"]:
                why = f"the name {name} is in use: give another --name"
                return self._refuse(connection, Close.NAME_IN_USE, why)
            # The same process, on a new connection: the old one is dead, and may not know it.
            before.connection.close(_GOING_AWAY, "it has dialled in again")
        host = ConnectedHost(name, hello, connection)
        self._hosts[name] = host
        self._connections[connection] = host
        connection.keep()
        if self.watcher is not None:
            self.watcher.joined(host)

    def _refuse(self, connection: HostConnection, code: Close, why: str) -> None:
        why = printable(why)  # it may quote the host
        now = asyncio.get_running_loop().time()
        if now - self._refused_at >= _QUIET:  # it dials again, every few seconds
            self._refused_at = now
            _log.warning("A host at %s is refused: %s", connection.address, why)
        connection.close(code, why)

    def _told(self, host: ConnectedHost, message: dict[str, Any]) -> None:
        kind = message["type"]
        watcher = self.watcher
        if kind == "drain":
            host.draining = True
            if watcher is not None:
                watcher.leaving(host)
            return
        if kind not in ("ready", "failed"):
            raise WireError(f"a message {kind} from a host")
        block = message["slot"]
        if block not in host.assigned:
            return  # of an assignment before this one
        if kind == "failed":
            if watcher is not None:
                watcher.failed(host, block, why=printable(message["why"]))
            return
        again = block in host.ready
        host.ready.add(block)
        if watcher is not None and not again:
            watcher.loaded(host, block)

    def _answered(self, host: ConnectedHost, content: bytes) -> None:
        """Give a visit its answer. Raises `WireError` for one that nobody asked for."""
        header = wire.header_of(content)
        sent = host.sent.pop(header.visit, None)
        if sent is None:
            raise WireError("an answer to a visit that was never sent")
        if sent.answer.done():
            return
        try:
            answer = self._answer(host, sent, header=header, content=content)
        except VisitError as error:
            sent.answer.set_exception(error)
        else:
            sent.answer.set_result(answer)

    def _answer(
        self, host: ConnectedHost, sent: _Sent, *, header: Header, content: bytes
    ) -> Answer:
        """The answer in a frame. Raises `VisitError` for a refusal, and for what is no answer."""
        if header.kind == Kind.REFUSAL and header.note in _REFUSALS:
            why = Why(header.note)
            cause = f"Host {host.name} refused: {why.name.lower()}"
            raise VisitError(cause, outcome=_REFUSALS[why])
        asked = sent.header
        answered = f"Host {host.name} answered"
        if (header.kind, header.dtype, header.slot) != (Kind.ANSWER, asked.dtype, asked.slot):
            raise VisitError(f"{answered} with a frame of another kind", outcome="wrong")
        if header.images != asked.images or not asked.images <= header.note <= wire.MAX_IMAGES:
            raise VisitError(f"{answered} for another number of images", outcome="wrong")
        try:
            values = wire.state_in(content, header, shape=self._shape)
        except WireError as error:
            raise VisitError(f"{answered} with {error}", outcome="wrong") from error
        if sent.before is not None:
            values += sent.before  # in place: a new array takes longer than the sum
        return Answer(
            values,
            compute_ms=header.time / _MILLI,
            queue_ms=header.waited / _MILLI,
            batch=header.note,
        )

    # --- files ------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        """A file of the model, or the part of it that a Range names."""
        _, _, token = request.headers.get("authorization", "").partition(" ")
        if not self.knows(token):
            return PlainTextResponse("another token\n", HTTPStatus.UNAUTHORIZED)
        path = self._model.files.get(request.path_params["digest"])
        if path is None:
            return PlainTextResponse("no such file\n", HTTPStatus.NOT_FOUND)
        return FileResponse(path, media_type="application/octet-stream")


class HostConnection(asyncio.Protocol):
    """A host's WebSocket, which tells `connected` what comes; uvicorn hands it over.

    It is ended if too many of its frames say nothing, as pings, pongs and empty fragments. Each
    takes 6 bytes of it and a step here, and of a ping the pong stays in memory until it is read.

    uvicorn's own class passes every message through a queue, a task and an ASGI app. That takes as
    long as all else that the gateway does for a visit, so this one calls them, and sends at once.

    `accepted` is called with the address of the other end, once it is a host: whoever does not know
    the token stays a stranger, whose silent connection makes room for others.
    `unread_since`: since when, in seconds of the event loop, the host does not read what is sent;
    `None` while it does.
    """

    def __init__(self, connected: ConnectedHosts, *, accepted: Callable[[Any], None]) -> None:
        self._connected = connected
        self._accepted = accepted
        self._wire = ServerProtocol(max_size=connected.most_bytes)
        self._parts: list[Any] = []
        self._is_text = False
        self._open = False
        self._empty = 0
        self._asked_since: float | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self.address = ""
        self._peer: Any = None
        self.unread_since: float | None = None

    def keep(self) -> None:
        """It is a host's: it may be silent for any time."""
        if self._peer:
            self._accepted(self._peer)

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
        """Keep the transport, and the address at its other end."""
        self._transport = transport
        self._peer = transport.get_extra_info("peername")
        self.address = self._peer[0] if self._peer else ""

    def data_received(self, data: bytes) -> None:
        """Take the frames of a host, or answer its request for a connection."""
        self._asked_since = None
        for start in range(0, len(data), _PIECE):
            self._wire.receive_data(data[start : start + _PIECE])
            for event in self._wire.events_received():
                if isinstance(event, Frame):
                    self._take(event)
                elif isinstance(event, http11.Request):
                    self._answer(event)
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection for all that waits for it."""
        del exc
        self._end("its connection has ended")

    def pause_writing(self) -> None:
        """Note the time from which the host does not read."""
        self.unread_since = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        """The host reads again."""
        self.unread_since = None

    def _answer(self, request: http11.Request) -> None:
        if request.path.partition("?")[0] == wire.HOST_PATH:
            response = self._wire.accept(request)
        else:
            response = self._wire.reject(
                HTTPStatus.NOT_FOUND, f"hosts dial in at {wire.HOST_PATH}\n"
            )
        self._wire.send_response(response)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self._open = True
            self._connected.opened(self)
            self._ping()

    def _take(self, frame: Frame) -> None:
        says_something = frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) and frame.data
        if self._open and not says_something:
            self._empty += 1
            if self._empty > _MOST_EMPTY:
                why = f"more than {_MOST_EMPTY} frames in {wire.PING_SECONDS:g} s that say nothing"
                self._break(why)
                return
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._parts = [frame.data]
            self._is_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is Opcode.CONT:
            if frame.data:
                self._parts.append(frame.data)
        else:
            return  # answered by the library
        if not frame.fin or not self._open:
            return
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        try:
            self._connected.received(self, str(content, "utf-8") if self._is_text else content)
        except (WireError, UnicodeDecodeError) as error:
            self._break(str(error))

    def _break(self, why: str) -> None:
        """End the connection of a host that breaks the protocol."""
        self._end(f"it breaks the protocol: {why}")
        self.close(Close.BROKEN, why)

    def _ping(self) -> None:
        """Ask for a sign of life; the first one asked for in vain may not be too old."""
        loop = asyncio.get_running_loop()
        # Not since the last sign: this loop may have stood still, and asked for none.
        if self._asked_since is None:
            self._asked_since = loop.time()
        elif loop.time() - self._asked_since >= wire.PONG_SECONDS:
            self._end("it answers no pings")
            self._transport.abort()
            return
        self._empty = 0
        self._wire.send_ping(b"")
        self._flush()
        self._pinging = loop.call_later(wire.PING_SECONDS, self._ping)

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
            self._connected.ended(self, why)
