"""The table of methods."""

import pytest

from layershuffle.core.methods import METHODS, find_method
from layershuffle.core.policies import Kept, LayerDrop, Sequential, Shuffled
from layershuffle.errors import UsageError


@pytest.mark.parametrize(
    ("name", "policy", "selects_by", "parts"),
    [
        ("baseline", Sequential(), "sequential", (False, False)),
        ("layershuffle", Shuffled(), "arbitrary", (False, False)),
        ("layershuffle-position", Shuffled(), "arbitrary", (True, False)),
        ("layershuffle-predict", Shuffled(), "arbitrary", (False, True)),
        ("layerdrop", LayerDrop(0.2), "sequential", (False, False)),
        ("layershuffle-depth", Shuffled(depth=(3, None)), "arbitrary", (False, False)),
        ("layershuffle-parallel", Shuffled(parallel=(1, 4)), "arbitrary", (False, False)),
        ("layershuffle-mixed", Shuffled(sequential_every=4), "arbitrary", (False, False)),
        ("layershuffle-exit", Shuffled(), "arbitrary", (False, False)),
        ("layershuffle-tied", Shuffled(), "arbitrary", (False, False)),
    ],
)
def test_table(name, policy, selects_by, parts):
    method = find_method(name)
    assert method.policy == policy
    assert method.selects_by == selects_by
    assert (method.encoding, method.prediction) == parts


def test_every_method_is_tested_above_and_has_a_source():
    assert len(METHODS) == 11
    assert all(method.source and method.summary for method in METHODS.values())


def test_truncated_names_its_blocks():
    method = find_method("truncated", kept=3)
    assert (method.policy, method.selects_by) == (Sequential(), "sequential")
    assert method.blocks == Kept(3, choose="spaced")
    assert method.blocks.draw(12, seed=0, step=0).blocks == (0, 6, 11)
    assert find_method("truncated", kept=3, choose="last").blocks == Kept(3, choose="last")


def test_options():
    assert find_method("layerdrop", drop=0.5).policy == LayerDrop(0.5)
    assert find_method("layershuffle", drop=0.2).policy == Shuffled(drop=0.2)
    assert find_method("layershuffle-depth", min_blocks=2).policy == Shuffled(depth=(2, None))
    assert find_method("layershuffle-parallel", max_parallel=6).policy == Shuffled(parallel=(1, 6))
    assert find_method("layershuffle-tied").distinct == 1
    assert find_method("layershuffle-tied", distinct=3).distinct == 3


def test_rounds_compose_with_dropped_blocks():
    wanted = Shuffled(drop=0.2, parallel=(1, 4))
    assert find_method("layershuffle-parallel", drop=0.2).policy == wanted
    assert find_method("layershuffle", drop=0.2, max_parallel=4).policy == wanted
    depth = find_method("layershuffle-depth", min_blocks=2, max_parallel=3)
    assert depth.policy == Shuffled(depth=(2, None), parallel=(1, 3))


def test_sequential_orders_compose_with_every_shuffled_method():
    assert find_method("layershuffle-mixed", sequential_every=8).policy.sequential_every == 8
    depth = find_method("layershuffle-depth", sequential_every=4).policy
    assert depth == Shuffled(depth=(3, None), sequential_every=4)
    tied = find_method("layershuffle-tied", distinct=3, sequential_every=4)
    assert (tied.policy, tied.distinct) == (Shuffled(sequential_every=4), 3)


def test_every_method_can_have_an_exit():
    assert find_method("layershuffle").exit_weight is None
    assert find_method("layershuffle-exit").exit_weight == 0.3
    assert find_method("layershuffle-exit", exit_weight=1.0).exit_weight == 1.0
    mixed = find_method("layershuffle-mixed", exit_weight=0.1)
    assert (mixed.policy, mixed.exit_weight) == (Shuffled(sequential_every=4), 0.1)


@pytest.mark.parametrize(
    ("name", "options", "phrase"),
    [
        ("layershufle", {}, "did you mean 'layershuffle'"),
        ("zzz", {}, "one of baseline"),
        ("baseline", {"drop": 0.2}, "no drop probability"),
        ("layershuffle-depth", {"drop": 0.2}, "no drop probability"),
        ("layershuffle", {"min_blocks": 3}, "no smallest number of blocks"),
        ("truncated", {}, "--kept 6"),
        ("layershuffle", {"distinct": 2}, "its own block"),
        ("layerdrop", {"max_parallel": 3}, "one block after the other"),
        ("layerdrop", {"sequential_every": 4}, "only the sequential order"),
        ("layershuffle", {"kept": 6}, "trains all blocks"),
        ("baseline", {"choose": "first"}, "trains all blocks"),
        ("layerdrop", {"drop": 1.0}, r"must be in \[0, 1\)"),
    ],
)
def test_wrong_options(name, options, phrase):
    with pytest.raises(UsageError, match=phrase):
        find_method(name, **options)
