"""What a request with several visits under way does next: by hand, and for every swarm."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import DEPTH, HOSTS, LIMITS, host

from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm import state
from layershuffle.swarm.free import MOST_BESIDE, counts, decide_free, visits_at_once
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visit, Visited
from layershuffle.swarm.policy import Finish, RequestProgress, UnderWay, Wait, compared
from layershuffle.swarm.rounds import Rounds, Way
from layershuffle.swarm.state import HostView, Swarm

THREE = Rounds(otherwise=Way(3), max_age=4)
AGAIN = Rounds({2: Way(2, 3)}, otherwise=Way(2), max_age=4)


def next_of(*hosts, rounds=THREE, now=0.0, walks=1, done=(), **progress):
    asked = RequestProgress(**{"depth": 4, "deadline": 1.0, **progress}).after(done)
    return decide_free(asked, Swarm(hosts), now=now, limits=LIMITS, rounds=rounds, walks=walks)


def replace_limits(**changes):
    return LIMITS.model_copy(update=changes)


def under_way(*visits):
    return tuple(UnderWay(host, blocks, version) for host, blocks, version in visits)


# --- decisions ------------------------------------------------------------------------------------

A, B, C = host("a", 0, 1), host("b", 2), host("c", 3)


def test_idle_hosts_get_a_block_each():
    assert next_of(A, B, C) == Visit("a", (0,), limit=0.1)
    a, b, c = (replace(host, waiting=1) for host in (A, B, C))
    assert next_of(a, B, C, under_way=under_way(("a", (0,), 0))).host == "b"
    assert next_of(a, b, C, under_way=under_way(("a", (0,), 0))).host == "c"
    two = under_way(("a", (0,), 0), ("c", (3,), 0))
    assert next_of(a, b, c, under_way=two) == Wait(0.99), "nobody is idle"


def test_no_more_are_under_way_than_may_be():
    three = under_way(("a", (0,), 0), ("b", (2,), 0), ("c", (3,), 0))
    assert next_of(A, B, C, under_way=three) == Wait(0.99, for_hosts=False)
    assert next_of(A, B, C, under_way=three[:2]).host == "a"
    late = tuple(replace(visit, waited=False) for visit in three[:1])
    assert next_of(A, B, C, under_way=(*late, *three[1:])) == Visit("a", (1,), limit=0.1)


def test_busy_swarms_run_one_visit_at_a_time_with_all_that_its_host_holds():
    quick = replace(A, compute=0.001)
    assert next_of(quick, B, C, walks=2) == Visit("a", (0, 1), limit=0.1)
    assert next_of(A, B, C, walks=2, under_way=under_way(("a", (0, 1), 0))) == Wait(
        0.99, for_hosts=False
    )
    assert next_of(host("a", 0, 1, 2, 3)) == Visit("a", (0, 1, 2, 3), limit=0.1), "one host"


@pytest.mark.parametrize(("compute", "blocks"), [(0.001, (0, 1)), (0.002, (0,))])
def test_where_the_way_takes_longest_a_visit_carries_all_blocks_of_its_host(compute, blocks):
    """Two hosts of two blocks, 4 ms away. Side by side a block takes 2.5 or 3 ms, and one visit
    after the other 3 or 4 ms: a sixth less, or a quarter."""
    far = {"compute": compute, "link": 0.004}
    hosts = host("a", 0, 1, **far), host("b", 2, 3, **far)
    assert next_of(*hosts, rounds=Rounds(otherwise=Way(2))).blocks == blocks


def test_how_many_visits_a_request_begins():
    def begun(*hosts, walks=1, rounds=THREE):
        asked = RequestProgress(4, 1.0)
        asks = {"now": 0.0, "limits": LIMITS, "rounds": rounds, "walks": walks}
        return visits_at_once(asked, Swarm(hosts), **asks)

    far = (host("a", 0, 1, compute=0.001), host("b", 2, 3, compute=0.001))
    far = tuple(replace(view, link=0.004) for view in far)
    assert begun(A, B, C) == 3
    assert begun(A, B, C, rounds=Rounds(otherwise=Way(2))) == 2
    assert begun(A, B, C, rounds=Rounds()) == 1
    assert begun(A, B, C, walks=2) == 1
    assert begun(A, replace(B, waiting=1), replace(C, waiting=1)) == 1, "the others are not idle"
    assert begun(*far) == 1, "the way takes longest"
    assert begun(replace(A, condition="gone")) == 0


def test_hosts_that_say_they_take_no_time_are_asked_like_others():
    at_once = {"compute": 0.0, "link": 0.0}
    assert next_of(host("a", 0, 1, **at_once), host("b", 2, **at_once)).host == "a"


def test_blocks_that_few_hold_go_first():
    assert next_of(A, host("b", 0, 2, 3), rounds=THREE).blocks == (1,)


def test_a_late_visit_is_repeated_elsewhere_alone():
    late = (UnderWay("a", (0,), 0, waited=False),)
    assert next_of(A, host("b", 0), done=(2, 3, 1), under_way=late).host == "b"
    assert next_of(A, done=(2, 3, 1), under_way=late) == Finish("unreachable")
    waiting = next_of(A, done=(2, 3, 1), under_way=late, min_blocks=4)
    assert waiting == Wait(0.99), "it has too few blocks, and the late answer may come"


def test_survivors_run_again_as_far_as_it_helps():
    """Two of four blocks: three passes; a pass begins when the one before has ended."""
    asked = {"rounds": AGAIN, "done": (0, 2)}
    hosts = host("a", 0), host("b", 2)
    assert next_of(*hosts, **asked).blocks == (0,)
    last_of_first = {"rounds": AGAIN, "done": (0,), "under_way": under_way(("b", (2,), 0))}
    assert next_of(*hosts, **last_of_first) == Wait(0.99)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2, 0)).blocks == (2,)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2) * 2).blocks == (0,)
    assert next_of(*hosts, rounds=AGAIN, done=(0, 2) * 3) == Finish("unreachable")
    back = next_of(*hosts, host("c", 3), rounds=AGAIN, done=(0, 2, 0))
    assert back.blocks == (3,), "a block that has not run goes before all others"
    assert next_of(*hosts, **asked, deadline=0.0159) == Finish("deadline")
    assert next_of(*hosts, **asked, most=2) == Finish("enough")
    assert next_of(hosts[0], rounds=AGAIN, done=(0, 2) * 2).blocks == (0,), "2 is gone"


def test_a_slow_host_takes_part_if_it_may_be_back_in_time():
    """Two quick blocks take 6 ms each, one under way at a time: 12 ms, and the slow host 11."""
    hosts = host("a", 0), host("b", 1), host("c", 2), host("d", 3, compute=0.009, link=0.002)
    limits = Limits(reserve_ms=10, slow_factor=2.0, slow_margin_ms=1.0)
    progress = RequestProgress(4, 1.0).after((0,))
    two = Rounds(otherwise=Way(2), max_age=4)
    visit = decide_free(progress, Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert visit.host != "d", "only one round is left: 6 ms"
    visit = decide_free(RequestProgress(4, 1.0), Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert (visit.host, visit.blocks, visit.waited) == ("d", (3,), False)
    busy = decide_free(
        RequestProgress(4, 1.0), Swarm(hosts), now=0.0, limits=limits, rounds=two, walks=3
    )
    assert busy.host != "d", "a busy swarm has no visits to spare"
    ended = progress.after((1, 2))
    ended = replace(ended, under_way=(UnderWay("d", (3,), 0, waited=False),))
    decision = decide_free(ended, Swarm(hosts), now=0.0, limits=limits, rounds=two)
    assert decision == Finish("unreachable"), "nobody waits for it"


def test_the_width_is_that_of_the_blocks_that_run():
    """Four blocks run two at a time and in two passes; of two that are enough, one at a time."""
    rounds = Rounds({4: Way(2), 2: Way(2, 2)}, otherwise=Way(3), max_age=4, once={2: 1})
    visit = next_of(replace(A, compute=0.001), B, C, rounds=rounds, most=2)
    assert visit.blocks == (0, 1), "one visit at a time carries all blocks of its host"
    assert next_of(A, B, C, rounds=rounds, most=2, under_way=under_way(("b", (2,), 0))) == Wait(
        0.99, for_hosts=False
    )
    slow = replace(C, compute=9.0)
    waited = under_way(("a", (0,), 0), ("b", (2,), 0))
    asked = {"rounds": replace(rounds, ways={4: Way(3), 3: Way(2)}), "under_way": waited}
    assert next_of(A, B, slow, **asked, min_blocks=0) == Wait(0.99, for_hosts=False), "three run"
    assert next_of(A, B, slow, **asked, min_blocks=4).blocks == (1,), "it needs the slow one too"


def test_places_with_the_same_weights_are_not_under_way_together():
    """Places 0 and 1 share weights; with 2 and 3 under way as well, 1 waits for 0."""
    tied = replace(THREE, tied=(0, 0, 2, 3))
    first = under_way(("d", (0,), 0))
    assert next_of(A, B, C, rounds=tied, under_way=first).blocks == (2,)
    assert next_of(A, B, C, rounds=THREE, under_way=first, done=(2, 3)).blocks == (1,)
    assert next_of(A, B, C, rounds=tied, under_way=first, done=(2, 3)) == Wait(0.99)
    late = (UnderWay("d", (0,), 0, waited=False),)
    assert next_of(A, B, C, rounds=tied, under_way=late, done=(2, 3)).blocks == (0, 1), "again"


def test_no_pass_begins_before_a_place_that_waits_for_its_twin():
    """Three survivors run twice. Place 0 runs again, and place 1, which came back, has not run."""
    rounds = Rounds({3: Way(2, 2)}, otherwise=Way(2), max_age=4, tied=(0, 0, 2, 3))
    progress = {"rounds": rounds, "done": (0, 2), "under_way": under_way(("d", (0,), 2))}
    assert next_of(host("a", 1), host("b", 2), **progress) == Wait(0.99)
    untied = replace(rounds, tied=None)
    assert next_of(host("a", 1), host("b", 2), **progress | {"rounds": untied}).blocks == (1,)


def test_where_all_weights_are_the_same_one_visit_carries_all():
    tied = replace(THREE, tied=(0, 0, 0, 0))
    assert next_of(replace(A, compute=0.001), B, rounds=tied).blocks == (0, 1)


def test_slow_hosts_are_the_last_resort():
    slow = replace(C, compute=0.05)
    limits = replace_limits(slow_factor=2.0, slow_margin_ms=1.0)

    def decided(**progress):
        asked = RequestProgress(**{"depth": 4, "deadline": 1.0, **progress}).after((0, 1, 2))
        hosts = Swarm((A, B, slow))
        return decide_free(asked, hosts, now=0.0, limits=limits, rounds=THREE)

    assert decided(min_blocks=4).host == "c"
    assert decided(min_blocks=3) == Finish("unreachable")
    beside = under_way(("b", (2,), 3))
    assert decided(min_blocks=4, under_way=beside) == Wait(0.99), "it waits for b first"


def test_a_block_that_nobody_will_be_asked_for_ends_no_pass():
    """Block 3 ran once, on a host that is slow since: the others run again all the same."""
    rounds = Rounds(otherwise=Way(1, 3), max_age=4)
    limits = replace_limits(slow_factor=2.0, slow_margin_ms=1.0)
    for third in (replace(C, compute=0.05), replace(C, condition="gone")):
        progress = RequestProgress(5, 1.0).after((0, 2, 3))
        hosts = Swarm((host("a", 0), B, third))
        action = decide_free(progress, hosts, now=0.0, limits=limits, rounds=rounds)
        assert action.blocks == (0,)
        action = decide_free(progress.after((0, 2)), hosts, now=0.0, limits=limits, rounds=rounds)
        assert action.blocks == (0,), "the third pass"


def test_no_more_than_eight_go_on_beside_a_request():
    """Nine slow hosts hold a block each; no host is called to be cancelled for the next one."""
    slow = [host(f"s{k}", k, compute=0.004, link=0.002) for k in range(9)]
    quick = [host(f"q{k}", k, compute=0.001, link=0.005) for k in range(9, 20)]
    limits = replace_limits(slow_factor=2.0, slow_margin_ms=1.0)
    progress = RequestProgress(20, 1.0)
    for k in range(MOST_BESIDE):
        visit = decide_free(
            progress, Swarm(slow + quick), now=0.0, limits=limits, rounds=Rounds(otherwise=Way(2))
        )
        assert (visit.host, visit.waited) == (f"s{k}", False), "by name, in every process"
        beside = UnderWay(visit.host, visit.blocks, 0, waited=False)
        progress = replace(progress, under_way=(*progress.under_way, beside))
    visit = decide_free(
        progress, Swarm(slow + quick), now=0.0, limits=limits, rounds=Rounds(otherwise=Way(2))
    )
    assert visit.waited
    assert visit.host.startswith("q")


def test_visits_side_by_side_draw_other_hosts():
    """Of a thousand holders some are drawn; the next visit of a request draws others."""
    swarm = Swarm(host(f"h{k:03}", 0, 1, 2, 3) for k in range(1000))

    def drawn(**progress):
        asked = RequestProgress(4, 1.0, seed=3, **progress)
        return [view.name for view in compared(asked, swarm, blocks=range(4), limits=LIMITS)]

    beside = under_way(("h000", (0,), 0))
    assert drawn() == drawn()
    assert len(set(drawn()) & set(drawn(under_way=beside))) < len(drawn()) / 2


def test_a_late_answer_is_waited_for_while_blocks_are_too_few():
    """Host a is late with block 0; another host could answer, but not in time."""
    late = (UnderWay("a", (0,), 3, waited=False),)
    far = host("b", 0, link=2.0)
    asked = {"done": (1, 2, 3), "under_way": late}
    assert next_of(A, far, **asked, min_blocks=4) == Wait(0.99)
    assert next_of(A, far, **asked, min_blocks=3) == Finish("deadline")


def test_what_still_counts():
    progress = RequestProgress(6, 1.0).after((0, 1, 2))
    assert counts(progress, UnderWay("a", (3,), 1), max_age=2)
    assert not counts(progress, UnderWay("a", (3,), 0), max_age=2), "too old"
    assert not counts(progress, UnderWay("a", (2,), 1), max_age=2), "it ran meanwhile"
    assert counts(progress, UnderWay("a", (0,), 1), max_age=2), "its next pass"
    assert counts(progress, UnderWay("a", (3, 4), 3), max_age=2)
    assert not counts(progress, UnderWay("a", (3, 4), 2), max_age=2), "one sum, on its own state"


# --- what holds for every swarm -------------------------------------------------------------------

TIED = st.lists(st.integers(0, 2), min_size=DEPTH, max_size=DEPTH).map(
    lambda weights: tuple(map(weights.index, weights))
)
ROUNDS = st.builds(
    lambda parallel, passes, age, tied: Rounds(
        otherwise=Way(parallel, passes), max_age=age, tied=tied
    ),
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 8), st.none() | TIED,
)  # fmt: skip
OUTCOMES = st.lists(
    st.tuples(
        st.sampled_from(["answered", "answered", "late", "lost", "wrong", "unavailable"]),
        st.floats(0, 3),
    ),
    min_size=60, max_size=60,
)  # fmt: skip


@given(HOSTS, OUTCOMES, ROUNDS, st.floats(0.02, 3.0), st.integers(0, DEPTH), st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_requests_end_in_time_and_run_no_block_too_often(
    hosts, fates, rounds, deadline, min_blocks, walks
):
    """Visits end in the order of their times; late ones go on, and may still count."""
    swarm = Swarm(
        HostView(f"h{i}", blocks, compute=compute, link=link, waiting=waiting)
        for i, (blocks, compute, link, waiting) in enumerate(hosts)
    )
    progress, now, calls, fates = RequestProgress(DEPTH, deadline, min_blocks), 0.0, [], iter(fates)
    last_start = deadline - LIMITS.reserve_ms / 1000
    for _ in range(500):
        calls = [call for call in calls if counts(progress, call[1], max_age=rounds.max_age)]
        action = decide_free(
            replace(progress, under_way=tuple(view for _, view, _, _ in calls)),
            swarm, now=now, limits=LIMITS, rounds=rounds, walks=walks,
        )  # fmt: skip
        if isinstance(action, Finish):
            break
        if isinstance(action, Visit):
            assert action.limit > 0
            assert now + action.limit <= last_start + 1e-9
            assert set(action.blocks) <= swarm[action.host].blocks
            busy = {block for _, view, _, _ in calls if view.waited for block in view.blocks}
            assert not busy & set(action.blocks)
            assert not action.waited or not rounds.with_twins(busy) & set(action.blocks)
            view = UnderWay(action.host, action.blocks, len(progress.done), action.waited)
            outcome, share = next(fates, ("answered", 0.5))
            ends = now + action.limit * (share if outcome == "answered" else min(share, 1))
            calls.append((ends, view, outcome, now + action.limit))
            continue
        several = [call for call in calls if call[1].waited and len(call[1].blocks) > 1]
        events = [(call[0], "end", call) for call in several or calls]
        events += [(call[3], "late", call) for call in calls if call[1].waited]
        time, kind, call = min(
            events, key=lambda event: event[:2], default=(action.until, "", None)
        )
        if call is None or time > action.until:
            now = action.until
            continue
        now = max(now, time)
        _, view, outcome, limit = call
        calls.remove(call)
        if kind == "late":
            calls.append((call[0], replace(view, waited=False), outcome, limit))
            outcome = "late"
        hop = Visited(view.host, view.blocks, outcome, 1.0, 0.5, 0.1)
        if outcome == "answered":
            swarm = swarm.with_host(state.answered(swarm[hop.host], hop, limits=LIMITS))
            progress = progress.after(view.blocks, version=view.version)
        else:
            swarm = swarm.with_host(state.failed(swarm[hop.host], hop, now=now, limits=LIMITS))
    else:
        raise AssertionError("the request did not end")
    assert now <= max(last_start, 0.0) + 1e-9
    if progress.done:
        # It refuses a block that runs twice on one version, and versions that are not there.
        ExecutionOrder(progress.done, DEPTH, progress.versions)
        assert max(Counter(progress.done).values()) <= rounds.otherwise.passes
    ages = [place - version for place, version in enumerate(progress.versions)]
    assert max(ages, default=0) <= rounds.max_age
    assert (action.ending == "complete") == (len(set(progress.done)) == DEPTH)
