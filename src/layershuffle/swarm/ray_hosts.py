"""Block hosts as Ray actors: one process per host, and visits as calls to it.

Chosen by measurement: asynchronous actors (they drop a cancelled call, which a synchronous actor
would still run), no restarts by Ray (a call to a restarting actor blocks for two seconds), detached
actors (a restarted server finds its hosts unchanged).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from layershuffle.errors import LayerShuffleError
from layershuffle.machine import imports_stay
from layershuffle.swarm.channel import ChannelLink, ChannelLost, ChannelServer, credentials_in
from layershuffle.swarm.frames import (
    BrokenFrame,
    answer_frame,
    read_answer,
    read_visit,
    split,
    visit_frame,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Packet,
    Visit,
    VisitError,
)
from layershuffle.swarm.placement import Carrier, HostCall, Node
from layershuffle.swarm.ray_config import HOST_MARK, channel_ports, host_names
from layershuffle.text import one_line

if TYPE_CHECKING:
    from layershuffle.swarm.host import HostInfo

_Result = TypeVar("_Result")
_MESSAGE = 200  # characters from the end of Ray's message about a process that does not start
_SPARE = 64  # calls that an actor accepts beyond its queue: canaries, reports
_MILLI = 1000.0
_log = logging.getLogger(__name__)


class BlockHostActor:
    """A `BlockHost` in its own process, which imports no heavy package but torch."""

    def __init__(self, name: str, *, limits: Mapping[str, Any], threads: int | None) -> None:
        # Importing torch takes a third of the time until a host holds its blocks.
        with imports_stay():
            from layershuffle.swarm.host import BlockHost

        self._limits = Limits(**limits)
        self._host = BlockHost(name, limits=self._limits, threads=threads)
        self._server: ChannelServer | None = None

    async def listen(self) -> None:
        """Open the data channel, unless it is open. Raises `LayerShuffleError` if that fails."""
        from ray.util import get_node_ip_address

        if self._server is None:
            credentials = credentials_in(os.environ)
            server = ChannelServer(self._host, credentials=credentials, limits=self._limits)
            # The address of Ray, which is 127.0.0.1 in a swarm on one machine.
            self._host.channel = await server.open(
                get_node_ip_address(), ports=channel_ports(os.environ)
            )
            self._server = server

    async def visit(self, order: bytes) -> bytes:
        """`BlockHost.visit` with frames as argument and result."""
        blocks, packet, budget_ms = read_visit(*split(order))
        # Ray copies bytes unchanged; with separate arguments a visit takes a quarter longer.
        return b"".join(
            answer_frame(0, await self._host.visit(blocks, packet, budget_ms=budget_ms))
        )

    async def call(self, method: HostCall, *args: Any) -> Any:
        """The result of this method of the host."""
        # In a thread, because a load takes long and must not block visits.
        return await asyncio.to_thread(getattr(self._host, method), *args)


class RayTransport:
    """Visits to Ray actors (`messages.Transport`), over their data channels where these are open.

    `actors` and `links` (to the channels) are keyed by host.
    """

    def __init__(self, ray: Any) -> None:
        self._ray, self.actors = ray, dict[str, Any]()
        self.links: dict[str, ChannelLink] = {}

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer; see `messages.Transport`."""
        budget_ms, link = visit.budget_ms, self.links.get(visit.host)
        if link is not None and link.open:
            begun = time.monotonic()
            try:
                return await link.visit((visit.block,), packet, budget_ms=budget_ms)
            except ChannelLost:
                # Blocks are stateless, so the visit may be repeated; and if the host is dead, Ray
                # reports it.
                budget_ms -= (time.monotonic() - begun) * _MILLI
        answer = await self._call(visit, packet, budget_ms=budget_ms)
        if link is not None:
            link.bypassed()
        return answer

    async def _call(self, visit: Visit, packet: Packet, *, budget_ms: float) -> Answer:
        actor, host = self.actors.get(visit.host), visit.host
        if actor is None:
            raise HostUnavailable(f"No host {host} is known")
        order = b"".join(visit_frame(0, (visit.block,), packet=packet, budget_ms=budget_ms))
        try:
            sealed = await called(self._ray, lambda: actor.visit.remote(order), host=host)
            return read_answer(*split(sealed))
        except VisitError:
            raise
        except BrokenFrame as error:
            _log.warning("Host %s sent an invalid answer: %s", host, error.cause)
            raise HostFailed(f"The answer of host {host} cannot be read") from error
        except LayerShuffleError as error:
            raise HostFailed(f"Host {host} failed: {error.cause}") from error

    async def disconnect(self, host: str) -> None:
        """Close the data channel to `host`, if there is one."""
        if link := self.links.pop(host, None):
            await link.close()


async def called(ray: Any, submit: Callable[[], Any], *, host: str) -> Any:
    """The result of the remote call that `submit` makes. Cancellation cancels the call, too.

    Raises the host's error unchanged if it is a `LayerShuffleError`, else a `VisitError`. Clients
    read its text, so Ray's messages go to the log.
    """
    errors, reference = ray.exceptions, None
    try:
        reference = submit()
        return await reference
    except asyncio.CancelledError:
        if reference is not None and ray.is_initialized():
            with suppress(TypeError):  # "no owner": Ray was restarted since
                ray.cancel(reference)
        raise
    except errors.ActorDiedError as error:
        raise HostGone(f"The process of host {host} is dead") from error
    except errors.RayTaskError as error:
        if isinstance(error.cause, LayerShuffleError):
            raise error.cause from None
        _log.warning("A call to host %s failed unexpectedly: %s", host, one_line(error.cause))
        raise HostFailed(f"Host {host} broke on the call") from error
    except errors.PendingCallsLimitExceeded as error:
        raise HostUnavailable(f"Host {host} has too many waiting calls") from error
    except errors.RayError as error:  # the host cannot be reached, or its answer is lost
        # Not a warning: while a host is away, every visit to it ends here.
        _log.debug("Host %s is not available: %s", host, one_line(error))
        raise HostUnavailable(f"Host {host} cannot be reached now") from error


class RayHosts:
    """The processes of block hosts on the members of a cluster (`placement.HostBackend`).

    `ray`: the connected module. `threads`: torch threads of each host; `None`: the
    `OMP_NUM_THREADS` of its machine. `only`: which of the members' hosts are run (default: all).
    `channel`: whether visits use the hosts' data channels where these are reachable; else they use
    only Ray. A call that fails raises `LayerShuffleError`; callers bound its time.
    """

    def __init__(
        self,
        ray: Any,
        *,
        limits: Limits,
        threads: int | None = 1,
        only: Collection[str] | None = None,
        channel: bool = True,
    ) -> None:
        self._ray, self._limits, self._threads, self._only = ray, limits, threads, only
        self.transport, self._channel = RayTransport(ray), channel
        self._why_not: dict[str, str] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._starts: dict[str, asyncio.Semaphore] = {}
        settings = f"{limits.model_dump_json()} {threads}".encode()
        self._kind = hashlib.sha256(settings).hexdigest()[:8]

    def forget(self) -> None:
        """Drop all handles and pending starts: a handle of a dead Ray would block its successor."""
        self.transport.actors.clear()
        for link in self.transport.links.values():
            link.end()
        self.transport.links.clear()
        self._making.clear()
        self._starts.clear()

    async def nodes(self) -> tuple[Node, ...]:
        """The living members that run block hosts, sorted by id."""
        members = await self._outside(self._ray.nodes)
        nodes = [
            Node(member["NodeID"], host_names(member["Resources"]), member["NodeManagerAddress"])
            for member in members
            if member["Alive"] and HOST_MARK in member["Resources"]
        ]
        if self._only is not None:
            ours = {node: tuple(n for n in node.names if n in self._only) for node in nodes}
            nodes = [replace(node, names=names) for node, names in ours.items() if names]
        return tuple(sorted(nodes, key=lambda node: node.id))

    async def start(self, name: str, *, node: str) -> HostInfo:
        """Start a process for the host `name` on the member `node`, unless there is one.

        A process with other limits is replaced.
        """
        if earlier := self._making.get(name):
            await asyncio.wait({earlier})
        # A new process imports torch, which takes two seconds of a core. More at once than cores
        # would slow down the running hosts. The number of cores of other machines is unknown, but
        # these usually run one host.
        async with self._starts.setdefault(node, asyncio.Semaphore(os.cpu_count() or 1)):
            return await self._begun(name, node)

    async def _begun(self, name: str, node: str) -> HostInfo:
        making = self._making[name] = asyncio.create_task(self._make(name, node))
        # A cancellation does not stop the thread; `end` waits for the process that it starts.
        await asyncio.shield(making)
        try:
            why_not = await self._listening(name) if self._channel else "it is switched off"
            info: HostInfo = await self.call(name, "info")
        except HostGone as error:
            # The reason, such as a package that the host lacks, is at the end of Ray's message.
            why = " ".join(str(error.__cause__).split())[-_MESSAGE:]
            _log.warning("The process of host %s does not start: %s", name, why)
            raise HostGone(
                f"The process of host {name} does not start; the log says more"
            ) from error
        self._why_not[name] = why_not
        if not why_not:
            await self._connect(name, info.channel)
        return info

    async def _listening(self, name: str) -> str:
        """Let the host open its data channel. Returns the reason if it cannot, else ""."""
        actor = self.transport.actors[name]
        try:
            await called(self._ray, actor.listen.remote, host=name)
        except HostGone:
            raise
        except LayerShuffleError as error:
            _log.warning("Visits to host %s go over Ray, not its channel: %s", name, error.cause)
            return error.cause
        return ""

    async def _connect(self, name: str, address: str) -> None:
        links = self.transport.links
        # A process that existed already keeps its connection.
        if name not in links or links[name].address != address:
            await self.transport.disconnect(name)
            links[name] = ChannelLink(
                name, address, credentials=credentials_in(os.environ), limits=self._limits
            )
        # Otherwise the first visits would use Ray, and look slower than later ones.
        await links[name].tried()

    def carriers(self) -> Mapping[str, Carrier]:
        """How visits reach each host now."""
        links = self.transport.links
        return {
            name: Carrier("channel")
            if (link := links.get(name)) is not None and link.open
            else Carrier("ray", self._why_not.get(name, "") if link is None else link.why)
            for name in self.transport.actors
        }

    async def _make(self, name: str, node: str) -> None:
        self.transport.actors[name] = await self._outside(lambda: self._actor_of(name, node))

    def _actor_of(self, name: str, node: str) -> Any:
        """The handle of the actor of `name` on `node`, which may not have started yet."""
        mine = f"{name}@{node}#{self._kind}"
        # End processes with this host's name on other machines or with other limits.
        for other in self._ray.util.list_named_actors():
            if other.startswith(f"{name}@") and other != mine:
                self._ray.kill(self._ray.get_actor(other))
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = self._ray.remote(BlockHostActor).options(
            name=mine,
            get_if_exists=True,
            lifetime="detached",
            scheduling_strategy=strategy(node, soft=False),
            num_cpus=0,
            max_restarts=0,
            max_concurrency=self._limits.max_queue + _SPARE,
            max_pending_calls=2 * (self._limits.max_queue + _SPARE),
        )
        return options.remote(name, limits=self._limits.model_dump(), threads=self._threads)

    async def call(self, name: str, method: HostCall, *args: Any) -> Any:
        """The result of this method of the host."""
        actor = self.transport.actors.get(name)
        if actor is None:
            raise HostUnavailable(f"No host {name} is known")
        # Not on the loop: it copies weights into the store of the host's member before it returns.
        reference = await self._outside(partial(actor.call.remote, method, *args))
        return await called(self._ray, lambda: reference, host=name)

    async def end(self, name: str) -> None:
        """End the host's process, also one that a cancelled start is still creating."""
        if making := self._making.pop(name, None):
            await asyncio.wait({making})
        await self.transport.disconnect(name)
        actor = self.transport.actors.get(name)
        if actor is not None:
            await self._outside(lambda: self._ray.kill(actor))
        # Not before: if the kill failed, a later `end` still has the handle.
        self.transport.actors.pop(name, None)

    async def _outside(self, call: Callable[[], _Result]) -> _Result:
        """Run a blocking call in its own thread, for which the process does not wait at its end.

        A call to a dead GCS never returns, and a thread of asyncio's pool would keep the process
        from ending.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Result] = loop.create_future()

        def settle(done: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lambda: None if answer.done() else done())

        def work() -> None:
            try:
                settle(partial(answer.set_result, call()))
            except (self._ray.exceptions.RayError, OSError, ValueError) as error:
                _log.debug("Ray did not carry out a call: %s", one_line(error))
                failure = HostUnavailable("Ray accepts no calls now")
                failure.__cause__ = error
                settle(partial(answer.set_exception, failure))
            finally:  # only after an unexpected error, whose traceback the thread prints
                broken = HostUnavailable("A call to Ray failed; the log has details")
                settle(partial(answer.set_exception, broken))

        threading.Thread(target=work, daemon=True, name="ray-call").start()
        return await answer
