"""The random generator, against a slow path that follows its description."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from itertools import permutations

import pytest
from scipy.stats import chisquare

from common import global_generators_untouched
from layershuffle.core.draws import Stream

ALPHA = 1e-4  # seeds are fixed: a test that passes once passes always


def slow_words(seed: int, step: int, micro_batch: int, rank: int, *, count: int) -> list[int]:
    """The first words of a stream: hex digests cut into four pieces of 16 digits."""
    name = ",".join(str(part) for part in (seed, step, micro_batch, rank))
    key = hashlib.sha256(("layershuffle.draws.v1:" + name).encode()).digest()
    digits = ""
    for index in range(count // 4 + 1):
        digits += hashlib.sha256(key + bytes.fromhex(f"{index:016x}")).hexdigest()
    return [int(digits[16 * i : 16 * i + 16], 16) for i in range(count)]


def slow_shuffle(words: list[int], items: list[int]) -> list[int]:
    """Fisher-Yates by removing and inserting, not by swapping in place."""
    out = list(items)
    for place in reversed(range(1, len(out))):
        while (word := words.pop(0)) >= 2**64 // (place + 1) * (place + 1):
            pass
        partner = word % (place + 1)
        kept = dict(enumerate(out)) | {place: out[partner], partner: out[place]}
        out = [kept[i] for i in range(len(out))]
    return out


NAMES = [(0, 0, 0, 0), (7, 3, 0, 0), (7, 3, 2, 0), (7, 3, 0, 5), (-1, 10**12, 0, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_shuffle_equals_the_slow_path(name: tuple[int, int, int, int]) -> None:
    seed, step, micro_batch, rank = name
    stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
    words = slow_words(*name, count=200)
    for length in (1, 2, 12, 24):
        assert list(stream.shuffled(range(length))) == slow_shuffle(words, list(range(length)))


def test_below_rejects_the_incomplete_run() -> None:
    """Half of all words are rejected for this n, so a plain remainder would differ."""
    n = 2**63 + 1
    words = slow_words(1, 2, 0, 0, count=400)
    wanted = [word for word in words if word < n]
    assert len(wanted) < 0.65 * len(words)
    stream = Stream(1, 2)
    assert [stream.below(n) for _ in wanted] == wanted


def test_chance_compares_with_the_exact_threshold() -> None:
    words = slow_words(4, 5, 0, 0, count=300)
    for p in (0.0, 0.2, 0.5, 1.0 / 3.0, 0.999):
        stream = Stream(4, 5)
        wanted = [word < Fraction(p) * 2**64 // 1 for word in words]
        assert [stream.chance(p) for _ in words] == wanted


@pytest.mark.parametrize(
    ("name", "golden"),
    [
        ((0, 0, 0, 0), "3,2,9,6,5,8,7,1,10,11,4,0"),
        ((0, 1, 0, 0), "11,7,8,3,10,9,6,5,2,1,4,0"),
        ((42, 1000, 3, 1), "2,6,11,5,9,1,3,8,0,7,10,4"),
    ],
)
def test_golden_shuffles(name: tuple[int, int, int, int], golden: str) -> None:
    """Frozen for ever: saved orders and resumed runs depend on them."""
    stream = Stream(name[0], name[1], micro_batch=name[2], rank=name[3])
    assert ",".join(map(str, stream.shuffled(range(12)))) == golden


def test_below_is_uniform() -> None:
    for n in (2, 3, 7, 12):
        stream = Stream(11, n)
        counts = Counter(stream.below(n) for _ in range(6000))
        assert chisquare([counts[i] for i in range(n)]).pvalue > ALPHA


def test_shuffles_are_uniform_over_all_24() -> None:
    counts = Counter(Stream(3, step).shuffled(range(4)) for step in range(7200))
    every = [counts[p] for p in permutations(range(4))]
    assert sum(every) == 7200
    assert chisquare(every).pvalue > ALPHA


@pytest.mark.parametrize("coordinate", range(4))
def test_neighbouring_streams_are_independent(coordinate: int) -> None:
    """The first draws of two streams whose names differ by one: all 16 pairs equally often."""
    counts: Counter[tuple[int, int]] = Counter()
    for index in range(4800):
        first = [index, index % 7, index % 3, index % 2]
        second = list(first)
        second[coordinate] += 1
        pair = [Stream(a, b, micro_batch=c, rank=d).below(4) for a, b, c, d in (first, second)]
        counts[pair[0], pair[1]] += 1
    assert chisquare([counts[i, j] for i in range(4) for j in range(4)]).pvalue > ALPHA


def test_no_global_generator_is_touched() -> None:
    with global_generators_untouched():
        stream = Stream(0, 0)
        stream.shuffled(range(12))
        stream.below(5)
        stream.chance(0.5)
