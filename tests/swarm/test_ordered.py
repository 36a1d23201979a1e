"""Requests that name their steps: decisions by hand, walks in virtual time against the formula."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_free import under_way
from test_policy import LIMITS, host
from test_router import LIMITS as SCRIPTED_LIMITS
from test_router import START, Scripted, after, routed

from clock import loop_time, run_virtual
from layershuffle.core.orders import ExecutionOrder
from layershuffle.errors import UsageError
from layershuffle.swarm.messages import HostFailed, HostGone, HostUnavailable, Visit
from layershuffle.swarm.ordered import Ask, PassOver, Steps, decide_step, stretch
from layershuffle.swarm.policy import Finish, RequestProgress, Wait
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm

A, B, C = host("a", 0, 1), host("b", 2), host("c", 3)
DEPTH = 4


def order_of(text):
    return ExecutionOrder.parse(text, depth=DEPTH)


def next_of(text, *hosts, ran="", answered=(), visits=(), **progress):
    """`ran`: "x" for a step that ran, "-" for one that was passed over."""
    order = order_of(text)
    steps = Steps(order, answered=frozenset(answered), under_way=visits)
    for mark in ran:
        steps = steps.after(1, ran=mark == "x")
    done = tuple(block for block, mark in zip(order, ran, strict=False) if mark == "x")
    asked = RequestProgress(**{"depth": DEPTH, "deadline": 1.0, "order": order.blocks, **progress})
    return decide_step(asked.after(done), steps, swarm=Swarm(hosts), now=0.0, limits=LIMITS)


def sent(*visits):
    """Visits under way: (position, host, block)."""
    return tuple((position, under_way((host, (block,), 0))[0]) for position, host, block in visits)


def late(visits):
    return tuple((position, replace(visit, waited=False)) for position, visit in visits)


def replayed(steps, start=START):
    """The formula of `core.orders` on the arithmetic of the scripted hosts."""
    states = [start]
    for k, (block, version) in enumerate(steps):
        out = after((block,), states[version])
        states.append(out if version == k else states[k] + (out - states[version]))
    return states[-1]


# --- decisions ------------------------------------------------------------------------------------


def test_a_round_is_asked_for_at_once_and_the_next_one_waits():
    assert next_of("0+2,3", A, B, C) == Ask(0, Visit("a", (0,), limit=0.1))
    first = sent((0, "a", 0))
    assert next_of("0+2,3", A, B, C, visits=first) == Ask(1, Visit("b", (2,), limit=0.1))
    both = sent((0, "a", 0), (1, "b", 2))
    nothing_ready = Wait(0.99, for_hosts=False)
    assert next_of("0+2,3", A, B, C, visits=both) == nothing_ready
    assert next_of("0+2,3", A, B, C, answered=(1,), visits=both[:1]) == nothing_ready
    assert next_of("0+2,3", A, B, C, ran="xx") == Ask(2, Visit("c", (3,), limit=0.1))
    assert next_of("0+2,3", A, B, C, ran="xxx") == Finish("complete")
    assert next_of("0+2,3", A, B, C, ran="x-x") == Finish("unreachable")


def test_a_step_on_an_older_state_does_not_wait_for_the_newest():
    """3,2@0: both at once, as in a round; 3,2,0@1: 0 beside 2, after 3."""
    three = sent((0, "c", 3))
    assert next_of("3,2@0", A, B, C, visits=three).position == 1
    assert next_of("3,2,0@1", A, B, C, visits=three) == Wait(0.99, for_hosts=False)
    visits = sent((1, "b", 2))
    assert next_of("3,2,0@1", A, B, C, ran="x", visits=visits).position == 2


def test_blocks_that_nobody_else_reads_between_share_a_visit():
    blocks = frozenset({0, 1, 2})
    assert stretch(order_of("0,1,0,3"), 0, held=blocks) == (0, 1, 0)
    assert stretch(order_of("0,1,2@1"), 0, held=blocks) == (0,), "2 reads the state between"
    assert stretch(order_of("0+1,2"), 0, held=blocks) == (0,)
    assert stretch(order_of("0+1,2,0"), 1, held=blocks) == (1,)
    assert stretch(order_of("0+1,2,0"), 2, held=blocks) == (2, 0)
    quick = host("a", 0, 1, compute=0.001)
    assert next_of("0,1,0", quick).visit.blocks == (0, 1, 0)
    short = next_of("0,1,0", host("a", 0, 1), deadline=0.02)
    assert short.visit.blocks == (0, 1), "three would not fit its time"


def test_a_step_without_a_host_is_passed_over_when_a_later_one_can_run():
    assert next_of("0+2,3", B, C).position == 1
    assert next_of("0+2,3", B, C, visits=sent((1, "b", 2))) == Wait(0.99), "it may come back"
    assert next_of("0+2,3", B, C, answered=(1,)) == PassOver()
    assert next_of("0+2,3", B, answered=(1,)) == Finish("unreachable"), "nothing comes after"
    assert next_of("0+2,3", B, ran="-x") == Finish("unreachable")


def test_too_few_blocks_wait_for_a_host_that_may_come_back():
    back = host("a", 0, condition="suspect", retry_at=0.5)
    asked = {"ran": "-x", "min_blocks": 2}
    assert next_of("1+2,0", back, B, **asked) == Wait(0.99)
    assert next_of("1+2,0", back, B, ran="-x") == Finish("unreachable")
    away = replace(back, retry_at=2.0)
    assert next_of("1+2,0", away, B, **asked) == Finish("unreachable")
    # Of what ran, nothing is waited for, although its host may come back.
    over = host("b", 2, condition="suspect", retry_at=0.5)
    assert next_of("1+2,0", over, ran="-x", min_blocks=2) == Finish("unreachable")


def test_a_late_step_is_asked_for_elsewhere_and_of_its_host_once_that_is_cleared():
    other, suspect = host("z", 0), replace(A, condition="suspect", retry_at=0.5)
    visits = late(sent((0, "a", 0)))
    assert next_of("0+2", suspect, other, B, answered=(1,), visits=visits).visit.host == "z"
    assert next_of("0+2,3", suspect, B, C, answered=(1,), visits=visits) == PassOver()
    assert next_of("0+2,3", A, B, C, answered=(1,), visits=visits).visit.host == "a"


def test_a_slow_host_is_the_last_resort():
    slow = host("a", 0, compute=9.0)
    others = (B, C, host("d", 1))
    assert next_of("0+2,3", slow, *others, answered=(1,), deadline=30.0) == PassOver()
    assert next_of("3+2,0", slow, *others, ran="xx", deadline=30.0) == Finish("unreachable")
    asked = next_of("3+2,0", slow, *others, ran="xx", deadline=30.0, min_blocks=3)
    assert asked.visit.host == "a"


def test_a_step_that_has_become_one_with_another_is_passed_over():
    """0,1,2@1,2 without 1: block 2 would run twice on the state after 0."""
    text = "0,1,2@1,2@2"
    assert next_of(text, A, B, ran="x-x") == PassOver()
    assert next_of(text, A, B, ran="xxx").visit.blocks == (2,)
    begun = sent((2, "b", 2))
    assert next_of(text, A, B, ran="x-", visits=begun) == Wait(0.99, for_hosts=False)
    # The other way round: the later of the two was asked for first.
    assert next_of("0,1,2,2@1", A, B, ran="x-", visits=sent((3, "b", 2))) == PassOver()


def test_a_request_ends_in_time():
    assert next_of("0+2", A, B, deadline=0.01) == Finish("deadline")
    assert next_of("0+2", A, B, deadline=0.0159) == Finish("deadline"), "no visit fits"
    assert next_of("0+2", A, B, deadline=0.0159, visits=sent((1, "b", 2))) == Wait(
        pytest.approx(0.0059)
    )


# --- walks ----------------------------------------------------------------------------------------

HOSTS = {"a": [0, 2], "b": [1], "c": [3]}


def asked(text):
    return {"order": order_of(text)}


@pytest.mark.parametrize("text", ["3+1+0,2", "3,1@0,2@1,0@0", "3,1,3,1", "2+0,2+0+1", "1,1,0+3"])
def test_the_steps_that_were_named_run(text):
    order = order_of(text)
    state, route, transport, router = routed({}, HOSTS, order=order)
    assert route.steps == order.steps
    assert (state == replayed(order.steps)).all()
    assert (route.ending, route.degraded) == ("complete", False)
    assert set(route.skipped) == set(range(DEPTH)) - set(order)
    assert set(route.skipped.values()) <= {"the requested order leaves it out"}
    assert sum(len(blocks) for _, blocks in transport.calls) == len(order)
    assert all(host.waiting == 0 for host in router.swarm.values())


def test_answers_are_added_up_in_the_order_of_the_steps():
    """They come the other way round, after 30, 20 and 10 ms, and float sums show the order."""

    async def go():
        transport = Scripted({"a": [0.03], "b": [0.02], "c": [0.01]})
        router = Router(transport, depth=DEPTH, limits=limits, clock=loop_time)
        router.swarm = Swarm(HostView(name, frozenset(blocks)) for name, blocks in HOSTS.items())
        return await router.walk(start, deadline=1.0, order=order_of("0+1+3"))

    limits = SCRIPTED_LIMITS.model_copy(update={"hop_floor_ms": 500.0})
    start = np.random.default_rng(0).standard_normal((1, 100, 3)).astype(np.float32)
    state, route = run_virtual(go())
    assert 30 <= route.ms < 31, "as long as the slowest visit"
    assert (state == replayed(route.steps, start)).all()
    backwards = replayed(order_of("3+1+0").steps, start)
    assert (state != backwards).any()


def test_the_order_goes_on_without_a_dead_host():
    acts = {"b": [HostGone("dead")]}
    state, route, _, _ = routed(acts, HOSTS, **asked("0+1+3,2,1"))
    assert route.steps == ((0, 0), (3, 0), (2, 2))
    assert (state == replayed(route.steps)).all()
    assert route.ending == "unreachable"
    assert "dead" in route.skipped[1]


def test_another_holder_takes_the_step_of_a_dead_one():
    acts = {"b": [HostGone("dead")]}
    state, route, transport, _ = routed(acts, {**HOSTS, "d": [1]}, **asked("0+1+3,2"))
    assert route.steps == order_of("0+1+3,2").steps
    assert (state == replayed(route.steps)).all()
    assert ("d", (1,)) in transport.calls


def test_the_late_answer_of_a_step_counts_while_nothing_follows():
    """b is given up after 60 ms, d cannot be reached, and b's answer comes after all."""
    acts = {"b": [0.2], "d": [HostUnavailable("full")]}
    hosts = {"a": [0], "b": [1], "d": [1]}
    state, route, _, _ = routed(acts, hosts, min_blocks=2, **asked("0+1"))
    assert route.steps == order_of("0+1").steps
    assert (state == replayed(route.steps)).all()
    assert 200 <= route.ms < 210


def cleared(name):
    """A probe finds, 200 ms after the start, that the host answers rightly again."""

    def clear(router):
        router.update(name, lambda host: replace(host, condition="healthy", why=""))

    return (0.2, clear)


def test_a_skipped_step_runs_if_the_step_after_it_fails():
    """a is late and then cleared, b fails: without a step that ran after it, 0 may still run."""
    acts = {"a": [30.0], "b": [HostFailed("oops")]}
    _, route, _, _ = routed(acts, {"a": [0], "b": [1]}, depth=2, order=(0, 1), later=cleared("a"))
    assert (route.order, route.ms) == ((0,), pytest.approx(200))


@pytest.mark.parametrize(("ms", "order", "in_all"), [(80, (0, 1), 135), (130, (1,), 115)])
def test_a_late_answer_counts_until_a_later_step_has_run(ms, order, in_all):
    """a is given up after 60 ms, so step 0 is skipped, and b runs step 1 for 55 ms.

    An answer of a before that takes the skip back, and step 1 runs again on the newer state.
    """
    acts = {"a": [ms / 1000], "b": [0.055, 0.055]}
    state, route, transport, _ = routed(acts, {"a": [0], "b": [1]}, depth=2, order=(0, 1))
    assert (route.order, route.ms) == (order, pytest.approx(in_all))
    assert (state == after(order)).all()
    assert transport.cancelled == (["b"] if ms == 80 else ["a"])


def test_a_late_visit_of_several_steps_stays_in_the_race_with_a_shorter_one():
    acts = {"a": [0.08], "b": [0.05]}
    _, route, _, _ = routed(acts, {"a": [0, 1], "b": [1]}, depth=2, order=(0, 1))
    assert (route.order, route.ms) == ((0, 1), pytest.approx(80))


def test_at_the_deadline_what_has_come_is_added_up():
    acts = {"b": [9.0]}
    state, route, transport, _ = routed(acts, HOSTS, seconds=0.05, **asked("1+0+3,2"))
    assert route.steps == ((0, 0), (3, 0))
    assert (state == replayed(route.steps)).all()
    assert (route.ending, transport.cancelled) == ("deadline", ["b"])


def test_a_pipeline_refuses_rounds_and_passes():
    for text in ("0+1", "0,1,0"):
        with pytest.raises(UsageError, match="pipeline now"):
            routed({}, HOSTS, routing="sequential", **asked(text))


FAULTS = st.lists(
    st.one_of(
        st.floats(0.0, 0.3),
        st.sampled_from([HostGone("dead"), HostUnavailable("full")]),
    ),
    max_size=3,
)


@st.composite
def orders(draw):
    """Any order of up to ten steps, each on any version that is there."""
    steps = set()
    blocks, versions = [], []
    for position in range(draw(st.integers(1, 10))):
        step = draw(st.integers(0, DEPTH - 1)), draw(st.integers(0, position))
        # A block runs once on one version.
        block, version = step if step not in steps else (step[0], position)
        steps.add((block, version))
        blocks.append(block)
        versions.append(version)
    return ExecutionOrder(tuple(blocks), DEPTH, tuple(versions))


@given(
    orders(),
    st.fixed_dictionaries(dict.fromkeys("abcd", FAULTS)),
    st.lists(st.sets(st.integers(0, DEPTH - 1)), min_size=4, max_size=4),
    st.integers(1, DEPTH),
)
@settings(max_examples=150, deadline=None)
def test_whatever_fails_what_ran_is_an_order_that_can_be_replayed(order, acts, blocks, few):
    hosts = dict(zip("abcd", map(sorted, blocks), strict=True))
    state, route, _, router = routed(acts, hosts, order=order, min_blocks=few)
    assert route.ms <= 1000
    assert all(host.waiting == 0 for host in router.swarm.values())
    if route.order:
        ran = ExecutionOrder(route.order, DEPTH, route.versions)
        assert (state == replayed(ran.steps)).all()
    # The steps that ran are those of the order without some.
    left = iter(order.blocks)
    assert all(block in left for block in route.order)
    assert (route.ending == "complete") == (len(route.order) == len(order))
    if route.ending == "complete":
        assert route.steps == order.steps
