"""How simulated requests end when hosts die."""

from __future__ import annotations

import json

import pytest

from layershuffle.swarm.chaos import Fault
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.rounds import Cell
from layershuffle.swarm.simulation.outcome import ENDED, outcome_json, outcome_report
from layershuffle.swarm.simulation.run import simulate
from layershuffle.swarm.simulation.scenario import Arrivals, HostTimes, Profile

PICO = SwarmPlan(
    model="pico",
    hosts={
        **{name: HostPlan(blocks=(b,)) for b, name in enumerate("abcd")},
        "e": HostPlan(blocks=(0,)),
        "f": HostPlan(blocks=(3,)),
    },
    # However busy the machine is, no real host is given up as late: only deaths count.
    limits=Limits(
        hop_floor_ms=25_000, hop_cap_ms=25_000, probe_ms=25_000, deadline_ms=30_000
    ),
)  # fmt: skip
PICO_FAULTS = (Fault(30, "a", "crash"), Fault(60, "b", "crash"), Fault(90, "d", "crash"))
PICO_REQUESTS, CLIENTS = 120, 3


@pytest.mark.parametrize(
    ("routing", "wanted"),
    [
        ("order-free", {"answered": 60, "degraded": 60}),
        ("sequential", {"answered": 60, "failed": 60}),
    ],
)
def test_requests_end_as_the_blocks_that_are_left_say(routing, wanted):
    """Requests that are under way at a death may end either way, at most one of every client."""
    simulated = simulate(
        PICO,
        profile=Profile(every=HostTimes(block_ms=1, link_ms=2), notice_ms=0),
        requests=PICO_REQUESTS,
        arrivals=Arrivals(clients=CLIENTS),
        faults=PICO_FAULTS,
        routing=routing,
    )
    for end in ENDED:
        count = wanted.get(end, 0)
        assert simulated.ended[end] == pytest.approx(count, abs=CLIENTS)


def test_a_client_that_was_refused_waits_as_retry_after_says():
    """A second without suspects, in which nothing is asked."""
    outcome = simulate(
        PICO,
        profile=Profile(),
        requests=10,
        faults=[Fault(0, name, "crash") for name in PICO.hosts],
        routing="sequential",
        arrivals=Arrivals(clients=1),
    )
    assert outcome.ended["failed"] == 10
    assert outcome.seconds == pytest.approx(9 + sum(outcome.ms) / 1000)
    assert f"simulated seconds {outcome.seconds:.1f}" in " ".join(
        outcome_report({"sequential": outcome}).split()
    )
    assert outcome_json(outcome)["seconds"] == outcome.seconds


def test_json_holds_the_figures_of_the_outcome_and_no_nan():
    options = {"profile": Profile(), "requests": 40, "accuracy": {Cell(1): 10.0, Cell(4): 85.0}}
    outcome = simulate(PICO, **options)
    report = outcome_json(outcome)
    assert report["percent"] == {"answered": 100.0, "degraded": 0.0, "late": 0.0, "failed": 0.0}
    assert report["ms"]["p99"] == outcome.quantile(0.99)
    assert report["answers_by_blocks"] == {"4": 40}
    assert report["right_of_requests"] == 85.0

    dead = tuple(Fault(0, name, "crash") for name in PICO.hosts)
    nothing = outcome_json(simulate(PICO, faults=dead, **options))
    assert nothing["percent"]["failed"] == 100.0
    assert nothing["mean_blocks"] is nothing["right_of_answers"] is None
    json.dumps([report, nothing], allow_nan=False)
