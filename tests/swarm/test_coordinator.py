"""Placement, coordinator and health over hosts in this process that compute by a formula."""

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm import state
from layershuffle.swarm.bundle import Bundle, Canary
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.donors import Lineage
from layershuffle.swarm.faults import Fault
from layershuffle.swarm.health import (
    Again,
    Check,
    Health,
    agrees,
    due,
    known_of,
    odd_one,
    patience,
    replicas,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostGone, HostUnavailable, Visited
from layershuffle.swarm.placement import (
    Drop,
    Hosted,
    Node,
    Refill,
    Start,
    homes_of,
    reconcile,
    spare_blocks,
)
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.program import digest_of
from layershuffle.swarm.router import Router
from layershuffle.swarm.service import _watch
from layershuffle.swarm.state import HostView, Swarm
from layershuffle.swarm.wire import Packet, pack, unpack

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


# --- placement ------------------------------------------------------------------------------------

A, B = Node("n1", ("a",), "10.0.0.1"), Node("n2", ("b",), "10.0.0.2")
PLAN = plan_of(a=(0, 1), b=(2, 3))


def up(name, node, blocks, **changes):
    return {name: Hosted(name, node, frozenset(blocks), "up", **changes)}


def decided(nodes, hosts, plan=PLAN, now=0.0):
    return reconcile(plan, nodes, hosts=hosts, now=now, depth=DEPTH)


def test_hosts_start_where_their_machines_are():
    assert decided([A, B], {}) == (
        Start("a", "n1", frozenset({0, 1})),
        Start("b", "n2", frozenset({2, 3})),
    )
    assert decided([A, B], up("a", "n1", [0, 1]) | up("b", "n2", [2, 3])) == ()
    assert decided([], {}) == ()


def test_a_machine_that_left_takes_its_host_along():
    hosts = up("a", "n1", [0, 1]) | up("b", "n2", [2, 3])
    (drop,) = decided([A], hosts)
    assert isinstance(drop, Drop)
    assert drop.name == "b"


def test_a_machine_that_joins_again_is_another_one():
    """Ray keeps a dead entry beside the new one: ids are compared, not names or addresses."""
    again = Node("n9", ("a",), "10.0.0.1")
    drop, start = decided([again], up("a", "n1", [0, 1]))
    assert (drop.name, start) == ("a", Start("a", "n9", frozenset({0, 1})))


@pytest.mark.parametrize(("now", "starts"), [(4.9, 0), (5.0, 1)])
def test_a_dead_host_starts_again_after_its_pause(now, starts):
    dead = {"a": Hosted("a", "n1", frozenset({0, 1}), "dead", retry_at=5.0)}
    assert len(decided([A], dead, now=now)) == starts


@pytest.mark.parametrize("phase", ["starting", "held", "up"])
def test_what_starts_or_is_held_is_left_alone(phase):
    assert decided([A], {"a": Hosted("a", "n1", frozenset({0, 1}), phase)}) == ()


def test_a_changed_plan_refills_hosts():
    hosts = up("a", "n1", [0, 1]) | up("b", "n2", [2])
    assert decided([A, B], hosts) == (Refill("b", frozenset({2, 3})),)


def test_spare_machines_get_what_the_fewest_hold():
    spare = Node("n0", ("z",), "10.0.0.9")
    starts = decided([spare, A], {})
    assert starts == (Start("a", "n1", frozenset({0, 1})), Start("z", "n0", frozenset({2, 3})))
    # A nameless one gets a name by its id; both spares together cover what is missing.
    nameless = Node("n5", (), "10.0.0.5")
    assert decided([spare, nameless], {}) == (
        Start("host@n5", "n5", frozenset({0, 1})),
        Start("z", "n0", frozenset({2, 3})),
    )
    assert decided([spare], up("z", "n0", [1, 3])) == ()


def test_spare_blocks_are_as_many_as_the_median_host_has():
    plan = plan_of(a=(0,), b=(1, 2), c=(0, 1, 2, 3))
    assert spare_blocks(plan, [frozenset({0, 1}), frozenset({0, 3})], depth=4) == {1, 2}


def test_two_machines_of_one_name():
    nodes = [Node("n3333333333", ("a",), ""), Node("n1111111111", ("a",), "")]
    assert homes_of(nodes, {}) == {"a": "n1111111111", "a@n3333333": "n3333333333"}
    kept = up("a", "n3333333333", [0])
    assert homes_of(nodes, kept) == {"a": "n3333333333", "a@n1111111": "n1111111111"}


# --- hosts that compute by a formula --------------------------------------------------------------


def computed(start, blocks, weights):
    for block in blocks:
        start = 2 * start + (10 * weights[block] + block)
    return start.astype(np.float32)


def bundle_of(weight, *, base="one", depth=DEPTH):
    """A bundle whose blocks differ by `weight`, a digit."""
    weights = dict.fromkeys(range(depth), weight)
    return Bundle(
        program=b"program",
        tensors={block: str(weight).encode() for block in range(depth)},
        depth=depth,
        shape=START.shape[1:],
        lineage=Lineage(base, DEPTH, shapes={}, view=None),
        canary=Canary(START, {b: computed(START, [b], weights) for b in range(depth)}),
    )


@dataclass
class Fake:
    """One process: weights by block, and what is wrong with it.

    `lies`: answers are false, but to the canary's input.
    """

    weights: dict = field(default_factory=dict)
    kind: str = "none"
    lies: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False


class FakePlaces:
    """Processes as objects; also their transport. What it is asked for one host must not overlap.

    `raises`: by what it is asked, what comes of it.
    """

    def __init__(self, *nodes):
        self.machines, self.processes, self.log = list(nodes), {}, []
        self.raises, self.busy, self.overlaps = {}, set(), []
        self.known = asyncio.Event()
        self.known.set()
        self.load_seconds = self.end_seconds = 0.0

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
            if name not in self.processes or self.processes[name].dead.is_set():
                self.processes[name] = Fake()
                self.processes[name].thawed.set()
                self.processes[name].open.set()
            return await self.info(name)

    async def load(self, name, program, *, tensors):
        self.log.append(("load", name, tuple(tensors)))
        if "load" in self.raises:
            raise self.raises["load"]
        with self.alone(name, "load"):
            await asyncio.sleep(self.load_seconds)
        self.processes[name].weights.update({b: int(t) for b, t in tensors.items()})

    async def unload(self, name, blocks):
        self.log.append(("unload", name, tuple(blocks)))
        for block in blocks:
            del self.processes[name].weights[block]

    async def info(self, name):
        held = self.processes[name].weights
        return SimpleNamespace(
            blocks={block: digest_of(str(weight).encode()) for block, weight in held.items()},
            draining=self.processes[name].draining,
        )

    async def drain(self, name):
        self.processes[name].draining = True

    async def end(self, name):
        with self.alone(name, "end"):
            await asyncio.sleep(self.end_seconds)
            process = self.processes.pop(name, None)
            if process is not None:
                self.log.append(("end", name))
                process.dead.set()

    async def misbehave(self, name, kind, *, factor):
        self.processes[name].kind = kind

    def kill(self, name):
        self.processes[name].dead.set()

    def freeze(self, name):
        self.processes[name].thawed.clear()

    def thaw(self, name):
        self.processes[name].thawed.set()

    def cut(self, name):
        self.processes[name].open.clear()

    def mend(self, name):
        self.processes[name].open.set()

    async def visit(self, visit, packet):
        process = self.processes.get(visit.host)
        if process is None:
            raise HostUnavailable("not known")
        if isinstance(self.raises.get(visit.host), Exception):
            raise self.raises[visit.host]
        await process.thawed.wait()
        await process.open.wait()
        if process.dead.is_set():
            raise HostGone("its process is dead")
        if process.draining or not set(visit.blocks) <= set(process.weights):
            raise HostUnavailable("draining, or not held")
        await asyncio.sleep(0.05 if process.kind == "slow" else 0)
        weights = dict(process.weights)
        after = computed(unpack(packet), visit.blocks, weights)
        if visit.host in self.raises:
            return self.raises[visit.host]
        wrong = process.kind == "wrong" or (process.lies and (unpack(packet) != START).any())
        return Answer(pack(after * (1.5 if wrong else 1), "fp32"), 0.1, 0.0)


async def until(true, seconds=3.0):
    """Wait for it."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


async def replaced(coordinator, places, name):
    """Kill it, and wait until another process of its name is up."""
    first = places.processes[name]
    places.kill(name)
    await until(lambda: places.processes.get(name) not in (None, first))
    await until(lambda: condition(coordinator, name) == "healthy")


def coordinated(check, plan=PLAN, nodes=(A, B), bundles=None, seconds=8.0, ready=True):
    """Run `check(coordinator, places)` beside a running coordinator whose hosts are up."""

    async def go():
        places = FakePlaces(*nodes)
        router = Router(places, depth=DEPTH, limits=plan.limits)
        coordinator = Coordinator(
            plan, router=router, places=places, bundles=bundles or {"base": bundle_of(1)}
        )
        running = asyncio.create_task(coordinator.run())
        try:
            async with asyncio.timeout(seconds):
                if ready:
                    assert await coordinator.ready(within=3.0) == ()
                await check(coordinator, places)
            assert not running.done(), running.result()
            assert coordinator.watching
            assert places.overlaps == []
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await coordinator.close()

    asyncio.run(go())


def condition(coordinator, name):
    return coordinator.router.swarm[name].condition


async def walked(coordinator):
    clock = coordinator.router.clock
    return await coordinator.router.walk(START, deadline=clock() + 1.0)


def answer_of(order, weights=(1, 1, 1, 1)):
    return computed(START, order, dict(enumerate(weights)))


# --- the coordinator ------------------------------------------------------------------------------


def test_hosts_come_up_with_their_blocks_and_are_used():
    async def check(coordinator, places):
        assert {n: p.weights for n, p in places.processes.items()} == {
            "a": {0: 1, 1: 1},
            "b": {2: 1, 3: 1},
        }
        after, route = await walked(coordinator)
        assert route.ending == "complete"
        assert (after == answer_of(route.order)).all()

    coordinated(check)


def test_before_they_come_the_route_says_so():
    async def check(coordinator, places):
        _, route = await walked(coordinator)
        assert route.skipped[0] == "host a is gone: it has not come yet"
        await until(lambda: "b" in coordinator.hosts and coordinator._is_up("b"))
        assert await coordinator.ready(within=0.0) == ("a",)

    coordinated(check, nodes=(B,), ready=False)


def test_a_dead_host_on_a_living_machine_starts_again():
    async def check(coordinator, places):
        first = places.processes["a"]
        places.kill("a")
        # Nobody asks: the canary finds out.
        await until(lambda: places.processes.get("a") not in (None, first))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert coordinator.hosts["a"].tries == 0

    coordinated(check)


def test_a_host_leaves_with_its_machine_and_comes_back_with_it():
    async def check(coordinator, places):
        places.machines.remove(A)
        await until(lambda: "a" not in coordinator.hosts)
        _, route = await walked(coordinator)
        assert route.skipped[0] == "host a is gone: its machine has left the swarm"
        places.machines.append(Node("n7", ("a",), "10.0.0.1"))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert coordinator.hosts["a"].node == "n7"

    coordinated(check)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_machine_that_joins_anew_between_two_looks(seconds):
    """One look ends the host on the old one, and starts it on the new."""

    async def check(coordinator, places):
        places.end_seconds = seconds
        places.machines[0] = Node("n7", ("a",), "10.0.0.1")
        await until(lambda: coordinator.hosts["a"].node == "n7")
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert places.log.count(("end", "a")) == 1
        assert places.log.count(("start", "a", "n7")) == 1

    coordinated(check)


def test_a_host_that_leaves_while_it_starts_is_forgotten():
    async def check(coordinator, places):
        places.load_seconds = 5.0
        places.machines.append(Node("n3", ("c",), ""))
        await until(lambda: ("load", "c", (0, 1)) in places.log)
        places.machines.pop()
        await until(lambda: "c" not in coordinator.hosts)
        assert "c" not in coordinator.router.swarm
        assert "c" not in places.processes

    coordinated(check)


def test_a_host_that_fails_its_canaries_is_not_let_in(caplog):
    bad = bundle_of(1)
    bad.canary.outputs[1] = bad.canary.outputs[1] + 1

    async def check(coordinator, places):
        await until(lambda: coordinator.hosts["a"].tries >= 3)
        assert condition(coordinator, "a") == "gone"
        assert condition(coordinator, "b") == "healthy"

    async def both(coordinator, places):
        await until(lambda: "a" in coordinator.hosts)
        await check(coordinator, places)

    coordinated(both, bundles={"base": bad}, ready=False)
    assert "Host a does not come up: it failed its canary on block 1" in caplog.text


def test_machines_that_are_not_known_for_a_while_change_nothing(caplog):
    async def check(coordinator, places):
        places.raises["nodes"] = LayerShuffleError("the head does not answer")
        await asyncio.sleep(0.05)
        del places.raises["nodes"]
        _, route = await walked(coordinator)
        assert route.ending == "complete"
        assert len([one for one in places.log if one[0] == "start"]) == 2

    coordinated(check)
    assert "the head does not answer" in caplog.text


def test_an_adopted_host_gets_only_what_it_lacks():
    async def check(coordinator, places):
        # A gateway that starts anew: another coordinator over the same processes.
        places.log.clear()
        plan = plan_of(a=(1, 2), b=(2, 3))
        router = Router(places, depth=DEPTH, limits=QUICK)
        second = Coordinator(plan, router=router, places=places, bundles={"base": bundle_of(1)})
        running = asyncio.create_task(second.run())
        assert await second.ready(within=3.0) == ()
        await until(lambda: ("unload", "a", (0,)) in places.log)
        assert [one for one in places.log if one[0] == "load"] == [("load", "a", (2,))]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    coordinated(check)


def test_a_new_plan_moves_blocks():
    async def check(coordinator, places):
        coordinator.plan = plan_of(a=(0, 1, 2), b=(3,))
        await until(lambda: set(places.processes["b"].weights) == {3})
        await until(lambda: coordinator.router.swarm["a"].blocks == {0, 1, 2})

    coordinated(check)


def test_drain_and_readmit():
    async def check(coordinator, places):
        assert await coordinator.drain("a")
        assert condition(coordinator, "a") == "draining"
        _, route = await walked(coordinator)
        assert route.skipped == dict.fromkeys((0, 1), "host a is draining: it is leaving")
        await coordinator.leave("a")
        assert "a" not in places.processes
        await asyncio.sleep(0.05)
        assert "a" not in places.processes
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)


def test_a_host_that_starts_can_be_drained():
    """Its start ends there, and it stays away until somebody wishes otherwise."""

    async def check(coordinator, places):
        places.load_seconds = 0.4
        places.log.clear()
        await coordinator.readmit("a")
        await until(lambda: ("load", "a", (0, 1)) in places.log)
        assert coordinator.hosts["a"].phase == "starting"
        places.load_seconds = 0.0
        assert await coordinator.drain("a") is True
        assert "a" not in places.processes
        await asyncio.sleep(0.5)
        assert (coordinator.hosts["a"].phase, condition(coordinator, "a")) == ("held", "gone")
        assert "a" not in places.processes
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)


def test_a_dead_host_can_be_drained():
    async def check(coordinator, places):
        places.raises["load"] = LayerShuffleError("no room")
        places.kill("a")
        await until(lambda: coordinator.hosts["a"].tries >= 2)
        assert await coordinator.drain("a") is True
        del places.raises["load"]
        await asyncio.sleep(0.1)
        assert coordinator.hosts["a"].phase == "held"
        assert "a" not in places.processes

    coordinated(check)


def test_a_host_that_is_given_blocks_finishes_before_it_leaves():
    """Its router's visits go on meanwhile, so its process is not to end."""

    async def check(coordinator, places):
        places.load_seconds = 0.2
        coordinator.plan = plan_of(a=(0, 1, 2), b=(3,))
        await until(lambda: ("load", "a", (2,)) in places.log)
        assert await coordinator.drain("a") is True
        assert places.processes["a"].draining
        await asyncio.sleep(0.4)
        assert (coordinator.hosts["a"].phase, condition(coordinator, "a")) == ("held", "draining")

    coordinated(check)


def test_a_spare_that_starts_can_be_drained():
    async def check(coordinator, places):
        places.load_seconds = 5.0
        places.machines.append(Node("n3", ("c",), ""))
        await until(lambda: ("load", "c", (0, 1)) in places.log)
        assert await coordinator.drain("c") is True
        assert "c" not in places.processes

    coordinated(check)


def test_readmitting_a_host_that_is_being_replaced():
    """Watch and operator at once: one process at a time, and one in the end."""

    async def check(coordinator, places):
        places.end_seconds = places.load_seconds = 0.05
        places.kill("a")
        await until(lambda: coordinator.hosts["a"].phase == "starting")
        for _ in range(3):
            await coordinator.readmit("a")
            await asyncio.sleep(0.03)
        await until(lambda: condition(coordinator, "a") == "healthy")
        starts = places.log.count(("start", "a", "n1"))
        await asyncio.sleep(0.2)
        assert places.log.count(("start", "a", "n1")) == starts
        assert coordinator.hosts["a"].phase == "up"

    coordinated(check)


def test_a_host_readmitted_while_it_leaves_stays():
    async def check(coordinator, places):
        places.end_seconds = 0.05
        coordinator.router.update("a", lambda host: state.sent(host, 1))
        leaving = asyncio.create_task(coordinator.leave("a"))
        await until(lambda: places.processes["a"].draining)
        await coordinator.readmit("a")
        await leaving
        await until(lambda: condition(coordinator, "a") == "healthy")
        await asyncio.sleep(0.1)
        assert coordinator.hosts["a"].phase == "up"
        assert places.log.count(("end", "a")) == 1

    coordinated(check)


# --- what nobody foresaw --------------------------------------------------------------------------


def test_a_canary_that_breaks_is_held_against_its_host_alone(caplog):
    async def check(coordinator, places):
        places.raises["a"] = ValueError("operands could not be broadcast")
        await until(lambda: condition(coordinator, "a") == "suspect")
        assert "operands could not be broadcast" in coordinator.router.swarm["a"].why
        await replaced(coordinator, places, "b")  # the watch goes on
        del places.raises["a"]
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)
    (first, *_) = [one for one in caplog.records if "canary of host a broke" in one.message]
    assert first.exc_info[0] is ValueError


@pytest.mark.parametrize(
    "answer",
    [
        Answer(Packet("int8", np.ones((1, 2, 3), np.int8), np.ones((7, 7), np.float32)), 0.1, 0.0),
        Answer(Packet("fp32", np.array([["?"]])), 0.1, 0.0),
        "no answer at all",
    ],
)
def test_an_answer_that_cannot_be_read_is_a_wrong_one(answer):
    async def check(coordinator, places):
        places.raises["a"] = answer
        await until(lambda: condition(coordinator, "a") == "shut-out")
        assert "cannot be read" in coordinator.router.swarm["a"].why
        await replaced(coordinator, places, "b")

    coordinated(check)


def test_a_bring_up_that_breaks_is_told_and_tried_again(caplog):
    async def check(coordinator, places):
        places.raises["load"] = KeyError("blocks.0.weight")
        places.kill("a")
        await until(lambda: coordinator.hosts["a"].tries >= 2)
        assert "KeyError" in coordinator.hosts["a"].why
        del places.raises["load"]
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)
    (first, *_) = [one for one in caplog.records if "Work with host a broke" in one.message]
    assert first.exc_info[0] is KeyError


def test_a_watch_that_breaks_begins_anew(caplog):
    async def go():
        places = FakePlaces(A, B)
        router = Router(places, depth=DEPTH, limits=QUICK)
        coordinator = Coordinator(
            PLAN, router=router, places=places, bundles={"base": bundle_of(1)}
        )
        places.raises["nodes"] = RuntimeError("nobody foresaw this")
        watch = asyncio.create_task(_watch(coordinator))
        await until(lambda: coordinator.restarts >= 2)
        await until(lambda: not coordinator.watching)
        del places.raises["nodes"]
        assert await coordinator.ready(within=3.0) == ()
        assert coordinator.watching
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert not coordinator.watching
        await coordinator.close()

    asyncio.run(go())
    (first, *_) = [one for one in caplog.records if "begins anew" in one.message]
    assert "nobody foresaw this" in str(first.exc_info[1])


def test_a_question_for_the_machines_that_hangs_is_asked_once(caplog):
    async def check(coordinator, places):
        places.known.clear()
        before = len(places.log)
        await until(lambda: caplog.text.count("no answer within 10 ms") >= 3)
        assert places.log[before:].count(("nodes",)) <= 2  # one was under way
        assert coordinator.watching
        places.known.set()
        await replaced(coordinator, places, "a")

    coordinated(check)


def test_hosts_end_side_by_side():
    seconds = []

    async def check(coordinator, places):
        places.end_seconds = 0.3
        begun = time.monotonic()
        await coordinator.close()
        seconds.append(time.monotonic() - begun)
        assert places.processes == {}
        places.end_seconds = 0.0

    coordinated(check)
    assert seconds[0] < 0.55


def test_a_host_that_does_not_end_holds_nobody_up():
    async def check(coordinator, places):
        places.end_seconds = 5.0
        places.kill("a")
        await until(lambda: ("start", "b", "n2") in places.log)
        await until(lambda: coordinator.hosts["a"].phase == "starting")
        places.machines.append(Node("n3", ("c",), ""))
        await until(lambda: coordinator.hosts.get("c") and coordinator.hosts["c"].phase == "up")
        places.end_seconds = 0.0

    coordinated(check)


def test_nothing_is_kept_of_hosts_that_left():
    async def check(coordinator, places):
        health = coordinator.health
        for number in range(5):
            places.machines.append(Node(f"m{number}", (), ""))
            name = f"host@m{number}"
            await until(lambda name=name: name in health._asked)
            places.machines.pop()
            await until(lambda name=name: name not in coordinator.hosts)
        await until(lambda: not coordinator._ending)
        for kept in (health._known, health._asked, health._since, coordinator._locks):
            assert set(kept) <= {"a", "b"}
        assert set(coordinator._starting) <= {"a", "b"}

    coordinated(check)


# --- swaps ----------------------------------------------------------------------------------------


def test_a_swap_loses_no_request():
    """A sibling's block replaces another under load: every answer is that of one or the other."""
    donor = bundle_of(2)

    async def check(coordinator, places):
        places.load_seconds = 0.05
        swapping = asyncio.create_task(coordinator.swap("a", 1, donor=donor))
        seen = set()
        while not swapping.done() or len(seen) < 2:
            after, route = await walked(coordinator)
            assert route.ending == "complete"
            old, new = answer_of(route.order), answer_of(route.order, (1, 2, 1, 1))
            assert (after == old).all() or (after == new).all()
            seen.add(bool((after == new).all()))
            assert coordinator.strangers >= {("a", 1)} or not (after == new).all()
        await swapping
        assert coordinator.strangers == {("a", 1)}
        # It is held to the new answer from now on, also by the next process of its name.
        await asyncio.sleep(0.15)
        assert condition(coordinator, "a") == "healthy"
        await replaced(coordinator, places, "a")
        assert places.processes["a"].weights == {0: 1, 1: 2}
        assert coordinator.strangers == {("a", 1)}
        await coordinator.swap("a", 1, donor=bundle_of(1))
        assert coordinator.strangers == frozenset(), "the weights are those of the plan's model"

    coordinated(check)


def test_a_host_that_starts_takes_no_swap():
    async def check(coordinator, places):
        places.load_seconds = 0.1
        await coordinator.readmit("a")
        with pytest.raises(LayerShuffleError, match="is starting"):
            await coordinator.swap("a", 1, donor=bundle_of(2))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert places.processes["a"].weights == {0: 1, 1: 1}

    coordinated(check)


def test_a_swap_whose_host_begins_anew_is_no_swap():
    async def check(coordinator, places):
        places.load_seconds = 0.1
        swapping = asyncio.create_task(coordinator.swap("a", 1, donor=bundle_of(2)))
        await until(lambda: ("load", "a", (1,)) in places.log)
        places.load_seconds = 0.0
        coordinator._hold("a", "somebody wished it")
        with pytest.raises(LayerShuffleError, match="came or went"):
            await swapping
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert places.processes["a"].weights == {0: 1, 1: 1}

    coordinated(check)


@pytest.mark.parametrize(
    ("host", "block", "donor", "says"),
    [
        ("c", 0, bundle_of(2), "no host 'c'"),
        ("a", 2, bundle_of(2), "does not hold block 2"),
        ("a", 1, bundle_of(2, base="other"), "cannot stand in"),
        ("a", 3, bundle_of(2, depth=3), "does not hold"),
        ("b", 3, bundle_of(2, depth=3), "has no block 3"),
    ],
)
def test_a_swap_of_what_does_not_fit_is_refused(host, block, donor, says):
    async def check(coordinator, places):
        with pytest.raises(UsageError, match=says):
            await coordinator.swap(host, block, donor=donor)
        assert condition(coordinator, "a") == "healthy"

    coordinated(check)


def test_donors_of_the_plan():
    plan = SwarmPlan(
        model="base",
        hosts={"a": HostPlan(blocks=(0, 1), donors={1: "sib"}), "b": HostPlan(blocks=(2, 3))},
        limits=QUICK,
    )

    async def check(coordinator, places):
        assert places.processes["a"].weights == {0: 1, 1: 2}

    coordinated(check, plan=plan, bundles={"base": bundle_of(1), "sib": bundle_of(2)})
    strange = {"base": bundle_of(1), "sib": bundle_of(2, base="other")}
    with pytest.raises(UsageError, match="cannot stand in"):
        coordinated(check, plan=plan, bundles=strange)


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [("crash", "gone"), ("freeze", "suspect"), ("cut", "suspect"), ("wrong", "shut-out")],
)
def test_faults_happen_and_rejoin_ends_them(kind, becomes):
    async def check(coordinator, places):
        await coordinator.happen(Fault(0, "a", kind))
        await until(lambda: condition(coordinator, "a") == becomes)
        await asyncio.sleep(0.1)
        assert condition(coordinator, "a") == becomes
        await coordinator.happen(Fault(0, "a", "rejoin"))
        await until(lambda: condition(coordinator, "a") == "healthy")
        after, route = await walked(coordinator)
        assert (after == answer_of(route.order)).all()
        assert route.ending == "complete"

    coordinated(check)


def test_slow_and_leave_happen_too():
    async def check(coordinator, places):
        await coordinator.happen(Fault(0, "a", "slow"))
        assert places.processes["a"].kind == "slow"
        await coordinator.happen(Fault(0, "a", "rejoin"))
        assert places.processes["a"].kind == "none"
        await coordinator.happen(Fault(0, "a", "leave"))
        assert "a" not in places.processes
        with pytest.raises(UsageError, match="no host 'q'"):
            await coordinator.happen(Fault(0, "q", "crash"))

    coordinated(check)


# --- whom to trust --------------------------------------------------------------------------------

LIMITS = Limits(canary_every_ms=1000, probe_ms=500)


def known(*hosts):
    one = known_of(bundle_of(1), [0, 1])
    return dict.fromkeys(hosts, one)


def test_who_is_due():
    held = frozenset({0, 1})
    swarm = Swarm(
        [
            HostView("fresh", held),
            HostView("gone", held, "gone"),
            HostView("late", held, "suspect", retry_at=11.0),
            HostView("now", held, "suspect", retry_at=9.0),
            HostView("old", held),
            HostView("out", held, "shut-out"),
            HostView("strange", held),
        ]
    )
    names = ("fresh", "gone", "late", "now", "old", "out")
    asked = {"fresh": (9.5, 4), "old": (8.9, 7), "now": (0.0, 2)}
    checks = due(swarm, known(*names), asked=asked, now=10.0, limits=LIMITS)
    assert [(check.host, check.block) for check in checks] == [("now", 0), ("old", 1)]
    assert checks[0].limit == 0.5


def test_a_busy_host_has_longer_for_a_canary():
    idle, busy = HostView("a", frozenset({0}), compute=0.02, link=0.0), None
    busy = state.sent(idle, 10)
    swarm = Swarm([idle])
    assert patience(idle, swarm, limits=LIMITS) == 0.5
    assert patience(busy, swarm, limits=LIMITS) == pytest.approx(4.0 * 0.02 * 11)


@pytest.mark.parametrize(("error", "fine"), [(0.0, True), (9e-4, True), (1.1e-3, False)])
def test_agreement_is_relative_to_the_largest_value(error, fine):
    wanted = np.array([[[0.0, -500.0]]], np.float32)
    assert agrees(wanted + np.float32(500 * error), wanted, tolerance=1e-3) == fine
    assert not agrees(np.full_like(wanted, np.nan), wanted, tolerance=1e-3)


def test_replicas_hold_the_same_weights():
    one, two = known_of(bundle_of(1), [0, 1]), known_of(bundle_of(2), [0, 1])
    swarm = Swarm(HostView(name, frozenset({0, 1})) for name in "abcd")
    hop = Visited("a", (1, 0), "answered", 1.0)
    assert replicas(hop, swarm, known={"a": one, "b": two, "c": one, "d": one}) == ("c", "c")
    assert replicas(hop, swarm, known={"a": one, "b": two, "c": {0: one[0]}}) is None
    all_same = dict.fromkeys("abcd", one)
    assert replicas(hop, swarm, known=all_same, apart=("b", "c")) == ("d", "d")
    assert replicas(hop, swarm, known=all_same, apart="bcd") is None
    busy = swarm.with_host(state.sent(swarm["c"], 3))
    assert replicas(hop, busy, known={"a": one, "c": one, "d": one}) == ("d", "d")


def trusted(check, limits, blocks=(0, 1), hosts="ab"):
    """Run `check(health, places)` with hosts of the same blocks, nothing else running."""

    async def go():
        places = FakePlaces()
        router = Router(places, depth=DEPTH, limits=limits)
        health = Health(router, seed=0)
        bundle = bundle_of(1)
        for name in hosts:
            await places.start(name, node="")
            await places.load(name, b"", tensors={block: bundle.tensors[block] for block in blocks})
            router.swarm = router.swarm.with_host(HostView(name, frozenset(blocks)))
            health.expect(name, known_of(bundle, blocks))
        async with asyncio.timeout(5):
            await check(health, places)
        await health.close()

    asyncio.run(go())


def hopped(health, name, after, blocks=(0,)):
    hop = Visited(name, blocks, "answered", 0.0)
    for observe in health.router.observers:
        observe(hop, START, after)


def test_an_audit_finds_the_host_that_lied():
    async def check(health, places):
        places.processes["a"].kind = "wrong"
        hopped(health, "a", answer_of([0, 1]) * 1.5, blocks=(0, 1))
        await until(lambda: health.disagreed == 1)
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["b"].condition == "healthy"
        assert health.router.swarm["a"].why == "it failed its canary on block 0"

    trusted(check, Limits(audit_share=1.0))


def test_an_audit_finds_that_the_replica_lies():
    async def check(health, places):
        places.processes["b"].kind = "wrong"
        hopped(health, "a", answer_of([0]))
        await until(lambda: health.router.swarm["b"].condition == "shut-out")
        assert health.router.swarm["a"].condition == "healthy"

    trusted(check, Limits(audit_share=1.0))


def test_hosts_that_no_canary_and_no_third_tells_apart_are_suspects_in_the_end(caplog):
    async def check(health, places):
        for strike in (1, 2, 3):
            assert all(host.usable for host in health.router.swarm.values())
            hopped(health, "a", answer_of([0]) + 5)
            await until(lambda strike=strike: caplog.text.count("pass their canaries") == strike)
            await until(lambda: not health._audits)
        for host in health.router.swarm.values():
            assert host.condition == "suspect"
            assert host.why == "a and b differ over blocks 0, and no third host decides"
        health.drop("b")
        assert not health._doubts

    trusted(check, Limits(audit_share=1.0))


OTHER = np.full_like(START, 3.0)


def lied(health, name, blocks=(0, 1)):
    """`name` answered a request wrongly, and passes its canaries."""
    hop = Visited(name, blocks, "answered", 0.0)
    after = computed(OTHER, blocks, dict.fromkeys(blocks, 1))
    for observe in health.router.observers:
        observe(hop, OTHER, after * 1.5)


def test_two_others_tell_a_liar_that_passes_its_canaries():
    async def check(health, places):
        lied(health, "a")
        await until(lambda: health.router.swarm["a"].condition == "shut-out")
        assert health.router.swarm["a"].why == "it disagrees with two others over blocks 0, 1"
        assert all(health.router.swarm[name].usable for name in "bc")
        assert (health.audited, health.disagreed) == (1, 1)

    trusted(check, Limits(audit_share=1.0), hosts="abc")


def test_a_third_tells_that_the_replica_lies():
    async def check(health, places):
        places.processes["b"].lies = True  # asked first; in its second block too
        hop = Visited("a", (0, 1), "answered", 0.0)
        for observe in health.router.observers:
            observe(hop, OTHER, computed(OTHER, (0, 1), {0: 1, 1: 1}))
        await until(lambda: health.router.swarm["b"].condition == "shut-out")
        assert all(health.router.swarm[name].usable for name in "ac")

    trusted(check, Limits(audit_share=1.0), hosts="abc")


def test_no_audit_judges_weights_that_were_swapped_meanwhile():
    async def check(health, places):
        health.expect("a", known_of(bundle_of(1), [0]))
        hop = Visited("a", (0,), "answered", 50.0)  # sent before that
        for observe in health.router.observers:
            observe(hop, START, answer_of([0]) * 1.5)
        assert not health._audits
        lied(health, "a")
        (audit,) = health._audits
        await asyncio.sleep(0)
        places.freeze("c")
        await until(lambda: health.disagreed)
        health.forget("a", [0])
        health.expect("a", known_of(bundle_of(1), [0]))
        places.thaw("c")
        await asyncio.wait({audit})
        assert all(host.usable for host in health.router.swarm.values())
        assert not health._doubts

    trusted(check, Limits(audit_share=1.0, hop_cap_ms=500), hosts="abc")


def test_no_hosts_are_doubted_for_weights_that_were_swapped_meanwhile():
    async def check(health, places):
        places.freeze("b")
        lied(health, "a")
        (audit,) = health._audits
        await asyncio.sleep(0.05)
        health.expect("a", known_of(bundle_of(1), [0]))
        places.thaw("b")
        await asyncio.wait({audit})
        assert health.disagreed == 1
        assert not health._doubts

    trusted(check, Limits(audit_share=1.0))


def test_a_host_that_is_dropped_during_its_canary_is_not_remembered():
    async def check(health, places):
        places.freeze("a")
        asking = asyncio.create_task(health._turn(Check("a", 0, 2.0)))
        await asyncio.sleep(0)
        health.drop("a")
        places.thaw("a")
        await asking
        assert "a" not in health._asked

    trusted(check, LIMITS)


@pytest.mark.parametrize(
    ("after", "second", "third", "odd"),
    [
        (9, (1, 2), (1, 2), "x"),
        (2, (1, 9), (1, 2), "q"),
        (2, (9, 8), (1, 2), "p"),
        (9, (1, 2), (1, 5), ""),
    ],
)
def test_the_odd_one_of_three(after, second, third, odd):
    def states(values):
        return tuple(START * value for value in values)

    hop = Visited("x", (0, 1), "answered", 1.0)
    one, two = Again(("p", "q"), states(second)), Again(("r", "r"), states(third))
    assert odd_one(hop, START * after, second=one, third=two, tolerance=1e-3) == odd


def test_audits_of_equal_answers_change_nothing_and_are_counted():
    async def check(health, places):
        hopped(health, "a", answer_of([0, 1]), blocks=(0, 1))
        hopped(health, "a", None)
        await until(lambda: health.audited == 1)
        assert health.disagreed == 0

    trusted(check, Limits(audit_share=1.0))


def test_audits_are_a_share_and_need_a_replica():
    async def check(health, places):
        async def share(n):
            for _ in range(n):
                hopped(health, "a", answer_of([0]))
                await asyncio.sleep(0)
                await until(lambda: not health._audits)
            return health.audited

        count = await share(400)
        assert 60 <= count <= 100  # 0.2 of 400, 2.5 standard deviations
        health.drop("b")
        assert await share(40) == count

    trusted(check, Limits(audit_share=0.2))


def test_a_late_answer_to_a_probe_keeps_a_host_out():
    async def check(health, places):
        running = asyncio.create_task(health.run())
        places.freeze("a")
        await until(lambda: health.router.swarm["a"].condition == "suspect")
        await until(lambda: health.router.swarm["a"].strikes >= 2)
        assert health.router.swarm["a"].why == "it did not answer a canary in time"
        places.thaw("a")
        await until(lambda: health.router.swarm["a"].condition == "healthy")
        assert health.router.swarm["a"].compute == pytest.approx(1e-4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    trusted(check, QUICK.model_copy(update={"probe_ms": 50.0}))


def test_a_canary_of_weights_that_were_swapped_meanwhile_says_nothing():
    async def check(health, places):
        places.freeze("a")
        asking = asyncio.create_task(health._canary(Check("a", 0, 2.0)))
        await asyncio.sleep(0)
        health.forget("a", [0])
        await places.load("a", b"", tensors={0: b"2"})
        health.expect("a", known_of(bundle_of(2), [0]))
        places.thaw("a")
        assert await asking == ""
        assert health.router.swarm["a"].condition == "healthy"
        assert await health.check("a") == ""

    trusted(check, LIMITS)


def test_an_audit_that_gets_no_answer_is_held_against_the_replica():
    async def check(health, places):
        places.kill("b")
        hopped(health, "a", answer_of([0]))
        await until(lambda: health.router.swarm["b"].condition == "gone")

    trusted(check, Limits(audit_share=1.0))
