"""Calibrations, how blocks ran, and how sure answers are: against slow counts and closed forms."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from gateway_site import VIT, made_up, picture, run, site
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server_app import logits, tensors

import layershuffle as ls
from common import DEPTH, FAMILIES, logits_of
from layershuffle.core.evaluation import Score
from layershuffle.core.forwards import block_runs
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.policies import Mode
from layershuffle.core.position import add_position
from layershuffle.core.position_forms import EncodingForm
from layershuffle.core.stack import depth_of, running, stack_of
from layershuffle.data import DataOptions, Split, open_data
from layershuffle.data.splits import limited_test
from layershuffle.gateway.brain.policy import (
    QUEUE,
    UNEXPLAINED,
    Cell,
    Rounds,
    cell_of,
    late_last,
    overlapped,
    probabilities,
)
from layershuffle.gateway.brain.state import VisitError
from layershuffle.gateway.brain.sureness import (
    Accuracy,
    CellAccuracy,
    Stop,
    Sureness,
    calibration_error,
    default_confidence,
    ending_at,
    temperature_of,
)
from layershuffle.gateway.calibration.calibration import (
    calibration_path,
    expected_accuracy,
    expected_interval,
    expected_when_asked,
    read_calibration,
    rounds_of,
    useful_blocks,
    write_calibration,
)
from layershuffle.gateway.client.calibrate import Walks, calibrate, cells_of, rows_of, walked_cells
from layershuffle.ground.errors import DataError, ModelFileError, StackError, UsageError
from layershuffle.ground.stats import independent_images, t_interval, wilson_interval
from layershuffle.models import file_view, image_view, truncate
from layershuffle.models.files import weights_digest
from pictures import file_of

DATA = "digit-pairs?test=40"


def digits_model(fixed=(0, 0)):
    """The bundled base model, cut to be quick to three blocks between the ends `fixed`."""
    model = truncate(ls.load("bundled:digits"), {(0, 0): "0,4,8", (1, 1): "0,2,4,8,11"}[fixed])
    stack_of(model).fixed = fixed
    return model


def test_an_assumed_order_of_classes_is_said(caplog, tmp_path):
    for split in ("train", "val"):
        for name in ("a", "b", "c", "d", "e"):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for number in range(2):
                (place / f"{number}.png").write_bytes(file_of(picture(number)))
    model = ls.wrap(FAMILIES["timm-vit"].plain())
    calibrate(model, f"folder:{tmp_path}", orders=2, images=5)
    assert [record.getMessage() for record in caplog.records] == [
        "the model names no classes; its outputs are taken for a, b, c and 2 more, in the order of "
        "the data; --classes FILE names them"
    ]


@pytest.mark.parametrize("fixed", [(0, 0), (1, 1)])
def test_equal_to_a_slow_count(fixed, monkeypatch):
    """Every cell and every late block, order by order, image by image; ends run in each."""
    model = digits_model(fixed)
    depth, (first, last) = depth_of(model), fixed
    monkeypatch.setattr("layershuffle.gateway.client.calibrate._BATCH", 4)
    calibration = calibrate(model, DATA, orders=3, images=10, seed=5)
    data = open_data(DATA, image_view(model), options=DataOptions(train=False, max_test=10))
    items = [data.splits["test"].dataset[index] for index in range(10)]
    items = [(data.finish(pixels[None]), label) for pixels, label in items]
    policy = ls.Shuffled(fixed=fixed)
    draws = [policy.draw(depth, seed=5, step=index).blocks for index in range(3)]
    draws = [blocks[first : depth - last] for blocks in draws]

    def right(order):
        order = order_of(order, depth).within_ends(fixed)
        with torch.inference_mode(), running(model, order):
            return np.array([int(model(x).argmax()) == label for x, label in items])

    cells = [row.cell for row in calibration.rows]
    assert cells == [
        Cell(kept, passes, parallel)
        for parallel in (1, 2, 3, 4)
        for passes, most in ((1, 3), (2, 2), (3, 1))
        for kept in range(1, most + 1)
    ]
    for row in calibration.rows:
        orders = [overlapped(blocks, row.cell, depth=depth) for blocks in draws]
        shares = [100 * right(order).mean() for order in orders]
        assert row.top1 == pytest.approx(np.mean(shares))
        assert row.sd_orders == pytest.approx(np.std(shares, ddof=1))
        assert 0 <= row.low <= row.top1 <= row.high <= 100
        assert (row.orders_low, row.orders_high) == (min(shares), max(shares))
    for age, top1 in enumerate(calibration.late, start=1):
        orders = [late_last(blocks, age, depth=depth) for blocks in draws]
        assert top1 == pytest.approx(np.mean([100 * right(order).mean() for order in orders]))
    assert len(calibration.late) == 2
    assert (calibration.split, calibration.orders, calibration.images, calibration.seed) == (
        "test",
        3,
        10,
        5,
    )
    assert calibration.classes[:2] == ("00", "01")
    assert calibration.weights == weights_digest(model)
    answers = np.stack([right(blocks[:2]) for blocks in draws], axis=1)
    counts = independent_images(answers, data.splits["test"].groups.numpy())
    tops = (100 * answers.mean(axis=0)).tolist()
    centre = np.mean(tops)
    over_orders = centre - t_interval(tops)[0]
    over_images = centre - wilson_interval(centre, 3 / (1 / counts).sum())[0]
    low = max(0, centre - math.hypot(over_orders, over_images))
    assert calibration.queue[1].low == pytest.approx(low)
    # The logits of other batch sizes differ in the last bits, and so do the temperatures.
    monkeypatch.setattr("layershuffle.gateway.client.calibrate._BATCH", 10)
    again = calibrate(model, DATA, orders=3, images=10, seed=5)
    assert again.temperatures == pytest.approx(calibration.temperatures, rel=1e-3)
    assert again.model_copy(update={"sureness": calibration.sureness}) == calibration


def test_all_numbers_of_blocks_cost_little_more_than_one():
    """The orders with k blocks begin those with k + 1, so that evaluation runs no block twice."""
    draws = [ls.Shuffled().draw(12, seed=0, step=step).blocks for step in range(20)]

    def runs(cells):
        orders = [overlapped(blocks, cell, depth=12) for cell in cells for blocks in draws]
        return block_runs(orders)

    cells = cells_of(12, parallel=4)
    once = [cell for cell in cells if cell.passes == cell.parallel == 1]
    assert runs(once) == runs([Cell(12)]) <= 20 * 12
    assert len(cells) == 4 * (12 + 9 + 6)
    assert runs(cells) <= 20 * 4 * (12 + 45 + 42), "a pass more is what it costs"


def with_rows(tops, **changes):
    """A calibration with these accuracies by cell."""
    like = made_up().rows[0]
    rows = [
        like.model_copy(
            update={"kept": c.kept, "passes": c.passes, "parallel": c.parallel, "top1": top}
        )
        for c, top in tops.items()
    ]
    return made_up().model_copy(update={"rows": tuple(rows), **changes})


GRID = {
    Cell(1): 20.0, Cell(2): 80.0, Cell(3): 90.0,
    Cell(1, 1, 2): 20.0, Cell(2, 1, 2): 60.0, Cell(3, 1, 2): 89.5,
    Cell(1, 1, 3): 20.0, Cell(2, 1, 3): 60.0, Cell(3, 1, 3): 89.4,
    Cell(1, 2): 30.0, Cell(2, 2): 86.0, Cell(1, 2, 2): 30.0, Cell(2, 2, 2): 85.6,
    Cell(1, 2, 3): 30.0, Cell(2, 2, 3): 82.0,
    Cell(1, 3): 30.5, Cell(1, 3, 2): 30.5, Cell(1, 3, 3): 30.5,
}  # fmt: skip


def test_what_pays_is_run():
    """Passes first, as few as are near the best; then as many side by side as cost nothing."""
    rounds = rounds_of(with_rows(GRID, late=(90.0, 80.0, 79.9, 85.0)))
    assert rounds.cells == {3: Cell(3, 1, 2), 2: Cell(2, 2, 2), 1: Cell(1, 2, 3)}
    assert rounds.max_age == 2, "three versions late it was worse than no third block"
    early = rounds_of(with_rows(GRID, late=(79.9,)))
    assert early.max_age == 2, "a state is as old as that with three under way"
    assert rounds_of(None) == QUEUE
    alone = rounds_of(made_up())
    assert (alone.cells[2], alone.max_age) == (Cell(2), 0), "nothing else was measured"


def test_expected_of_what_ran():
    calibration = with_rows(GRID)
    expected = expected_accuracy(calibration, Cell(2, 2, 3))
    assert (expected.top1, expected.kept, expected.passes, expected.parallel) == (82, 2, 2, 3)
    assert (expected.low, expected.high, expected.orders_low) == (15, 22, 11)
    assert (expected.orders, expected.images, expected.data) == (7, 90, "digit-pairs")
    assert expected_accuracy(calibration, Cell(3, 2)).top1 == 90, (
        "the most passes that were measured"
    )
    assert expected_accuracy(calibration, Cell(3, 1, 4)) is None


def of_one_block(values, *, images):
    """Scores of one block in as many orders, with these accuracies; the first images are right."""
    scores = [
        Score(
            mode=Mode(order="arbitrary", kept=1), index=index, images=images,
            order=ExecutionOrder((0,), 1), top1=value, top5=0.0, cross_entropy=0.0,
            right=torch.arange(images) < value * images / 100,
        )
        for index, value in enumerate(values)
    ]  # fmt: skip
    return {Cell(1): scores}


@pytest.mark.parametrize("groups", [None, torch.arange(50)[:, None] // 2], ids=["alone", "pairs"])
@pytest.mark.parametrize("values", [[60.0, 64.0, 62.0, 70.0], [100.0] * 4])
def test_intervals_hold_both_spreads(values, groups):
    """Squares of half-widths add, on each side; images that are wrong together count as fewer.

    The number of images is the harmonic mean of the orders' numbers.
    """
    scores = of_one_block(values, images=50)
    (row,) = rows_of(scores, Split(dataset=range(50), groups=groups))
    images = 50
    if groups is not None:
        right = np.stack([score.right.numpy() for score in scores[Cell(1)]], axis=1)
        counts = independent_images(right, groups.numpy())
        assert (counts < 30).all(), "25 pairs are little more than 25 images"
        images = 4 / (1 / counts).sum()
    mean = np.mean(values)
    t_low, t_high = t_interval(values)
    w_low, w_high = wilson_interval(mean, images)
    assert (row.top1, row.orders_low, row.orders_high) == (mean, min(values), max(values))
    assert row.low == pytest.approx(mean - math.hypot(mean - t_low, mean - w_low))
    assert row.high == pytest.approx(mean + math.hypot(t_high - mean, w_high - mean))


@pytest.mark.parametrize("images", [40, 400])
def test_the_interval_covers(images):
    """Simulated truth, orders and images both vary: 95 % intervals hold it in 92 % or more."""
    rng = np.random.default_rng(images)
    covered = 0
    for _ in range(300):
        ease = rng.normal(0.5, 1.0, images)  # of an image, shared by all orders
        orders = rng.normal(0.0, 0.3, 8)
        right = ease[None] + orders[:, None] + rng.normal(0, 0.5, (8, images)) > 0
        (row,) = rows_of(
            of_one_block(100 * right.mean(axis=1), images=images), Split(dataset=range(images))
        )
        spread = math.sqrt(1.0 + 0.3**2 + 0.5**2)
        truth = 50 * (1 + math.erf(0.5 / spread / math.sqrt(2)))
        covered += row.low <= truth <= row.high
    assert covered >= 0.92 * 300


def test_the_range_over_orders_holds_nine_of_ten():
    """Of 0, 1, ... 100 % the 5 % quantile is 5 and the 95 % quantile 95."""
    scores = of_one_block([float(k) for k in reversed(range(101))], images=50)
    (row,) = rows_of(scores, Split(dataset=range(50)))
    assert (row.orders_low, row.orders_high) == (5, 95)


@pytest.mark.parametrize(
    ("tops", "useful"),
    [([9.1, 42.2, 70.8, 95.0], 3), ([47.5, 95.0], 1), ([10.0, 60.0, 40.0, 50.0], 2)],
)
def test_useful_blocks_have_half_of_the_accuracy(tops, useful):
    rows = [
        made_up().rows[0].model_copy(update={"kept": kept, "top1": top})
        for kept, top in enumerate(tops, start=1)
    ]
    assert useful_blocks(made_up().model_copy(update={"rows": tuple(rows)})) == useful
    assert useful_blocks(None) == 1


def test_expected_interval():
    """Closed form: half the answers with four blocks, half with two."""
    expected = [expected_accuracy(made_up(), cell) for cell in (Cell(4), Cell(2))]
    mean, low, high = expected_interval(expected * 50)
    chance = 1.96 * math.sqrt(60 * 40 / 100)
    assert mean == 60
    assert low == pytest.approx(60 - math.hypot(5, chance))
    assert high == pytest.approx(60 + math.hypot(2, chance))


def test_file(tmp_path):
    path = tmp_path / "calibration.json"
    assert read_calibration(path, weights="w") is None
    write_calibration(made_up(), path)
    assert read_calibration(path, weights="w") == made_up()
    with pytest.raises(ModelFileError, match="other weights"):
        read_calibration(path, weights="v")
    good = json.loads(path.read_text())
    sure = sure_at(1.0).sureness.model_dump(mode="json")
    for wrong, words in [
        (good | {"schema": 3}, "of another version .schema Input should be 4.*calibrate again"),
        (good | {"extra": 1}, "extra"),
        (good | {"orders": 0}, "orders"),
        (good | {"sureness": sure | {"confidence": 1.01}}, "sureness confidence Input"),
        (good | {"rows": good["rows"][1:]}, "1, 2, 3, ... blocks"),
        (good | {"rows": [good["rows"][0] | {"top1": 101}]}, "rows 0 top1 Input should be less"),
    ]:
        path.write_text(json.dumps(wrong))
        with pytest.raises(ModelFileError, match=words):
            read_calibration(path, weights="w")
    path.write_text("{")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_calibration(path, weights="w")


def test_the_calibration_is_saved_beside_the_weights(tmp_path):
    """Saving the model again removes it, because it was measured on other weights."""
    model = digits_model()
    ls.save(model, tmp_path / "run" / "model")
    for spec in (f"dir:{tmp_path}/run", str(tmp_path / "run"), str(tmp_path / "run" / "model")):
        assert calibration_path(spec) == tmp_path / "run" / "model" / "calibration.json"
    path = calibration_path(str(tmp_path / "run"))
    write_calibration(made_up(3), path)
    ls.save(model, tmp_path / "run" / "model")
    assert not path.exists()
    for spec in ("bundled:digits", "timm:vit_tiny_patch16_224?pretrained=false"):
        with pytest.raises(UsageError, match="no directory of its own"):
            calibration_path(spec)


def test_exported_files_are_calibrated_under_the_name_that_a_swarm_asks_for():
    exported = ls.load("bundled:digits-onnx")
    measured = calibrate(exported, DATA, orders=2, images=20)
    assert measured.weights == exported.manifest.weights


def test_refused():
    with pytest.raises(StackError, match="position encoding"):
        calibrate(add_position(digits_model(), encoding=EncodingForm()), DATA)
    with pytest.raises(UsageError, match="at least two orders"):
        calibrate(digits_model(), DATA, orders=1)
    with pytest.raises(DataError, match="has 5 outputs"):
        calibrate(FAMILIES["timm-vit"].wrapped(), DATA)


def test_the_gateway_reports_expected_accuracy():
    async def go():
        async with site(calibration=made_up()) as place:
            full = (await place.classify(file_of(picture()))).json()
            place.blocks.faults["a"] = VisitError("dead", outcome="lost")
            return full, (await place.classify(file_of(picture()))).json()

    full, part = asyncio.run(go())
    assert full["expected"] == {
        "top1": 80, "low": 75, "high": 82, "orders_low": 71, "orders_high": 86, "kept": 4,
        "orders": 7, "images": 90, "data": "digit-pairs", "split": "test",
        "passes": 1, "parallel": 1, "sd_orders": 1, "confidence": None, "sure": None,
    }  # fmt: skip
    assert full["expected_why"] == ""
    assert part["expected"]["top1"] == 20 * len(part["blocks"]) < 80
    assert {g["label"] for g in full["top"]} == set("abcde")


# --- how blocks ran -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(3), "4,1,0"),
        (Cell(3, passes=2), "4,1,0,4,1,0"),
        (Cell(3, parallel=2), "4,1@0,0@1"),
        (Cell(3, passes=2, parallel=2), "4,1@0,0@1,4,1@3,0@4"),
        (Cell(2, passes=3, parallel=4), "4+1,4+1,4+1"),
    ],
)
def test_orders_without_a_barrier(cell, text):
    order = overlapped((4, 1, 0, 2, 3), cell, depth=5)
    assert order == ExecutionOrder.parse(text, depth=5)


def test_the_last_block_may_be_late():
    assert late_last((2, 0, 1), 1, depth=3) == ExecutionOrder.parse("2,0,1@1", depth=3)
    assert late_last((2, 0, 1), 2, depth=3) == ExecutionOrder.parse("2,0,1@0", depth=3)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_what_ran_is_what_was_measured(kept, passes, parallel):
    order = overlapped(range(12), Cell(kept, passes, parallel), depth=12)
    # No more blocks can be under way than there are.
    assert cell_of(order.steps) == Cell(kept, passes, min(parallel, kept))


def test_what_ran_counts_late_answers_and_half_passes():
    assert cell_of(ExecutionOrder.parse("0,1,2,3@2", depth=4).steps) == Cell(4, 1, 2)
    assert cell_of(ExecutionOrder.parse("0,1,2,3@0", depth=4).steps) == Cell(4, 1, 2)
    assert cell_of(ExecutionOrder.parse("0,1,0", depth=4).steps) == Cell(2, 1, 1)
    # Block 0 ran three times while block 1 was away: that is no second pass.
    assert cell_of(ExecutionOrder.parse("0,0,0,1", depth=4).steps) == Cell(2, 1, 1)
    # In the second pass: five versions old is more than any number under way explains.
    assert cell_of(ExecutionOrder.parse("0,1,0,1@0", depth=4).steps) == Cell(2, 2, UNEXPLAINED)
    assert cell_of(ExecutionOrder.parse("0,1,2,0,1@0,2@0", depth=4).steps) == Cell(
        3, 2, UNEXPLAINED
    )


# --- how sure answers are -------------------------------------------------------------------------


def test_probabilities_are_those_of_torch_in_float64():
    values = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32) * 40
    wanted = (torch.from_numpy(values).double() / 1.7).softmax(dim=-1).numpy()
    assert probabilities(values, 1.7) == pytest.approx(wanted, rel=1e-12)
    assert probabilities(np.float32([3e38, -3e38])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("right", "margin"), [(80, 4.0), (60, 0.1), (99, 2.0)])
def test_the_temperature_makes_the_chance_the_share_of_right_answers(right, margin):
    """With one margin for all answers the best T is margin / ln(share / (1 - share))."""
    values = np.tile(np.float32([margin, 0.0]), (100, 1))
    labels = np.array([0] * right + [1] * (100 - right))
    found = temperature_of(values, labels)
    assert found == pytest.approx(margin / math.log(right / (100 - right)), rel=1e-3)
    assert probabilities(values[0], found)[0] == pytest.approx(right / 100, abs=1e-4)


def test_the_calibration_error_is_the_mean_distance_of_chance_and_share():
    chances = np.array([0.9] * 10 + [0.5] * 30 + [1.0] * 10)
    right = np.array([True] * 7 + [False] * 3 + [True] * 18 + [False] * 12 + [True] * 10)
    assert calibration_error(chances, right) == pytest.approx(100 * (10 * 0.2 + 30 * 0.1) / 50)


def replayed(walks, confidence, order, image, *, alive, parallel):
    """How one request with so many blocks alive ends: (kind, right, blocks), step by step."""
    first = Cell(5) if parallel == 1 else Cell(alive, 1, parallel)
    chances, right = (values[order, :, image] for values in walks.answers[first])
    for done in range(1, alive + 1):
        if done == 5:
            return "unsure", right[4], 5
        if done >= 2 and chances[done - 1] >= confidence:
            return "sure", right[done - 1], done
    if (again := Cell(alive, 2, parallel)) not in walks.answers:
        return "unsure", right[alive - 1], alive
    chances, right = (values[order, :, image] for values in walks.answers[again])
    for step, chance in enumerate(chances):
        if chance >= confidence:
            return "sure again", right[step], alive
    return "unsure", right[-1], alive


def made_up_walks(images=800):
    """Chances that are higher where answers are right. Three of five blocks run twice, and up to
    two side by side; all five, too."""
    generator = np.random.default_rng(3)

    def answers(steps):
        right = generator.random((2, steps, images)) < 0.7
        return generator.random(right.shape) ** np.where(right, 0.6, 1.5), right

    cells = [Cell(5), Cell(5, 1, 2), Cell(3, 1, 2), Cell(3, 2), Cell(3, 2, 2)]
    return Walks({cell: answers(cell.kept) for cell in cells}, least=2, weight=0.5)


def test_walked_is_what_the_calibration_lets_run():
    rounds = Rounds({1: Cell(1, 3, 2), 2: Cell(2, 3), 3: Cell(3, 1, 2), 4: Cell(4)})
    assert walked_cells(rounds, least=2) == (Cell(2, 3), Cell(3, 1, 2))


def test_blocks_of_a_row_run_once_and_one_after_the_other_if_it_says_nothing_else():
    numbers = dict.fromkeys(("top1", "low", "high", "orders_low", "orders_high"), 50.0)
    assert CellAccuracy(**numbers, kept=3).cell == Cell(3, 1, 1)
    assert CellAccuracy(**numbers, kept=3, passes=2, parallel=4).cell == Cell(3, 2, 4)


@pytest.mark.parametrize("confidence", [0.6, 0.9])
@pytest.mark.parametrize(("alive", "parallel"), [(2, 1), (3, 1), (3, 2), (5, 1), (5, 2)])
def test_each_kind_of_answer_is_expected_to_be_as_right_as_it_is(confidence, alive, parallel):
    """Requests replayed one by one: by kind, the mean of what is expected is what is right."""
    walks = made_up_walks()
    stops = (walks.stop(0.6), walks.stop(0.9))
    sureness = sure_at(0.9).sureness.model_copy(update={"stops": stops, "least": 2})
    calibration = made_up().model_copy(update={"sureness": sureness})
    kinds = {}
    for order in range(2):
        for image in range(800):
            kind, right, kept = replayed(
                walks, confidence, order, image, alive=alive, parallel=parallel
            )
            cell = Cell(kept, 2 if (alive, kind) == (3, "unsure") else 1, parallel)
            expected = expected_when_asked(
                calibration, cell, confidence=confidence + 0.01, sure=kind != "unsure",
                again=kind == "sure again",
            )  # fmt: skip
            assert (expected.confidence, expected.sure) == (confidence, kind != "unsure")
            assert (expected.kept, expected.orders) == (kept, 6)
            assert expected.low <= expected.top1 <= expected.high
            kinds.setdefault(kind, []).append((expected.top1, 100 * right))
    assert set(kinds) == {"sure", "unsure"} | ({"sure again"} if alive == 3 else set())
    for kind, pairs in kinds.items():
        mean, share = np.mean(pairs, axis=0)
        # That of the sure is measured where all blocks are alive, one after the other.
        same = kind == "unsure" or (parallel == 1 and (kind == "sure again" or alive == 5))
        assert mean == pytest.approx(share, abs=1.0 if same else 8.0), kind


def test_what_hardly_came_up_is_not_known():
    walks = made_up_walks()
    (stop,) = [walks.stop(0.9999)]
    assert stop.sure is None
    assert stop.sure_again == ()
    assert {row.kept for row in stop.unsure} == {2, 3, 4, 5}
    sureness = sure_at(0.9).sureness.model_copy(update={"stops": (stop,)})
    calibration = made_up().model_copy(update={"sureness": sureness})
    asked = {"confidence": 0.9999, "sure": True, "again": False}
    assert expected_when_asked(calibration, Cell(2), **asked) is None
    asked = {"confidence": 0.3, "sure": False, "again": False}
    assert expected_when_asked(calibration, Cell(2), **asked) is None, "below what was measured"
    assert expected_when_asked(made_up(), Cell(2), **asked) is None


def test_what_ending_early_costs_is_counted_answer_by_answer():
    generator = np.random.default_rng(3)
    chances, right = generator.random((4, 5, 50)), generator.random((4, 5, 50)) < 0.7
    for confidence, least in ((0.01, 1), (0.6, 1), (0.6, 3), (0.9, 2), (1.0, 1)):
        blocks, hits = [], []
        for order in range(4):
            for image in range(50):
                reached = [n for n in range(least - 1, 5) if chances[order, n, image] >= confidence]
                last = reached[0] if reached else 4
                blocks.append(last + 1)
                hits.append(right[order, last, image])
        assert ending_at(confidence, chances, right=right, least=least) == pytest.approx(
            (np.mean(blocks), 100 * np.mean(hits))
        )


def test_the_default_is_the_least_confidence_that_loses_at_most_a_third_of_a_point():
    """1,000 images, all right at the end; after one block 4 are wrong, with a chance of 0.7."""
    chances, right = np.full((1, 2, 1000), 0.999), np.ones((1, 2, 1000), dtype=bool)
    chances[0, 0, :4], right[0, 0, :4] = 0.7, False
    assert default_confidence(chances, right) == 0.701
    right[0, 0, 0] = True
    assert default_confidence(chances, right) == 0.5, "3 of 1,000 may be lost"
    chances[0, 0] = 1.0
    right[0, 0, :9] = False
    assert default_confidence(chances, right) is None


def test_a_calibration_measures_every_beginning_of_its_orders(monkeypatch):
    """Against each beginning of each order run alone; fitted on held-out, scored on test images."""
    model = digits_model()
    monkeypatch.setattr("layershuffle.gateway.client.calibrate._BATCH", 16)
    sureness = calibrate(model, DATA, orders=7, images=30, seed=5).sureness
    assert sureness is not None
    assert (sureness.split, sureness.orders, sureness.images) == ("holdout", 6, 30)
    data = open_data(DATA, file_view(model), options=DataOptions(max_test=30))
    orders = [ls.Shuffled().draw(3, seed=5, step=k) for k in range(6)]

    def answers(split):
        part = data.splits[split]
        part = limited_test(part.dataset, limit=30)
        items = [part.dataset[index] for index in range(30)]
        pixels = data.finish(torch.stack([image for image, _ in items]))
        out = np.empty((6, 3, 30, 100), np.float32)
        for k, order in enumerate(orders):
            for count in range(3):
                with torch.no_grad(), running(model, order.blocks[: count + 1]):
                    out[k, count] = logits_of(model(pixels)).numpy()
        return out, np.array([label for _, label in items])

    outputs, labels = answers("holdout")
    for count, temperature in enumerate(sureness.temperatures):
        alone = outputs[:, count].reshape(-1, 100)
        assert temperature == pytest.approx(temperature_of(alone, np.tile(labels, 6)), rel=1e-3)
    outputs, labels = answers("test")
    right = outputs.argmax(axis=-1) == labels
    for count, temperature in enumerate(sureness.temperatures):
        for errors, used in ((sureness.raw_error, 1.0), (sureness.error, temperature)):
            chances = probabilities(outputs[:, count], used).max(axis=-1)
            wanted = calibration_error(chances.ravel(), right[:, count].ravel())
            assert errors[count] == pytest.approx(wanted, abs=0.05)


# --- at the gateway -------------------------------------------------------------------------------

TEMPERATURES = (1.5, 0.9, 2.0, 0.7)


def sure_at(confidence):
    """A calibration of the pico model that ends requests at `confidence`.

    Of those that are sure 97 % are right; 10 k of those that are not after k blocks.
    """

    def row(top1, **cell):
        return {"top1": top1, "low": 9, "high": 99, "orders_low": 9, "orders_high": 99, **cell}

    unsure = tuple(CellAccuracy(**row(10 * k, kept=k)) for k in range(2, DEPTH + 1))
    stop = Stop(
        confidence=0.3, blocks=3, top1=60, sure=Accuracy(**row(97)), sure_again=(), unsure=unsure
    )
    sureness = Sureness(
        split="holdout", orders=6, images=9, temperatures=TEMPERATURES, raw_error=(1.0,) * DEPTH,
        error=(0.5,) * DEPTH, least=2, stops=(stop,), confidence=confidence,
    )  # fmt: skip
    return made_up().model_copy(update={"sureness": sureness})


def test_what_is_expected_says_how_many_at_once_were_measured():
    """The others that were never sure were measured one after the other."""
    asked = {"confidence": 0.3, "sure": False, "again": False}
    expected = expected_when_asked(sure_at(0.3), Cell(3, parallel=3), **asked)
    assert (expected.kept, expected.passes, expected.parallel) == (3, 1, 1)
    assert expected.top1 == 30


def answer_of(calibration, *, seed=0, **options):
    async def go(place):
        heads = place.remote_model.model.head
        runs = []
        place.remote_model.model.head = lambda state: runs.append(1) or heads(state)
        response = await place.classify(file_of(picture(seed)), **options)
        return response.json() | {"status": response.status_code, "heads": len(runs)}

    return run(go, calibration=calibration)


@pytest.mark.parametrize("confidence", [0.3, 0.4, 0.5])
def test_a_request_ends_where_its_chance_first_reaches_the_confidence(confidence):
    """Against the model in one process, block by block of the order that the swarm took."""
    whole = answer_of(sure_at(0.9), confidence="off")
    assert (whole["ending"], len(whole["blocks"]), whole["heads"]) == ("complete", DEPTH, 1)
    chances = []
    for count, temperature in enumerate(TEMPERATURES, start=1):
        alone = logits(VIT.wrapped(), tensors(picture()), whole["blocks"][:count])[0]
        chances.append(float((alone.double() / temperature).softmax(-1).max()))
    assert whole["chance"] == whole["top"][0]["probability"] == pytest.approx(chances[-1])
    reached = [count for count, chance in enumerate(chances, start=1) if chance >= confidence]
    wanted = min([*reached, DEPTH])
    asked = answer_of(sure_at(0.9), confidence=confidence, min_blocks=1)
    assert (asked["blocks"], asked["heads"]) == (whole["blocks"][:wanted], wanted)
    assert asked["chance"] == pytest.approx(chances[wanted - 1])
    assert (asked["ending"] == "sure", asked["degraded"]) == (wanted < DEPTH, False)
    assert len(asked["skipped"]) == DEPTH - wanted
    assert answer_of(sure_at(confidence), min_blocks=1)["top"] == asked["top"], "the default"


def test_what_an_answer_expects_is_that_of_its_kind():
    """Sure, never sure, not asked: with `off`, and where it could not end before all blocks."""
    sure = answer_of(sure_at(0.9), confidence=0.3)
    assert (sure["ending"], sure["expected"]["top1"], sure["expected"]["sure"]) == (
        "sure",
        97,
        True,
    )
    assert sure["expected"]["kept"] == len(sure["blocks"])
    never = answer_of(sure_at(0.9), confidence=1.0)
    assert (never["expected"]["top1"], never["expected"]["sure"]) == (10 * DEPTH, False)
    for options in ({"confidence": "off"}, {"confidence": 1.0, "min_blocks": DEPTH}):
        whole = answer_of(sure_at(0.9), **options)
        assert (whole["expected"]["top1"], whole["expected"]["sure"]) == (20 * DEPTH, None)
    low = answer_of(sure_at(0.9), confidence=0.2)
    assert (low["ending"], low["expected"]) == ("sure", None)
    assert low["expected_why"] == "no request ended at a chance of 20 % when it was measured"
    earlier = answer_of(sure_at(0.9), confidence=0.3, min_blocks=1)
    assert (earlier["ending"], earlier["expected"]) == ("sure", None)
    assert (
        earlier["expected_why"] == "requests that may end after 1 block were not measured, only 2"
    )


def test_fewest_blocks_hold_also_for_sure_answers():
    asked = answer_of(sure_at(0.9), confidence=0.01, min_blocks=3)
    assert (asked["ending"], len(asked["blocks"])) == ("sure", 3)
    assert len(answer_of(sure_at(0.9), confidence=0.01)["blocks"]) == 2, "half of the accuracy"


def test_without_temperatures_no_answer_has_a_chance():
    plain = answer_of(None)
    assert (plain["chance"], plain["ending"], len(plain["blocks"])) == (None, "complete", DEPTH)
    refused = answer_of(None, confidence=0.9)
    assert (refused["status"], refused["heads"]) == (422, 0)
    assert "never measured" in refused["error"]["cause"]
