"""The coordinator over hosts that compute by a formula, in virtual time."""

import asyncio

import numpy as np
import pytest
from fake_hosts import (
    A,
    B,
    FakeHosts,
    FormulaBundle,
    answer_of,
    bundle_of,
    condition,
    coordinated,
    coordinator_of,
    plan_of,
    replaced,
    running,
    walked,
)

from clock import loop_time, run_virtual
from layershuffle.errors import LayerShuffleError
from layershuffle.swarm import state
from layershuffle.swarm.messages import Answer, Packet
from layershuffle.swarm.placement import Node
from layershuffle.swarm.service import keep_running
from waiting import until


def test_hosts_come_up_with_their_blocks_and_are_used():
    async def check(coordinator, hosts):
        assert {n: p.weights for n, p in hosts.processes.items()} == {
            "a": {0: 1, 1: 1},
            "b": {2: 1, 3: 1},
        }
        after, route = await walked(coordinator)
        assert route.ending == "complete"
        assert (after == answer_of(route.order)).all()

    coordinated(check)


def test_before_they_come_the_route_says_so():
    async def check(coordinator, hosts):
        _, route = await walked(coordinator)
        assert route.skipped[0] == "host a is gone: it has not come yet"
        await until(lambda: "b" in coordinator.hosts and coordinator.is_up("b"))
        assert await coordinator.ready(within=0.0) == ("a",)

    coordinated(check, nodes=(B,), ready=False)


def test_a_dead_host_on_a_living_machine_starts_again(caplog):
    async def check(coordinator, hosts):
        first = hosts.processes["a"]
        hosts.kill("a")
        # Without requests, the canary notices.
        await until(lambda: hosts.processes.get("a") not in (None, first))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert coordinator.hosts["a"].tries == 1  # until it has run for a minute
        assert caplog.messages == ["Host a has died", "Host a is up again"]

    coordinated(check)


def test_a_host_leaves_with_its_machine_and_comes_back_with_it(caplog):
    async def check(coordinator, hosts):
        hosts.machines.remove(A)
        await until(lambda: "a" not in coordinator.hosts)
        _, route = await walked(coordinator)
        assert route.skipped[0] == "host a is gone: its machine has left the swarm"
        hosts.machines.append(Node("n7", ("a",), "10.0.0.1"))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert (coordinator.hosts["a"].node, caplog.messages) == ("n7", ["Host a is up again"])

    coordinated(check)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_machine_that_joins_anew_between_two_looks(seconds):
    """One look ends the host on the old one, and starts it on the new."""

    async def check(coordinator, hosts):
        hosts.end_seconds = seconds
        hosts.machines[0] = Node("n7", ("a",), "10.0.0.1")
        await until(lambda: coordinator.hosts["a"].node == "n7")
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert hosts.log.count(("end", "a")) == 1
        assert hosts.log.count(("start", "a", "n7")) == 1

    coordinated(check)


def test_a_host_that_leaves_while_it_starts_is_forgotten():
    async def check(coordinator, hosts):
        hosts.load_seconds = 5.0
        hosts.machines.append(Node("n3", ("c",), ""))
        await until(lambda: ("load", "c", (0, 1)) in hosts.log)
        hosts.machines.pop()
        await until(lambda: "c" not in coordinator.hosts)
        assert "c" not in coordinator.router.swarm
        assert "c" not in hosts.processes

    coordinated(check)


class OtherBlock1(FormulaBundle):
    def compute(self, block, state):
        return super().compute(block, state) + (block == 1)


def test_a_host_that_fails_its_canaries_is_not_let_in(caplog):
    async def check(coordinator, hosts):
        await until(lambda: coordinator.hosts["a"].tries >= 3)
        assert condition(coordinator, "a") == "gone"
        assert condition(coordinator, "b") == "healthy"

    async def both(coordinator, hosts):
        await until(lambda: "a" in coordinator.hosts)
        await check(coordinator, hosts)

    coordinated(both, bundle=bundle_of(1, kind=OtherBlock1), ready=False)
    assert "Host a did not start: it failed its canary on block 1" in caplog.text


def test_machines_that_are_not_known_for_a_while_change_nothing(caplog):
    async def check(coordinator, hosts):
        hosts.raises["nodes"] = LayerShuffleError("the head does not answer")
        await asyncio.sleep(0.05)
        del hosts.raises["nodes"]
        _, route = await walked(coordinator)
        assert route.ending == "complete"
        assert len([call for call in hosts.log if call[0] == "start"]) == 2

    coordinated(check)
    assert "the head does not answer" in caplog.text


def test_an_adopted_host_gets_only_what_it_lacks():
    async def check(coordinator, hosts):
        # A gateway that starts anew: another coordinator over the same processes.
        hosts.log.clear()
        second = coordinator_of(hosts, plan_of(a=(1, 2), b=(2, 3)))
        async with running(second):
            assert await second.ready(within=3.0) == ()
            await until(lambda: ("unload", "a", (0,)) in hosts.log)
        assert [entry for entry in hosts.log if entry[0] == "load"] == [("load", "a", (2,))]

    coordinated(check)


def test_a_new_plan_moves_blocks():
    async def check(coordinator, hosts):
        coordinator.plan = plan_of(a=(0, 1, 2), b=(3,))
        await until(lambda: set(hosts.processes["b"].weights) == {3})
        await until(lambda: coordinator.router.swarm["a"].blocks == {0, 1, 2})

    coordinated(check)


def test_drain_and_readmit():
    async def check(coordinator, hosts):
        assert await coordinator.drain("a")
        assert condition(coordinator, "a") == "draining"
        _, route = await walked(coordinator)
        assert route.skipped == dict.fromkeys((0, 1), "host a is draining: it is leaving")
        await coordinator.leave("a")
        assert "a" not in hosts.processes
        await asyncio.sleep(0.05)
        assert "a" not in hosts.processes
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)


def test_a_host_that_starts_can_be_drained():
    """Its start is cancelled, and it stays away until it is readmitted."""

    async def check(coordinator, hosts):
        hosts.load_seconds = 0.4
        hosts.log.clear()
        await coordinator.readmit("a")
        await until(lambda: ("load", "a", (0, 1)) in hosts.log)
        assert coordinator.hosts["a"].phase == "starting"
        hosts.load_seconds = 0.0
        assert await coordinator.drain("a") is True
        assert "a" not in hosts.processes
        await asyncio.sleep(0.5)
        assert (coordinator.hosts["a"].phase, condition(coordinator, "a")) == ("held", "gone")
        assert "a" not in hosts.processes
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)


def test_a_dead_host_can_be_drained():
    async def check(coordinator, hosts):
        hosts.raises["load"] = LayerShuffleError("no room")
        hosts.kill("a")
        await until(lambda: coordinator.hosts["a"].tries >= 2)
        assert await coordinator.drain("a") is True
        del hosts.raises["load"]
        await asyncio.sleep(0.1)
        assert coordinator.hosts["a"].phase == "held"
        assert "a" not in hosts.processes

    coordinated(check)


def test_a_host_that_is_given_blocks_finishes_before_it_leaves():
    """Visits go on meanwhile, so its process must not end."""

    async def check(coordinator, hosts):
        hosts.load_seconds = 0.2
        coordinator.plan = plan_of(a=(0, 1, 2), b=(3,))
        await until(lambda: ("load", "a", (2,)) in hosts.log)
        assert await coordinator.drain("a") is True
        await asyncio.sleep(0.4)
        assert (coordinator.hosts["a"].phase, condition(coordinator, "a")) == ("held", "draining")

    coordinated(check)


def test_a_spare_that_starts_can_be_drained():
    async def check(coordinator, hosts):
        hosts.load_seconds = 5.0
        hosts.machines.append(Node("n3", ("c",), ""))
        await until(lambda: ("load", "c", (0, 1)) in hosts.log)
        assert await coordinator.drain("c") is True
        assert "c" not in hosts.processes

    coordinated(check)


def test_readmitting_a_host_that_is_being_replaced():
    """Watch and operator at once: one process at a time, and one in the end."""

    async def check(coordinator, hosts):
        hosts.end_seconds = hosts.load_seconds = 0.05
        hosts.kill("a")
        await until(lambda: coordinator.hosts["a"].phase == "starting")
        for _ in range(3):
            await coordinator.readmit("a")
            await asyncio.sleep(0.03)
        await until(lambda: condition(coordinator, "a") == "healthy")
        starts = hosts.log.count(("start", "a", "n1"))
        await asyncio.sleep(0.2)
        assert hosts.log.count(("start", "a", "n1")) == starts
        assert coordinator.hosts["a"].phase == "up"

    coordinated(check)


def test_a_host_readmitted_while_it_leaves_stays():
    async def check(coordinator, hosts):
        hosts.end_seconds = 0.05
        coordinator.router.update("a", lambda host: state.sent(host, 1))
        leaving = asyncio.create_task(coordinator.leave("a"))
        await until(lambda: condition(coordinator, "a") == "draining")
        await coordinator.readmit("a")
        await leaving
        await until(lambda: condition(coordinator, "a") == "healthy")
        await asyncio.sleep(0.1)
        assert coordinator.hosts["a"].phase == "up"
        assert hosts.log.count(("end", "a")) == 1

    coordinated(check)


# --- unexpected failures --------------------------------------------------------------------------


def test_a_canary_that_breaks_is_held_against_its_host_alone(caplog):
    async def check(coordinator, hosts):
        hosts.raises["a"] = ValueError("operands could not be broadcast")
        await until(lambda: condition(coordinator, "a") == "suspect")
        assert "operands could not be broadcast" in coordinator.router.swarm["a"].why
        await replaced(coordinator, hosts, "b")  # the watch goes on
        del hosts.raises["a"]
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)
    (first, *_) = [log for log in caplog.records if "canary of host a broke" in log.message]
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
    async def check(coordinator, hosts):
        hosts.raises["a"] = answer
        await until(lambda: condition(coordinator, "a") == "shut-out")
        assert "cannot be read" in coordinator.router.swarm["a"].why
        await replaced(coordinator, hosts, "b")

    coordinated(check)


GOOD = Packet("fp32", answer_of([0, 1]))


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        (Answer(GOOD, float("nan"), 0.0), "shut-out"),
        (Answer(GOOD, 1.0, -1.0), "shut-out"),
        (Answer(GOOD, 1.0, 0.0, 0), "shut-out"),
        (Answer(GOOD, 1.0, 0.0, float("inf")), "shut-out"),
        (Answer(GOOD, 0.1, 1e300), "suspect"),
        (Answer(GOOD, 1.1, 1.1), "suspect"),  # in a visit of 1 ms, with a slack of 1.1 ms
    ],
)
@pytest.mark.parametrize("asked", ["canary", "visit"])
def test_impossible_times_shut_a_host_out_or_make_it_suspect(answer, then, asked):
    async def check(coordinator, hosts):
        link = coordinator.router.swarm["a"].link
        hosts.raises["a"] = answer
        if asked == "visit":
            await walked(coordinator)
        await until(lambda: condition(coordinator, "a") == then)
        assert coordinator.router.swarm["a"].link == link
        why = {"shut-out": "times or batch size", "suspect": "longer than its visit"}[then]
        assert why in coordinator.router.swarm["a"].why

    coordinated(check, plan=plan_of(a=(0, 1)), nodes=(A,))


def test_a_failed_bring_up_is_reported_and_retried(caplog):
    async def check(coordinator, hosts):
        hosts.raises["load"] = KeyError("blocks.0.weight")
        hosts.kill("a")
        await until(lambda: coordinator.hosts["a"].tries >= 2)
        assert "KeyError" in coordinator.hosts["a"].why
        del hosts.raises["load"]
        await until(lambda: condition(coordinator, "a") == "healthy")

    coordinated(check)
    (first, *_) = [log for log in caplog.records if "Work with host a broke" in log.message]
    assert first.exc_info[0] is KeyError


def test_a_failed_watch_restarts(caplog):
    async def go():
        hosts = FakeHosts(A, B)
        coordinator = coordinator_of(hosts)
        hosts.raises["nodes"] = RuntimeError("nobody foresaw this")
        watch = asyncio.create_task(keep_running("The monitor", coordinator.run, pause=0.01))
        await until(lambda: caplog.text.count("The monitor failed and is started again") >= 2)
        await until(lambda: not coordinator.watching)
        del hosts.raises["nodes"]
        assert await coordinator.ready(within=3.0) == ()
        assert coordinator.watching
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert not coordinator.watching
        await coordinator.close()

    run_virtual(go())
    errors = [str(r.exc_info[1]) for r in caplog.records if "is started again" in r.message]
    assert "nobody foresaw this" in errors[0]


def test_a_hanging_query_for_machines_is_not_repeated(caplog):
    async def check(coordinator, hosts):
        hosts.known.clear()
        before = len(hosts.log)
        await asyncio.sleep(0.2)
        assert caplog.text.count("no answer within 10 ms") == 1  # in many looks
        assert hosts.log[before:].count(("nodes",)) <= 2  # one was under way
        assert coordinator.watching
        hosts.known.set()
        await replaced(coordinator, hosts, "a")

    coordinated(check)


def test_hosts_end_side_by_side():
    seconds = []

    async def check(coordinator, hosts):
        hosts.end_seconds = 0.3
        began = loop_time()
        await coordinator.close()
        seconds.append(loop_time() - began)
        assert hosts.processes == {}
        hosts.end_seconds = 0.0

    coordinated(check)
    assert seconds == [pytest.approx(0.3)]


def test_a_host_that_does_not_end_blocks_nobody():
    async def check(coordinator, hosts):
        hosts.end_seconds = 5.0
        hosts.kill("a")
        await until(lambda: ("start", "b", "n2") in hosts.log)
        await until(lambda: coordinator.hosts["a"].phase == "starting")
        hosts.machines.append(Node("n3", ("c",), ""))
        await until(lambda: coordinator.hosts.get("c") and coordinator.hosts["c"].phase == "up")
        hosts.end_seconds = 0.0

    coordinated(check)


def test_a_machine_that_comes_and_goes_never_has_two_things_done_to_its_host():
    """While one end of the host waits for another, a new start waits for both."""

    async def check(coordinator, hosts):
        machine = Node("n3", ("c",), "")
        hosts.machines.append(machine)
        await until(lambda: "c" in coordinator.hosts and coordinator.is_up("c"))
        hosts.end_seconds = 0.05
        for _ in range(2):
            hosts.machines.remove(machine)
            await until(lambda: "c" not in coordinator.hosts)
            hosts.machines.append(machine)
            await until(lambda: "c" in coordinator.hosts)
        hosts.machines.remove(machine)
        await until(lambda: len(coordinator._ending) == 1)  # the first of three has ended
        hosts.machines.append(machine)
        await until(lambda: "c" in coordinator.hosts and coordinator.is_up("c"))
        assert hosts.overlaps == []

    coordinated(check)


def test_hosts_that_left_are_forgotten():
    async def check(coordinator, hosts):
        for number in range(5):
            hosts.machines.append(Node(f"m{number}", (), ""))
            name = f"host@m{number}"
            await until(lambda name=name: name in coordinator.router.swarm)
            await asyncio.sleep(0.2)  # its canaries have been asked too
            assert name in coordinator.traces
            hosts.machines.pop()
            await until(lambda name=name: name not in coordinator.traces)
        assert coordinator.traces == {"a", "b"}

    coordinated(check)
