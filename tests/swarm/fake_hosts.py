"""Hosts that compute by a formula in virtual time, for tests of coordinator and health."""

import asyncio
import random
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from clock import loop_time, run_virtual
from layershuffle.swarm.bundle import Bundle
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostGone, HostUnavailable, pack, unpack
from layershuffle.swarm.placement import Node
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.program import digest_of
from layershuffle.swarm.router import Router
from waiting import until

DEPTH = 4
START = np.ones((1, 2, 3), np.float32)
QUICK = Limits(
    suspect_ms=20, canary_every_ms=60, probe_ms=200, watch_ms=10, hop_floor_ms=60, audit_share=0.0
)


def plan_of(limits=QUICK, **hosts):
    return SwarmPlan(
        model="base",
        hosts={name: HostPlan(blocks=blocks) for name, blocks in hosts.items()},
        limits=limits,
    )


A, B = Node("n1", ("a",), "10.0.0.1"), Node("n2", ("b",), "10.0.0.2")
PLAN = plan_of(a=(0, 1), b=(2, 3))


def computed(start, blocks, weights):
    for block in blocks:
        start = 2 * start + (10 * weights[block] + block)
    return start.astype(np.float32)


class FormulaBundle(Bundle):
    """Weights are digits, and there is no program."""

    def compute(self, block, state):
        return computed(state, [block], {block: int(self.tensors[block])})


def bundle_of(weight, *, depth=DEPTH, kind=FormulaBundle):
    """A bundle whose blocks differ by `weight`, a digit."""
    return kind(
        program=b"program",
        tensors={block: str(weight).encode() for block in range(depth)},
        depth=depth,
        shape=START.shape[1:],
        sample=START,
    )


@dataclass
class Fake:
    """One process: weights by block, and its faults.

    `wrong`: all answers are false. `lies`: so often (0 to 1) those to requests are, and canaries
    are answered rightly, as if it knew them.
    """

    weights: dict = field(default_factory=dict)
    wrong: bool = False
    lies: float = 0.0
    dead: bool = False
    thawed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeHosts:
    """Processes as objects, and their transport. Calls for one host must not overlap.

    `raises`: by what it is asked, what comes of it.
    """

    def __init__(self, *nodes):
        self.machines, self.processes, self.log = list(nodes), {}, []
        self.raises, self.busy, self.overlaps = {}, set(), []
        self.known = asyncio.Event()
        self.known.set()
        self.load_seconds = self.end_seconds = 0.0
        self.chance = random.Random(0)
        self.transport = self

    async def nodes(self):
        self.log.append(("nodes",))
        await self.known.wait()
        if "nodes" in self.raises:
            raise self.raises["nodes"]
        return tuple(self.machines)

    @contextmanager
    def alone(self, name, what):
        if name in self.busy:
            self.overlaps.append((name, what))
        self.busy.add(name)
        try:
            yield
        finally:
            self.busy.discard(name)

    async def start(self, name, *, node):
        self.log.append(("start", name, node))
        with self.alone(name, "start"):
            await asyncio.sleep(0)
            if name not in self.processes or self.processes[name].dead:
                self.processes[name] = Fake()
                self.processes[name].thawed.set()
            return await self.call(name, "info")

    async def end(self, name):
        with self.alone(name, "end"):
            await asyncio.sleep(self.end_seconds)
            if process := self.processes.pop(name, None):
                self.log.append(("end", name))
                process.dead = True

    async def call(self, name, method, *args):
        process = self.processes[name]
        if method == "load":
            _, blocks, *tensors = args
            self.log.append(("load", name, tuple(blocks)))
            if "load" in self.raises:
                raise self.raises["load"]
            with self.alone(name, "load"):
                await asyncio.sleep(self.load_seconds)
            process.weights.update(zip(blocks, map(int, tensors), strict=True))
        elif method == "unload":
            self.log.append(("unload", name, tuple(args[0])))
            for block in args[0]:
                del process.weights[block]
        weights = process.weights.items()
        return SimpleNamespace(
            pid=1,
            blocks={block: digest_of(str(weight).encode()) for block, weight in weights},
        )

    def kill(self, name):
        """The process dies by itself."""
        self.processes[name].dead = True

    def freeze(self, name):
        self.processes[name].thawed.clear()

    def thaw(self, name):
        self.processes[name].thawed.set()

    async def visit(self, visit, packet):
        process = self.processes.get(visit.host)
        if process is None:
            raise HostUnavailable("not known")
        if isinstance(self.raises.get(visit.host), Exception):
            raise self.raises[visit.host]
        await process.thawed.wait()
        if process.dead:
            raise HostGone("its process is dead")
        if visit.block not in process.weights:
            raise HostUnavailable("not held")
        await asyncio.sleep(0.001)  # else the clock would stand still while requests go on
        weights = dict(process.weights)
        after = computed(unpack(packet), [visit.block], weights)
        if visit.host in self.raises:
            return self.raises[visit.host]
        # Only the router says how long its request has left: a hint that no real host gets.
        asked = visit.budget is not None
        wrong = process.wrong or (asked and self.chance.random() < process.lies)
        return Answer(pack(after * (1.5 if wrong else 1), "fp32"), 0.1, 0.0)


async def replaced(coordinator, hosts, name):
    """Kill the host, and wait until its next process is up."""
    first = hosts.processes[name]
    hosts.kill(name)
    await until(lambda: hosts.processes.get(name) not in (None, first))
    await until(lambda: condition(coordinator, name) == "healthy")


def coordinator_of(backend, plan=PLAN, bundle=None):
    """A coordinator in virtual time; nothing runs yet."""
    router = Router(backend.transport, depth=DEPTH, limits=plan.limits, clock=loop_time)
    return Coordinator(plan, router=router, backend=backend, bundle=bundle or bundle_of(1))


@asynccontextmanager
async def running(coordinator):
    """The coordinator watches its hosts inside."""
    task = asyncio.create_task(coordinator.run())
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def coordinated(check, plan=PLAN, nodes=(A, B), bundle=None, ready=True):
    """Run `check(coordinator, hosts)` beside a running coordinator whose hosts are up."""

    async def go():
        hosts = FakeHosts(*nodes)
        coordinator = coordinator_of(hosts, plan, bundle)
        try:
            async with running(coordinator):
                if ready:
                    assert await coordinator.ready(within=3.0) == ()
                await check(coordinator, hosts)
                assert coordinator.watching
            assert hosts.overlaps == []
        finally:
            await coordinator.close()

    run_virtual(go())


def condition(coordinator, name):
    return coordinator.router.swarm[name].condition


async def walked(coordinator):
    clock = coordinator.router.clock
    return await coordinator.router.walk(START, deadline=clock() + 1.0)


def answer_of(order, weights=(1, 1, 1, 1)):
    return computed(START, order, dict(enumerate(weights)))
