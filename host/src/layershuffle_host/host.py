"""A host: dials in to gateways, holds the blocks that they assign, and serves visits."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import random
import secrets
import ssl
import threading
import time
import timeit
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import onnxruntime
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidState, WebSocketException
from websockets.frames import Frame, Opcode

from layershuffle_host import __version__, wire
from layershuffle_host.blocks import Block
from layershuffle_host.files import Cache, Source, is_loopback, usual_cache
from layershuffle_host.wire import Header, Kind, State, Why, WireError

_log = logging.getLogger("layershuffle_host")
_OPEN_SECONDS = 3.0
_DRAIN_SECONDS = 10.0
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 3.0
_MOST_WAITING = 1024
_MOST_WAITING_BYTES = 128 << 20
# Up to here a block runs where frames are read: changing threads takes as long, and costs more.
_INLINE_SECONDS = 0.005
# glibc keeps the memory that loading gave back: as much as the blocks take.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
Key = tuple[str, str]
"""A block by the digests of its graph and of its weights."""


def delays(draw: random.Random) -> Iterator[float]:
    """The seconds to wait before the first, second, ... try.

    They grow to a few seconds at most, and are drawn, so that hosts do not try at the same moment.
    """
    for attempt in itertools.count():
        longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(attempt, 16))
        yield longest * draw.uniform(0.5, 1.0)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A visit that came at `arrived` through `socket`; only the gateway there knows the visit."""

    socket: _Socket
    header: Header
    state: State
    block: Block
    arrived: float


class Host:
    """A process that serves blocks. `run()` ends after `drain()`.

    `urls`: addresses of gateways, with the scheme http, https, ws or wss; `memory`: how many bytes
    of weights it takes; `ca`: a file with the certificate of a private authority. Raises
    `ValueError` for a URL of another scheme, and for a token that is no token of a swarm.

        asyncio.run(Host(["ws://127.0.0.1:8000"], token="secret").run())
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str,
        name: str = "host",
        memory: int = 200_000_000,
        threads: int = 1,
        cache: Path | None = None,
        ca: Path | None = None,
    ) -> None:
        if len(token) > wire.MAX_TEXT:
            raise ValueError(f"a token has at most {wire.MAX_TEXT} characters, not {len(token)}")
        self.name = name
        self.instance = secrets.token_hex(8)
        self.memory = memory
        self.threads = threads
        directory = cache or usual_cache()
        if directory is None:
            _log.info("No file is kept: no place for them can be written (--cache names one)")
        # What was dropped may be wanted again, so the disk holds more than the memory.
        self.cache = Cache(directory, limit=4 * memory)
        self.speed = _speed()
        self.blocks: dict[Key, Block] = {}
        self.links = [_Link(self, url, token=token, ca=ca) for url in urls]
        self.waiting: deque[_Waiting] = deque()
        self.waiting_bytes = 0
        self.busy = 0
        self.draining = False
        self._wake = asyncio.Event()
        self._drain = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "block")
        # Files load one after the other, while the blocks that are there serve visits.
        self.loader = ThreadPoolExecutor(1, "files")

    async def run(self) -> None:
        """Serve until `drain`, then answer what waits and leave."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(link.run()) for link in self.links]
                tasks.append(group.create_task(self._work()))
                await self._drain.wait()
                await self._finish()
                for task in tasks:
                    task.cancel()
        finally:
            for link in self.links:
                link.stop_loading()
            self._pool.shutdown(wait=False)
            self.loader.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Take no more visits, answer those that wait, and end `run`."""
        self.draining = True
        self._drain.set()

    async def _finish(self) -> None:
        sockets: list[_Socket] = []
        for link in self.links:
            if link.socket is not None:
                link.socket.write(wire.text_of("drain"))
                sockets.append(link.socket)
        transports = [socket.transport for socket in sockets]
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while (
                    self.waiting or self.busy or any(t.get_write_buffer_size() for t in transports)
                ):
                    await asyncio.sleep(0.005)
                await asyncio.gather(*(socket.close(1001) for socket in sockets))
        except TimeoutError:
            _log.warning("drained for %.0f s, leaving with visits unanswered", _DRAIN_SECONDS)

    def drop_unassigned(self) -> None:
        """Forget blocks that no gateway wants any more; visits that wait keep theirs."""
        wanted: set[Key] = set()
        for link in self.links:
            wanted.update(link.slots.values())
        self.blocks = {key: block for key, block in self.blocks.items() if key in wanted}

    def require_room(self, size: int) -> None:
        """Raises `MemoryError` if weights of `size` bytes do not fit with those that are held."""
        held = sum(block.bytes for block in self.blocks.values())
        if held + size > self.memory:
            raise MemoryError(f"no memory: {held} of {self.memory} bytes are taken")

    # --- visits -----------------------------------------------------------------------------------

    def take(self, visit: _Waiting) -> None:
        """Put a visit into the queue, or refuse it."""
        if self.draining:
            visit.socket.refuse(visit.header, Why.DRAINING)
        elif len(self.waiting) >= _MOST_WAITING or self.waiting_bytes > _MOST_WAITING_BYTES:
            visit.socket.refuse(visit.header, Why.FULL)
        else:
            self.waiting.append(visit)
            self.waiting_bytes += visit.state.nbytes
            self._wake.set()

    async def _work(self) -> None:
        """Run the visits that wait, oldest first, those of one block together."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.waiting:
                batch = self._batch()
                self.busy = len(batch)
                if batch and not await self._served(batch):
                    # One state may have broken it for the others.
                    for visit in batch:
                        if len(batch) == 1 or not await self._served([visit]):
                            visit.socket.refuse(visit.header, Why.FAILED)
                self.busy = 0
                if self.waiting:
                    # So that what has arrived meanwhile can join the next batch.
                    await asyncio.sleep(0)

    async def _served(self, batch: Sequence[_Waiting]) -> bool:
        """Run visits of one block together, answer them, and return whether that went well."""
        block = batch[0].block
        begin = time.monotonic()
        state = np.concatenate([visit.state for visit in batch])
        try:
            if block.seconds * len(state) <= _INLINE_SECONDS:
                out = block.run(state)
            else:
                out = await asyncio.get_running_loop().run_in_executor(self._pool, block.run, state)
        # ONNX Runtime's errors have no class of their own.
        except Exception as error:  # noqa: BLE001
            _log.warning("a block failed: %s", error)
            return False
        micros = int(1e6 * (time.monotonic() - begin))
        together = len(state)
        for visit in batch:
            state = out[: len(visit.state)]
            out = out[len(visit.state) :]
            if visit.header.dtype != wire.Dtype.FLOAT32:
                state = np.subtract(state, visit.state, out=state)
            waited = int(1e6 * (begin - visit.arrived))
            header = Header(Kind.ANSWER, *visit.header[1:5], together, micros, waited)
            visit.socket.write(wire.frame(header, state))
        return True

    def _batch(self) -> list[_Waiting]:
        """The oldest visit and those of its block, out of the queue; late ones are refused."""
        now = time.monotonic()
        block = self.waiting[0].block
        images = 0
        batch = list[_Waiting]()
        others = deque[_Waiting]()
        for visit in self.waiting:
            if visit.block is not block or images + len(visit.state) > wire.MAX_IMAGES:
                others.append(visit)
                continue
            self.waiting_bytes -= visit.state.nbytes
            if visit.arrived + 1e-6 * visit.header.time < now:
                visit.socket.refuse(visit.header, Why.LATE)
                continue
            batch.append(visit)
            images += len(visit.state)
        self.waiting = others
        return batch


class _Socket(ClientConnection):
    """A connection that hands every visit to its `link` at once, and sends without waiting.

    The queues and tasks of the library would cost three turns of the event loop for every visit.
    """

    link: _Link | None = None

    def process_event(self, event: Any) -> None:
        whole = isinstance(event, Frame) and event.opcode is Opcode.BINARY and event.fin
        if whole and self.link is not None:
            with suppress(WireError):  # It is raised again where the connection is served.
                return self.link.visited(self, event.data)
        super().process_event(event)

    def write(self, content: str | bytes) -> None:
        """Send a text or a binary frame; if the connection has ended, the frame is lost."""
        with suppress(InvalidState):
            if isinstance(content, bytes):
                self.protocol.send_binary(content)
            else:
                self.protocol.send_text(content.encode())
            self.send_data()

    def refuse(self, header: Header, why: Why) -> None:
        """Send the reason why a visit has no answer."""
        self.write(wire.frame(header._replace(kind=Kind.REFUSAL, note=why, time=0)))


class _Dial(connect):
    """A dial that follows no redirect, because the token is for the gateway alone."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _Link:
    """The connection to one gateway, which is dialled again for as long as the host runs."""

    def __init__(self, host: Host, url: str, *, token: str, ca: Path | None) -> None:
        parts = urlsplit(url)
        secure = {"ws": "", "http": "", "wss": "s", "https": "s"}.get(parts.scheme)
        if secure is None or not parts.netloc:
            raise ValueError(f"{url!r} is no address of a gateway: write ws://HOST:PORT")
        # OpenSSL names no file that is missing.
        tls = ssl.create_default_context(cafile=ca and ca.resolve(strict=True)) if secure else None
        base = f"{parts.netloc}{parts.path.rstrip('/')}"
        self._host = host
        self._url = f"ws{secure}://{base}"
        self._tls = tls
        self._token = token
        self._proxied = not is_loopback(parts.hostname or "")
        self._source = Source(f"http{secure}://{base}", token, tls, self._proxied)
        self.slots: dict[int, Key] = {}
        self.socket: _Socket | None = None
        self._loading: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    def stop_loading(self) -> None:
        """Stop the transfer of files, if one is under way."""
        self._stopped.set()
        if self._loading is not None:
            self._loading.cancel()

    async def run(self) -> None:
        """Dial, serve, and dial again; blocks stay loaded meanwhile."""
        waits = delays(random.Random())
        said = ""
        while True:
            previous = said
            try:
                async with _Dial(
                    self._url + wire.HOST_PATH,
                    ssl=self._tls,
                    proxy=True if self._proxied else None,
                    compression=None,
                    max_size=wire.MAX_FRAME_BYTES,
                    open_timeout=_OPEN_SECONDS,
                    ping_interval=wire.PING_SECONDS,
                    ping_timeout=wire.PONG_SECONDS,
                    close_timeout=1,
                    create_connection=_Socket,
                ) as socket:
                    assert isinstance(socket, _Socket)
                    if await self._serve(socket):
                        waits = delays(random.Random())
                        previous = ""
                if self._host.draining:
                    return
                said = f"closed: {socket.close_code} {_printable(socket.close_reason or '')}"
            except (OSError, ValueError, ImportError, WebSocketException) as error:  # of a proxy
                said = f"cannot be reached: {error or type(error).__name__}"
            if said != previous:  # once, not for every try of a night
                _log.warning("%s %s", self._url, said)
            await asyncio.sleep(next(waits))

    async def _serve(self, socket: _Socket) -> bool:
        """Serve until the connection ends, and return whether the gateway took this host."""
        self.socket = socket
        socket.link = self
        taken = False
        hello = wire.text_of(
            "hello",
            protocol=wire.PROTOCOL,
            token=self._token,
            name=self._host.name,
            instance=self._host.instance,
            version=__version__,
            runtime=f"onnxruntime {onnxruntime.__version__}",
            memory=self._host.memory,
            speed=self._host.speed,
            held=self._host.cache.digests()[: wire.MAX_HELD],
        )
        socket.write(hello)
        try:
            with suppress(ConnectionClosed):  # `run` says how
                async for content in socket:
                    if isinstance(content, bytes):
                        self.visited(socket, content)
                    else:
                        self._told(socket, wire.message_in(content))
                        taken = True
        except WireError as error:
            _log.warning("%s breaks the protocol: %s", self._url, error)
            await socket.close(1002, str(error)[:100])
        finally:
            self.socket = None
        return taken

    def visited(self, socket: _Socket, content: bytes) -> None:
        """Take a visit from a frame. Raises `WireError`, without effect, if it is no visit."""
        header = wire.header_of(content)
        if header.kind != Kind.VISIT:
            raise WireError(f"a frame of kind {header.kind} from a gateway")
        if socket.transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            raise WireError("it sends visits and reads no answers")
        block = self._host.blocks.get(self.slots.get(header.slot, ("", "")))
        if block is None:
            return socket.refuse(header, Why.UNKNOWN_BLOCK)
        state = wire.state_in(content, header, shape=block.shape)
        self._host.take(_Waiting(socket, header, state, block, time.monotonic()))

    def _told(self, socket: _Socket, message: dict[str, Any]) -> None:
        if message["type"] != "assign":
            raise WireError(f"a message {message['type']} from a gateway")
        blocks = message["blocks"]
        self.slots = {block["slot"]: _key(block) for block in blocks}
        _log.info("%s assigns %d blocks", self._url, len(blocks))
        self.stop_loading()
        self._stopped = threading.Event()
        self._host.drop_unassigned()
        self._loading = asyncio.create_task(self._load_all(socket, blocks))

    async def _load_all(self, socket: _Socket, blocks: Sequence[dict[str, Any]]) -> None:
        """Load what is missing, and try again what failed, until another assignment comes."""
        loop = asyncio.get_running_loop()
        waits = delays(random.Random())
        left = list(blocks)
        said = set[str]()
        while left:
            failed = []
            for block in left:
                key = _key(block)
                slot = block["slot"]
                try:
                    if key not in self._host.blocks:
                        self._host.require_room(block["weights"]["bytes"])
                        loaded = await loop.run_in_executor(
                            self._host.loader, self._loaded, block, self._stopped
                        )
                        # Another gateway may have assigned it meanwhile, too.
                        if key not in self._host.blocks:
                            self._host.require_room(loaded.bytes)
                            self._host.blocks[key] = loaded
                        _trim(0)
                # Files may be anything, and so may be what their readers raise.
                except Exception as error:  # noqa: BLE001
                    why = f"{type(error).__name__}: {error}"[: wire.MAX_TEXT]
                    if why not in said:  # once, not for every try of a night
                        said.add(why)
                        _log.warning("block %s: %s", key[1][:12], why)
                    socket.write(wire.text_of("failed", slot=slot, why=why))
                    failed.append(block)
                else:
                    seconds = self._host.blocks[key].seconds
                    socket.write(wire.text_of("ready", slot=slot, seconds=seconds))
            if left := failed:
                await asyncio.sleep(next(waits))

    def _loaded(self, block: dict[str, Any], stopped: threading.Event) -> Block:
        """The block, from files that are here or at the gateway. Runs in the loader's thread."""
        contents: list[bytes] = []
        for file in (block["graph"], block["weights"]):
            content = self._host.cache.content(
                file["sha256"], file["bytes"], source=self._source, stopped=stopped
            )
            contents.append(content)
        graph, weights = contents
        tokens, width = block["shape"]
        return Block(graph, weights, shape=(tokens, width), threads=self._host.threads)


def _printable(text: str) -> str:
    """The words of a gateway for the log, on one line: what does not print is escaped."""
    parts: list[str] = []
    for character in text:
        prints = character.isprintable()
        parts.append(character if prints else character.encode("unicode_escape").decode())
    return "".join(parts)


def _key(block: dict[str, Any]) -> Key:
    return block["graph"]["sha256"], block["weights"]["sha256"]


def _speed() -> float:
    """GFLOP/s of a product of two matrices of 256 x 256, the best of a few."""
    matrix = np.ones((256, 256), np.float32)
    return 2e-9 * 256**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
