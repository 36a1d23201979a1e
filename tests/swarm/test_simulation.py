"""The simulation against closed forms."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layershuffle.errors import UsageError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.policy import ROUTINGS
from layershuffle.swarm.rounds import QUEUE, Cell, Rounds, Way
from layershuffle.swarm.simulation.outcome import ENDED, figures, outcome_report
from layershuffle.swarm.simulation.run import simulate
from layershuffle.swarm.simulation.scenario import (
    FAULTS,
    Arrivals,
    Churn,
    Fault,
    Machines,
    SimulatedDevice,
    crashes,
    in_turn,
    life,
)
from refusals import refuses

DEPTH = 12
QUIET = Limits(canary_every_ms=1e12)
ACCURACY = {Cell(1): 10.0, Cell(6): 70.0, Cell(12): 85.0}


def spread(hosts=DEPTH, replicas=1, block_ms=3.0, link_ms=2.0):
    """Block b on the hosts b, b + 1, ... modulo their number, each block on `replicas` of them."""
    return {
        f"host-{host + 1}": SimulatedDevice(
            frozenset(b for b in range(DEPTH) if (host - b) % hosts < replicas), block_ms, link_ms
        )
        for host in range(hosts)
    }


def run(devices, requests=100, limits=QUIET, **options):
    return simulate(devices, requests=requests, limits=limits, **options)


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("hosts", [1, 3, 12])
def test_one_client_without_failures(routing, hosts):
    """A visit for each block."""
    outcome = run(spread(hosts), routing=routing, arrivals=Arrivals(clients=1))
    assert outcome.hops == DEPTH
    np.testing.assert_allclose(outcome.ms, DEPTH * 5.0, atol=1e-9)
    assert outcome.seconds == pytest.approx(100 * DEPTH * 5 / 1000)
    assert (outcome.ended["answered"], outcome.blocks) == (100, {12: 100})


@pytest.mark.parametrize(("parallel", "hosts", "ms"), [(2, 12, 30), (3, 12, 20), (3, 6, 20)])
def test_blocks_side_by_side(parallel, hosts, ms):
    """A round takes as long as one visit. Busy swarms lose nothing."""
    rounds = Rounds(otherwise=Way(parallel), max_age=11)
    outcome = run(spread(hosts), rounds=rounds, arrivals=Arrivals(clients=1))
    np.testing.assert_allclose(outcome.ms[1:-1], ms, atol=1e-6)
    assert outcome.blocks == {12: 100}
    busy, alone = (
        run(spread(hosts), rounds=ways, arrivals=Arrivals(clients=12)) for ways in (rounds, QUEUE)
    )
    assert busy.seconds <= 1.03 * alone.seconds


def test_survivors_run_again():
    """Three of twelve hosts are left; what ran three times is looked up as such."""
    dead = [Fault(0, f"host-{number}", "crash") for number in range(4, 13)]
    accuracy = {Cell(1): 10.0, Cell(12): 90.0, Cell(3, 3, 3): 80.0}
    options = {"faults": dead, "arrivals": Arrivals(clients=1), "accuracy": accuracy}
    outcome = run(spread(), rounds=Rounds({3: Way(3, 3)}, max_age=11), **options)
    assert outcome.blocks == {3: 100}
    assert outcome.visited["host-1"] == 300
    assert outcome.accuracy == pytest.approx(80, abs=1), "the first one did not know it yet"
    assert run(spread(), **options).accuracy == pytest.approx(10 + 80 * 2 / 11, abs=1)


def test_one_server_is_a_queue_with_fixed_service():
    """Against Lindley's recursion, request by request, and the mean wait of an M/D/1 queue."""
    limits = Limits(canary_every_ms=1e12, deadline_ms=3e4, hop_cap_ms=3e4, hop_floor_ms=3e4)
    service, rate, count = 0.005, 120.0, 4000
    arrivals = Arrivals(rate=rate)
    only = {"only": SimulatedDevice(frozenset({0}), 1000 * service, 0.0)}
    alone = Machines(max_batch=1)
    outcome = run(only, requests=count, limits=limits, machines=alone, arrivals=arrivals, seed=3)
    times, wait, waits = arrivals.times(count, seed=3), 0.0, [0.0]
    for before, now in pairwise(times):
        wait = max(0.0, wait + service - (now - before))
        waits.append(wait)
    np.testing.assert_allclose(outcome.ms, sorted(1000 * (w + service) for w in waits), atol=1e-6)
    load = rate * service
    assert np.mean(outcome.ms) / 1000 - service == pytest.approx(
        load * service / (2 * (1 - load)), rel=0.25
    )


def test_a_full_batch_takes_its_share_longer():
    """Four clients on one host of one block: the first runs it alone, three wait and batch."""
    only = {"only": SimulatedDevice(frozenset({0}), 3.0, 2.0)}
    outcome = run(only, requests=4, machines=Machines(batch_share=0.25), arrivals=Arrivals())
    np.testing.assert_allclose(outcome.ms, [5.0, *[2 + 3 + 3 * 1.5] * 3])


def test_dead_hosts_cost_a_pipeline_every_request_from_then_on():
    """Four of twelve die at request 40 of 100; sequential loses 60, order-free none."""
    faults = [Fault(40, f"host-{i}", "crash") for i in (2, 5, 7, 11)]
    options = {"faults": faults, "arrivals": Arrivals(clients=1), "accuracy": ACCURACY}
    ordered = run(spread(), routing="sequential", **options)
    assert ordered.ended == {"answered": 40, "degraded": 0, "late": 0, "failed": 60}
    assert ordered.right == pytest.approx(0.4 * 85)
    free = run(spread(), **options)
    assert free.ended == {"answered": 40, "degraded": 60, "late": 0, "failed": 0}
    assert free.blocks == {8: 60, 12: 40}
    assert free.accuracy == free.right == pytest.approx(0.4 * 85 + 0.6 * 75)
    # The first request after it finds out, host by host, at the cost of the notice.
    extra = 4 * (Machines().notice_ms + 1) - 4 * (2 + 3)
    assert free.ms[-1] == pytest.approx(12 * 5 + extra, abs=4 * Machines().notice_ms)


def test_churn_against_the_binomial():
    """Hosts are up 9 of 10 times: a pipeline has them all in 0.9^12 of the cases."""
    churn, count = Churn(up_s=9, down_s=1), 400
    options = {"requests": count, "churn": churn, "arrivals": Arrivals(rate=0.4), "seed": 5}
    ordered, free = (
        run(spread(), routing=routing, **options) for routing in ("sequential", "order-free")
    )
    whole = churn.availability**DEPTH
    noise = 4 * math.sqrt(whole * (1 - whole) / count)
    assert ordered.share("answered") / 100 == pytest.approx(whole, abs=noise)
    assert free.share("answered", "degraded") == 100
    assert free.mean_blocks == pytest.approx(DEPTH * churn.availability, abs=0.15)
    third = sum(free.blocks.get(k, 0) for k in (12,)) / count
    assert third == pytest.approx(whole, abs=noise)


# --- failures -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 99),
    routing=st.sampled_from(ROUTINGS),
    hosts=st.sampled_from([3, 6, 12]),
    replicas=st.integers(1, 3),
    churned=st.booleans(),
    rate=st.sampled_from([None, 20.0, 200.0]),
    faults=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 3), st.sampled_from(FAULTS)), max_size=6
    ),
)
def test_every_request_ends_once(seed, routing, hosts, replicas, churned, rate, faults):
    limits = Limits(deadline_ms=400, canary_every_ms=300)
    outcome = run(
        spread(hosts, replicas),
        limits=limits,
        requests=60,
        seed=seed,
        routing=routing,
        arrivals=Arrivals(rate=rate) if rate else None,
        churn=Churn(up_s=0.5, down_s=0.3) if churned else None,
        faults=[Fault(at, f"host-{host}", kind) for at, host, kind in faults],
    )
    assert sum(outcome.ended.values()) == outcome.requests == len(outcome.ms) == 60
    assert sum(outcome.blocks.values()) == 60 - outcome.ended["failed"]
    assert outcome.ended["late"] == 0
    assert outcome.ms[-1] <= 400 + 1e-6
    assert all(1 <= blocks <= DEPTH for blocks in outcome.blocks)
    if routing == "sequential":
        assert outcome.blocks.keys() <= {DEPTH}


def test_the_same_seed_gives_the_same():
    options = {"churn": Churn(up_s=2, down_s=1), "arrivals": Arrivals(rate=50)}
    first, again, other = (
        run(spread(replicas=2), limits=Limits(), seed=seed, **options) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.ms != other.ms


def test_lives_are_exponential_and_steady_from_the_start():
    churn = Churn(up_s=2, down_s=1)
    up, stays = zip(*(life(churn, number, seed=4) for number in range(400)), strict=True)
    assert np.mean(up) == pytest.approx(churn.availability, abs=4 * math.sqrt(2 / 9 / 400))
    times = np.array([[next(stay) for _ in range(51)] for stay in stays])
    for there, mean in ((True, 2), (False, 1)):
        first = times[np.array(up) == there, 0]
        assert first.mean() == pytest.approx(mean, rel=4 / math.sqrt(len(first)))
        after = times[np.array(up) != there, 1::2]  # they have changed sides once
        assert after.mean() == pytest.approx(mean, rel=4 / math.sqrt(after.size))


@pytest.mark.parametrize(("block_ms", "clients"), [(0.3, 4), (5.0, 1), (5.0, 4), (30.0, 1)])
@pytest.mark.parametrize("rounds", [QUEUE, Rounds(otherwise=Way(4), max_age=11)])
def test_a_host_ten_times_slower_is_waited_for(block_ms, rounds, clients):
    """It alone holds two blocks. Every answer has them, also while nobody knows that it is slow."""
    outcome = run(
        spread(6, block_ms=block_ms, link_ms=5.0),
        requests=150,
        limits=Limits(),
        faults=[Fault(50, "host-2", "slow")],
        rounds=rounds,
        arrivals=Arrivals(clients=clients),
    )
    assert outcome.blocks == {12: 150}
    assert outcome.ended["answered"] == 150


def test_a_deadline_too_near_for_a_slow_host_is_met_without_it():
    limits = Limits(deadline_ms=300)
    faults = [Fault(50, "host-2", "slow")]
    outcome = run(spread(6, block_ms=20.0), limits=limits, faults=faults, requests=200)
    assert outcome.ms[-1] <= 300
    assert outcome.ended["degraded"] >= 140
    assert outcome.ended["failed"] == outcome.ended["late"] == 0


def test_with_a_second_holder_a_slow_host_costs_little():
    doubled = spread(6, replicas=2)
    fast, slow = (
        run(doubled, requests=300, faults=faults, arrivals=Arrivals(clients=1))
        for faults in ([], [Fault(10, "host-1", "slow")])
    )
    assert slow.ended["answered"] == 300
    assert slow.quantile(0.95) <= 1.5 * fast.quantile(0.95)


@pytest.mark.parametrize("away_s", [0.5, 5, 30])
def test_a_host_that_was_cut_off_is_back_within_five_seconds(away_s):
    """Requests at 20 a second; from the cut on, answers lack its two blocks."""
    begin, end = 40, 40 + int(20 * away_s)
    faults = [Fault(begin, "host-2", "cut"), Fault(end, "host-2", "rejoin")]
    count = end + 20 * 8
    outcome = run(
        spread(6), requests=count, limits=Limits(), faults=faults, arrivals=Arrivals(rate=20)
    )
    assert outcome.ended["failed"] == outcome.ended["late"] == 0
    assert set(outcome.blocks) <= {10, 11, 12}
    assert outcome.ended["degraded"] <= 20 * (away_s + 5) + 20, "some arrive in a burst"
    # Its loss costs the requests of the first second a probe, and those after it nothing.
    assert outcome.ms[-1] <= 1000


BUSY, WORKERS = Machines(delay_ms=15), spread(6, block_ms=0.5, link_ms=3.0)
"""Half of the visits take 19 ms, one in 120 more than 100 ms, as on a machine with much to do."""


def test_a_busy_machine_is_no_failure():
    """With a limit of 100 ms whatever the others take, 29 % of these requests missed blocks."""
    outcome = run(WORKERS, requests=600, limits=Limits(), machines=BUSY, seed=1)
    assert outcome.share("answered") >= 99


def test_a_kill_is_noticed_at_once_on_a_busy_machine():
    """No visit to the dead host is waited for longer than the notice of its death takes."""
    faults = [Fault(200, "host-2", "crash")]
    calm, killed = (
        run(WORKERS, requests=400, limits=Limits(), machines=BUSY, faults=hit, seed=1)
        for hit in ([], faults)
    )
    # Up to four requests were past their visit to it when it died.
    assert 196 <= killed.ended["degraded"] <= 204
    assert killed.quantile(0.99) <= calm.quantile(0.99) + BUSY.notice_ms


def test_a_lying_host_is_shut_out_by_its_canary():
    limits = Limits(canary_every_ms=500)
    outcome = run(
        spread(6),
        limits=limits,
        requests=300,
        faults=[Fault(100, "host-4", "wrong")],
        arrivals=Arrivals(rate=100),
        accuracy=ACCURACY,
    )
    # At most 500 ms and a visit at 100 requests per second, those under way with them.
    assert 0 < outcome.false <= 65
    assert outcome.ended["degraded"] >= 300 - 100 - 65
    assert outcome.right < 85
    blind = run(spread(6), requests=300, faults=[Fault(100, "host-4", "wrong")])
    assert blind.false >= 190


def test_audits_find_a_lying_host_before_its_canary_does():
    """Canaries every 4 s, requests for 4 s from the lie on; audits of half of the visits."""
    false = {
        share: run(
            spread(6, replicas=3),
            limits=Limits(canary_every_ms=4000, audit_share=share),
            requests=800,
            faults=[Fault(400, "host-4", "wrong")],
            arrivals=Arrivals(rate=100),
            seed=5,
        ).false
        for share in (0.0, 0.5)
    }
    assert 0 < false[0.5] <= 30 < false[0.0]


def test_leaving_hosts_lose_no_request():
    outcome = run(
        spread(6, replicas=2), faults=[Fault(30, "host-1", "leave")], arrivals=Arrivals(rate=100)
    )
    assert outcome.ended["answered"] == 100
    assert outcome.ms[-1] < 200


def test_too_few_blocks_are_no_answer():
    dead = [Fault(0, f"host-{i}", "crash") for i in range(1, 7)]
    enough = run(spread(), faults=dead, min_blocks=6)
    assert enough.ended["degraded"] == 100
    short = run(spread(), faults=dead, min_blocks=7)
    assert short.ended["failed"] == 100
    assert short.mean_blocks is None
    assert short.accuracy is None


# --- large swarms ---------------------------------------------------------------------------------


def test_a_thousand_hosts_under_churn():
    outcome = run(
        in_turn(spread(), 1000),
        requests=60,
        churn=Churn(up_s=20, down_s=10),
        arrivals=Arrivals(rate=200),
    )
    assert outcome.share("answered", "degraded") == 100
    assert outcome.blocks == {12: 60}


# --- around it ------------------------------------------------------------------------------------


def test_devices_in_turn():
    grown = in_turn(spread(5), 12)
    assert list(grown)[4:7] == ["host-5", "host-1~2", "host-2~2"]
    assert grown["host-2~3"] == grown["host-2"]
    with refuses(UsageError):
        in_turn(spread(5), 4)


def test_crashes_hit_a_share_of_the_hosts_once_each():
    names = list("abcdef")
    faults = crashes(names, share=1 / 3, requests=1000, seed=0)
    assert len({fault.host for fault in faults}) == len(faults) == 2
    assert all(100 <= fault.at < 900 for fault in faults)
    assert faults == crashes(names, share=1 / 3, requests=1000, seed=0)
    hit = {f.host for seed in range(30) for f in crashes(names, share=0.2, requests=50, seed=seed)}
    assert hit == set(names)
    for share in (0.0, -1.0, 1.5):
        with refuses(UsageError):
            crashes(names, share=share, requests=50, seed=0)


def test_a_client_that_was_refused_waits_as_retry_after_says():
    """A second without suspects, in which nothing is asked."""
    dead = [Fault(0, name, "crash") for name in spread()]
    options = {"faults": dead, "routing": "sequential", "arrivals": Arrivals(clients=1)}
    outcome = run(spread(), requests=10, accuracy=ACCURACY, **options)
    assert outcome.ended["failed"] == 10
    assert outcome.seconds == pytest.approx(9 + sum(outcome.ms) / 1000)
    row = figures(outcome)
    assert (row["failed"], row["right_of_requests"]) == (100, 0)
    assert row["mean_blocks"] is row["right_of_answers"] is None
    json.dumps(row, allow_nan=False)


def test_the_report_holds_the_figures():
    faults = crashes([f"host-{i}" for i in range(1, 13)], share=0.3, requests=100, seed=0)
    outcomes = [
        run(spread(), routing=routing, faults=faults, accuracy=ACCURACY) for routing in ROUTINGS
    ]
    text = outcome_report(outcomes)
    for outcome in outcomes:
        assert f"{outcome.share('failed'):.2f}" in text
        assert f"{outcome.quantile(0.99):.1f}" in text
        assert f"{outcome.right:.1f}" in text
    assert all(f"% {end}" in text for end in ENDED)
    assert outcomes[0].quantile(1.0) == outcomes[0].ms[-1]
    assert " -" in outcome_report([run(spread(), requests=1)])


def test_what_cannot_be_simulated():
    with refuses(UsageError):
        run(spread(), requests=0)
    with refuses(UsageError):
        run(spread(), min_blocks=13)
    with refuses(UsageError):
        run({"a": SimulatedDevice(frozenset({0, 2}))})
