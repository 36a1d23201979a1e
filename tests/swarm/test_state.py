"""The router's state of a host, event by event, against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layershuffle.swarm import state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visited
from layershuffle.swarm.state import HostView, Pace, Swarm

LIMITS = Limits()
HOST = HostView("a", frozenset({0, 1, 2}))


def hop(outcome="answered", *, ms=10.0, compute=4.0, queue=2.0, why=""):
    return Visited("a", 0, outcome, ms, compute, queue, why)


def test_the_first_answer_sets_the_averages_and_later_ones_move_them_by_a_fifth():
    once = state.answered(HOST, hop(), limits=LIMITS)
    assert (once.compute, once.link) == pytest.approx((0.004, 0.004))
    seen = state.answered(once, hop(compute=9.0, ms=21.0), limits=LIMITS)
    assert seen.compute == pytest.approx(0.8 * 0.004 + 0.2 * 0.009)
    assert seen.link == pytest.approx(0.8 * 0.004 + 0.2 * 0.010)
    assert state.answered(HOST, hop(ms=5.0), limits=LIMITS).link == 0.0, "never less than no time"


def test_pauses_double_up_to_their_bound():
    host, now = HOST, 100.0
    pauses = []
    for _ in range(7):
        host = state.failed(host, hop("late"), now=now, limits=LIMITS)
        pauses.append(round(host.retry_at - now, 6))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert host.condition == "suspect"
    under_way = state.failed(host, lagging(90.0, "late"), now=now + 1, limits=LIMITS)
    assert under_way == host, "it was sent before"
    assert state.failed(host, lagging(9.0, "lost"), now=now, limits=LIMITS).condition == "gone"


def test_an_answer_to_a_healthy_host_forgives():
    host = HostView("a", frozenset({0}), strikes=3)
    assert state.answered(host, hop(), limits=LIMITS).strikes == 0


def test_a_suspect_comes_back_by_a_probe_alone():
    host = state.answered(HOST, hop(compute=40.0, ms=50.0), limits=LIMITS)
    suspect = state.failed(host, hop("late"), now=10.0, limits=LIMITS)
    late_answer = state.answered(suspect, hop(), limits=LIMITS)
    assert late_answer.condition == "suspect"
    assert late_answer.strikes == 0, "it is late, not gone"
    assert not state.probe_due(suspect, now=10.049)
    assert state.probe_due(suspect, now=10.05)
    back = state.probed(suspect, hop(compute=5.0, ms=9.0), limits=LIMITS)
    assert (back.condition, back.strikes, back.why) == ("healthy", 1, "")
    assert back.compute == pytest.approx(0.005), "its history is forgotten"
    again = state.failed(back, hop("late"), now=20.0, limits=LIMITS)
    assert again.retry_at == pytest.approx(20.1), "a probe alone forgives nothing"
    assert state.answered(back, hop(), limits=LIMITS).strikes == 0


def lagging(lag_ms, outcome="answered"):
    return hop(outcome)._replace(lag_ms=lag_ms)


def test_the_longest_recent_lag_fades_from_visit_to_visit():
    host = state.answered(HOST, lagging(80.0), limits=LIMITS)
    assert host.lag == pytest.approx(0.080)
    for _ in range(139):
        host = state.answered(host, lagging(-3.0), limits=LIMITS)
    assert host.lag == pytest.approx(0.080 * 0.995**139)
    assert state.answered(host, lagging(50.0), limits=LIMITS).lag == pytest.approx(0.050)
    assert state.answered(host, hop(), limits=LIMITS).lag == host.lag, "no visit of a request"


def test_a_host_that_was_late_is_given_more_time_when_it_comes_back():
    late = state.failed(HOST, lagging(95.0, "late"), now=0.0, limits=LIMITS)
    assert state.probed(late, hop(), limits=LIMITS).lag == pytest.approx(0.095)
    failed = state.failed(HOST, lagging(95.0, "failed"), now=0.0, limits=LIMITS)
    assert failed.lag is None


def test_load_that_slows_every_host_raises_every_limit():
    """The median of the swarm, or the host's own lag if that is longer; a new host has none."""
    lags = {"a": 0.02, "b": 0.03, "c": 0.9, "d": None}
    hosts = {name: HostView(name, frozenset({0}), lag=lag) for name, lag in lags.items()}
    pace = Swarm(hosts.values()).pace(LIMITS)
    assert pace.lag == 0.03
    assert [state.lag_of(host, pace) for host in hosts.values()] == [0.03, 0.03, 0.9, 0.03]


@pytest.mark.parametrize(("outcome", "condition"), [("lost", "gone"), ("wrong", "shut-out")])
def test_death_and_wrong_answers_are_final(outcome, condition):
    host = state.failed(HOST, hop(outcome, why="because"), now=0.0, limits=LIMITS)
    assert (host.condition, host.why) == (condition, "because")
    assert not state.probe_due(host, now=1e9)
    assert state.failed(host, hop("late"), now=0.0, limits=LIMITS) == host
    assert state.probed(host, hop(), limits=LIMITS).condition == condition


def test_a_draining_host_stays_so_when_it_fails():
    host = state.draining(HOST)
    assert not host.usable
    assert state.failed(host, hop("late"), now=0.0, limits=LIMITS).condition == "draining"


def test_expected_time_counts_link_queue_and_compute():
    host = HostView("a", frozenset({0}), compute=0.004, link=0.003, waiting=5)
    assert state.expected(host, pace=Pace(1.0, 1.0)) == pytest.approx(0.003 + 6 * 0.004)
    assert state.expected(HOST, pace=Pace(0.01, 0.5)) == pytest.approx(0.51)


def test_batches_are_told_apart_from_slowness():
    """8 images in batches of 8: 40 ms a batch are 5 ms an image; a visit of one waits for all 8."""
    together = Visited("a", 0, "answered", 45.0, 40.0, 2.0, batch=8.0)
    host = HOST
    for _ in range(60):
        host = state.answered(host, together, limits=LIMITS)
    assert host.compute == pytest.approx(0.005)
    assert host.batch == pytest.approx(8, rel=1e-4)
    assert state.expected(host, pace=Pace(1, 1)) == pytest.approx(0.003 + 0.04, rel=1e-3)
    full = state.expected(host, pace=Pace(1, 1), images=16)
    assert full == pytest.approx(16 * 0.003 + 16 * 0.005, rel=1e-3)


def test_links_are_measured_by_single_images():
    many = Visited("a", 0, "answered", 100.0, 40.0, images=16, batch=16.0)
    host = state.answered(state.answered(HOST, hop(), limits=LIMITS), many, limits=LIMITS)
    assert host.link == pytest.approx(0.004)
    assert host.compute == pytest.approx(0.8 * 0.004 + 0.2 * 0.0025)


def test_waiting_counts_what_is_under_way():
    host = state.sent(state.sent(HOST, 2), 3)
    assert host.waiting == 5
    assert state.settled(host, 2).waiting == 3
    assert state.settled(state.settled(host, 5), 1).waiting == 0


def test_pace_is_the_median_of_usable_hosts_or_the_prior():
    hosts = [
        HostView(name, frozenset({0}), compute=compute, link=compute / 2)
        for name, compute in (("a", 0.001), ("b", 0.003), ("c", 0.1))
    ]
    assert Swarm(hosts).pace(LIMITS) == Pace(0.003, 0.0015)
    assert Swarm().pace(LIMITS) == Pace(0.005, 0.005)
    gone = [*hosts[:2], state.failed(hosts[2], hop("lost"), now=0.0, limits=LIMITS)]
    assert Swarm(gone).pace(LIMITS).compute == pytest.approx(0.002)


def test_swarm_is_a_value_sorted_by_name():
    first = Swarm([HostView("b", frozenset({0})), HOST])
    second = first.with_host(HostView("b", frozenset({1})))
    assert list(first) == ["a", "b"]
    assert first["b"].blocks == {0}
    assert second["b"].blocks == {1}
    assert second.usable(1) == ("a", "b")
    assert list(second.without("a")) == ["b"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=40), st.integers(0, 9))
def test_a_changed_swarm_equals_one_built_anew(changes, seed):
    """The indexes that `with_host` carries on, against those of a new value."""
    draw = np.random.default_rng(seed)
    conditions = ("healthy", "healthy", "suspect", "shut-out", "draining", "gone")
    limits, swarm, old = Limits(), Swarm(), Swarm()
    for number, kind in changes:
        name = f"h{number}"
        view = swarm.get(name) or HostView(name, frozenset({number % 3}))
        new = [
            lambda v: v._replace(waiting=v.waiting + 1),
            lambda v: v._replace(
                compute=float(draw.integers(1, 5)), link=1.0, lag=float(draw.integers(9))
            ),
            lambda v: v._replace(condition=conditions[draw.integers(6)]),
            lambda v: v._replace(blocks=frozenset(draw.integers(0, 4, size=2).tolist())),
        ][kind % 4](view)
        old, before = swarm, dict(swarm)
        swarm = swarm.without(name) if kind == 6 else swarm.with_host(new)
        assert dict(old) == before
        for value in (swarm, old):
            fresh = Swarm(value.values())
            assert list(value) == list(fresh) == sorted(value)
            assert value.pace(limits) == fresh.pace(limits)
            assert value.suspects == fresh.suspects
            for block in range(4):
                assert value.held(block) == fresh.held(block)
                assert value.usable(block) == tuple(
                    v.name for v in value.values() if v.usable and block in v.blocks
                )
