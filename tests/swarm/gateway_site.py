"""A gateway without sockets: a pico model whose blocks run in this process, host by host."""

import asyncio
import struct
import subprocess
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import torch
from PIL import Image

from clock import AtOnce, ThreadlessLoop
from common import DEPTH, FAMILIES, SIZE
from layershuffle.core.stack import blocks_of, depth_of
from layershuffle.core.tensors import logits_of
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.state import Answer, HostState, Swarm
from layershuffle.gateway.brain.sureness import CellAccuracy
from layershuffle.gateway.calibration.calibration import Calibration
from layershuffle.gateway.hosts.router import Router
from layershuffle.gateway.hosts.served_model import RemoteModel
from layershuffle.gateway.http.admission import Keys
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.requests import Gateway
from layershuffle.models import class_names_of, file_view, num_classes_of
from layershuffle.models.stem_head import run_head, run_stem
from pictures import noise
from waiting import HANGS

T = TypeVar("T")
VIT = FAMILIES["timm-vit"]
HOSTS = {"a": {0, 2}, "b": {1}, "c": {3}}
WATCHING = SimpleNamespace(
    watching=True,
    health=SimpleNamespace(audited=0, disagreed=0),
    children=SimpleNamespace(names=("a",)),
)
LIMITS = Limits(reserve_ms=10, deadline_ms=9000, suspect_ms=50, hop_floor_ms=5000, hop_cap_ms=5000)


@dataclass
class Blocks:
    """A transport that runs the blocks of a model itself.

    `faults` by host: what a visit raises. With a `gate`, visits wait until it is set.
    """

    model: torch.nn.Module | None
    faults: dict[str, Exception] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    visits: int = 0
    cancelled: int = 0

    async def visit(self, visit, state, *, form="fp32"):
        self.visits += 1
        if visit.host in self.faults:
            raise self.faults[visit.host]
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        with torch.inference_mode():
            after = blocks_of(self.model)[visit.block](torch.from_numpy(state.copy()))
        return Answer(after.numpy(), 0.5, 0.1)


class PicoModel:
    """What a gateway asks of a `ServedModel`, by a model in torch."""

    def __init__(self, model: torch.nn.Module) -> None:
        view, classes = file_view(model), num_classes_of(model)
        self.depth, self.hosted = depth_of(model), range(depth_of(model))
        self.manifest = SimpleNamespace(
            file_view=view, classes=classes, class_names=class_names_of(model)
        )
        self._model, self._shape = model, (view.channels, view.height, view.width)

    def stem(self, images: Any) -> Any:
        with torch.inference_mode():
            state, _ = run_stem(self._model, torch.from_numpy(images), forward=self._model)
            return state.numpy()

    def head(self, state: Any) -> Any:
        with torch.inference_mode():
            blank, state = torch.zeros(len(state), *self._shape), torch.from_numpy(state.copy())
            return run_head(self._model, blank, state=state, forward=self._logits).numpy()

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        return logits_of(self._model(images), self._model)


def made_up(depth: int = DEPTH) -> Calibration:
    """A calibration of the pico model: k blocks are right in 20 k percent."""
    rows = tuple(
        CellAccuracy(
            kept=k,
            top1=20.0 * k,
            low=20.0 * k - 5,
            high=20.0 * k + 2,
            sd_orders=1.0,
            orders_low=20.0 * k - 9,
            orders_high=20.0 * k + 6,
        )
        for k in range(1, depth + 1)
    )
    return Calibration(
        schema=4, weights="w", data="digit-pairs", split="test", seed=0, orders=7, images=90,
        classes=tuple("abcde"), rows=rows,
    )  # fmt: skip


@dataclass
class Site:
    """A gateway and its parts."""

    app: Any
    remote_model: RemoteModel
    router: Router
    blocks: Blocks
    client: httpx.AsyncClient

    async def classify(self, file: bytes, **options: Any) -> httpx.Response:
        """POST the file as the body."""
        return await classify(self.client, file, **options)

    def client_at(self, address: str) -> httpx.AsyncClient:
        """A client whose requests come from that address."""
        transport = httpx.ASGITransport(app=self.app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def classify(client: httpx.AsyncClient, file: bytes, **options: Any) -> httpx.Response:
    """POST the file as the body."""
    return await client.post("/v1/classify", content=file, params=options)


async def sent(
    app: Any,
    path: str,
    *chunks: bytes,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
    query: bytes = b"",
    address: str = "10.0.0.1",
    whole: bool = True,
    leave: asyncio.Event | None = None,
) -> tuple[int, bytes]:
    """The status and the body of an answer; raw ASGI, so that nothing is mended on the way.

    The client disconnects when `leave` is set, and in place of the end of a body that is not
    `whole`.
    """
    end = {"type": "http.request", "body": b""} if whole else {"type": "http.disconnect"}
    parts = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages, answer = [end, *reversed(parts)], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "query_string": query,
        "raw_path": path.encode("utf-8", "replace"), "headers": headers, "client": (address, 1),
        "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("gateway", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return answer[0]["status"], b"".join(message.get("body", b"") for message in answer[1:])


@asynccontextmanager
async def site(
    hosts: Mapping[str, set[int]] = HOSTS,
    *,
    swarm: Limits = LIMITS,
    raises: bool = True,
    make: Callable[[], torch.nn.Module] = VIT.wrapped,
    keys: Sequence[str] = (),
    page: bool = False,
    calibration: Calibration | None = None,
    coordinator: Any = WATCHING,
    **options: Any,
) -> AsyncIterator[Site]:
    """A gateway on this event loop to the model of `make`; `options` go to `Gateway`."""
    transport = Blocks(make())
    clock = asyncio.get_running_loop().time
    router = Router(transport, depth=DEPTH, limits=swarm, clock=clock)
    router.swarm = Swarm(HostState(name, frozenset(blocks)) for name, blocks in hosts.items())
    remote_model = RemoteModel(PicoModel(make()), router, calibration=calibration)  # type: ignore[arg-type]
    gateway = Gateway(remote_model, coordinator, keys=Keys(keys), **options)
    app = create_app(gateway, page=page)
    wire = httpx.ASGITransport(app=app, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=wire, base_url="http://gateway") as client:
        try:
            yield Site(app, remote_model, router, transport, client)
        finally:
            remote_model.close()


@contextmanager
def started(
    serving: Callable[[Callable[[Any], None]], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[Any]:
    """What `serving(told)` tells from a thread of its own, on the event loop that `loop` makes; it
    is cancelled at the end."""
    reports, ready, running = list[Any](), threading.Event(), list[Any]()

    def tell(what: Any) -> None:
        reports.append(what)
        ready.set()

    async def go() -> None:
        running.extend([asyncio.current_task(), asyncio.get_running_loop()])
        try:
            await serving(tell)
        except asyncio.CancelledError:
            pass
        finally:
            ready.set()

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(go())

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        assert ready.wait(HANGS)
        yield reports[0]
    finally:
        task, its_loop = running
        its_loop.call_soon_threadsafe(task.cancel)
        thread.join(30)


def run(
    test: Callable[[Site], Awaitable[T]],
    *args: Any,
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **options: Any,
) -> T:
    """`test(site)` on a fresh gateway, whose clock is that of the event loop that `loop` makes."""

    async def go() -> T:
        async with site(*args, **options) as place:
            return await test(place)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(go())


def run_in_virtual_time(test: Callable[[Site], Awaitable[T]], *args: Any, **options: Any) -> T:
    """As `run`; all that computes takes no time, so that deadlines come to the millisecond."""
    return run(test, *args, loop=ThreadlessLoop, decoder_threads=AtOnce(), **options)


def certify(place: Path) -> None:
    """An authority in "ca.pem", and of it "cert.pem" with "key.pem" for 127.0.0.1."""
    elliptic = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    names = ("-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1")
    usage = ("-addext", "keyUsage=critical,keyCertSign,digitalSignature")
    authority = ("-CA", place / "ca.pem", "-CAkey", place / "ca.key")
    for name, key, more in (
        ("ca.pem", "ca.key", ("-subj", "/CN=authority", *usage)),
        ("cert.pem", "key.pem", (*names, *authority, "-addext", "basicConstraints=CA:FALSE")),
    ):
        words = ("req", "-x509", *elliptic, *more, "-keyout", place / key, "-out", place / name)
        subprocess.run(
            ["openssl", *map(str, words)], capture_output=True, check=True, timeout=HANGS
        )
    (place / "key.pem").chmod(0o600)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png_claiming(
    width: int, height: int, *, kind: int = 2, pixels: bytes = zlib.compress(bytes(1000))
) -> bytes:
    """A PNG of a few bytes that claims to be so large; `pixels` are compressed."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    end = png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + end


def picture(seed: int = 0, *, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Coloured noise."""
    return noise(seed, size=size)
