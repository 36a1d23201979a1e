"""scripts/breaks.py: its runs, models and trainings."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import breaks
import breaks_page
import pytest
import torch
from trainings import key_of

import layershuffle as ls
from layershuffle.core.discovery import find_blocks
from layershuffle.data.digits import digit_images, draw_pairs

RUNS = [run for stage in breaks.STAGES for run in stage]
PAIRS = 128
"""Two batches, so that a training of the tests is short."""


def short(case: str, *, arm: str = "layershuffle", **changes: object) -> breaks.BreakRun:
    """A run of the table with two steps on few pairs."""
    run = next(run for run in RUNS if run.case == case and run.arm == arm)
    return replace(run, steps=2, warmup=1, pairs=PAIRS, **changes)


def images() -> torch.Tensor:
    return breaks.finish(breaks.train_pairs(short("200 pairs"))[0][:4])


def test_runs_are_named_apart_and_refine_what_came_before() -> None:
    assert len({key_of(run, breaks.KEY) for run in RUNS}) == len(RUNS)
    for number, stage in enumerate(breaks.STAGES):
        before = {(run.case, run.seed) for run in chain(*breaks.STAGES[:number])}
        for run in stage:
            ready = run.start in {"bundled", "scratch"} or (run.start, run.seed) in before
            assert ready, key_of(run, breaks.KEY)


@pytest.mark.parametrize("kind", breaks.KINDS)
def test_wrap_takes_every_kind_of_block(kind: str) -> None:
    torch.manual_seed(0)
    model = ls.wrap(breaks.KINDS[kind](3)).eval()
    path, container = find_blocks(breaks.KINDS[kind](3))
    assert (path, len(list(container.children()))) == ("blocks", 3)
    blocks = ls.blocks_of(model)
    seen = []
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: seen.append(number))
    with torch.no_grad(), ls.running(model, "2,0,1"), ls.tap(model) as tap:
        model(images())
        assert seen == [2, 0, 1]
        # Each block gets the output of the previous one in the order.
        assert torch.equal(tap.records[1].tensor, blocks[0](tap.records[0].tensor))


def test_weights_of_a_block_are_about_as_many_but_for_convmixer() -> None:
    sizes = {
        kind: sum(weight.numel() for weight in ls.blocks_of(ls.wrap(make(2)))[0].parameters())
        for kind, make in breaks.KINDS.items()
    }
    assert sizes == {"attention": 33472, "MLP-Mixer": 34351, "ConvNeXt": 36416, "ConvMixer": 6080}


@pytest.mark.parametrize("scale", [0.0, 0.25, 1.0])
def test_skip_connections_are_scaled(scale: float) -> None:
    model = ls.load("bundled:digits").eval()
    plain = ls.load("bundled:digits").eval()
    breaks.scale_skips(model, scale)
    with torch.no_grad():
        state = plain.blocks[3](torch.ones(2, 16, breaks.WIDTH))
        residual = plain.blocks[5](state) - state
        torch.testing.assert_close(model.blocks[5](state), scale * state + residual)
        with ls.tap(model) as tap, ls.running(model, "5,3"):
            model(images())
        before, after = (record.tensor for record in tap.records)
        expected = scale * before + plain.blocks[3](before) - before
        torch.testing.assert_close(after, expected)
        # Scores are those of the scaled model, though they share the beginnings of orders.
        labels = torch.zeros(4, dtype=torch.int64)
        scores = ls.evaluate(model, [(images(), labels)], orders=["5,3", "5,2"])
        with ls.running(model, "5,3"):
            loss = torch.nn.functional.cross_entropy(model(images()), labels)
    assert math.isclose(scores[0].cross_entropy, float(loss), rel_tol=1e-5)


def test_few_digits_are_among_more() -> None:
    _, values = digit_images()
    used: dict[int, set[int]] = {}
    draws = draw_pairs("train", breaks.PAIRS)
    for run in RUNS:
        if run.digits is not None and run.seed == 0 and run.arm == "baseline":
            changed = breaks.fewer_digits(draws.digits, run.digits)
            assert torch.equal(values[changed], values[draws.digits])
            used[run.digits] = set(changed.flatten().tolist())
    for digits, instances in used.items():
        assert len(instances) == 10 * digits
    ordered = [used[digits] for digits in sorted(used)]
    assert len(ordered) == 4
    assert all(few < more for few, more in pairwise(ordered))


def test_few_pairs_are_the_first_of_more() -> None:
    few, labels = breaks.train_pairs(short("200 pairs"))
    more, more_labels = breaks.train_pairs(replace(short("200 pairs"), pairs=1000))
    assert torch.equal(few, more[:PAIRS])
    assert torch.equal(labels, more_labels[:PAIRS])


def test_both_arms_differ_in_the_order_alone(tmp_path: Path) -> None:
    bundled = ls.load("bundled:digits").state_dict()
    models = [breaks.train(short("200 pairs", arm=arm), tmp_path)[0] for arm in breaks.ARMS]
    for model in models:
        assert not torch.equal(model.state_dict()["head.weight"], bundled["head.weight"])
    fixed = replace(short("200 pairs"), arm="baseline")
    again, _ = breaks.train(fixed, tmp_path)
    for name, weight in models[0].state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_detached_prediction_leaves_the_model_as_it_is_without(tmp_path: Path) -> None:
    run = short(breaks_page.NO_PARTS)
    model, parts = breaks.train(run, tmp_path)
    plain, none = breaks.train(replace(run, prediction=None, detached=False), tmp_path)
    attached, _ = breaks.train(replace(run, detached=False), tmp_path)
    assert parts is not None
    assert none is None
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert any(
        not torch.equal(attached.state_dict()[name], weight)
        for name, weight in plain.state_dict().items()
    )


@pytest.mark.parametrize("case", ["encoding, frozen table", "encoding, noise"])
def test_tables_that_are_not_trained(tmp_path: Path, case: str) -> None:
    run = short(case)
    start = breaks.add_parts(ls.load("bundled:digits"), run)
    _, parts = breaks.train(run, tmp_path)
    assert start is not None
    assert parts is not None
    expected = start.encoding.table
    if run.table == "noise":
        generator = torch.Generator().manual_seed(run.seed)
        expected = [torch.empty_like(expected).normal_(generator=generator) for _ in range(2)][1]
    assert torch.equal(parts.encoding.table, expected)
    assert not torch.equal(
        parts.encoding.projections[0].weight, start.encoding.projections[0].weight
    )


def test_a_base_is_trained_again_only_where_it_is_needed(tmp_path: Path) -> None:
    base = replace(RUNS[0], steps=2, warmup=1, pairs=PAIRS, depth=2, case="depth 2")
    refined = replace(base, arm="layershuffle", start=base.case)

    def left(*finished: breaks.BreakRun) -> list[list[breaks.BreakRun]]:
        keys = {key_of(run, breaks.KEY) for run in finished}
        return breaks.missing([[base], [refined]], tmp_path, finished=keys)

    assert left() == [[base], [refined]]
    assert left(base) == [[base], [refined]]  # its weights are not here
    other = replace(refined, arm="baseline")
    keys = {key_of(base, breaks.KEY), key_of(other, breaks.KEY)}
    stages = breaks.missing([[base], [refined, other]], tmp_path, finished=keys)
    assert stages == [[base], [refined]]
    breaks.measure(base, tmp_path)
    assert left(base) == [[], [refined]]
    started = breaks.begin(refined, tmp_path).state_dict()
    trained, _ = breaks.train(base, tmp_path)
    assert all(torch.equal(started[name], value) for name, value in trained.state_dict().items())
    breaks.weights_of(base, tmp_path).unlink()
    assert left(base, refined) == [[], []]
