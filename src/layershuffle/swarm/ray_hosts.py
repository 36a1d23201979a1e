"""Block hosts as Ray actors: one process per host, and visits as calls to it.

Measured choices: asynchronous actors (a cancelled call is dropped, a synchronous one would run it
all the same), no restarts by Ray (a call to a restarting actor blocks for two seconds), detached
(a gateway that starts again finds its hosts as they were).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import pickle
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Visit,
    VisitError,
)
from layershuffle.swarm.placement import Node
from layershuffle.swarm.ray_config import HOST_MARK, host_names
from layershuffle.swarm.wire import Packet, unpack

if TYPE_CHECKING:
    from layershuffle.swarm.host import HostInfo, Misbehaviour

_Result = TypeVar("_Result")
_TOLD = 200  # characters of what Ray says
_SPARE = 64  # calls that an actor takes beyond its queue: canaries, questions
# What reading a message raises that is none, or that another version of this package wrote.
_UNREADABLE = (
    pickle.UnpicklingError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    OverflowError, TypeError, ValueError,
)  # fmt: skip


class BlockHostActor:
    """A `BlockHost` in a process of its own. What it imports is torch and light."""

    def __init__(self, name: str, *, limits: Mapping[str, Any], threads: int) -> None:
        from layershuffle.swarm.host import BlockHost

        self._host = BlockHost(name, limits=Limits(**limits), threads=threads)

    async def load(self, program: bytes, blocks: Sequence[int], *tensors: bytes) -> None:
        """`BlockHost.load`, beside the visits under way."""
        held = dict(zip(blocks, tensors, strict=True))
        await asyncio.to_thread(self._host.load, program, held)

    async def unload(self, blocks: Sequence[int]) -> None:
        """`BlockHost.unload`."""
        self._host.unload(blocks)

    async def visit(self, order: bytes) -> bytes:
        """`BlockHost.visit`, in and out as `_sealed` bytes."""
        blocks, packet, budget_ms = pickle.loads(order)
        return _sealed(await self._host.visit(blocks, packet, budget_ms=budget_ms))

    async def info(self) -> HostInfo:
        """`BlockHost.info`."""
        return self._host.info()

    async def drain(self) -> None:
        """`BlockHost.drain`."""
        self._host.drain()

    async def misbehave(self, kind: Misbehaviour, factor: float) -> None:
        """`BlockHost.misbehave`, for drills."""
        self._host.misbehave(kind, factor)


def _sealed(message: object) -> bytes:
    # Ray passes bytes on as they are; with what is in them as arguments a hop takes a quarter more.
    return pickle.dumps(message, protocol=5)


def opened(sealed: Any, *, host: str) -> Answer:
    """The answer that a host sent. Raises `HostFailed` for what is none."""
    try:
        answer: Answer = pickle.loads(sealed)
        unpack(answer.packet)
        sound = all(
            math.isfinite(number) and number >= 0
            for number in (answer.compute_ms, answer.queue_ms, answer.batch)
        )
    except _UNREADABLE as error:
        raise HostFailed(
            f"The answer of host {host} cannot be read ({type(error).__name__}: {_words(error)})"
        ) from error
    if not sound:
        raise HostFailed(f"Host {host} answered with times that are none")
    return answer


class RayTransport:
    """Visits to Ray actors (`messages.Transport`).

    `actors`: by host. `cuts`: hosts that nothing reaches and nothing comes from, for drills.
    """

    def __init__(self, ray: Any) -> None:
        self._ray, self.actors = ray, dict[str, Any]()
        self.cuts: dict[str, asyncio.Event] = {}

    async def way(self, host: str) -> None:
        """Wait until the way to `host` is open."""
        while host in self.cuts:
            await self.cuts[host].wait()

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer; see `messages.Transport`."""
        await self.way(visit.host)
        actor = self.actors.get(visit.host)
        if actor is None:
            raise HostUnavailable(f"No host {visit.host} is known")
        order = _sealed((visit.blocks, packet, visit.budget_ms))
        try:
            sealed = await called(self._ray, lambda: actor.visit.remote(order), host=visit.host)
        except VisitError:
            raise
        except LayerShuffleError as error:
            raise HostFailed(f"Host {visit.host} failed: {error.cause}") from error
        await self.way(visit.host)
        return opened(sealed, host=visit.host)


async def called(ray: Any, submit: Callable[[], Any], *, host: str) -> Any:
    """The result of the remote call that `submit` makes; being cancelled drops the call.

    Raises what the host raised, if it is ours, as it was; else a `VisitError`.
    """
    errors, reference = ray.exceptions, None
    try:
        reference = submit()
        return await reference
    except asyncio.CancelledError:
        if reference is not None and ray.is_initialized():
            ray.cancel(reference)
        raise
    except errors.ActorDiedError as error:
        raise HostGone(f"The process of host {host} is dead") from error
    except errors.RayTaskError as error:
        if isinstance(error.cause, LayerShuffleError):
            raise error.cause from None
        raise HostFailed(f"Host {host} failed: {_words(error.cause)}") from error
    except errors.RayError as error:  # cannot be reached, has too many calls, lost the answer
        raise HostUnavailable(
            f"Host {host} is not available ({type(error).__name__}: {_words(error)})"
        ) from error


class RayHosts:
    """The processes of block hosts on the members of a cluster (`placement.Places`).

    `ray`: the connected module. `threads`: of torch in each host. `only`: hosts to run, of those
    that the members name (default: all). Every call raises
    `LayerShuffleError` where it fails; callers bound its time.
    """

    def __init__(
        self,
        ray: Any,
        *,
        limits: Limits,
        threads: int = 1,
        only: Collection[str] | None = None,
    ) -> None:
        self._ray, self._limits, self._threads, self._only = ray, limits, threads, only
        self.transport = RayTransport(ray)
        self._processes: dict[str, tuple[str, int]] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        settings = f"{limits.model_dump_json()} {threads}".encode()
        self._kind = hashlib.sha256(settings).hexdigest()[:8]

    async def nodes(self) -> tuple[Node, ...]:
        """The living members that are to run block hosts, by id."""
        members = await self._outside(self._ray.nodes)
        found = [_node(member) for member in members if _hosts_blocks(member)]
        if self._only is not None:
            kept = {node: tuple(n for n in node.names if n in self._only) for node in found}
            found = [replace(node, names=names) for node, names in kept.items() if names]
        return tuple(sorted(found, key=lambda node: node.id))

    async def start(self, name: str, *, node: str) -> HostInfo:
        """A process for the host `name` on the member `node`: a new one, or the one it has.

        One that was made with other limits, or is draining, is replaced.
        """
        info = await self._started(name, node)
        if info.draining:
            await self.end(name)
            info = await self._started(name, node)
        return info

    async def _started(self, name: str, node: str) -> HostInfo:
        if earlier := self._making.get(name):
            await asyncio.wait({earlier})
        making = self._making[name] = asyncio.create_task(self._make(name, node))
        # The thread goes on when this is cancelled: `end` waits for what it makes.
        await asyncio.shield(making)
        try:
            info = await self.info(name)
        except HostGone as error:  # what it lacks stands at the end of what Ray says
            why = " ".join(str(error.__cause__).split())[-_TOLD:]
            raise HostGone(f"The process of host {name} does not start: {why}") from error
        self._processes[name] = (node, info.pid)
        return info

    async def _make(self, name: str, node: str) -> None:
        self.transport.actors[name] = await self._outside(lambda: self._made(name, node))

    def _made(self, name: str, node: str) -> Any:
        """Handle of the actor of `name` on `node`; it may not have started yet."""
        mine = f"{name}@{node}#{self._kind}"
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

    async def load(self, name: str, program: bytes, *, tensors: Mapping[int, bytes]) -> None:
        """`BlockHost.load`; the weights pass through the store of the host's member once."""
        actor = self._actor(name)
        submit = partial(actor.load.remote, program, tuple(tensors), *tensors.values())
        # Copies all weights before it returns: not on the event loop.
        await self.transport.way(name)
        reference = await self._outside(submit)
        await called(self._ray, lambda: reference, host=name)
        await self.transport.way(name)

    async def unload(self, name: str, blocks: Sequence[int]) -> None:
        """`BlockHost.unload`."""
        await self._ask(name, "unload", tuple(blocks))

    async def info(self, name: str) -> HostInfo:
        """`BlockHost.info`."""
        info: HostInfo = await self._ask(name, "info")
        return info

    async def drain(self, name: str) -> None:
        """`BlockHost.drain`."""
        await self._ask(name, "drain")

    async def end(self, name: str) -> None:
        """End the host's process, if there is one, or will be one of a start that was given up."""
        if making := self._making.pop(name, None):
            await asyncio.wait({making})
        actor = self.transport.actors.get(name)
        if actor is not None:
            await self._outside(lambda: self._ray.kill(actor))
        # Only now: what could not be ended is ended another time.
        self.transport.actors.pop(name, None)
        self._processes.pop(name, None)
        self.mend(name)

    async def misbehave(self, name: str, kind: Misbehaviour, *, factor: float) -> None:
        """`BlockHost.misbehave`, for drills."""
        await self._ask(name, "misbehave", kind, factor)

    def kill(self, name: str) -> None:
        """The host's process dies at once, for drills."""
        self._signal(name, signal.SIGKILL)
        del self._processes[name]  # its number may become another process's

    def freeze(self, name: str) -> None:
        """The host's process stops without a word, for drills."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Undo `freeze`."""
        self._signal(name, signal.SIGCONT)

    def cut(self, name: str) -> None:
        """Drop all that goes to the host or comes from it, for drills; its process goes on."""
        self._actor(name)
        self.transport.cuts.setdefault(name, asyncio.Event())

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        if way := self.transport.cuts.pop(name, None):
            way.set()

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name not in self._processes:
            raise HostUnavailable(f"The process of host {name} is not known")
        node, pid = self._processes[name]
        if node == self._ray.get_runtime_context().get_node_id():
            try:
                os.kill(pid, number)
            except ProcessLookupError as error:
                raise HostUnavailable(f"The process of host {name} is dead") from error
            return
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        send = self._ray.remote(_send_signal).options(
            num_cpus=0, max_retries=0, scheduling_strategy=strategy(node, soft=False)
        )
        send.remote(pid, int(number))

    def _actor(self, name: str) -> Any:
        actor = self.transport.actors.get(name)
        if actor is None:
            raise HostUnavailable(f"No host {name} is known")
        return actor

    async def _ask(self, name: str, method: str, *args: Any) -> Any:
        actor = self._actor(name)
        await self.transport.way(name)
        told = await called(self._ray, lambda: getattr(actor, method).remote(*args), host=name)
        await self.transport.way(name)
        return told

    async def _outside(self, call: Callable[[], _Result]) -> _Result:
        """A call that blocks, in a thread."""
        try:
            return await asyncio.to_thread(call)
        except (self._ray.exceptions.RayError, OSError, ValueError) as error:
            raise HostUnavailable(f"Ray does not do as asked ({_words(error)})") from error


def _hosts_blocks(node: Mapping[str, Any]) -> bool:
    return bool(node["Alive"]) and HOST_MARK in node["Resources"]


def _node(node: Mapping[str, Any]) -> Node:
    return Node(node["NodeID"], host_names(node["Resources"]), node["NodeManagerAddress"])


def _send_signal(pid: int, number: int) -> None:
    os.kill(pid, number)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:_TOLD]
