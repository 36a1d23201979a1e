"""Blocks side by side and again in the simulation, which drives the real router."""

import numpy as np
import pytest
from test_simulation import run, spread

from layershuffle.swarm.chaos import Fault
from layershuffle.swarm.rounds import Cell, Rounds, Way
from layershuffle.swarm.simulation.scenario import Arrivals

SIDE_BY_SIDE = [(2, 12, 30), (3, 12, 20), (3, 6, 20), (4, 1, 38)]


@pytest.mark.parametrize(("parallel", "hosts", "ms"), SIDE_BY_SIDE)
def test_blocks_side_by_side(parallel, hosts, ms):
    """A round takes as long as one visit; one host runs all in one. Busy swarms lose nothing."""
    rounds = Rounds(otherwise=Way(parallel), max_age=11)
    outcome = run(spread(hosts), rounds=rounds, arrivals=Arrivals(clients=1))
    np.testing.assert_allclose(outcome.ms[1:-1], ms, atol=1e-6)
    assert outcome.blocks == {12: 100}
    many = {"arrivals": Arrivals(clients=12)}
    busy = run(spread(hosts), rounds=rounds, **many)
    alone = run(spread(hosts), routing="order-free-serial", rounds=rounds, **many)
    assert busy.seconds <= 1.03 * alone.seconds


def test_survivors_run_again():
    """Three of twelve hosts are left; what ran three times is looked up as such."""
    dead = [Fault(0, f"host-{number}", "crash") for number in range(4, 13)]
    rounds = Rounds({3: Way(3, 3)}, max_age=11)
    accuracy = {Cell(1): 10.0, Cell(12): 90.0, Cell(3, 3, 3): 80.0}
    options = {"faults": dead, "arrivals": Arrivals(clients=1), "accuracy": accuracy}
    outcome = run(spread(), rounds=rounds, **options)
    assert outcome.blocks == {3: 100}
    assert outcome.served["host-1"] == 300
    assert outcome.accuracy == pytest.approx(80, abs=1), "the first one did not know it yet"
    once = run(spread(), routing="order-free-serial", rounds=rounds, **options)
    assert once.accuracy == pytest.approx(10 + 80 * 2 / 11, abs=1)
