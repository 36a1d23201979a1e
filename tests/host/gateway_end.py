"""The gateway's end of the protocol, as small as it can be: it serves files and takes one host."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request, Response

from layershuffle_host.host import Host
from layershuffle_host.wire import (
    FILE_PATH,
    HOST_PATH,
    MAX_FRAME_BYTES,
    Dtype,
    Header,
    Kind,
    State,
    frame,
    header_of,
    message_in,
    state_in,
    text_of,
)

SHAPE = (16, 64)
TOKEN = "a secret"


class Gateway:
    """Files of an exported directory, and the hosts that dial in, each when it has said hello.

    `cut`: bytes after which the next transfers end. `fetched`: (digest, first byte, status).
    """

    def __init__(self, directory: Path) -> None:
        facts = json.loads((directory / "manifest.json").read_text())
        self.files = {
            stored["sha256"]: (directory / name).read_bytes()
            for name, stored in facts["files"].items()
        }
        self.blocks = [self._entry(slot, b, facts) for slot, b in enumerate(facts["blocks"])]
        self.cut: list[int] = []
        self.fetched: list[tuple[str, int, int]] = []
        self.knows_ranges = True
        self.refuse: tuple[int, str] | None = None
        self.name = "127.0.0.1"

    def _entry(self, slot: int, block: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        graph, weights = (
            {key: facts["files"][block[part]][key] for key in ("sha256", "bytes")}
            for part in ("graph", "weights")
        )
        return {"slot": slot, "graph": graph, "weights": weights, "shape": list(SHAPE)}

    def offer(self, content: bytes) -> dict[str, Any]:
        """A file of these bytes, as an assignment names it."""
        digest = hashlib.sha256(content).hexdigest()
        self.files[digest] = content
        return {"sha256": digest, "bytes": len(content)}

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}:{self.port}"

    @asynccontextmanager
    async def listening(
        self, port: int = 0, *, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Gateway]:
        self.hosts: asyncio.Queue[HostEnd] = asyncio.Queue()  # of this event loop
        self.scheme = "ws" if tls is None else "wss"
        async with serve(
            self._host,
            "127.0.0.1",
            port,
            process_request=self._request,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ssl=tls,
        ) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    def _request(self, _: ServerConnection, request: Request) -> Response | None:
        if request.path == HOST_PATH:
            return None
        digest = request.path.removeprefix(FILE_PATH)
        allowed = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not allowed or digest not in self.files:
            return Response(404, "Not Found", Headers(), b"")
        first = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")
        start = int(first) if self.knows_ranges else 0
        content = self.files[digest][start:]
        status = HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK
        self.fetched.append((digest, start, status))
        headers = Headers({"Content-Length": str(len(content)), "Connection": "close"})
        sent = content[: self.cut.pop(0)] if self.cut else content
        return Response(status, "OK", headers, sent)

    async def _host(self, socket: ServerConnection) -> None:
        hello = message_in(str(await socket.recv()))
        if self.refuse is not None:
            await socket.close(*self.refuse)
            return
        host = HostEnd(socket, hello)
        self.hosts.put_nowait(host)
        await host.read()


class HostEnd:
    """A host, as the gateway sees it."""

    def __init__(self, socket: ServerConnection, hello: dict[str, Any]) -> None:
        self.socket, self.hello = socket, hello
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.visits: dict[int, asyncio.Future[bytes]] = {}
        self.closed = asyncio.Event()

    async def read(self) -> None:
        try:
            async for content in self.socket:
                if isinstance(content, str):
                    self.messages.put_nowait(message_in(content))
                else:
                    self.visits.pop(header_of(content).visit).set_result(content)
        except ConnectionClosedError:
            pass  # `socket.close_code` says how
        finally:
            self.closed.set()

    async def assign(self, *blocks: dict[str, Any]) -> None:
        await self.socket.send(text_of("assign", blocks=list(blocks)))

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which has to be of this kind."""
        message = await asyncio.wait_for(self.messages.get(), 20)
        assert message["type"] == kind, message
        return message

    async def load(self, *blocks: dict[str, Any]) -> None:
        """Assign blocks and wait for all of them."""
        await self.assign(*blocks)
        for block in blocks:
            assert (await self.hear("ready"))["slot"] == block["slot"]

    async def ask(
        self, slot: int, state: State, *, visit: int, dtype: Dtype = Dtype.FLOAT32, left: float = 9
    ) -> bytes:
        """Send a visit; the frame that comes back."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.visits[visit] = future
        header = Header(Kind.VISIT, dtype, slot, visit, len(state), 0, int(1e6 * left))
        await self.socket.send(frame(header, state))
        return await asyncio.wait_for(future, 20)

    async def visit(self, slot: int, state: State, **how: Any) -> State:
        """The state that the host answers."""
        content = await self.ask(slot, state, **{"visit": 1, **how})
        header = header_of(content)
        assert header.kind == Kind.ANSWER, header
        return state_in(content, header, shape=SHAPE)


def states(batch: int, *, seed: int = 0) -> State:
    return np.random.default_rng(seed).standard_normal((batch, *SHAPE)).astype(np.float32)


@asynccontextmanager
async def hosting(*gateways: Gateway, cache: Path | None, **how: Any) -> AsyncIterator[Host]:
    """A host in this process, which drains at the end."""
    urls = [gateway.url for gateway in gateways]
    host = Host(urls, **{"token": TOKEN, "name": "pi", "cache": cache, **how})
    running = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        host.drain()
        await asyncio.wait_for(running, 20)


Talk = Callable[[Host, HostEnd], Awaitable[None]]


def talk(gateway: Gateway, cache: Path | None, say: Talk, **how: Any) -> None:
    """Run `say` with a host that has said hello."""

    async def main() -> None:
        async with gateway.listening(), hosting(gateway, cache=cache, **how) as host:
            await say(host, await asyncio.wait_for(gateway.hosts.get(), 20))

    asyncio.run(main())
