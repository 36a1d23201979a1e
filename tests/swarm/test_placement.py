"""Decisions about which host runs on which machine, with times as arguments."""

import pytest
from fake_hosts import DEPTH, PLAN, A, B, plan_of

from layershuffle.swarm.placement import (
    Drop,
    HostRecord,
    Node,
    Reload,
    Start,
    homes_of,
    reconcile,
    spare_blocks,
)


def up(name, node, blocks, **changes):
    return {name: HostRecord(name, node, frozenset(blocks), "up", **changes)}


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
    dead = {"a": HostRecord("a", "n1", frozenset({0, 1}), "dead", retry_at=5.0)}
    assert len(decided([A], dead, now=now)) == starts


@pytest.mark.parametrize("phase", ["starting", "held", "up"])
def test_what_starts_or_is_held_is_left_alone(phase):
    assert decided([A], {"a": HostRecord("a", "n1", frozenset({0, 1}), phase)}) == ()


def test_a_changed_plan_refills_hosts():
    hosts = up("a", "n1", [0, 1]) | up("b", "n2", [2])
    assert decided([A, B], hosts) == (Reload("b", frozenset({2, 3})),)


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
    mine = up("a", "n3333333333", [0])
    assert homes_of(nodes, mine) == {"a": "n3333333333", "a@n1111111": "n1111111111"}
