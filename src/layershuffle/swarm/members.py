"""The gateway's end of the hosts' wire: who has dialled in, and the visits to them.

`docs/host-protocol.md` specifies it. Two ASGI routes take part in the gateway's one port: a
WebSocket for hosts, and the files of the model by their SHA-256. Nothing that a host sends is
believed before `layershuffle_host.wire` has checked it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    State,
    Visit,
    VisitError,
    Wire,
    WorkExpired,
    WrongAnswer,
)
from layershuffle.swarm.served import ServedModel
from layershuffle_host import wire
from layershuffle_host.wire import Close, Dtype, Header, Kind, Why, WireError

HELLO_SECONDS = 5.0
STALLED_SECONDS = 4.0
"""A host that has read nothing for so long is dropped."""
_MOST_ABANDONED = 4096
_QUIET = 10.0  # seconds between two lines of the log on hosts that are refused
_MILLI = 1000.0
DTYPES: Mapping[Wire, Dtype] = {"fp32": Dtype.FLOAT32, "fp16": Dtype.FLOAT16, "int8": Dtype.INT8}
_REFUSALS: Mapping[Why, type[VisitError]] = {
    Why.UNKNOWN_BLOCK: HostUnavailable,
    Why.FULL: HostUnavailable,
    Why.LATE: WorkExpired,
    Why.FAILED: HostFailed,
    Why.DRAINING: HostUnavailable,
}
_log = logging.getLogger(__name__)


def rounded(state: State, form: Wire) -> State:
    """The state that a host receives of one that travels as `form`."""
    header = Header(Kind.VISIT, DTYPES[form], 0, 0, len(state))
    tokens, width = state.shape[1:]
    return wire.state_in(wire.frame(header, state), header, shape=(tokens, width))


@dataclass(eq=False, slots=True)
class _Sent:
    """A visit under way."""

    header: Header
    before: State
    answer: asyncio.Future[Answer]


@dataclass(eq=False, slots=True)
class Member:
    """A host that is connected. `hello`: what it said of itself; `assigned`: blocks to hold;
    `ready`: those that it has loaded, with its seconds for one image; `draining`: it leaves."""

    name: str
    hello: Mapping[str, Any]
    address: str
    socket: WebSocket
    serving: asyncio.Task[None]
    assigned: frozenset[int] = frozenset()
    ready: dict[int, float] = field(default_factory=dict)
    draining: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)
    abandoned: dict[int, None] = field(default_factory=dict)
    unread_since: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class MemberWatcher(Protocol):
    """Learns what hosts do. Nothing here may wait."""

    def joined(self, member: Member) -> None:
        """A host said hello; it holds nothing yet."""

    def loaded(self, member: Member, block: int) -> None:
        """It has loaded a block that it is to hold."""

    def failed(self, member: Member, block: int, *, why: str) -> None:
        """It could not load a block. It tries again."""

    def leaving(self, member: Member) -> None:
        """It takes no more visits, and leaves once it has answered."""

    def left(self, member: Member, why: str) -> None:
        """Its connection has ended."""


class Members(Mapping[str, Member]):
    """The hosts of a swarm by name, and how visits reach them (`messages.Transport`).

    `token`: what hosts have to know. Use it from one event loop only.
    """

    def __init__(self, model: ServedModel, *, token: str) -> None:
        self._model, self.token = model, token
        self._members: dict[str, Member] = {}
        self._numbers = count(1)
        self._tasks = set[asyncio.Task[None]]()
        self._refused_at = -_QUIET
        self.watcher: MemberWatcher | None = None

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def routes(self) -> list[BaseRoute]:
        """The ASGI routes of hosts."""
        return [
            WebSocketRoute(wire.HOST_PATH, self._host),
            Route(f"{wire.FILE_PATH}{{digest}}", self._file),
        ]

    # --- visits -----------------------------------------------------------------------------------

    async def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Answer:
        """The host's answer; see `messages.Transport`."""
        member = self._members.get(visit.host)
        if member is None:
            raise HostGone(f"Host {visit.host} is not connected")
        number = next(self._numbers) % (1 << 32)
        micros = min(int(_MILLI * visit.budget_ms), (1 << 32) - 1)
        header = Header(Kind.VISIT, DTYPES[form], visit.block, number, len(state), 0, micros)
        sent = _Sent(header, state, asyncio.get_running_loop().create_future())
        member.sent[number] = sent
        try:
            await self._send(member, wire.frame(header, state))
            return await sent.answer
        finally:
            if member.sent.pop(number, None) is not None:
                # Its answer may still come, too late to be believed.
                member.abandoned[number] = None
                if len(member.abandoned) > _MOST_ABANDONED:
                    del member.abandoned[next(iter(member.abandoned))]

    def assign(self, name: str, blocks: Collection[int]) -> None:
        """Tell a host which blocks to hold from now on."""
        member = self._members[name]
        member.assigned = frozenset(blocks)
        member.ready = {block: s for block, s in member.ready.items() if block in member.assigned}
        self._start(self._tell(member))

    def cut(self, name: str) -> None:
        """End the connection of a host, which may dial in again."""
        if name in self._members:
            self._members[name].serving.cancel()

    async def close(self) -> None:
        """End all connections."""
        tasks = [*self._tasks, *(member.serving for member in self._members.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, member: Member) -> None:
        # One after the other, and only the newest: what was assigned before is void.
        async with member.turn:
            entries = [self._model.entry(block) for block in sorted(member.assigned)]
            with suppress(HostGone):  # `left` was said
                await self._send(member, wire.text_of("assign", blocks=entries))

    async def _send(self, member: Member, content: str | bytes) -> None:
        now = asyncio.get_running_loop().time()
        if member.unread_since is None:
            member.unread_since = now
        elif now - member.unread_since > STALLED_SECONDS:
            member.serving.cancel(f"it has read nothing for {STALLED_SECONDS:g} s")
        try:
            if isinstance(content, str):
                await member.socket.send_text(content)
            else:
                await member.socket.send_bytes(content)
        # Starlette raises the second one for a connection that it has seen the end of.
        except (WebSocketDisconnect, RuntimeError) as error:
            raise HostGone(f"The connection of host {member.name} has ended") from error
        member.unread_since = None

    # --- connections ------------------------------------------------------------------------------

    async def _host(self, socket: WebSocket) -> None:
        """Serve one connection, from hello to its end."""
        await socket.accept()
        try:
            hello = await self._hello(socket)
        except _Refused as refused:
            now, where = asyncio.get_running_loop().time(), socket.client
            if now - self._refused_at >= _QUIET:  # it dials again, every few seconds
                self._refused_at = now
                _log.warning("A host at %s is refused: %s", where.host if where else "", refused)
            await socket.close(refused.code, str(refused)[:100])
            return
        if hello is None:
            return
        name, serving = hello["name"], asyncio.current_task()
        assert serving is not None
        address = socket.client.host if socket.client is not None else ""
        member = Member(name, hello, address, socket, serving)
        if (before := self._members.get(name)) is not None:
            # The same process, on a new connection: the old one is dead, and may not know it.
            before.serving.cancel("it has dialled in again")
            self._leave(before, "it has dialled in again")
        self._members[name] = member
        why = "its connection has ended"
        try:
            if self.watcher is not None:
                self.watcher.joined(member)
            await self._read(member)
        except WireError as error:
            why = f"it breaks the protocol: {error}"
            await socket.close(Close.BROKEN, str(error)[:100])
        except asyncio.CancelledError as error:
            why = str(error) or "the gateway has cut its connection"
        finally:
            self._leave(member, why)

    async def _hello(self, socket: WebSocket) -> dict[str, Any] | None:
        """The host's hello, `None` if it has gone. Raises `_Refused`."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                event = await socket.receive()
        except TimeoutError as error:
            raise _Refused(Close.NO_HELLO, f"no hello within {HELLO_SECONDS:g} s") from error
        if event["type"] != "websocket.receive":
            return None
        try:
            hello = wire.message_in(event.get("text") or "")
        except WireError as error:
            raise _Refused(Close.BROKEN, str(error)) from error
        if hello["type"] != "hello":
            raise _Refused(Close.BROKEN, "the first message is no hello")
        if why := wire.version_refused(hello["protocol"]):
            raise _Refused(Close.VERSION, why)
        if not hmac.compare_digest(hello["token"].encode(), self.token.encode()):
            raise _Refused(Close.BAD_TOKEN, "another token")
        there = self._members.get(hello["name"])
        if there is not None and there.hello["instance"] != hello["instance"]:
            raise _Refused(Close.NAME_IN_USE, f"the name {hello['name']} is in use")
        return hello

    async def _read(self, member: Member) -> None:
        """Take what the host sends, until its connection ends. Raises `WireError`."""
        while (event := await member.socket.receive())["type"] == "websocket.receive":
            if (content := event.get("bytes")) is not None:
                self._answered(member, content)
            else:
                self._told(member, wire.message_in(event.get("text") or ""))

    def _leave(self, member: Member, why: str) -> None:
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        for sent in member.sent.values():
            if not sent.answer.done():
                sent.answer.set_exception(HostGone(f"Host {member.name} has gone: {why}"))
        if self.watcher is not None:
            self.watcher.left(member, why)

    def _told(self, member: Member, message: dict[str, Any]) -> None:
        kind, watcher = message["type"], self.watcher
        if kind == "drain":
            member.draining = True
            if watcher is not None:
                watcher.leaving(member)
        elif kind not in ("ready", "failed"):
            raise WireError(f"a message {kind} from a host")
        elif message["slot"] not in member.assigned:
            pass  # of an assignment before this one
        elif kind == "ready":
            again = message["slot"] in member.ready
            member.ready[message["slot"]] = message["seconds"]
            if watcher is not None and not again:
                watcher.loaded(member, message["slot"])
        elif watcher is not None:
            watcher.failed(member, message["slot"], why=message["why"])

    def _answered(self, member: Member, content: bytes) -> None:
        """Give a visit its answer. Raises `WireError` for one that nobody asked for."""
        number = wire.header_of(content).visit
        sent = member.sent.pop(number, None)
        if sent is None:
            if number not in member.abandoned:
                raise WireError("an answer to a visit that was never sent")
            del member.abandoned[number]
            return
        if sent.answer.done():
            return
        try:
            answer = self._answer(member, sent, content=content)
        except VisitError as error:
            sent.answer.set_exception(error)
        else:
            sent.answer.set_result(answer)

    def _answer(self, member: Member, sent: _Sent, *, content: bytes) -> Answer:
        """The answer in a frame. Raises `VisitError` for a refusal, and for what is no answer."""
        header = wire.header_of(content)
        if header.kind == Kind.REFUSAL and header.note in _REFUSALS:
            why = Why(header.note)
            raise _REFUSALS[why](f"Host {member.name} refused: {why.name.lower()}")
        asked = sent.header
        if (header.kind, header.dtype, header.slot) != (Kind.ANSWER, asked.dtype, asked.slot):
            raise WrongAnswer(f"Host {member.name} answered with a frame of another kind")
        if header.images != asked.images or not asked.images <= header.note <= wire.MAX_IMAGES:
            raise WrongAnswer(f"Host {member.name} answered for another number of images")
        try:
            values = wire.state_in(content, header, shape=self._model.shape)
        except WireError as error:
            raise WrongAnswer(f"Host {member.name} answered with {error}") from error
        return Answer(
            values if header.dtype == Dtype.FLOAT32 else sent.before + values,
            compute_ms=header.time / _MILLI,
            queue_ms=header.waited / _MILLI,
            batch=header.note,
        )

    # --- files ------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        """A file of the model, or the part of it that a Range names."""
        _, _, token = request.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return PlainTextResponse("another token\n", HTTPStatus.UNAUTHORIZED)
        path: Path | None = self._model.files.get(request.path_params["digest"])
        if path is None:
            return PlainTextResponse("no such file\n", HTTPStatus.NOT_FOUND)
        return FileResponse(path, media_type="application/octet-stream")


class _Refused(Exception):
    """A host that is not taken, with the code that says why."""

    def __init__(self, code: Close, why: str) -> None:
        super().__init__(why)
        self.code = code
