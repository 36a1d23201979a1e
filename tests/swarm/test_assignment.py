"""Which host holds which blocks: coverage, memory, few moves, by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layershuffle.gateway.brain.assignment import Assignment, BlockFile, HostCapacity, assign

BLOCKS = [BlockFile(f"{number:064x}", 10) for number in range(12)]

files = st.lists(
    st.builds(BlockFile, st.sampled_from("abcdefgh"), st.just(10)), min_size=1, max_size=12
)
capacities = st.lists(
    st.builds(
        HostCapacity,
        st.sampled_from([f"host-{number}" for number in range(8)]),
        st.integers(0, 130),
        st.floats(0.1, 100),
        st.frozensets(st.sampled_from("abcdefgh")),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda capacity: capacity.name,
)


def after(given: list[HostCapacity], held: Assignment) -> list[HostCapacity]:
    """The hosts once they hold what they were assigned."""
    return [
        replace(capacity, blocks=held.get(capacity.name, capacity.blocks)) for capacity in given
    ]


def now_of(given: list[HostCapacity]) -> Assignment:
    return {capacity.name: capacity.blocks for capacity in given}


def weights(held: frozenset[int], blocks: list[BlockFile]) -> set[str]:
    return {blocks[place].digest for place in held}


def copies_of(digest: str, held: Assignment, blocks: list[BlockFile]) -> int:
    return sum(digest in weights(places, blocks) for places in held.values())


@given(capacities, files)
def test_memory_holds_and_no_block_is_left_out_while_there_is_room(
    given: list[HostCapacity], blocks: list[BlockFile]
) -> None:
    held = assign(given, blocks)
    assert held.keys() == {capacity.name for capacity in given}
    slots = 0
    for capacity in given:
        mine = weights(held[capacity.name], blocks)
        assert 10 * len(mine) <= capacity.memory
        slots += capacity.memory // 10
        # Places that share their weights cost nothing more, so all of them are served.
        tied = {place for place, file in enumerate(blocks) if file.digest in mine}
        assert held[capacity.name] == tied
    digests = {file.digest for file in blocks}
    counts = [copies_of(digest, held, blocks) for digest in digests]
    assert sum(count > 0 for count in counts) == min(len(digests), slots)
    for digest in digests:
        if copies_of(digest, held, blocks) < 2:
            # Nobody who lacks it has room for it, or all room is for blocks that nobody holds.
            lacking = [d for d in given if digest not in weights(held[d.name], blocks)]
            free = [d.memory - 10 * len(weights(held[d.name], blocks)) for d in lacking]
            assert all(room < 10 for room in free)


@given(capacities, files)
def test_nothing_moves_while_nobody_comes_or_goes(
    given: list[HostCapacity], blocks: list[BlockFile]
) -> None:
    held = assign(given, blocks)
    assert assign(after(given, held), blocks) == held
    assert assign(reversed(after(given, held)), blocks) == held


@given(capacities, files, st.integers(0, 7))
def test_who_stays_keeps_its_blocks_but_for_one_that_nobody_else_can_take(
    given: list[HostCapacity], blocks: list[BlockFile], leaver: int
) -> None:
    held = assign(given, blocks)
    left = [d for d in after(given, held) if d.name != given[leaver % len(given)].name]
    now = assign(left, blocks)
    orphans = {
        digest
        for digest in {file.digest for file in blocks}
        if not any(digest in weights(d.blocks, blocks) for d in left)
    }
    lost = sum(len(weights(d.blocks, blocks) - weights(now[d.name], blocks)) for d in left)
    assert lost <= len(orphans)


@given(capacities, files)
def test_a_newcomer_takes_nothing_from_the_others(
    given: list[HostCapacity], blocks: list[BlockFile]
) -> None:
    held = assign(given, blocks)
    now = assign([*after(given, held), HostCapacity("new", 1000)], blocks)
    gone = [held[capacity.name] - now[capacity.name] for capacity in given]
    # But where a block had no holder, and its place was taken.
    orphans = sum(copies_of(f.digest, held, blocks) == 0 for f in blocks)
    assert orphans or not any(gone)


@given(capacities, files, st.lists(st.integers(0, 7), max_size=5))
def test_blocks_that_enough_have_loaded_are_given_up_and_no_other(
    given: list[HostCapacity], blocks: list[BlockFile], order: list[int]
) -> None:
    """Hosts join one after the other, and load what they get before the next one comes."""
    there: list[HostCapacity] = []
    for number in [*order, *range(len(given))]:
        newcomer = given[number % len(given)]
        if newcomer.name not in {capacity.name for capacity in there}:
            there.append(newcomer)
        for _ in range(4):
            held = assign(there, blocks)
            orphans = any(copies_of(f.digest, now_of(there), blocks) == 0 for f in blocks)
            for file in blocks:
                loaded = [d for d in there if file.digest in weights(d.ready, blocks)]
                kept = [d for d in loaded if file.digest in weights(held[d.name], blocks)]
                assert len(kept) >= min(len(loaded), 1 if orphans else 2)
            there = [replace(d, blocks=held[d.name], ready=held[d.name]) for d in there]
        assert assign(there, blocks) == held


def test_who_was_first_gives_up_what_later_ones_have_loaded() -> None:
    there: list[HostCapacity] = []
    for number in range(4):
        there.append(HostCapacity(f"host-{number}", 1000))
        for _ in range(3):
            held = assign(there, BLOCKS)
            there = [replace(d, blocks=held[d.name], ready=held[d.name]) for d in there]
    assert max(len(places) for places in held.values()) <= 7
    assert {copies_of(file.digest, held, BLOCKS) for file in BLOCKS} <= {2, 3}


def test_nobody_gives_up_more_than_all_but_one_beyond_its_share() -> None:
    """Four hosts have loaded all twelve blocks; of two copies each, six are the share of one."""
    every = frozenset(range(12))
    held = assign(
        [HostCapacity(f"host-{n}", 1000, blocks=every, ready=every) for n in range(4)], BLOCKS
    )
    assert [len(places) for places in held.values()] == [7, 7, 7, 7]


@pytest.mark.parametrize("speed", [1.0, 0.2])
@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 12, 24, 36, 240])
def test_equal_hosts_hold_equally_many_and_each_block_at_least_twice(
    hosts: int, speed: float
) -> None:
    """Also where each holds one block, and there are more of them than blocks to hold twice."""
    held = assign([HostCapacity(f"host-{n}", 1000, speed) for n in range(hosts)], BLOCKS)
    assert {len(places) for places in held.values()} == {max(1, 24 // hosts)}
    assert {copies_of(file.digest, held, BLOCKS) for file in BLOCKS} == {max(2, hosts // 12)}


@pytest.mark.parametrize("unit", [1.0, 0.125])
def test_fast_hosts_hold_more(unit: float) -> None:
    """Only the ratio of speeds counts."""
    slow = [HostCapacity(name, 1000, unit) for name in "ab"]
    held = assign([HostCapacity("fast", 1000, 3 * unit), *slow], BLOCKS)
    assert len(held["fast"]) == 12
    assert len(held["a"]) == len(held["b"]) == 6


def test_a_host_takes_what_lies_on_its_disk() -> None:
    mine = frozenset(file.digest for file in BLOCKS[6:])
    given = [HostCapacity("a", 60), HostCapacity("b", 60, on_disk=mine)]
    assert assign(given, BLOCKS, copies=1) == {
        "a": frozenset(range(6)),
        "b": frozenset(range(6, 12)),
    }


def test_hosts_that_load_nothing_try_what_the_fewest_hold_or_try() -> None:
    """Block 0 has one holder, 1 and 2 have two. All failed to load 2, and one is trying 1."""
    given = [
        HostCapacity("holds all", 30, blocks=frozenset({0, 1, 2})),
        HostCapacity("holds two", 20, blocks=frozenset({1, 2})),
    ]
    for number in range(1, 6):
        trying = frozenset({1}) if number == 5 else frozenset[int]()
        given.append(
            HostCapacity(f"try-{number}", 10, blocks=trying, failed=frozenset({2}), speed=9.0)
        )
    held = assign(given, BLOCKS[:3])
    # Then 0 counts two, and comes first by its digest; then three; then 2, for all its failures.
    assert [held[f"try-{number}"] for number in range(1, 6)] == [{0}, {0}, {1}, {2}, {1}]


def test_a_departed_block_is_taken_over_and_a_newcomer_gets_work() -> None:
    given = [HostCapacity(f"host-{n}", 1000) for n in range(4)]
    held = assign(given, BLOCKS)
    left = after(given, held)[1:]
    now = assign(left, BLOCKS)
    assert {copies_of(file.digest, now, BLOCKS) for file in BLOCKS} <= {2, 3}
    assert all(now[capacity.name] >= capacity.blocks for capacity in left)
    grown = assign([*after(left, now), HostCapacity("new", 1000)], BLOCKS)
    assert len(grown["new"]) == 6
    assert all(grown[capacity.name] == now[capacity.name] for capacity in left)


def test_a_block_without_a_holder_takes_the_place_of_one_with_two() -> None:
    full = HostCapacity("a", 20, blocks=frozenset({0, 1}))
    also = HostCapacity("b", 20, blocks=frozenset({0, 1}))
    held = assign([full, also], BLOCKS[:3])
    assert {place for places in held.values() for place in places} == {0, 1, 2}
