"""scripts/digit_scenes.py: its scenes; scripts/scenes.py: models, losses and scores."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import digit_scenes
import pytest
import scenes
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from trainings import key_of

import layershuffle as ls
from layershuffle.data.digits import digit_images, digit_instances


@pytest.fixture(scope="module")
def truth() -> digit_scenes.Scenes:
    return digit_scenes.scenes("test", range(40))


def boxes_of(truth: digit_scenes.Scenes, row: int) -> list[tuple[int, ...]]:
    """Class, left, top, right and bottom of each digit."""
    pairs = zip(truth.values[row].tolist(), truth.boxes[row].tolist(), strict=True)
    return [(1 + value, *map(int, box)) for value, box in pairs if value >= 0]


# --- the data set -----------------------------------------------------------------------------


def test_a_scene_depends_on_its_seed_split_and_index_alone(truth: digit_scenes.Scenes) -> None:
    again = digit_scenes.scenes("test", [31, 4])
    for name, part in vars(again).items():
        assert torch.equal(part, getattr(truth, name)[[31, 4]]), name
    others = [digit_scenes.scenes("test", [4], seed=1), digit_scenes.scenes("validation", [4])]
    assert all(not torch.equal(other.ink[0], truth.ink[4]) for other in others)


def test_splits_share_no_handwriting() -> None:
    _, values = digit_images()
    for split, instances in digit_instances().items():
        some = digit_scenes.scenes(split, range(20))
        chosen = some.values >= 0
        assert set(some.digits[chosen].tolist()) <= set(instances.tolist())
        assert torch.equal(values[some.digits[chosen]], some.values[chosen])
        assert torch.equal(some.digits >= 0, chosen)


def test_boxes_are_the_extents_of_masks(truth: digit_scenes.Scenes) -> None:
    counts = set()
    for row, mask in enumerate(truth.mask):
        rest = mask.clone()
        digits = boxes_of(truth, row)
        counts.add(len(digits))
        for label, left, top, right, bottom in digits:
            own = mask[top:bottom, left:right]
            assert set(own.unique().tolist()) <= {0, label}
            edges = (own[0], own[-1], own[:, 0], own[:, -1])
            assert all(bool(edge.any()) for edge in edges)
            assert bool(rest[top:bottom, left:right].any())  # no box covers another one
            rest[top:bottom, left:right] = 0
        assert not rest.any()
        assert int(truth.ink[row, 0][mask > 0].min()) >= digit_scenes.MASK_INK
        assert int((truth.ink[row, 0][mask == 0] >= digit_scenes.MASK_INK).sum()) > 0  # clutter
    assert counts == {1, 2, 3, 4, 5}


# --- outputs and targets ----------------------------------------------------------------------


class Says(nn.Module):
    """A model with a constant output: tokens [n, 1 + 64, OUTPUTS]."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, _: Tensor) -> Tensor:
        return self.tokens


def test_every_output_of_a_token_has_its_place() -> None:
    tokens = torch.randn(2, 65, scenes.OUTPUTS, generator=torch.Generator().manual_seed(0))
    predicted = scenes.predict(Says(tokens), torch.zeros(2, 1, 32, 32))
    for label, row, column in ((0, 0, 0), (3, 5, 30), (10, 31, 2)):
        token = 1 + 8 * (row // 4) + column // 4
        place = (4 * (row % 4) + column % 4) * digit_scenes.CLASSES + label
        assert predicted.pixels[1, label, row, column] == tokens[1, token, place]
    x, y, w, h = tokens[1, 12, -5:-1].tolist()  # row 1, column 3: its middle is at (14, 6)
    centre = (14 + 4 * x, 6 + 4 * y)
    half = (5 * math.exp(min(w, 2)), 5 * math.exp(min(h, 2)))
    expected = [centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1]]
    torch.testing.assert_close(predicted.boxes[1, 11], torch.tensor(expected))
    assert torch.equal(predicted.values[1, 11], tokens[1, 12, scenes.PIXELS : scenes.PIXELS + 10])
    assert predicted.centreness[1, 11] == tokens[1, 12, -1]


def test_tokens_answer_for_the_smallest_box_at_their_middle(truth: digit_scenes.Scenes) -> None:
    assigned = scenes.assigned(truth.boxes, truth.values)
    for row in range(len(truth.ink)):
        for token in range(64):
            x, y = 4 * (token % 8) + 2, 4 * (token // 8) + 2
            best, area = -1, math.inf
            for number, (_, left, top, right, bottom) in enumerate(boxes_of(truth, row)):
                middle = ((left + right) / 2, (top + bottom) / 2)
                home = x - 2 <= middle[0] < x + 2 and y - 2 <= middle[1] < y + 2
                size = (right - left) * (bottom - top)
                if size < area and (home or (left < x < right and top < y < bottom)):
                    best, area = number, size
            assert int(assigned[row, token]) == best
        assert set(range(len(boxes_of(truth, row)))) <= set(assigned[row].tolist())


def test_centreness_is_that_of_fcos() -> None:
    box = torch.tensor([0.0, 0.0, 4.0, 8.0])
    points = torch.tensor([[2.0, 4.0], [1.0, 4.0], [1.0, 2.0], [4.0, 4.0], [9.0, 4.0]])
    # The root of (nearer / farther side) across times the same down.
    expected = torch.tensor([1, math.sqrt(1 / 3), math.sqrt(1 / 3 * 2 / 6), 0, 0])
    torch.testing.assert_close(scenes.centreness_of(box.expand(5, 4), points), expected)


def perfect(truth: digit_scenes.Scenes) -> scenes.Predicted:
    """The outputs of a perfect model, with logits of 30."""
    box = scenes.assigned(truth.boxes, truth.values)
    values = torch.full((*box.shape, 10), -30.0)
    boxes = torch.zeros(*box.shape, 4)
    for row, token in (box >= 0).nonzero().tolist():
        number = box[row, token]
        values[row, token, truth.values[row, number]] = 30
        boxes[row, token] = truth.boxes[row, number]
    pixels = nn.functional.one_hot(truth.mask.long(), digit_scenes.CLASSES).permute(0, 3, 1, 2)
    centreness = torch.zeros(box.shape)
    return scenes.Predicted(pixels=60.0 * pixels, values=values, boxes=boxes, centreness=centreness)


def test_a_perfect_answer_scores_100_and_loses_nothing(truth: digit_scenes.Scenes) -> None:
    answer = perfect(truth)
    rows = torch.arange(len(truth.ink))
    # A centreness of logit 0 costs log 2 whatever is wanted.
    assert math.isclose(float(scenes.loss_of(answer, truth, rows)), math.log(2), rel_tol=1e-4)
    score = scenes.scored([answer], truth)
    assert math.isclose(score.miou, 100, abs_tol=1e-3)
    assert math.isclose(score.map, 100, abs_tol=1e-3)


def test_scores_are_means_over_the_digits(truth: digit_scenes.Scenes) -> None:
    answer = perfect(truth)
    # The model takes every 3 for an 8, in pixels and in boxes.
    pixels, values = answer.pixels.clone(), answer.values.clone()
    pixels[:, 9] += 2 * pixels[:, 4]
    values[:, :, 8] = values[:, :, 8].maximum(2 * values[:, :, 3].clamp(min=-30))
    said = pixels.argmax(1)
    ratios = []
    for label in range(1, 11):
        mine, wanted = said == label, truth.mask == label
        ratios.append(float((mine & wanted).sum() / (mine | wanted).sum()))
    assert ratios[3] == 0
    assert 0 < ratios[8] < 1
    wrong = replace(answer, pixels=pixels, values=values)
    score = scenes.scored([wrong], truth)
    assert math.isclose(score.miou, 10 * sum(ratios), rel_tol=1e-5)
    assert score.map < 100


def test_a_surer_box_of_the_same_digit_removes_another() -> None:
    values = torch.full((1, 64, 10), -30.0)
    boxes = torch.zeros(1, 64, 4)
    boxes[0, :3] = torch.tensor([[0.0, 0, 8, 8], [0, 1, 8, 8], [0, 0, 8, 8]])
    values[0, 0, 5], values[0, 1, 5], values[0, 2, 6] = 1.0, 2.0, 0.0
    predicted = scenes.Predicted(
        pixels=torch.zeros(1, 11, 32, 32), values=values, boxes=boxes, centreness=torch.zeros(1, 64)
    )
    (answer,) = scenes.detections(predicted)
    assert answer["labels"][:2].tolist() == [5, 6]
    assert answer["boxes"][0].tolist() == [0, 1, 8, 8]
    expected = math.sqrt(0.5 / (1 + math.exp(-2)))  # root of class times centreness
    assert math.isclose(float(answer["scores"][0]), expected, rel_tol=1e-5)
    assert float(answer["scores"][2]) < 1e-6


# --- models and trainings ---------------------------------------------------------------------


def test_tokens_of_the_dense_model_come_from_blocks_in_order(truth: digit_scenes.Scenes) -> None:
    torch.manual_seed(0)
    model = scenes.dense_model(ls.load("bundled:digits").state_dict()).eval()
    bundled = ls.load("bundled:digits")
    order = ls.Shuffled().draw(12, seed=0, step=0)
    images = scenes.finish(truth.ink[:2])
    with torch.no_grad():
        patches = model.patch_embed(images)
        state = torch.cat([model.cls_token.expand(2, -1, -1), patches], 1) + model.pos_embed
        for block in order:
            state = bundled.blocks[block](state)
        expected = model.head(bundled.norm(state))
        with ls.running(model, order):
            torch.testing.assert_close(model(images), expected)
    assert expected.shape == (2, 65, scenes.OUTPUTS)
    # A dense model starts with all weights of another one, including head and positions.
    again = scenes.dense_model(model.state_dict())
    assert all(torch.equal(again.state_dict()[name], w) for name, w in model.state_dict().items())


def short(arm: str) -> scenes.SceneRun:
    run = next(run for run in chain(*scenes.STAGES) if run.arm == arm)
    return replace(run, steps=2, warmup=1)


def test_a_frozen_model_trains_its_head_alone() -> None:
    start = scenes.dense_model(ls.load("bundled:digits").state_dict())
    before = {name: weight.clone() for name, weight in start.state_dict().items()}
    some = digit_scenes.scenes("train", range(scenes.BATCH))
    model = scenes.train(scenes.with_frozen_blocks(start), short("frozen layershuffle"), some)
    moved = {n for n, weight in model.state_dict().items() if not torch.equal(weight, before[n])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("arm", "groups", "in_order"),
    [
        ("baseline", 1, 1),
        ("layershuffle", 1, 0),
        ("layershuffle-mixed", 4, 1),
        ("layershuffle-tied-3-mixed-exit", 4, 1),
    ],
)
def test_arms_differ_in_the_orders_of_a_step(arm: str, groups: int, in_order: int) -> None:
    drawn = scenes.orders_of(short(arm)).draw(step=1, micro_batch=0)
    plain = ls.ExecutionOrder.sequential(12)
    assert (len(drawn), sum(order == plain for order in drawn)) == (groups, in_order)


def test_an_exit_says_what_the_cut_orders_say(truth: digit_scenes.Scenes) -> None:
    torch.manual_seed(0)
    model = scenes.dense_model(ls.load("bundled:digits").state_dict()).eval()
    images, order = scenes.finish(truth.ink[:2]), ls.Shuffled().draw(12, seed=0, step=0)
    cut = ls.ExecutionOrder(order.blocks[:5], 12)
    with torch.no_grad():
        with ls.running(model, [order] * 2, exit_after=5):
            both = scenes.halves(scenes.predict(model, images))
        for said, ran in zip(both, (order, cut), strict=True):
            with ls.running(model, ran):
                expected = scenes.predict(model, images)
            for name, part in vars(expected).items():
                torch.testing.assert_close(getattr(said, name), part, rtol=1e-4, atol=1e-4)


def test_the_best_recipe_trains_three_blocks_and_an_exit(tmp_path: Path) -> None:
    base = scenes.dense_model(ls.load("bundled:digits").state_dict())
    save_model(base, str(scenes.weights_of(scenes.BASE, tmp_path)))
    run = short("layershuffle-tied-3-mixed-exit")
    some = digit_scenes.scenes("train", range(scenes.BATCH))
    start = scenes.begin(run, tmp_path)
    blocks = ls.blocks_of(scenes.train(start, run, some))
    tied = [[a.attn.qkv.weight is b.attn.qkv.weight for b in blocks] for a in blocks]
    assert tied == [[i // 4 == k // 4 for k in range(12)] for i in range(12)]


def test_runs_are_named_apart() -> None:
    runs = list(chain(*scenes.STAGES))
    assert len({key_of(run, scenes.KEY) for run in runs}) == len(runs)


def test_the_base_is_trained_again_only_where_it_is_needed(tmp_path: Path) -> None:
    base, refined, frozen = map(short, ("base", "baseline", "frozen baseline"))
    base = scenes.BASE

    def left(*finished: scenes.SceneRun) -> list[list[scenes.SceneRun]]:
        keys = {key_of(run, scenes.KEY) for run in finished}
        return scenes.missing([[base], [refined, frozen]], tmp_path, finished=keys)

    assert left() == left(base) == [[base], [refined, frozen]]
    assert left(base, refined) == [[], [frozen]]  # a classifier needs no base
    scenes.weights_of(base, tmp_path).touch()
    assert left(base) == [[], [refined, frozen]]
