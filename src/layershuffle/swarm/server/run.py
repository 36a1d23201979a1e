"""Run the gateway: one process, beside router and coordinator, on their event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.server.auth import check_address
from layershuffle.swarm.server.door import Door, Punctual
from layershuffle.swarm.server.limits import GatewayLimits

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
    tls: ssl.SSLContext | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is told the address once it is open.

    `port` 0 takes a free one. With `tls` (`https.server_context`) the gateway speaks https alone.
    Raises `UsageError` for an address that other machines reach if the app takes no API key, unless
    it is to be `public`; `LayerShuffleError` for a port in use.
    """
    check_address(host, keyed=app.state.keyed, public=public)
    # They tell every broken form and head, at the client's pace.
    for name in ("python_multipart", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    limits = limits or GatewayLimits()
    with _listening(host, port, limits) as listener:
        name, number = listener.getsockname()[:2]
        if ready is not None:
            scheme = "http" if tls is None else "https"
            ready(f"{scheme}://{f'[{name}]' if ':' in name else name}:{number}")
        await _Server(server_config(app), limits=limits, tls=tls).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn behind our door. It accepts connections itself: uvicorn would set no time-outs."""

    def __init__(
        self, config: uvicorn.Config, *, limits: GatewayLimits, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._patience, self._tls = limits.head_ms / 1000, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept connections."""
        await super().startup(sockets=[])
        loop = asyncio.get_running_loop()
        handshake = None if self._tls is None else self._patience
        for listener in sockets or []:
            self.servers.append(
                await loop.create_server(
                    self._protocol,
                    sock=listener,
                    backlog=_BACKLOG,
                    ssl=self._tls,
                    ssl_handshake_timeout=handshake,
                    ssl_shutdown_timeout=handshake,
                )
            )

    def _protocol(self) -> Punctual:
        return Punctual(
            patience=self._patience,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


def server_config(app: FastAPI) -> uvicorn.Config:
    """How uvicorn is to run: no forwarded addresses believed, no version told, bounded."""
    return uvicorn.Config(
        app,
        http=Punctual,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # The limits per client go by the address of the connection. Behind a proxy that is the
        # proxy's.
        proxy_headers=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=_GRACE,
    )


def _listening(host: str, port: int, limits: GatewayLimits) -> Door:
    listener = Door(socket.AF_INET6 if ":" in host else socket.AF_INET, limits=limits)
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
