"""The routing policy: chosen visits by hand, and what must hold for every swarm (hypothesis)."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm import state
from layershuffle.swarm.free import decide_free
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visit, Visited
from layershuffle.swarm.ordered import Ask, PassOver, Steps, decide_step
from layershuffle.swarm.policy import (
    Finish,
    RequestProgress,
    UnderWay,
    Wait,
    compared,
    hop_limit,
    skipped,
)
from layershuffle.swarm.rounds import QUEUE
from layershuffle.swarm.state import HostView, Swarm

LIMITS = Limits(reserve_ms=10)


def host(name, *blocks, **fields):
    return HostView(name, frozenset(blocks), **{"compute": 0.004, "link": 0.002, **fields})


def decide(progress, swarm, *, now, routing):
    """The next visit, wait or end of a request that has one visit in flight at a time."""
    if routing == "order-free" and progress.order is None:
        return decide_free(progress, swarm, now=now, limits=LIMITS, rounds=QUEUE)
    blocks = progress.order or range(progress.depth)
    steps = Steps(ExecutionOrder(tuple(blocks), progress.depth))
    if progress.done:
        for block in steps.order.blocks[: steps.order.blocks.index(progress.done[-1]) + 1]:
            steps = steps.after(1, ran=block in progress.done)
    action = PassOver()
    while isinstance(action, PassOver):
        visits = tuple((steps.over, visit) for visit in progress.under_way)
        action = decide_step(
            progress, replace(steps, under_way=visits),
            swarm=swarm, now=now, limits=LIMITS, routing=routing,
        )  # fmt: skip
        if isinstance(action, PassOver):
            steps = steps.after(1, ran=False)
    return action.visit if isinstance(action, Ask) else action


def next_of(*hosts, now=0.0, routing="order-free", done=(), **progress):
    asked = RequestProgress(**{"depth": 4, "deadline": 1.0, **progress}).after(done)
    return decide(asked, Swarm(hosts), now=now, routing=routing)


def test_the_host_expected_first_goes_next_with_all_it_holds():
    busy, quick = host("a", 0, 1, waiting=10), host("b", 2, 3)
    assert next_of(busy, quick) == Visit("b", (2, 3), limit=0.1)
    assert next_of(busy, quick, done=(3, 2)) == Visit("a", (0, 1), limit=pytest.approx(0.2))


def test_ties_go_by_name():
    assert next_of(host("b", 0), host("a", 1)).host == "a"


def test_fewer_blocks_are_asked_for_when_time_is_short():
    visit = next_of(host("a", 0, 1, 2, 3), deadline=0.024)
    assert visit == Visit("a", (0, 1, 2), limit=pytest.approx(0.014))


@pytest.mark.parametrize("order", [None, tuple(range(12))])
def test_hosts_are_compared_by_what_they_can_do_in_time(order):
    """All twelve blocks of a would be too late, and one of b too: five of a are not."""
    a, b = host("a", *range(12), compute=0.005, link=0.001), host("b", 0, link=0.03)
    visit = next_of(a, b, depth=13, deadline=0.04, order=order)
    assert visit == Visit("a", (0, 1, 2, 3, 4), limit=pytest.approx(0.03))


def test_a_request_ends_when_nothing_fits_its_time():
    assert next_of(host("a", 0, 1, 2, 3), deadline=0.0159) == Finish("deadline")
    assert next_of(host("a", 0), deadline=0.01, now=0.0) == Finish("deadline")


def test_a_request_ends_when_all_ran():
    assert next_of(host("a", 0), done=(1, 0, 3, 2)) == Finish("complete")
    assert next_of(host("a", 0), done=(1, 0, 3, 2), min_blocks=5) == Finish("complete")
    assert next_of(host("a", 0), order=(2, 1), done=(2, 1)) == Finish("complete")


def test_unreachable_blocks_end_a_request_that_has_enough():
    gone = host("a", 0, 1, condition="gone")
    assert next_of(gone, host("b", 2, 3), done=(2, 3)) == Finish("unreachable")


def test_with_too_few_blocks_a_suspect_is_waited_for():
    suspect = host("a", 0, 1, condition="suspect", retry_at=0.4)
    asked = {"done": (2,), "min_blocks": 3}
    assert next_of(suspect, **asked) == Wait(0.99)
    assert next_of(replace(suspect, retry_at=2.0), **asked) == Finish("unreachable")
    gone = replace(suspect, condition="gone", retry_at=0.0)
    assert next_of(gone, **asked) == Finish("unreachable")


def test_with_too_few_blocks_the_next_process_of_a_dead_host_is_waited_for():
    """It died at 5 s and is waited for until 15 s; a pipeline does not wait, nor who has enough."""
    hop = Visited("a", (0, 1), "lost", 1.0, why="its process is dead")
    dead = state.failed(host("a", 0, 1), hop, now=5.0, limits=LIMITS)
    asked = {"done": (2,), "min_blocks": 3, "deadline": 20.0}
    assert next_of(dead, now=14.9, **asked) == Wait(19.99)
    assert next_of(dead, now=15.0, **asked) == Finish("unreachable")
    assert next_of(dead, now=5.0, **{**asked, "done": (2, 3), "min_blocks": 2}) == Finish(
        "unreachable"
    )
    assert next_of(dead, now=5.0, routing="sequential", deadline=20.0) == Finish("lost")
    left = host("a", 0, 1, condition="gone", why="it has left")
    assert next_of(left, now=5.0, **asked) == Finish("unreachable")


def test_slow_hosts_are_a_last_resort():
    slow, quick = host("a", 0, compute=0.1), (host("b", 1), host("c", 2))
    assert next_of(slow, *quick, done=(1, 2)) == Finish("unreachable")
    assert next_of(slow, *quick, done=(1, 2), min_blocks=3).host == "a"


def test_images_count_as_work():
    """Link and compute times of one image: 16 images on 2 blocks take 16 * 2 + 32 * 4 ms."""
    visit = next_of(host("a", 0, 1, 2, 3), images=16, deadline=2.0, done=(2, 3))
    assert visit == Visit("a", (0, 1), limit=pytest.approx(4 * 0.160))
    short = next_of(host("a", 0, 1, 2, 3), images=16, deadline=0.2)
    assert short.blocks == (0, 1)
    assert not short.fair, "it is given less than twice what it needs"
    assert next_of(host("a", 0), deadline=0.05).fair


def test_nobody_is_given_less_time_than_the_work_needs():
    """The cap of 1 s is for silent hosts; 16 images on 4 blocks of 40 ms take 2.6 s."""
    visit = next_of(host("a", 0, 1, 2, 3, compute=0.04), images=16, deadline=9.0)
    assert visit.limit == pytest.approx(2 * (0.032 + 2.56))
    assert visit.budget == pytest.approx(9 - 0.01)


def test_a_request_ends_with_as_many_blocks_as_the_plan_needs():
    a, b = host("a", 0, 1, 2), host("b", 3)
    assert next_of(a, b, most=3, done=(3,)).blocks == (0, 1)
    assert next_of(a, b, most=3, done=(0, 1, 3)) == Finish("enough")
    assert next_of(a, b, most=3, min_blocks=4, done=(0, 1, 3)).blocks == (2,)
    assert next_of(a, b, most=1, order=(2, 3)).blocks == (2,), "an order asked for is run whole"
    assert next_of(a, b, most=1, routing="sequential", done=(0, 1)).blocks == (2,)
    asked = RequestProgress(4, 1.0, most=3, done=(0, 1, 3))
    skips = skipped(asked, Swarm([a, b]), ending="enough", limits=LIMITS)
    assert skips == {2: "the plan needs only 3 blocks per request"}


def test_the_host_furthest_behind_its_share_is_first():
    """a has run 10 blocks of 2 per request, b 4 of 0.5, c 2 of 0.25."""
    a = host("a", 0, share=2.0, served=10, compute=0.009)
    b, c = host("b", 1, share=0.5, served=4), host("c", 2, share=0.25, served=2)
    assert next_of(a, b, c).host == "a"  # 11 / 2 before 5 / 0.5 and 3 / 0.25
    assert next_of(a, b, c, done=(0,)).host == "b"
    assert next_of(replace(a, waiting=20), b, c).host == "b", "what is under way counts"
    assert next_of(a, replace(b, share=None), c).host == "b", "no share: whenever it can"
    assert next_of(replace(a, share=0.0), c).host == "c"


def test_a_late_answer_is_waited_for_while_nothing_else_can_be_done():
    suspect = host("a", 0, 1, 2, 3, condition="suspect", retry_at=9.0)
    late = {"under_way": (UnderWay("a", (0,), 0, waited=False),)}
    assert next_of(suspect, **late) == Wait(0.99)
    assert next_of(suspect) == Finish("unreachable")
    assert next_of(suspect, **late, done=(3,)) == Finish("unreachable"), "it has enough"
    assert next_of(suspect, **late, routing="sequential") == Wait(0.99)


def test_an_order_asked_for_is_kept_and_gaps_are_left_out():
    a, b = host("a", 0, 3), host("b", 1, 2, condition="gone")
    assert next_of(a, host("b", 1, 2), order=(2, 3, 0, 1)).blocks == (2,)
    assert next_of(a, b, order=(2, 3, 0, 1)).blocks == (3, 0)
    assert next_of(a, b, order=(2, 3, 0, 1), done=(3, 0)) == Finish("unreachable")
    assert next_of(a, b, order=(3, 2, 0), done=(3, 0)) == Finish("unreachable")
    quick_but_later = host("c", 0, 1, link=0.0)
    assert next_of(host("b", 2), quick_but_later, order=(2, 3, 0, 1)).host == "b"


def test_a_pipeline_needs_each_block_in_its_place():
    a, b, c = host("a", 0, 1), host("b", 2, 3), host("c", 0, 1, compute=0.001)
    assert next_of(a, b, c, routing="sequential") == Visit("a", (0, 1), limit=0.1)
    assert next_of(a, b, c, routing="replicated-sequential").host == "c"
    dead = replace(a, condition="gone")
    assert next_of(dead, b, c, routing="sequential") == Finish("lost")
    assert next_of(dead, b, c, routing="replicated-sequential").host == "c"
    assert next_of(dead, b, routing="replicated-sequential") == Finish("lost")
    frozen = replace(a, condition="suspect", retry_at=0.2)
    assert next_of(frozen, b, c, routing="sequential") == Wait(0.99)
    assert next_of(frozen, b, c, routing="sequential", now=0.99) == Finish("lost")
    assert next_of(a, b, c, routing="sequential", done=(0, 1), now=0.99) == Finish("lost")


def test_a_pipeline_runs_neighbouring_blocks_of_one_host_together():
    assert next_of(host("a", 0, 1, 3), routing="sequential").blocks == (0, 1)


@pytest.mark.parametrize(
    ("wanted", "lag", "left", "limit"),
    [
        (0.01, 0.0, 9.0, 0.1),
        (0.1, 0.0, 9.0, 0.4),
        (0.5, 0.0, 9.0, 1.0),
        (0.1, 0.0, 0.3, 0.3),
        (0.01, 0.01, 9.0, 0.1),
        (0.01, 0.09, 9.0, 0.4),
        (0.01, 5.0, 9.0, 1.0),  # a host that is always late raises its limit to the cap alone
    ],
)
def test_hop_limits(wanted, lag, left, limit):
    assert hop_limit(wanted, lag=lag, left=left, limits=LIMITS) == pytest.approx(limit)


def test_every_skipped_block_has_its_reason():
    swarm = Swarm([host("a", 0, condition="suspect", why="no answer in time"), host("b", 1)])
    skips = skipped(
        RequestProgress(4, 1.0, order=(0, 1, 3)), swarm, ending="deadline", limits=LIMITS
    )
    assert skips == {
        0: "host a is suspect: no answer in time",
        1: "the deadline was near",
        2: "the requested order leaves it out",
        3: "no host holds it",
    }


# --- what holds for every swarm -------------------------------------------------------------------

DEPTH = 6
HOSTS = st.lists(
    st.builds(
        lambda blocks, compute, link, waiting: (frozenset(blocks), compute, link, waiting),
        st.sets(st.integers(0, DEPTH - 1), min_size=1),
        st.one_of(st.none(), st.floats(0.0001, 0.5)),
        st.one_of(st.none(), st.floats(0, 0.3)),
        st.integers(0, 20),
    ),
    min_size=1, max_size=6,
)  # fmt: skip
# What becomes of a visit: its outcome, and the share of its limit that it took.
FATES = st.lists(
    st.tuples(
        st.sampled_from(["answered", "answered", "late", "lost", "wrong", "unavailable"]),
        st.floats(0, 1),
    ),
    min_size=40, max_size=40,
)  # fmt: skip
ORDERS = st.one_of(st.none(), st.permutations(range(DEPTH)).map(tuple))


def played(hosts, fates, *, routing, progress):
    """A whole request in virtual time; every visit, with when it began."""
    swarm = Swarm(
        HostView(f"h{i}", blocks, compute=compute, link=link, waiting=waiting)
        for i, (blocks, compute, link, waiting) in enumerate(hosts)
    )
    now, visits, fates = 0.0, [], iter(fates)
    for _ in range(200):
        action = decide(progress, swarm, now=now, routing=routing)
        if isinstance(action, Finish):
            return action, progress, visits, swarm, now
        if isinstance(action, Wait):
            assert now < action.until <= progress.deadline
            now = action.until
            continue
        visits.append((now, action))
        outcome, share = next(fates, ("answered", 0.5))
        now += action.limit if outcome == "late" else action.limit * share
        hop = Visited(action.host, action.blocks, outcome, 1.0, 0.5, 0.1)
        if outcome == "answered":
            swarm = swarm.with_host(state.answered(swarm[hop.host], hop, limits=LIMITS))
            progress = progress.after(action.blocks)
        else:
            swarm = swarm.with_host(state.failed(swarm[hop.host], hop, now=now, limits=LIMITS))
    raise AssertionError("the request did not end")


@given(
    HOSTS, FATES, st.sampled_from(["order-free", "sequential", "replicated-sequential"]),
    st.floats(0.02, 3.0), st.integers(0, DEPTH), ORDERS,
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_requests_end_in_time_and_never_repeat_a_block(
    hosts, fates, routing, deadline, min_blocks, order
):
    progress = RequestProgress(DEPTH, deadline, min_blocks, order)
    ending, progress, visits, swarm, now = played(hosts, fates, routing=routing, progress=progress)
    assert len(set(progress.done)) == len(progress.done)
    last_start = deadline - LIMITS.reserve_ms / 1000
    for begun, visit in visits:
        assert visit.limit > 0
        assert begun + visit.limit <= last_start + 1e-9
        assert set(visit.blocks) <= swarm[visit.host].blocks
    assert now <= max(last_start, 0.0) + 1e-9
    if order is not None:
        assert list(progress.done) == [block for block in order if block in progress.done]
    elif routing != "order-free":
        assert progress.done == tuple(range(len(progress.done)))
    assert (ending.ending == "complete") == (len(progress.done) == DEPTH)
    assert routing == "order-free" or ending.ending in ("complete", "lost")


@given(HOSTS, st.sampled_from([(), ("lost",), ("late", "lost", "wrong")]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_reachable_block_runs_when_time_allows(hosts, faults, demanding):
    """Also when the first visits fail: what a healthy host holds at the end has run.

    Slow hosts are left out, unless the request asks for every block.
    """
    fates = [(fault, 0.5) for fault in faults] + [("answered", 0.001)] * 40
    progress = RequestProgress(DEPTH, 1000.0, min_blocks=DEPTH if demanding else 1)
    _, progress, _, swarm, _ = played(hosts, fates, routing="order-free", progress=progress)
    bound = state.slow_above(swarm.pace(LIMITS), LIMITS)
    reachable = {
        block
        for host in swarm.values()
        if host.usable and (demanding or not state.is_slow(host, bound=bound))
        for block in host.blocks
    }
    assert reachable <= set(progress.done)


def test_a_step_compares_a_bounded_number_of_hosts():
    limits = Limits(compared=48)
    swarm = Swarm(HostView(f"h{i:04}", frozenset({i % 12})) for i in range(2400))
    seen = Counter()
    for seed in range(200):
        progress = RequestProgress(12, 1.0, seed=seed)
        chosen = compared(progress, swarm, blocks=range(12), limits=limits)
        assert len(chosen) <= 48
        assert {block for host in chosen for block in host.blocks} == set(range(12))
        seen.update(host.name for host in chosen)
        assert chosen == compared(progress, swarm, blocks=range(12), limits=limits)
    assert max(seen.values()) < 20
    assert len(seen) > 2200
    few = Swarm(HostView(f"h{i:02}", frozenset({i % 12})) for i in range(48))
    asked = RequestProgress(12, 1.0)
    assert compared(asked, few, blocks=range(12), limits=limits) == list(few.values())
