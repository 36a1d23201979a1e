"""The data channel: states are sent to a host over a separate connection, beside Ray.

A call of an actor took 2 ms for a state of 148 KiB, a socket a tenth of that (decision 025). So
each host opens one server, whose address is in its `HostInfo`, and a gateway keeps one connection
to each host, which carries concurrent visits. Ray still starts and watches the hosts, and carries
the visits to a host whose channel cannot be reached.

Both sides prove that they hold the swarm's token before anything else is read: the server sends a
random number, the client answers with its own random number and an HMAC over both, and the server
with another HMAC. With the swarm's certificates both sides also use TLS. Use it from one event
loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.frames import (
    BrokenFrame,
    FrameKind,
    FrameStream,
    Head,
    answer_frame,
    failure_frame,
    read_answer,
    read_visit,
    visit_frame,
    word_frame,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostFailed, Packet, VisitError
from layershuffle.text import one_line

if TYPE_CHECKING:
    from layershuffle.swarm.host import BlockHost  # it imports torch

_MILLI = 1000.0
_NONCE = 32  # bytes
_CONNECTIONS = 64  # at one host; a swarm has one gateway, and one more when it is replaced
_log = logging.getLogger(__name__)


class ChannelLost(LayerShuffleError):
    """The channel ended before the answer; the host may be alive or dead."""


@dataclass(frozen=True)
class Credentials:
    """The credentials of a member of the swarm: the token, and its TLS contexts."""

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
            # Both sides need a certificate of the swarm, as with Ray.
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
    """32 bytes that only a holder of the token can compute for these random numbers.

    `side`: who computes it, the gateway or the host named `host`.
    """
    # Without the side, a proof could be sent back to its author; without the host, one host's
    # random number could be signed for another.
    return hmac.digest(token, b"layershuffle channel " + side + host.encode() + nonces, "sha256")


# --- the host's side ------------------------------------------------------------------------------


class ChannelServer:
    """Accepts connections over which gateways visit `host`.

    `connections`: the open connections. `refused`: number of connections without a proof.
    """

    def __init__(self, host: BlockHost, *, credentials: Credentials, limits: Limits) -> None:
        self.host, self.credentials, self.limits = host, credentials, limits
        self.connections: set[_Served] = set()
        self.refused = 0
        self._server: asyncio.Server | None = None

    async def open(self, address: str, *, ports: Sequence[int] = (0,)) -> str:
        """Listen on the first free port of `ports` (0: any). Returns "address:port".

        Raises `LayerShuffleError` if none is.
        """
        loop, tls = asyncio.get_running_loop(), self.credentials.server
        patience = None if tls is None else self.limits.channel_ms / _MILLI
        for port in ports:
            try:
                self._server = await loop.create_server(
                    lambda: _Served(self).stream, address, port, ssl=tls,
                    ssl_handshake_timeout=patience,
                )  # fmt: skip
            except OSError as error:
                why = one_line(error)
            else:
                return f"{address}:{self._server.sockets[0].getsockname()[1]}"
        raise LayerShuffleError(f"No data channel can be opened on {address} ({why})")

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for connection in [*self.connections]:
            connection.stream.abort("the host ends")


class _Served:
    """The host's end of the connection of one gateway."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        self._nonce = secrets.token_bytes(_NONCE)
        self._loop = asyncio.get_running_loop()
        self._visits: dict[int, Future[Answer]] = {}
        self._patience: asyncio.TimerHandle | None = None
        self.stream = FrameStream(self._receive, made=self._made, lost=self._lost)

    def _made(self) -> None:
        connections = self._server.connections
        if len(connections) >= _CONNECTIONS:
            self.stream.abort("there are too many connections")
            return
        connections.add(self)
        self._patience = asyncio.get_running_loop().call_later(
            self._server.limits.channel_ms / _MILLI, self.stream.abort, "it sent no proof in time"
        )
        self.stream.send(word_frame(FrameKind.CHALLENGE, words=self._nonce))

    def _lost(self, why: str) -> None:
        self._server.connections.discard(self)
        if self._patience is not None:
            self._patience.cancel()
        if not self.stream.trusted:
            # A warning only once, because repeated connections would fill the log.
            level = logging.DEBUG if self._server.refused else logging.WARNING
            _log.log(level, "A connection to the data channel was refused: %s", why)
            self._server.refused += 1
        # Their results are no longer needed.
        for visit in [*self._visits.values()]:
            visit.cancel()

    def _receive(self, head: Head, tail: bytearray) -> None:
        if not self.stream.trusted:
            self._check(head, tail)
        elif head.kind is FrameKind.CANCEL:
            # The visit may be over already.
            if visit := self._visits.pop(head.id, None):
                visit.cancel()
        else:
            self._begin(head.id, *read_visit(head, tail))

    def _begin(
        self, number: int, blocks: tuple[int, ...], packet: Packet, budget_ms: float
    ) -> None:
        try:
            visit = self._server.host.begin(blocks, packet, budget_ms=budget_ms)
        except LayerShuffleError as error:
            self._fail(number, error)
            return
        self._visits[number] = visit
        # A task would take as long as the rest of this method. The visit ends in another thread.
        visit.add_done_callback(
            lambda visit: self._loop.call_soon_threadsafe(self._answer, number, visit)
        )

    def _check(self, head: Head, tail: bytearray) -> None:
        """Trust the peer from now on if it has the token. Raises `BrokenFrame`."""
        token, name = self._server.credentials.token, self._server.host.name
        nonces = self._nonce + tail[:_NONCE]
        proof = proof_of(token, b"gateway ", host=name, nonces=nonces)
        if head.kind is not FrameKind.PROOF or not hmac.compare_digest(proof, tail[_NONCE:]):
            raise BrokenFrame("a wrong token")
        self.stream.trusted = True
        if self._patience is not None:
            self._patience.cancel()
        mine = proof_of(token, b"host ", host=name, nonces=nonces)
        self.stream.send(word_frame(FrameKind.WELCOME, words=mine))

    def _answer(self, number: int, visit: Future[Answer]) -> None:
        """Send the result or the error of a visit, unless it was cancelled."""
        self._visits.pop(number, None)
        if visit.cancelled():
            return
        if (error := visit.exception()) is not None:
            self._fail(number, error)
        else:
            self.stream.send(answer_frame(number, visit.result()))

    def _fail(self, number: int, error: BaseException) -> None:
        if not isinstance(error, VisitError):
            name = self._server.host.name
            if not isinstance(error, LayerShuffleError):  # unexpected
                _log.error("A visit of host %s broke", name, exc_info=error)
            error = HostFailed(f"Host {name} failed: {one_line(error)}")
        self.stream.send(failure_frame(number, error))


# --- the gateway's side ---------------------------------------------------------------------------


class _Connection:
    """An open connection to a host. `ended` is done, with the reason, when it has ended."""

    def __init__(self, host: str, *, token: bytes) -> None:
        self._host, self._token = host, token
        self._nonce = secrets.token_bytes(_NONCE)
        self._proof = b""
        self._numbers = count(1)
        self._visits: dict[int, asyncio.Future[Answer]] = {}
        loop = asyncio.get_running_loop()
        self.proved: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.answered = False
        self.stream = FrameStream(self._receive, made=lambda: None, lost=self._lost)

    async def visit(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Answer:
        """The host's answer; cancellation cancels the visit at the host."""
        number = next(self._numbers)
        frame = visit_frame(number, blocks, packet=packet, budget_ms=budget_ms)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._visits[number] = answer
        self.stream.send(frame)
        try:
            return await answer
        except asyncio.CancelledError:
            self.stream.send(word_frame(FrameKind.CANCEL, number=number))
            raise
        finally:
            self._visits.pop(number, None)

    def _lost(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
        waits: list[asyncio.Future[Any]] = [self.proved, *self._visits.values()]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(ChannelLost(f"The channel to host {self._host}: {why}"))

    def _receive(self, head: Head, tail: bytearray) -> None:
        if self.stream.trusted:
            self._take(head, tail)
        elif head.kind is FrameKind.CHALLENGE and not self._proof and len(tail) == _NONCE:
            nonces = bytes(tail) + self._nonce
            mine = proof_of(self._token, b"gateway ", host=self._host, nonces=nonces)
            self._proof = proof_of(self._token, b"host ", host=self._host, nonces=nonces)
            self.stream.send(word_frame(FrameKind.PROOF, words=self._nonce + mine))
        elif (
            head.kind is FrameKind.WELCOME
            and self._proof
            and hmac.compare_digest(self._proof, tail)
        ):
            self.stream.trusted = True
            if not self.proved.done():
                self.proved.set_result(None)
        else:
            raise BrokenFrame("a wrong token")

    def _take(self, head: Head, tail: bytearray) -> None:
        answer = self._visits.get(head.id)
        if answer is None or answer.done():
            return  # of a cancelled visit
        try:
            answer.set_result(read_answer(head, tail))
        except VisitError as error:
            answer.set_exception(error)
        self.answered = True


class ChannelLink:
    """The connection to a host's channel, which is reopened when it is lost.

    `why` is the reason for a missing connection, "" while it is open. The pauses between tries
    double, from `suspect_ms` to `suspect_max_ms`.
    """

    def __init__(
        self, host: str, address: str, *, credentials: Credentials, limits: Limits
    ) -> None:
        self.host, self.address, self.why = host, address, "it is being opened"
        self._credentials, self._limits = credentials, limits
        self._connection: _Connection | None = None
        self._tried = asyncio.Event()
        self._logged = False
        self._task = asyncio.create_task(self._run())

    @property
    def open(self) -> bool:
        """Whether it can carry visits now."""
        return self._connection is not None and self._connection.stream.open

    async def tried(self) -> None:
        """Wait until the first attempt to open it has succeeded or failed."""
        await self._tried.wait()

    async def visit(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Answer:
        """The host's answer. Raises its `VisitError`, or `ChannelLost` if the channel ended."""
        if self._connection is None:
            raise ChannelLost(f"The channel to host {self.host}: {self.why}")
        return await self._connection.visit(blocks, packet, budget_ms=budget_ms)

    def bypassed(self) -> None:
        """Log that a visit went over Ray, once until the channel is open again."""
        if self.why and not self._logged:
            self._logged = True
            _log.warning(
                "Visits to host %s go over Ray, not its data channel: %s", self.host, self.why
            )

    def end(self) -> None:
        """End the connection soon, and do not reopen it."""
        self._task.cancel()

    async def close(self) -> None:
        """End the connection, and do not reopen it."""
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        first, longest = self._limits.suspect_ms, self._limits.suspect_max_ms
        pause = first
        while True:
            connection = _Connection(self.host, token=self._credentials.token)
            try:
                self.why = await self._until_lost(connection)
            finally:
                self._connection = None
                connection.stream.abort("the gateway has closed it")
            self._tried.set()
            # A connection that breaks before the first answer counts as a failed attempt.
            pause = first if connection.answered else min(2 * pause, longest)
            await asyncio.sleep(pause / _MILLI)

    async def _until_lost(self, connection: _Connection) -> str:
        """Open the connection, and wait until it ends. Returns why it failed or ended."""
        limit = self._limits.channel_ms
        try:
            async with asyncio.timeout(limit / _MILLI):
                await self._opened(connection)
        except TimeoutError:
            return f"{self.address} did not answer within {limit:g} ms"
        except (OSError, ChannelLost) as error:
            return f"{self.address} cannot be used ({one_line(error)})"
        if self._logged:
            _log.warning("The data channel to host %s is open again", self.host)
        self._connection, self.why, self._logged = connection, "", False
        self._tried.set()
        return f"the connection to {self.address} was lost ({await connection.ended})"

    async def _opened(self, connection: _Connection) -> None:
        address, _, port = self.address.rpartition(":")
        tls = self._credentials.client
        await asyncio.get_running_loop().create_connection(
            lambda: connection.stream,
            address,
            int(port),
            ssl=tls,
            server_hostname=None if tls is None else address,
        )
        await connection.proved
