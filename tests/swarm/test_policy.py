"""The routing policy: chosen visits by hand. `test_router` has what must hold for every swarm."""

import time

import pytest

from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import (
    QUEUE,
    Cell,
    RequestProgress,
    Rounds,
    UnderWay,
    Wait,
    counts,
    decide,
    hop_limit,
    skipped,
    strikes,
)
from layershuffle.gateway.brain.state import HostState, Swarm, Visit, Visited

LIMITS = Limits(reserve_ms=10)
THREE = Rounds({kept: Cell(kept, parallel=3) for kept in range(1, 7)}, max_age=4)
AGAIN = Rounds({kept: Cell(kept, 3 if kept == 2 else 1, 2) for kept in range(1, 7)}, max_age=4)


def host(name, *blocks, **fields):
    return HostState(name, frozenset(blocks), **{"compute": 0.004, "link": 0.002, **fields})


def next_of(*hosts, rounds=QUEUE, now=0.0, walks=1, done=(), **progress):
    asked = RequestProgress(**{"blocks": range(4), "deadline": 1.0, "done": done, **progress})
    return decide(asked, Swarm(hosts), now=now, limits=LIMITS, rounds=rounds, walks=walks)


def asked_of(*hosts, **options):
    """(host, block) of the next visit."""
    visit = next_of(*hosts, **options)
    return visit.host, visit.block


def under_way(*visits, late=False):
    """Visits of (block, version)."""
    return tuple(UnderWay(*visit, late) for visit in visits)


A, B, C = host("a", 0, 1), host("b", 2), host("c", 3)


# --- one visit after the other --------------------------------------------------------------------


def test_the_host_expected_first_is_next_with_its_rarest_block():
    busy, quick = host("a", 0, 1, waiting=10), host("b", 2, 3)
    assert next_of(busy, quick) == Visit("b", 2, limit=0.1)
    assert next_of(busy, quick, done=(3, 2)) == Visit("a", 0, limit=pytest.approx(4 * 0.046))
    assert asked_of(A, host("b", 0, 2, 3, link=0.0)) == ("b", 2), "a can run 0 as well"
    assert asked_of(host("b", 0), host("a", 1)) == ("a", 1), "ties go by name"


def test_a_request_ends_when_all_ran_or_nothing_fits_its_time():
    assert next_of(A, deadline=0.0159) == "deadline"
    assert next_of(A, deadline=0.01) == "deadline"
    assert next_of(A, deadline=0.01, under_way=under_way((0, 0))) == "deadline", "none is awaited"
    assert next_of(A, deadline=5.0159, now=5.0) == "deadline"
    assert next_of(A, deadline=5.05, now=5.0).limit == pytest.approx(0.04)
    exact = host("a", 0, 1, compute=0.5, link=0.25)
    assert next_of(exact, deadline=0.76).expected == 0.76 - 0.01, "it just fits"
    assert next_of(A, done=(1, 0, 3, 2)) == "complete"
    assert next_of(A, done=(1, 0, 3, 2), min_blocks=5) == "complete"


def test_a_slow_host_goes_last_and_is_waited_for_while_it_fits():
    slow = host("a", 0, 1, compute=0.1)
    assert asked_of(slow, host("b", 1), C) == ("b", 1)
    assert asked_of(slow, B, C, done=(1, 2, 3)) == ("a", 0)
    assert next_of(slow, B, C, done=(1, 2, 3), deadline=0.111) == "deadline"


def test_a_host_that_failed_once_is_waited_for_until_its_probe_has_decided():
    hop = Visited("a", 0, "late", 100.0, lag_ms=90.0)
    suspect = state.failed(host("a", 0, 1), hop, now=0.1, limits=LIMITS)
    asked = {"done": (2, 3)}
    hope = 0.1 + (LIMITS.suspect_ms + LIMITS.probe_ms) / 1000
    assert next_of(suspect, B, **asked, now=0.1) == Wait(pytest.approx(hope))
    assert next_of(suspect, B, **asked, now=hope) == "unreachable"
    assert next_of(suspect, B, **asked, now=0.1, deadline=0.5) == Wait(pytest.approx(0.49))
    twice = state.failed(suspect, hop._replace(lag_ms=None), now=0.2, limits=LIMITS)
    assert next_of(twice, B, **asked, now=0.2) == "unreachable"
    assert asked_of(suspect, B, done=(3,), now=0.1) == ("b", 2), "others go on meanwhile"


def test_with_too_few_blocks_who_may_come_back_is_waited_for():
    """A host that died at 5 s is waited for until 15 s, and not with enough."""
    suspect = host("a", 0, 1, condition="suspect", strikes=3, retry_at=0.4)
    few = {"done": (2,), "min_blocks": 3}
    assert next_of(suspect, **few) == Wait(0.99)
    assert next_of(suspect._replace(retry_at=2.0), **few) == "unreachable"
    dead = state.failed(A, Visited("a", 0, "lost", 1.0), now=5.0, limits=LIMITS)
    few |= {"deadline": 20.0}
    assert next_of(dead, now=14.9, **few) == Wait(19.99)
    assert next_of(dead, now=15.0, **few) == "unreachable"
    assert next_of(dead, now=5.0, **few | {"done": (2, 3), "min_blocks": 2}) == "unreachable"
    left = host("a", 0, 1, condition="gone", why="it has left")
    assert next_of(left, now=5.0, **few) == "unreachable"


def test_a_slow_host_has_longer_for_a_visit_as_far_as_the_deadline_allows():
    slow = host("a", 0, 1, compute=0.064, link=0.032)
    assert next_of(slow, deadline=2.0).limit == pytest.approx(4 * 0.096)
    short = next_of(slow, deadline=0.15)
    assert (short.limit, short.fair) == (pytest.approx(0.14), False), "less than twice its need"
    assert next_of(A, deadline=0.05).fair
    slower = next_of(slow._replace(compute=0.64), deadline=9.0)
    assert slower.limit == pytest.approx(2 * 0.672), "the cap of 1 s is for silent hosts"
    assert slower.budget == pytest.approx(8.99)


def test_a_request_ends_when_it_is_sure():
    hosts = host("a", 0, 1, 2), host("b", 3)
    sure = {"done": (0, 3), "chance": 0.95, "confidence": 0.95}
    assert next_of(*hosts, **sure) == "sure"
    assert next_of(*hosts, **sure, deadline=0.01) == "sure", "late, and sure all the same"
    assert next_of(*hosts, **sure, under_way=under_way((1, 2))) == "sure"
    assert asked_of(*hosts, **sure | {"chance": 0.94}) == ("a", 1)
    assert asked_of(*hosts, **sure | {"chance": float("nan")}) == ("a", 1)
    assert asked_of(*hosts, **sure | {"confidence": None}) == ("a", 1)
    assert asked_of(*hosts, **sure, min_blocks=3) == ("a", 1)
    assert asked_of(*hosts, done=(0, 3), confidence=0.01) == ("a", 1), "no answer was looked at"
    assert next_of(*hosts, **sure | {"done": (0, 1, 2, 3)}) == "complete"
    skips = skipped(RequestProgress(range(4), 1.0, done=(0, 3)), Swarm(hosts), ending="sure")
    assert skips == dict.fromkeys((1, 2), "the answer was sure after 2 blocks")


@pytest.mark.parametrize(
    ("wanted", "lag", "left", "limit"),
    [
        (0.01, 0.0, 9.0, 0.1),
        (0.1, 0.0, 9.0, 0.4),
        (0.5, 0.0, 9.0, 1.0),
        (0.1, 0.0, 0.3, 0.3),
        (0.01, 0.09, 9.0, 0.4),
        (0.01, 5.0, 9.0, 1.0),  # a host that is always late raises its limit to the cap alone
    ],
)
def test_hop_limits(wanted, lag, left, limit):
    assert hop_limit(wanted, lag=lag, left=left, limits=LIMITS) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("outcome", "fair", "over", "again", "counted"),
    [
        ("lost", False, True, True, True),  # a death always counts
        ("late", True, True, False, True),
        ("late", False, True, False, False),  # it had too little time
        ("late", False, False, False, True),
        ("late", True, True, True, False),
        ("refused", False, True, False, True),
        ("refused", True, False, True, False),
    ],
)
def test_failed_visits_that_count_against_their_host(outcome, fair, over, again, counted):
    visit = Visit("a", 0, limit=0.1, fair=fair)
    assert strikes(visit, outcome, over=over, again=again) == counted


def test_every_skipped_block_has_its_reason():
    swarm = Swarm([host("a", 0, condition="suspect", why="no answer in time"), host("b", 1, 2)])
    asked = RequestProgress(range(4), 1.0, done=[2])
    assert skipped(asked, swarm, ending="deadline") == {
        0: "host a is suspect: no answer in time",
        1: "the deadline was near",
        3: "no host holds it",
    }


# --- several visits under way ---------------------------------------------------------------------


def test_idle_hosts_get_a_block_each_as_far_as_they_may_and_busy_swarms_one():
    asked = {"rounds": THREE}
    a, b, c = (host._replace(waiting=1) for host in (A, B, C))
    assert asked_of(a, B, C, **asked, under_way=under_way((0, 0))) == ("b", 2)
    two = under_way((0, 0), (3, 0))
    assert next_of(a, b, c, **asked, under_way=two) == Wait(0.99), "nobody is idle"
    three = (*two, *under_way((2, 0)))
    full = Wait(0.99, for_hosts=False)
    assert next_of(A, B, C, **asked, under_way=three) == full
    late = (UnderWay(0, 0, late=True), *three[1:])
    assert asked_of(A, B, C, **asked, under_way=late) == ("a", 0)
    assert next_of(A, B, C, **asked, walks=2, under_way=two[:1]) == full


def test_a_late_answer_is_waited_for_while_blocks_are_too_few():
    late = {"done": (1, 2, 3), "under_way": under_way((0, 3), late=True)}
    far = host("b", 0, link=2.0)
    assert asked_of(host("b", 0), **late) == ("b", 0)
    assert next_of(far, **late, min_blocks=3) == "deadline"
    assert next_of(**late, min_blocks=4) == Wait(0.99)
    assert next_of(**late, min_blocks=3) == "unreachable"


def test_survivors_run_again_as_far_as_it_helps():
    """Two of four blocks: three passes; a pass begins when the one before has ended."""
    asked, hosts = {"rounds": AGAIN}, (host("a", 0), host("b", 2))
    assert asked_of(*hosts, **asked, done=(0, 2)) == ("a", 0)
    last_of_first = {"done": (0,), "under_way": under_way((2, 0))}
    assert next_of(*hosts, **asked, **last_of_first) == Wait(0.99)
    assert asked_of(*hosts, **asked, done=(0, 2, 0)) == ("b", 2)
    assert next_of(*hosts, **asked, done=(0, 2) * 3) == "unreachable"
    assert asked_of(*hosts, host("c", 3), **asked, done=(0, 2, 0)) == ("c", 3), "it has not run"
    assert next_of(*hosts, **asked, done=(0, 2), deadline=0.0159) == "deadline"
    assert asked_of(hosts[0], **asked, done=(0, 2) * 2) == ("a", 0), "2 is gone, and ends no pass"


def test_the_width_is_that_of_the_blocks_that_run():
    """Four blocks run two at a time; of three that can be reached, one at a time."""
    rounds = Rounds({4: Cell(4, parallel=2), 3: Cell(3)}, max_age=4)
    busy = under_way((2, 0))
    hosts = host("a", 1), B, C
    assert next_of(*hosts, rounds=rounds, under_way=busy) == Wait(0.99, for_hosts=False)
    assert next_of(A, B, C, rounds=rounds, under_way=busy).host == "a"


def test_what_still_counts():
    progress = RequestProgress(range(6), 1.0, done=(0, 1, 2))
    assert counts(progress, UnderWay(3, 1), max_age=2)
    assert not counts(progress, UnderWay(3, 0), max_age=2), "too old"
    assert not counts(progress, UnderWay(2, 1), max_age=2), "it ran meanwhile"
    assert counts(progress, UnderWay(0, 1), max_age=2), "its next pass"


def test_ten_thousand_hosts_are_decided_on_in_a_fraction_of_a_second():
    """By loops over all of them: 20 ms of processor time on a quiet machine."""
    hosts = [host(f"h{i:05}", i % 12, compute=0.004 + 1e-6 * (i % 997)) for i in range(10_000)]
    quickest = {block: min(hosts[block::12], key=lambda view: view.compute) for block in range(12)}
    swarm = Swarm(hosts)
    done = []
    began = time.process_time()
    while len(done) < 12:
        asked = RequestProgress(range(12), 1.0, done=done)
        visit = decide(asked, swarm, now=0.0, limits=LIMITS, rounds=QUEUE)
        assert visit.host == quickest[visit.block].name
        swarm.put(state.sent(swarm[visit.host]))
        done.append(visit.block)
    assert time.process_time() - began < 12 * 0.5
    assert sorted(done) == list(range(12))
