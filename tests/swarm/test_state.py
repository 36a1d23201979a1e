"""The router's state of a host, event by event, against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.state import HostState, Pace, Swarm, Visited

LIMITS = Limits()
HOST = HostState("a", frozenset({0, 1, 2}))


def hop(outcome="answered", *, ms=10.0, compute=4.0, queue=2.0, **fields):
    return Visited("a", 0, outcome, ms, compute, queue, **fields)


def answered(host, *hops):
    for each in hops:
        host = state.answered(host, each, limits=LIMITS)
    return host


def failed(host, outcome, *, now=0.0, **fields):
    return state.failed(host, hop(outcome, **fields), now=now, limits=LIMITS)


def test_the_first_answer_sets_the_averages_and_later_ones_move_them_by_a_fifth():
    once = answered(HOST, hop())
    assert (once.compute, once.link) == pytest.approx((0.004, 0.004))
    seen = answered(once, hop(compute=9.0, ms=21.0))
    assert seen.compute == pytest.approx(0.8 * 0.004 + 0.2 * 0.009)
    assert seen.link == pytest.approx(0.8 * 0.004 + 0.2 * 0.010)
    assert answered(HOST, hop(ms=5.0)).link == 0.0, "never less than no time"
    bare = answered(HOST, Visited("a", 0, "answered", 10.0))
    assert (bare.compute, bare.link) == (0.0, 0.010), "all of it is the link's, if nothing is said"


def test_pauses_double_up_to_their_bound():
    host, now = HOST, 100.0
    pauses = []
    for _ in range(7):
        host = failed(host, "late", now=now)
        pauses.append(round(host.retry_at - now, 6))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert host.condition == "suspect"
    assert failed(host, "late", now=now + 1, lag_ms=90.0) == host, "it was sent before"
    assert failed(host, "lost", now=now, lag_ms=9.0).condition == "gone"


def test_a_suspect_comes_back_by_a_probe_alone():
    suspect = failed(answered(HOST, hop(compute=40.0, ms=50.0)), "late", now=10.0)
    late = answered(suspect, hop())
    assert (late.condition, late.strikes) == ("suspect", 0), "it is late, not gone"
    assert not state.probe_due(suspect, now=10.049)
    assert state.probe_due(suspect, now=10.05)
    back = state.probed(suspect, hop(compute=5.0, ms=9.0), limits=LIMITS)
    assert (back.condition, back.strikes, back.why) == ("healthy", 1, "")
    assert back.compute == pytest.approx(0.005), "its history is forgotten"
    again = failed(back, "late", now=20.0)
    assert again.retry_at == pytest.approx(20.1), "a probe alone forgives nothing"
    assert answered(back, hop()).strikes == 0


def test_the_longest_recent_lag_fades_from_visit_to_visit_and_is_kept_by_a_late_one():
    host = answered(HOST, hop(lag_ms=80.0))
    assert host.lag == pytest.approx(0.080)
    host = answered(host, *[hop(lag_ms=-3.0)] * 139)
    assert host.lag == pytest.approx(0.080 * 0.995**139)
    assert answered(host, hop(lag_ms=50.0)).lag == pytest.approx(0.050)
    assert answered(host, hop()).lag == host.lag, "no visit of a request"
    late = failed(HOST, "late", lag_ms=95.0)
    assert state.probed(late, hop(), limits=LIMITS).lag == pytest.approx(0.095)
    assert failed(HOST, "failed", lag_ms=95.0).lag is None
    assert failed(HOST._replace(lag=0.12), "late", lag_ms=95.0).lag == 0.12, "it fades by answers"


def test_load_that_slows_every_host_raises_every_limit():
    """The median of the swarm, or the host's own lag if that is longer; a new host has none."""
    lags = {"a": 0.02, "b": 0.03, "c": 0.9, "d": None}
    hosts = {name: HostState(name, frozenset({0}), lag=lag) for name, lag in lags.items()}
    pace = Swarm(hosts.values()).pace(LIMITS)
    assert pace.lag == 0.03
    assert [state.lag_of(host, pace) for host in hosts.values()] == [0.03, 0.03, 0.9, 0.03]


@pytest.mark.parametrize(("outcome", "condition"), [("lost", "gone"), ("wrong", "shut-out")])
def test_death_and_wrong_answers_are_final(outcome, condition):
    host = failed(HOST, outcome, why="because")
    assert (host.condition, host.why) == (condition, "because")
    assert not state.probe_due(host, now=1e9)
    assert failed(host, "late") == host
    assert state.probed(host, hop(), limits=LIMITS).condition == condition


def test_a_draining_host_stays_so_when_it_fails():
    host = state.draining(HOST)
    assert not host.usable
    assert failed(host, "late").condition == "draining"


def test_expected_time_counts_link_queue_and_batches():
    """8 images in batches of 8: 40 ms a batch are 5 ms an image; a visit of one waits for all 8."""
    busy = HostState("a", frozenset({0}), compute=0.004, link=0.003, waiting=5)
    assert state.expected(busy, pace=Pace(1.0, 1.0)) == pytest.approx(0.003 + 6 * 0.004)
    assert state.expected(HOST, pace=Pace(0.01, 0.5)) == pytest.approx(0.51)
    host = answered(HOST, *[Visited("a", 0, "answered", 45.0, 40.0, 2.0, batch=8.0)] * 60)
    assert host.compute == pytest.approx(0.005)
    assert state.expected(host, pace=Pace(1, 1)) == pytest.approx(0.003 + 0.04, rel=1e-3)


def test_waiting_counts_what_is_under_way():
    host = state.sent(state.sent(HOST, 2), 3)
    assert host.waiting == 5
    assert answered(host, hop()).waiting == 4
    assert state.sent(host, -6).waiting == 0


def test_pace_is_the_median_of_usable_hosts_or_the_prior():
    times = {"a": 0.001, "b": 0.003, "c": 0.1}
    swarm = Swarm(HostState(n, frozenset({0}), compute=t, link=t / 2) for n, t in times.items())
    assert swarm.pace(LIMITS) == Pace(0.003, 0.0015)
    assert Swarm().pace(LIMITS) == Pace(0.005, 0.005)
    swarm.put(failed(swarm["c"], "lost"))
    assert swarm.pace(LIMITS).compute == pytest.approx(0.002)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=40), st.integers(0, 9))
def test_a_changed_swarm_equals_one_built_anew(changes, seed):
    """After any `put` and `remove`."""
    draw, swarm = np.random.default_rng(seed), Swarm()
    conditions = ("healthy", "healthy", "suspect", "shut-out", "draining", "gone")
    for number, kind in changes:
        name = f"h{number:02}"
        view = swarm.get(name) or HostState(name, frozenset({number % 3}))
        blocks = [frozenset(draw.integers(0, 4, size=2).tolist()) for _ in range(2)]
        new = [
            view._replace(waiting=view.waiting + 1),
            view._replace(compute=float(draw.integers(5)), link=1.0, lag=float(draw.integers(9))),
            view._replace(condition=conditions[draw.integers(6)]),
            view._replace(blocks=blocks[0], loading=blocks[1]),
        ][kind % 4]
        if kind == 6 and name in swarm:
            swarm.remove(name)
        else:
            swarm.put(new)
        views = list(swarm.values())
        assert list(swarm) == sorted(swarm)
        anew = Swarm(reversed(views))
        assert list(anew) == sorted(swarm)
        assert swarm.pace(LIMITS) == anew.pace(LIMITS)
        assert [view.name for view in views] == sorted(swarm)
        assert swarm.usable_hosts == sum(v.usable for v in views)
        for block in range(4):
            assert swarm.held(block) == [v for v in views if block in v.blocks | v.loading]
            usable = sum(v.usable and block in v.blocks for v in views)
            assert swarm.copies()[block] == usable
            assert (block in swarm.lacking(range(4))) == (usable == 0)
