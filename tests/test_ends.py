"""Blocks that keep their place: what runs, scores, saves, merges and analyses a model with ends."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import layershuffle as ls
from analysis.subjects import subject_of
from common import CLASSES, DEPTH, FAMILIES, images, redraw
from layershuffle.analysis import attention, attribution, leave_one_out, norms, umap
from layershuffle.analysis.subject import balanced_orders
from layershuffle.cli import parse
from layershuffle.core.evaluation import evaluate
from layershuffle.core.stack import fixed_of, stack_of
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import MergePlan, sample_plans
from layershuffle.models import truncate
from layershuffle.models.metadata import read_record
from refusals import refuses

VIT = FAMILIES["timm-vit"]
BATCHES = [(images(4, seed=seed), torch.arange(4) % CLASSES) for seed in range(2)]


def with_ends(*fixed: int, seed: int = 0) -> nn.Module:
    """A pico model of four blocks, as a method with `fixed` prepares it."""
    model: nn.Module = redraw(VIT.wrapped(), seed=seed).eval()
    ls.Method("anyorder", branch_scale=1, fixed=fixed or (1, 1)).prepare(model)
    return model


def logits_along(model: nn.Module, x: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """The logits along a plain order, whatever the ends."""
    with torch.no_grad(), ls.running(model, blocks, fixed=(0, 0)):
        answer: Tensor = model(x)
    return answer


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fixed", "keeps"),
    [
        ("0,2,1,3", (1, 1), True),
        ("0,3", (1, 1), True),
        ("0,2,2,1,3", (1, 1), True),
        ("0,2+1,3", (1, 1), True),
        ("0,2,1@1,3", (1, 1), True),
        ("3,0,2,1", (0, 0), True),
        ("2,1,3", (0, 1), True),
        ("0,1,3,2", (2, 0), True),
        ("0,2,1", (1, 1), False),
        ("2,1,3", (1, 1), False),
        ("1,0,2,3", (1, 1), False),
        ("0+2,1,3", (1, 1), False),
        ("0,2,1+3", (1, 1), False),
        ("0,2@0,1,3", (1, 1), False),
        ("0,2,0,3", (1, 1), False),
        ("1,0,2,3", (2, 0), False),
        ("3", (1, 1), False),
    ],
)
def test_an_order_keeps_the_ends_or_not(text: str, fixed: tuple[int, int], *, keeps: bool) -> None:
    order = ls.ExecutionOrder.parse(text, depth=4)
    assert order.keeps_ends(fixed) is keeps
    model = VIT.wrapped()
    stack_of(model).fixed = fixed
    if keeps:
        with torch.no_grad(), ls.running(model, order):
            model(images(2))
    else:
        with pytest.raises(UsageError), ls.running(model, order):
            pass
        with torch.no_grad(), ls.running(model, order, fixed=(0, 0)):
            model(images(2))


def test_a_beginning_with_its_last_blocks() -> None:
    order = ls.ExecutionOrder.parse("0,2+1,3", depth=4)
    assert [str(order.beginning(count, last=1)) for count in range(1, 5)] == [
        "0,3",
        "0,2,3",
        "0,2+1,3",
        "0,2+1,3",
    ]
    assert order.beginning(2) == ls.ExecutionOrder.parse("0,2", depth=4)


@pytest.mark.parametrize(
    ("text", "fixed", "wanted"),
    [
        ("3,1", (1, 1), "0,3,1,5"),
        ("3,1", (1, 2), "0,3,1,4,5"),
        ("3,5", (2, 0), "0,1,3,5"),
        ("3+1,2,2", (1, 1), "0,3+1,2,2,5"),
        ("3,2@0,4@1", (2, 1), "0,1,3,2@2,4@3,5"),
        ("3,0@0,5", (0, 0), "3+0,5"),
    ],
)
def test_the_ends_run_before_and_after_an_order_of_the_others(
    text: str, fixed: tuple[int, int], wanted: str
) -> None:
    order = ls.ExecutionOrder.parse(text, depth=6).within_ends(fixed)
    assert str(order) == wanted
    assert order.keeps_ends(fixed)


@pytest.mark.parametrize("text", ["0,2", "2,5", "3,1"])
def test_an_order_of_the_others_has_no_end(text: str) -> None:
    with refuses(UsageError):
        ls.ExecutionOrder.parse(text, depth=6).within_ends((2, 1))


BROKEN: dict[str, Callable[[nn.Module], object]] = {
    "running": lambda model: ls.running(model, "3,0,2,1").__enter__(),
    "running per sample": lambda model: ls.running(
        model, [ls.ExecutionOrder.sequential(4), ls.ExecutionOrder((0, 1, 3, 2), 4)]
    ).__enter__(),
    "forward_many": lambda model: ls.forward_many(model, images(2), ["0,1,2,3", "0,1,2"]),
    "evaluate": lambda model: evaluate(model, BATCHES, orders=["0,1,3"], fixed=(1, 2)),
    "evaluate kept": lambda model: evaluate(model, BATCHES, modes="kept:1"),
    "predict": lambda model: ls.predict(model, ["none.png"], order="1,2,3"),
    "predict kept": lambda model: ls.predict(model, ["none.png"], mode="kept:1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_orders_that_break_them_are_refused(name: str) -> None:
    with refuses(UsageError):
        BROKEN[name](with_ends(1, 1))


def test_any_order_runs_for_who_asks() -> None:
    model, plain = with_ends(1, 1), redraw(VIT.wrapped(), seed=0).eval()
    x = images(2)
    with torch.no_grad(), ls.running(plain, "3,0,2"):
        wanted = plain(x)
    assert torch.equal(logits_along(model, x, (3, 0, 2)), wanted)
    with torch.no_grad():
        (answer,) = dict(ls.forward_many(model, x, ["3,0,2"], fixed=(0, 0))).values()
    assert torch.equal(answer, wanted)
    scores = evaluate(model, BATCHES, modes="arbitrary,kept:1", num_orders=3, fixed=(0, 0))
    plainly = evaluate(plain, BATCHES, modes="arbitrary,kept:1", num_orders=3)
    assert scores == plainly


def test_the_ends_belong_to_the_model_and_its_copies() -> None:
    model = with_ends(2, 0)
    assert fixed_of(copy.deepcopy(model)) == (2, 0)
    assert fixed_of(ls.unwrap(copy.deepcopy(model)) and ls.wrap(VIT.plain())) == (0, 0)
    assert "fixed" not in vars(ls.unwrap(model).blocks)
    assert fixed_of(ls.wrap(model)) == (0, 0), "an unwrapped model has none"


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["pass", "batch"])
def test_modes_draw_what_is_not_fixed(draw: Any) -> None:
    model = with_ends(1, 1)
    modes = "sequential,arbitrary,kept:3,kept:2,arbitrary:parallel=2,kept:3:arbitrary:passes=2"
    scores = evaluate(model, BATCHES, modes=modes, num_orders=8, draw=draw)
    drawn: dict[str, set[str]] = {}
    for score in scores:
        own = [score.order] if score.order is not None else score.batch_orders
        drawn.setdefault(score.label, set()).update(map(str, own))
        assert score.fixed == (1, 1)
    # Two blocks side by side have one order, however it is written.
    (together,) = drawn.pop("arbitrary:parallel=2")
    assert together in {"0,1+2,3", "0,2+1,3"}
    assert drawn == {
        "sequential": {"0,1,2,3"},
        "arbitrary": {"0,1,2,3", "0,2,1,3"},
        "kept:3:sequential": {"0,1,3", "0,2,3"},
        "kept:2:sequential": {"0,3"},
        "kept:3:arbitrary:passes=2": {"0,1,1,3", "0,2,2,3"},
    }
    assert {score.kept for score in scores if "kept:3" in score.label} == {3}


@pytest.mark.parametrize("fixed", [(1, 1), (0, 2), (0, 1), (2, 0)])
def test_who_is_sure_passes_through_the_last_blocks(fixed: tuple[int, int]) -> None:
    """Against each order cut between the ends, image by image."""
    model, stop = with_ends(*fixed), 0.6
    first, last = fixed
    scores = evaluate(model, BATCHES, modes="arbitrary,kept:3", num_orders=4, stop=stop)
    stopped = set()
    for score in scores:
        assert score.order is not None
        blocks = score.order.blocks
        ran, right, loss = 0, 0, 0.0
        for x, labels in BATCHES:
            for image, label in zip(x, labels.tolist(), strict=True):
                for count in range(min(first + 1, len(blocks) - last), len(blocks) - last + 1):
                    path = blocks[:count] + blocks[len(blocks) - last :]
                    chances = logits_along(model, image[None], path)[0].softmax(-1)
                    if chances.max() >= stop:
                        break
                ran += len(path)
                stopped.add(len(path))
                right += int(chances.argmax()) == label
                loss -= math.log(chances[label])
        assert (score.blocks, score.top1) == (ran / 8, 100 * right / 8)
        assert score.cross_entropy == pytest.approx(loss / 8, rel=1e-5)
    assert len(stopped) > 1, "not all at once"


# --- files ----------------------------------------------------------------------------------------


def test_a_saved_model_knows_its_ends(tmp_path: Path) -> None:
    for fixed in ((1, 1), (0, 0), (2, 0)):
        ls.save(with_ends(*fixed), tmp_path / "model")
        assert read_record(tmp_path / "model")["fixed"] == [*fixed]
        again = ls.load(tmp_path / "model")
        assert fixed_of(again) == fixed
        broken = ls.running(again, "3,0,2,1")
        if any(fixed):
            with pytest.raises(UsageError):
                broken.__enter__()
        with torch.no_grad(), ls.running(again, "3,0,2,1", fixed=(0, 0)):
            again(images(1))


def test_a_model_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    ls.save(with_ends(1, 1), tmp_path / "model")
    path = tmp_path / "model" / "layershuffle.json"
    text = path.read_text()
    path.write_text(text.replace('  "fixed": [\n    1,\n    1\n  ],\n', ""))
    assert path.read_text() != text
    assert fixed_of(ls.load(tmp_path / "model")) == (0, 0)


def test_a_model_of_0_2_0_is_loaded(tmp_path: Path) -> None:
    """Its metadata held what config.json has as well."""
    model = FAMILIES["timm-vit"].wrapped()
    ls.save(model, tmp_path / "model")
    path = tmp_path / "model" / "layershuffle.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "model_args": {"depth": 4}}))
    assert torch.equal(ls.load(tmp_path / "model")(images(1)), model(images(1)))


@pytest.mark.parametrize(
    ("blocks", "fixed"), [("0,2,1,3", (1, 1)), ("0,1,2", (0, 0)), ("0,2,3", (0, 0))]
)
def test_a_shorter_model_keeps_them_where_it_has_them(blocks: str, fixed: tuple[int, int]) -> None:
    assert fixed_of(truncate(with_ends(1, 1), blocks)) == fixed


def test_a_shorter_model_says_that_its_ends_are_drawn_now(caplog: pytest.LogCaptureFixture) -> None:
    truncate(with_ends(1, 1), "0,2,1,3")
    truncate(FAMILIES["timm-vit"].wrapped(), "0")
    assert caplog.records == []
    truncate(with_ends(1, 1), "0,2,3")
    (record,) = caplog.records
    assert "all of them are drawn" in record.getMessage()


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["1", "1,a", "1,1,1", "-1,1", "1.5,1"])
def test_a_flag_that_is_no_pair_is_refused(word: str) -> None:
    with refuses(SettingsError):
        parse(["eval", "bundled:digits", "--data", "digit-pairs", f"--fixed={word}"])


@pytest.mark.parametrize("command", ["fit --model m --out o", "eval m"])
def test_the_flag_is_a_pair(command: str) -> None:
    arguments = parse([*command.split(), "--data", "d", "--fixed", "2,1"])
    assert arguments.settings.fixed == (2, 1)  # type: ignore[union-attr]


# --- merges ---------------------------------------------------------------------------------------


def test_a_merge_has_the_ends_of_its_donors() -> None:
    donors = [with_ends(1, 1, seed=seed) for seed in range(4)]
    group = MergeGroup(donors)
    plans = sample_plans(4, DEPTH, count=20, seed=0, slots="random", fixed=group.fixed)
    assert {(plan.blocks[0], plan.blocks[3]) for plan in plans} == {(0, 3)}
    assert {plan.blocks[1:3] for plan in plans} == {(1, 2), (2, 1)}
    merged = group.merge(plans[0])
    assert fixed_of(merged) == fixed_of(ls.uniform_soup(donors)) == (1, 1)
    with pytest.raises(UsageError):
        ls.running(merged, "3,0,2,1").__enter__()
    assert sample_plans(4, DEPTH, count=5, seed=0, slots="random") == sample_plans(
        4, DEPTH, count=5, seed=0, slots="random", fixed=(0, 0)
    )


def test_donors_agree_in_their_ends_and_slots_keep_them() -> None:
    donors = [with_ends(1, 1, seed=seed) for seed in range(2)]
    with refuses(UsageError):
        MergeGroup([donors[0], with_ends(0, 0, seed=1)])
    with refuses(UsageError):
        MergeGroup(donors).merge(MergePlan((0, 1, 0, 1), slots=(1, 0, 2, 3)))


def test_members_of_an_ensemble_keep_their_own() -> None:
    members = [with_ends(1, 1), VIT.wrapped().eval()]
    scores = ls.evaluate_ensemble(members, BATCHES, num_orders=6)
    first, second = ({str(score.member_orders[k]) for score in scores} for k in (0, 1))
    assert first <= {"0,1,2,3", "0,2,1,3"}
    assert any(not text.startswith("0,") for text in second)
    with refuses(UsageError):  # they have no orders in common
        ls.evaluate_ensemble(members, BATCHES, num_orders=6, orders="same")


# --- analyses -------------------------------------------------------------------------------------


def test_the_square_of_orders_is_of_the_drawn_blocks() -> None:
    orders = balanced_orders(7, first=0, count=4, seed=3, fixed=(2, 1))
    assert all(order.keeps_ends((2, 1)) for order in orders)
    square = np.array([order.blocks[2:6] for order in orders])
    for column in square.T:
        assert sorted(column) == [2, 3, 4, 5]
    assert balanced_orders(7, first=3, count=4, seed=3) == balanced_orders(
        7, first=3, count=4, seed=3, fixed=(0, 0)
    )


@pytest.mark.parametrize("analysis", [norms, attention, attribution, leave_one_out])
def test_an_analysis_tells_of_the_drawn_blocks(analysis: Any) -> None:
    measured = analysis.measure(subject_of(with_ends(1, 1), count=4, batch_size=2))
    (table,) = measured.tables.values()
    assert set(table.block) == set(table.position) == {1, 2}
    assert len(analysis.figures(measured.tables)) == 1


def test_leaving_out_a_drawn_block_against_forwards_by_hand() -> None:
    model = with_ends(1, 1)
    subject = subject_of(model, count=4, batch_size=4, num_orders=2)
    (table,) = leave_one_out.measure(subject).tables.values()
    x, labels = images(4), torch.arange(4) % CLASSES

    def loss(blocks: tuple[int, ...]) -> float:
        logits = logits_along(model, x, blocks).double()
        return float(nn.functional.cross_entropy(logits, labels))

    for block, position, change in table[["block", "position", "cross_entropy"]].to_numpy():
        other = 3 - int(block)
        whole = (0, int(block), other, 3) if position == 1 else (0, other, int(block), 3)
        assert change == pytest.approx(loss((0, other, 3)) - loss(whole), abs=1e-6)


def test_what_the_ends_add_to_a_logit_stands_beside_the_blocks() -> None:
    facts = attribution.measure(subject_of(with_ends(1, 1), count=4)).facts
    parts = facts["stem"] + facts["constant"] + facts["blocks"] + facts["ends"]
    assert parts == pytest.approx(facts["logit"], abs=1e-5)


def test_outputs_are_collected_under_orders_that_keep_them() -> None:
    _, positions = umap.collect(subject_of(with_ends(1, 1), count=6))
    assert set(positions[:, 0]) == {0}
    assert set(positions[:, 3]) == {3}
    assert set(positions[:, 1]) == {1, 2}
