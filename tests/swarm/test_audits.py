"""Which visits are audited: shares against the settings, and lies that look odd."""

import math

import numpy as np
import pytest

from layershuffle.swarm.audits import AuditDraw, measures

SHARE, LATER = 0.02, 400  # visits in which a new host is audited more often


def visits(count, *, seed=0):
    """States before and after blocks that add a third of the state's length, more or less."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        before = draw.standard_normal((1, 5, 8)).astype(np.float32)
        added = draw.standard_normal((1, 5, 8)) - 0.2 * before
        size = 0.33 * draw.lognormal(0, 0.3) * np.linalg.norm(before) / np.linalg.norm(added)
        yield before, (before + size * added).astype(np.float32)


def drawn(pairs, *, share=SHARE, seed=1, host="a"):
    """Which of the visits of one host are audited, all of them rightly answered."""
    draw = AuditDraw(np.random.default_rng(seed))
    for before, after in pairs:
        audited = draw.chosen(host, before=before, after=after, share=share)
        if audited:
            draw.passed(host)
        yield audited


def test_measures_are_length_and_direction():
    before = np.array([[[3.0, 4.0]]], np.float32)
    ratio, cosine = measures(before, before + np.array([0.0, 2.0], np.float32))
    assert ratio == pytest.approx(math.log(2 / 5))
    assert cosine == pytest.approx(4 / 5)
    ratio, cosine = measures(before, -before)
    assert (ratio, cosine) == (pytest.approx(math.log(2)), pytest.approx(-1))
    assert np.isfinite(measures(before, before)).all()
    assert np.isfinite(measures(0 * before, before)).all()


def test_a_new_host_is_audited_at_its_first_visit():
    assert next(drawn(visits(1)))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_as_many_visits_are_audited_as_may_be(share):
    later = list(drawn(visits(6000), share=share))[LATER:]
    noise = 4 * math.sqrt(share * (1 - share) / len(later))
    assert np.mean(later) == pytest.approx(share, abs=noise + 0.1 * share)


def test_a_share_of_one_is_all_and_equal_answers_are_never_odd():
    assert all(drawn(visits(200), share=1.0))
    (pair,) = visits(1)
    later = list(drawn([pair] * 6000))[LATER:]
    assert np.mean(later) == pytest.approx(SHARE / 2, abs=4 * math.sqrt(SHARE / 2 / len(later)))


LIES = {
    "the opposite": lambda before, after: -after,
    "noise": lambda before, after: after + 10 * np.float32(after.std()) * np.sign(before + 1),
    "nothing done": lambda before, after: before,
    "zeros": lambda before, after: 0 * after,
    "five times as much": lambda before, after: before + 5 * (after - before),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_first_rare_lie_is_audited(lie):
    """After 500 honest visits, in 40 hosts; a random audit of 2 % would see one of them."""
    caught = 0
    for seed in range(40):
        draw = AuditDraw(np.random.default_rng(seed))
        *honest, (before, after) = visits(501, seed=seed)
        for pair in honest:
            if draw.chosen("a", before=pair[0], after=pair[1], share=SHARE):
                draw.passed("a")
        after = LIES[lie](before, after)
        caught += draw.chosen("a", before=before, after=after, share=SHARE)
    assert caught >= 36


def test_a_host_that_begins_anew_has_no_habits():
    draw = AuditDraw(np.random.default_rng(0))
    for before, after in visits(100):
        draw.chosen("a", before=before, after=after, share=SHARE)
        draw.passed("a")
    assert {*draw._passed, *draw._habits} == {"a"}
    draw.drop("a")
    assert {*draw._passed, *draw._habits} == set()
    ((before, after),) = visits(1)
    assert draw.chosen("a", before=before, after=after, share=SHARE)
