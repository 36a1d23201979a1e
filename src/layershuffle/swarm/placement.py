"""The coordinator's decisions on which block host runs on which machine, and their execution.

Decisions (`reconcile`) are pure functions with time as an argument. `HostBackend` is the interface
of every engine.

A host of the plan runs on the machine with its name. Machines that the plan does not name get the
blocks that the fewest hosts hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any, Literal, Protocol

from layershuffle.swarm.limits import Limits, restart_pause
from layershuffle.swarm.messages import Transport

if TYPE_CHECKING:
    from layershuffle.swarm.host import HostInfo
    from layershuffle.swarm.plan import SwarmPlan  # reads YAML, which hosts do not need

Phase = Literal["starting", "up", "dead", "held"]
_ID_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Node:
    """A living machine of the swarm and the names of its hosts.

    `id` is new whenever the machine joins, because a name or an address can come back with another
    process.
    """

    id: str
    names: tuple[str, ...]
    address: str


HostCall = Literal["load", "unload", "info"]
"""Calls to a host other than visits: the methods of `host.BlockHost` with these names."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """How visits reach a host now: by its data channel, Ray, or a call in this process.

    `why`: for Ray, the reason why the channel is not used.
    """

    kind: Literal["channel", "ray", "process"]
    why: str = ""


class HostBackend(Protocol):
    """Runs the processes of hosts. All methods raise `LayerShuffleError` if they fail."""

    @property
    def transport(self) -> Transport:
        """Carries visits to the hosts that run here."""

    async def nodes(self) -> Sequence[Node]:
        """The living machines."""

    async def start(self, name: str, *, node: str) -> HostInfo:
        """Start a process for `name` on that machine, or adopt one that may hold blocks already."""

    async def end(self, name: str) -> None:
        """End its process, if there is one."""

    async def call(self, name: str, method: HostCall, *args: Any) -> Any:
        """Call that method of `host.BlockHost` with `args`, and return its result."""

    def carriers(self) -> Mapping[str, Carrier]:
        """How visits reach each host that runs here."""

    def forget(self) -> None:
        """Drop everything about the processes, because their engine has ended or is ending."""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A block host as the coordinator sees it, on the machine `node`.

    starting  its process starts, loads blocks or answers its first canaries
    up        it takes visits, as far as the router trusts it
    dead      its process has ended; it is restarted from `retry_at` on
    held      an operator has stopped it or is stopping it; it stays away until
              `Coordinator.readmit`

    `pid` is the id of its process there, 0 without one; `tries` counts consecutive processes that
    ended, `since` is when the current one came up, and `why` describes the last failure.
    """

    name: str
    node: str
    blocks: frozenset[int]
    phase: Phase = "starting"
    retry_at: float = 0.0
    tries: int = 0
    since: float = 0.0
    why: str = ""
    pid: int = 0


def ended(host: HostRecord, *, now: float, limits: Limits, why: str = "") -> HostRecord:
    """`host` after its process has ended or failed to start: dead until the next try."""
    ran = now - host.since if host.phase == "up" else 0.0
    tries, pause = restart_pause(host.tries, ran=ran, limits=limits)
    return replace(host, phase="dead", retry_at=now + pause, tries=tries, why=why, pid=0)


@dataclass(frozen=True, slots=True)
class Start:
    """Start the host `name` on the machine `node` and give it `blocks`."""

    name: str
    node: str
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the host: its machine has left."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Make the host hold exactly `blocks`, as the plan now says."""

    name: str
    blocks: frozenset[int]


HostAction = Start | Drop | Reload


def reconcile(
    plan: SwarmPlan,
    nodes: Sequence[Node],
    *,
    hosts: Mapping[str, HostRecord],
    now: float,
    depth: int,
) -> tuple[HostAction, ...]:
    """The actions that make the hosts match `plan`, on the available machines."""
    homes = homes_of(nodes, hosts)
    here = {name: host for name, host in hosts.items() if homes.get(name) == host.node}
    # A host whose name has moved to another machine has left its old one, too.
    drops = [Drop(name, "its machine has left the swarm") for name in hosts if name not in here]
    # A held host may stay away for days, so spares should hold its blocks as well.
    holding = {name: host.blocks for name, host in here.items() if host.phase != "held"}
    actions: list[HostAction] = [*drops]
    # Hosts of the plan first: spares get the blocks that these leave.
    for name in sorted(homes, key=lambda name: (name not in plan.hosts, name)):
        host = here.get(name)
        planned = frozenset(plan.hosts[name].blocks) if name in plan.hosts else None
        if host is None or (host.phase == "dead" and now >= host.retry_at):
            holding.pop(name, None)
            blocks = planned or spare_blocks(plan, holding.values(), depth=depth)
            holding[name] = blocks
            actions.append(Start(name, homes[name], blocks))
        # A host that is starting or dead gets its planned blocks when it is started.
        elif host.phase == "up" and planned not in (None, host.blocks):
            actions.append(Reload(name, planned or host.blocks))
    return tuple(actions)


def homes_of(nodes: Iterable[Node], hosts: Mapping[str, HostRecord]) -> dict[str, str]:
    """The machine of each host name.

    If two machines have the same name, the machine that already runs the host keeps the name, else
    the first by id; the host of the other machine is called `name@id`. The host of a machine
    without a name is called `host@id`.
    """
    homes: dict[str, str] = {}
    pairs = [(name, node.id) for node in nodes for name in node.names or ("host@",)]
    running = {(name, host.node) for name, host in hosts.items()}
    for name, node in sorted(pairs, key=lambda pair: (pair not in running, pair[1], pair[0])):
        short = node[:_ID_LENGTH]
        if name == "host@" or name in homes:
            homes[f"{name.removesuffix('@')}@{short}"] = node
        else:
            homes[name] = node
    return homes


@asynccontextmanager
async def started_early(backend: HostBackend, plan: SwarmPlan) -> AsyncIterator[None]:
    """Start the processes of the plan's hosts within, before their coordinator exists.

    They import torch while the model is loaded. The coordinator restarts those that fail.
    """

    async def start() -> None:
        homes = homes_of(await backend.nodes(), {})
        hosts = [backend.start(name, node=homes[name]) for name in plan.hosts if name in homes]
        await asyncio.gather(*hosts, return_exceptions=True)

    starting = asyncio.ensure_future(start())
    try:
        yield
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def spare_blocks(
    plan: SwarmPlan, others: Iterable[frozenset[int]], *, depth: int
) -> frozenset[int]:
    """The blocks for a host that the plan does not name, given the blocks of the `others`.

    It gets as many blocks as the plan's median host: those that the fewest hosts hold, low ids
    first.
    """
    size = median_low(len(host.blocks) for host in plan.hosts.values())
    holders = Counter(block for blocks in others for block in blocks)
    return frozenset(sorted(range(depth), key=lambda block: (holders[block], block))[:size])
