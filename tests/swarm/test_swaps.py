"""What an operator changes in a running swarm, in virtual time: swaps, donors, and a spare."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_hosts import (
    QUICK,
    answer_of,
    bundle_of,
    condition,
    coordinated,
    replaced,
    walked,
)

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.placement import Node
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.server.admin import Fields, carry_out
from waiting import until


def test_a_swap_loses_no_request():
    """A sibling's block rehosts another under load: every answer is that of one or the other."""
    donor = bundle_of(2)

    async def check(coordinator, hosts):
        hosts.load_seconds = 0.05
        swapping = asyncio.create_task(coordinator.swap("a", 1, donor=donor))
        seen = set()
        while not swapping.done() or len(seen) < 2:
            after, route = await walked(coordinator)
            assert route.ending == "complete"
            old, new = answer_of(route.order), answer_of(route.order, (1, 2, 1, 1))
            assert (after == old).all() or (after == new).all()
            seen.add(bool((after == new).all()))
            assert coordinator.foreign_blocks >= {("a", 1)} or not (after == new).all()
        await swapping
        assert coordinator.foreign_blocks == {("a", 1)}
        # It is held to the new answer from now on, also by the next process of its name.
        await asyncio.sleep(0.15)
        assert condition(coordinator, "a") == "healthy"
        await replaced(coordinator, hosts, "a")
        assert hosts.processes["a"].weights == {0: 1, 1: 2}
        assert coordinator.foreign_blocks == {("a", 1)}
        await coordinator.swap("a", 1, donor=bundle_of(1))
        assert coordinator.foreign_blocks == frozenset(), (
            "the weights are those of the plan's model"
        )

    coordinated(check)


def test_a_host_that_starts_takes_no_swap():
    async def check(coordinator, hosts):
        hosts.load_seconds = 0.1
        await coordinator.readmit("a")
        with pytest.raises(LayerShuffleError, match="is starting"):
            await coordinator.swap("a", 1, donor=bundle_of(2))
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert hosts.processes["a"].weights == {0: 1, 1: 1}

    coordinated(check)


def test_a_swap_whose_host_begins_anew_is_no_swap():
    async def check(coordinator, hosts):
        hosts.load_seconds = 0.1
        swapping = asyncio.create_task(coordinator.swap("a", 1, donor=bundle_of(2)))
        await until(lambda: ("load", "a", (1,)) in hosts.log)
        hosts.load_seconds = 0.0
        coordinator.hold("a", "somebody wished it")
        with pytest.raises(LayerShuffleError, match="came or went"):
            await swapping
        await coordinator.readmit("a")
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert hosts.processes["a"].weights == {0: 1, 1: 1}

    coordinated(check)


@pytest.mark.parametrize(
    ("host", "block", "donor", "says"),
    [
        ("c", 0, bundle_of(2), "no host 'c'"),
        ("a", 2, bundle_of(2), "does not hold block 2"),
        ("a", 1, bundle_of(2, base="other"), "cannot stand in.*every seed makes another base"),
        ("a", 3, bundle_of(2, depth=3), "does not hold"),
        ("b", 3, bundle_of(2, depth=3), "has no block 3"),
    ],
)
def test_a_swap_of_what_does_not_fit_is_refused(host, block, donor, says):
    async def check(coordinator, hosts):
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

    async def check(coordinator, hosts):
        assert hosts.processes["a"].weights == {0: 1, 1: 2}

    coordinated(check, plan=plan, bundles={"base": bundle_of(1), "sib": bundle_of(2)})
    strange = {"base": bundle_of(1), "sib": bundle_of(2, base="other")}
    with pytest.raises(UsageError, match="cannot stand in"):
        coordinated(check, plan=plan, bundles=strange)


def test_a_spare_that_starts_is_readmitted():
    """The router does not know it before it is up."""

    async def check(coordinator, hosts):
        hosts.load_seconds = 5.0
        hosts.machines.append(Node("n3", ("c",), ""))
        await until(lambda: ("load", "c", (0, 1)) in hosts.log)
        service = SimpleNamespace(coordinator=coordinator, router=coordinator.router)
        await carry_out(service, "readmit", fields=Fields(host="c"))
        await until(lambda: hosts.log.count(("start", "c", "n3")) == 2)

    coordinated(check)
