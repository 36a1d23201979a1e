"""A gateway without sockets or Ray: a pico model whose blocks run in this process, host by host."""

import asyncio
import io
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from common import DEPTH, FAMILIES, SIZE
from layershuffle.stack import blocks_of
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, pack, unpack
from layershuffle.swarm.remote_model import RemoteModel
from layershuffle.swarm.router import Router
from layershuffle.swarm.server import run as serving
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.state import HostView, Swarm

VIT = FAMILIES["timm-vit"]
HOSTS = {"a": {0, 2}, "b": {1}, "c": {3}}
LIMITS = Limits(reserve_ms=10, deadline_ms=9000, suspect_ms=50, hop_floor_ms=5000, hop_cap_ms=5000)


@dataclass
class Blocks:
    """A transport that runs the blocks of a model itself; `faults` by host: what a visit raises."""

    model: torch.nn.Module
    faults: dict[str, Exception] = field(default_factory=dict)
    delay: float = 0.0
    visits: int = 0
    cancelled: int = 0

    async def visit(self, visit, packet):
        self.visits += 1
        if visit.host in self.faults:
            raise self.faults[visit.host]
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        state = torch.from_numpy(unpack(packet).copy())
        with torch.inference_mode():
            for block in visit.blocks:
                state = blocks_of(self.model)[block](state)
        return Answer(pack(state.numpy(), packet.wire), 0.5, 0.1)


@dataclass
class Site:
    """Everything that is running."""

    app: Any
    front: RemoteModel
    router: Router
    blocks: Blocks
    client: httpx.AsyncClient

    async def classify(self, *files: bytes, **fields: Any) -> httpx.Response:
        """POST the files as a form."""
        return await classify(self.client, *files, **fields)

    def client_at(self, address: str) -> httpx.AsyncClient:
        """A client whose requests come from that address."""
        transport = httpx.ASGITransport(app=self.app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def classify(client: httpx.AsyncClient, *files: bytes, **fields: Any) -> httpx.Response:
    """POST the files as a form."""
    parts = [("image", (f"{i}.png", one)) for i, one in enumerate(files)]
    data = {name: str(value) for name, value in fields.items()}
    return await client.post("/v1/classify", files=parts, data=data)


@asynccontextmanager
async def site(
    hosts: Mapping[str, set[int]] = HOSTS,
    *,
    swarm: Limits = LIMITS,
    raises: bool = True,
    **options: Any,
) -> AsyncIterator[Site]:
    """A gateway on this event loop; `options` go to `create_app`."""
    blocks = Blocks(VIT.wrapped())
    router = Router(blocks, depth=DEPTH, limits=swarm)
    router.swarm = Swarm(HostView(name, frozenset(held)) for name, held in hosts.items())
    front = RemoteModel(VIT.wrapped(), router)
    app = create_app(front, **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        try:
            yield Site(app, front, router, blocks, client)
        finally:
            front.close()


@asynccontextmanager
async def listening(
    app: Any, limits: GatewayLimits, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Any, int]]:
    """(server, port) of `app` on a socket of this machine."""
    with serving._listening("127.0.0.1", 0, limits) as listener:
        server = serving._Server(serving.server_config(app), limits=limits, tls=tls)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running


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
        subprocess.run(["openssl", *map(str, words)], capture_output=True, check=True, timeout=20)
    (place / "key.pem").chmod(0o600)


def picture(seed: int = 0, *, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """The image as a file of that format."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()
