"""Plans for described devices: against closed forms and the simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layershuffle.errors import UsageError
from layershuffle.swarm.assignment import BlockFile
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.planning import (
    HostsFile,
    HostSpec,
    ModelFacts,
    most_per_second,
    plan_for,
    plan_report,
)
from layershuffle.swarm.rounds import Cell
from layershuffle.swarm.simulation.run import simulate
from refusals import refuses

DEPTH = 12
FILES = tuple(BlockFile(f"block-{number}", 1_000_000) for number in range(DEPTH))
FACTS = ModelFacts(blocks=FILES, block_ms=5.0, cells={Cell(DEPTH): 96.1})


def bound(seconds, memory, blocks=FILES, allowed=None):
    allowed = np.ones((len(seconds), len(blocks)), bool) if allowed is None else allowed
    return most_per_second(
        np.array(seconds), blocks, memory=np.array(memory, float), allowed=allowed
    )


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_with_memory_for_all_the_speeds_add_up(seconds, depth, places):
    """Each of `depth` files runs `places` places of a request."""
    blocks = [BlockFile(str(file), 7) for file in range(depth) for _ in range(places)]
    wanted = sum(1 / time for time in seconds) / (depth * places)
    assert bound(seconds, [1e9] * len(seconds), blocks) == pytest.approx(wanted, rel=1e-6)


def test_memory_bounds_what_a_fast_host_can_do():
    """It has room for half of the blocks, so the slow one runs the other half."""
    assert bound([1e-6, 0.01], [6e6, 12e6]) == pytest.approx(100 / 6, rel=1e-6)


def test_a_plan_is_bounded_by_its_fullest_host():
    held = np.array([[block < 9 for block in range(12)], [block >= 9 for block in range(12)]])
    assert bound([0.01, 0.01], [9e6, 9e6], allowed=held) == pytest.approx(100 / 9, rel=1e-6)


def test_from_devices_to_figures():
    """Four equal hosts: a request alone takes 12 visits, and busy hosts come near the bound."""
    file = HostsFile(hosts={"pi": HostSpec(count=4, memory_mb=6, link_ms=1, speed=0.5)})
    planned = plan_for(file, FACTS)
    holders = [block for device in planned.devices.values() for block in device.blocks]
    assert sorted(holders) == sorted([*range(12)] * 2), "two of each"
    assert planned.most == pytest.approx(4 * 100 / 12, rel=1e-6)
    assert planned.bound == pytest.approx(planned.most, rel=1e-6)
    # No deadline cuts a request off, and a host takes one visit at a time.
    patient = {"deadline_ms": 1e9, "hop_floor_ms": 1e9, "hop_cap_ms": 1e9}
    limits = Limits(**patient, canary_every_ms=1e12)
    options = {"limits": limits, "max_batch": 1, "requests": 400}
    alone = simulate(planned.devices, clients=1, **options)
    assert alone.figures["ms_median"] == pytest.approx(12 * (10 + 1))
    busy = simulate(planned.devices, clients=24, **options)
    assert 0.9 * planned.most <= busy.figures["per_second"] <= 1.05 * planned.most
    text = plan_report(planned, FACTS)
    assert "at most 33.3 requests/s. No plan can give more than 33.3" in text
    assert "With all blocks 96.1 %" in text
    assert "on one host only" not in text


def test_blocks_without_a_second_holder_are_said():
    planned = plan_for(HostsFile(hosts={"a": HostSpec(memory_mb=13)}), FACTS)
    assert "12 blocks on one host only" in plan_report(planned, FACTS)


def test_what_cannot_be_planned():
    with refuses(UsageError):
        plan_for(HostsFile(hosts={"a": HostSpec(memory_mb=11.5)}), FACTS)
    twice = {"pi": HostSpec(count=2, memory_mb=9), "pi-2": HostSpec(memory_mb=9)}
    with refuses(UsageError):
        plan_for(HostsFile(hosts=twice), FACTS)
