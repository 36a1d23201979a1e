"""Run the gateway: one process, beside router and coordinator, on their event loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.gateway.access import check_address
from layershuffle.swarm.gateway.limits import GatewayLimits

PORT = 8000
_GRACE = 5  # seconds that requests under way get when the server is told to end
_HEADER_BYTES = 1 << 14
_BACKLOG = 128


async def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    public: bool = False,
    limits: GatewayLimits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is told the address once it is open.

    `port` 0 takes a free one. Raises `UsageError` for an address that other machines reach if the
    app takes no API key, unless it is to be `public`; `LayerShuffleError` for a port in use.
    """
    check_address(host, keyed=app.state.keyed, public=public)
    # It tells every broken form, at the client's pace.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    with _listening(host, port) as listener:
        name, number = listener.getsockname()[:2]
        server = uvicorn.Server(server_config(app, limits=limits or GatewayLimits()))
        if ready is not None:
            ready(f"http://{f'[{name}]' if ':' in name else name}:{number}")
        await server.serve(sockets=[listener])


def server_config(app: FastAPI, *, limits: GatewayLimits) -> uvicorn.Config:
    """How uvicorn is to run: no forwarded addresses believed, no version told, bounded."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # The rate limit goes by the address of the connection. Behind a proxy that is the proxy's.
        proxy_headers=False,
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=_GRACE,
    )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, or asyncio leaves Nagle's algorithm on, and every answer, which goes
    # out as head and body, waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LayerShuffleError(
            f"The gateway cannot listen on {host}:{port} ({error.strerror or error})",
            hint="choose another port or address",
        ) from error
    return listener
