"""The calibration: numbers against a slow count, its file, and its use by the gateway."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from gateway_site import VIT, made_up, picture, site

import layershuffle as ls
from common import FAMILIES
from layershuffle.core.evaluation import Score
from layershuffle.core.forwards import block_runs
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import Mode
from layershuffle.core.position import add_position
from layershuffle.core.position_forms import EncodingForm
from layershuffle.core.stack import running
from layershuffle.core.tying import tie
from layershuffle.data import DataOptions, open_data
from layershuffle.errors import DataError, ModelFileError, StackError, UsageError
from layershuffle.models import image_view, truncate
from layershuffle.models.files import weights_digest
from layershuffle.stats import ImageGroups, t_interval, wilson_interval
from layershuffle.swarm.calibration import (
    calibration_path,
    read_calibration,
    write_calibration,
)
from layershuffle.swarm.expectations import (
    expected_at,
    expected_of_named,
    expected_over,
    rounds_of,
    useful_blocks,
)
from layershuffle.swarm.measuring import calibrate, cells_of, rows_of
from layershuffle.swarm.messages import HostGone
from layershuffle.swarm.rounds import QUEUE, Cell, Way, late_last, overlapped
from pictures import file_of

DATA = "digit-pairs?test=40"


def digits_model():
    """The bundled base model, cut to three blocks to be quick."""
    return truncate(ls.load("bundled:digits"), "0,4,8")


def test_an_assumed_order_of_classes_is_said(caplog):
    model = ls.wrap(FAMILIES["timm-vit"].plain())
    calibrate(model, "formula?classes=5&size=16&test=5&train=5&validation=5", orders=2, images=5)
    assert [record.getMessage() for record in caplog.records] == [
        "the model names no classes; its outputs are taken for orbits-0, orbits-1, orbits-2 and 2 "
        "more, in the order of the data; --classes FILE names them"
    ]


def test_equal_to_a_slow_count():
    """Every cell and every late block, order by order, image by image."""
    model = digits_model()
    calibration = calibrate(model, DATA, orders=3, images=25, seed=5, batch_size=10)
    data = open_data(DATA, image_view(model), options=DataOptions(train=False, max_test=25))
    items = [data.splits["test"].dataset[index] for index in range(25)]
    items = [(data.finish(pixels[None]), label) for pixels, label in items]
    draws = [ls.Shuffled().draw(3, seed=5, step=index).blocks for index in range(3)]

    def right(order):
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
        orders = [overlapped(blocks, row.cell, depth=3) for blocks in draws]
        shares = [100 * right(order).mean() for order in orders]
        assert row.top1 == pytest.approx(np.mean(shares))
        assert row.sd_orders == pytest.approx(np.std(shares, ddof=1))
        assert 0 <= row.low <= row.top1 <= row.high <= 100
        assert (row.orders_low, row.orders_high) == (min(shares), max(shares))
    for age, top1 in enumerate(calibration.late, start=1):
        orders = [late_last(blocks, age, depth=3) for blocks in draws]
        assert top1 == pytest.approx(np.mean([100 * right(order).mean() for order in orders]))
    assert len(calibration.late) == 2
    assert (calibration.split, calibration.orders, calibration.images, calibration.seed) == (
        "test",
        3,
        25,
        5,
    )
    assert calibration.classes[:2] == ("00", "01")
    assert calibration.weights == weights_digest(model)
    clusters = ImageGroups(data.splits["test"].groups.numpy())
    counts = [round(clusters.effective(right(blocks[:2])), 1) for blocks in draws]
    assert calibration.queue[1].effective == pytest.approx(3 / sum(1 / count for count in counts))
    # The logits of other batch sizes differ in the last bits, and so do the temperatures.
    again = calibrate(model, DATA, orders=3, images=25, seed=5, batch_size=25)
    assert again.temperatures == pytest.approx(calibration.temperatures, rel=1e-3)
    assert again.model_copy(update={"sureness": calibration.sureness}) == calibration


def test_places_with_the_same_weights_are_measured_apart(tmp_path):
    """Four places, of which the first three share weights: as a slow count of their orders."""
    model = tie(truncate(ls.load("bundled:digits"), "0,4,8,10"), (0, 0, 0, 3))
    calibration = calibrate(model, DATA, orders=2, images=20)
    assert calibration.tied == (0, 0, 0, 3) == rounds_of(calibration).tied
    data = open_data(DATA, image_view(model), options=DataOptions(train=False, max_test=20))
    items = [data.splits["test"].dataset[index] for index in range(20)]
    images = data.finish(torch.stack([pixels for pixels, _ in items]))
    labels = torch.tensor([label for _, label in items])
    draws = [ls.Shuffled().draw(4, seed=0, step=index).blocks for index in range(2)]

    def top1(order):
        with torch.inference_mode(), running(model, order):
            return 100 * float((model(images).argmax(1) == labels).double().mean())

    for cell in (Cell(4, 1, 2), Cell(4, 1, 3), Cell(3, 2, 2)):
        orders = [overlapped(blocks, cell, depth=4, tied=calibration.tied) for blocks in draws]
        assert orders != [overlapped(blocks, cell, depth=4) for blocks in draws]
        assert expected_at(calibration, cell).top1 == pytest.approx(np.mean([*map(top1, orders)]))
    together = ExecutionOrder.parse("0+1+2+3", depth=4)
    assert expected_of_named(calibration, together) is None
    untied = calibration.model_copy(update={"tied": None})
    assert expected_of_named(untied, together).parallel == 4
    write_calibration(calibration, tmp_path / "calibration.json")
    stored = read_calibration(tmp_path / "calibration.json", weights=calibration.weights)
    assert stored == calibration


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


def ways(rounds):
    return [rounds.way(kept) for kept in (3, 2, 1)]


def test_what_pays_is_run():
    """Passes first, as few as are near the best; then as many side by side as cost nothing."""
    rounds = rounds_of(with_rows(GRID, late=(90.0, 80.0, 79.9, 85.0)))
    assert ways(rounds) == [Way(2, 1), Way(2, 2), Way(3, 2)]
    assert rounds.max_age == 2, "three versions late it was worse than no third block"
    early = rounds_of(with_rows(GRID, late=(79.9,)))
    assert early.max_age == 2, "a state is as old as that with three under way"
    assert rounds_of(None) == QUEUE
    alone = rounds_of(made_up())
    assert ({*alone.ways.values()}, alone.max_age) == ({Way()}, 0), "nothing else was measured"


def test_expected_of_what_ran():
    calibration = with_rows(GRID)
    expected = expected_at(calibration, Cell(2, 2, 3))
    assert (expected.top1, expected.kept, expected.passes, expected.parallel) == (82, 2, 2, 3)
    assert expected_at(calibration, Cell(3, 2)).top1 == 90, "the most passes that were measured"
    assert expected_at(calibration, Cell(3, 1, 4)) is None


def of_one_block(values, *, images, effective=None):
    """Scores of one block in as many orders, with these accuracies."""
    scores = [
        Score(
            mode=Mode(order="arbitrary", kept=1), index=index, images=images,
            order=ExecutionOrder((0,), 1), top1=value, top5=0.0, cross_entropy=0.0, top1_n=count,
        )
        for index, (value, count) in enumerate(
            zip(values, effective or [None] * len(values), strict=True)
        )
    ]  # fmt: skip
    return {Cell(1): scores}


def test_images_that_are_wrong_together_count_as_fewer():
    """Wilson's half-widths with the harmonic mean of the orders' effective numbers of images."""
    values = [60.0, 64.0, 62.0, 70.0]
    (row,) = rows_of(of_one_block(values, images=50, effective=[10.0, 20.0, 20.0, 40.0]))
    assert row.effective == pytest.approx(4 / (1 / 10 + 2 / 20 + 1 / 40))
    (t_low, t_high), (w_low, w_high) = t_interval(values), wilson_interval(64.0, row.effective)
    assert row.low == pytest.approx(64 - math.hypot(64 - t_low, 64 - w_low))
    assert row.high == pytest.approx(64 + math.hypot(t_high - 64, w_high - 64))
    (alone,) = rows_of(of_one_block(values, images=50))
    assert alone.effective is None
    assert alone.low > row.low


def test_intervals_hold_both_spreads():
    """Squares of half-widths add, on each side; the sum is never narrower than either."""
    values = [60.0, 64.0, 62.0, 70.0]
    (row,) = rows_of(of_one_block(values, images=50))
    t_low, t_high = t_interval(values)
    w_low, w_high = wilson_interval(64.0, 50)
    assert row.top1 == 64
    assert row.low == pytest.approx(64 - math.hypot(64 - t_low, 64 - w_low))
    assert row.high == pytest.approx(64 + math.hypot(t_high - 64, w_high - 64))
    assert row.low < min(t_low, w_low)
    (sure,) = rows_of(of_one_block([100.0] * 4, images=50))
    assert (sure.top1, sure.high) == (100, 100)
    assert sure.low == pytest.approx(wilson_interval(100.0, 50)[0])


@pytest.mark.parametrize("images", [40, 400])
def test_the_interval_covers(images):
    """Simulated truth, orders and images both vary: 95 % intervals hold it in 92 % or more."""
    rng = np.random.default_rng(images)
    covered = 0
    for _ in range(300):
        ease = rng.normal(0.5, 1.0, images)  # of an image, shared by all orders
        orders = rng.normal(0.0, 0.3, 8)
        right = ease[None] + orders[:, None] + rng.normal(0, 0.5, (8, images)) > 0
        (row,) = rows_of(of_one_block(100 * right.mean(axis=1), images=images))
        spread = math.sqrt(1.0 + 0.3**2 + 0.5**2)
        truth = 50 * (1 + math.erf(0.5 / spread / math.sqrt(2)))
        covered += row.low <= truth <= row.high
    assert covered >= 0.92 * 300


def test_the_range_over_orders_holds_nine_of_ten():
    """Of 0, 1, ... 100 % the 5 % quantile is 5 and the 95 % quantile 95; few orders give all."""
    (row,) = rows_of(of_one_block([float(k) for k in reversed(range(101))], images=50))
    assert (row.orders_low, row.orders_high) == (5, 95)
    (few,) = rows_of(of_one_block([60.0, 64.0, 62.0, 70.0], images=50))
    assert (few.orders_low, few.orders_high) == (60, 70)


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


def test_expected_at():
    calibration = made_up()
    row = expected_at(calibration, Cell(3))
    assert (row.top1, row.low, row.high, row.kept) == (60, 55, 62, 3)
    assert (row.orders_low, row.orders_high) == (51, 66)
    assert (row.orders, row.images, row.data, row.split) == (7, 90, "digit-pairs", "test")
    assert expected_at(calibration, Cell(9)) is None


def test_expected_over():
    """Closed form: half the answers with four blocks, half with two."""
    mean, low, high = expected_over(made_up(), [Cell(4), Cell(2)] * 50)
    chance = 1.96 * math.sqrt(60 * 40 / 100)
    assert mean == 60
    assert low == pytest.approx(60 - math.hypot(5, chance))
    assert high == pytest.approx(60 + math.hypot(2, chance))
    # 90 images that count as 30 have a design effect of 3; 45 answers would have one of 1.99.
    rows = [row.model_copy(update={"effective": 30.0}) for row in made_up().rows]
    grouped = made_up().model_copy(update={"rows": tuple(rows)})
    effect = 1 + 2 * 44 / 89
    chance = 1.96 * math.sqrt(80 * 20 / 45 * effect)
    assert expected_over(grouped, [Cell(4)] * 45)[1] == pytest.approx(80 - math.hypot(5, chance))
    assert expected_over(grouped, [Cell(4)])[1] == expected_over(made_up(), [Cell(4)])[1]


def test_file(tmp_path):
    path = tmp_path / "calibration.json"
    assert read_calibration(path, weights="w") is None
    write_calibration(made_up(), path)
    assert read_calibration(path, weights="w") == made_up()
    with pytest.raises(ModelFileError, match="other weights"):
        read_calibration(path, weights="v")
    good = json.loads(path.read_text())
    for wrong, words in [
        (good | {"schema": 1}, "of another version .schema Input should be 3"),
        (good | {"extra": 1}, "extra"),
        (good | {"orders": 0}, "orders"),
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
    assert calibration_path("bundled:digits").parent.joinpath("layershuffle.json").is_file()
    with pytest.raises(UsageError, match="no directory of its own"):
        calibration_path("timm:vit_tiny_patch16_224?pretrained=false")


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
            swarm = (await place.client.get("/v1/swarm")).json()
            place.blocks.faults["a"] = HostGone("dead")
            return full, (await place.classify(file_of(picture()))).json(), swarm

    full, part, swarm = asyncio.run(go())
    assert full["expected"] == {
        "top1": 80, "low": 75, "high": 82, "orders_low": 71, "orders_high": 86, "kept": 4,
        "orders": 7, "images": 90, "data": "digit-pairs", "split": "test", "effective": None,
        "passes": 1, "parallel": 1,
    }  # fmt: skip
    assert full["expected_why"] == ""
    assert part["expected"]["top1"] == 20 * len(part["blocks"]) < 80
    assert {g["label"] for g in full["top"]} == set("abcde")
    assert swarm["calibration"] == {
        "data": "digit-pairs", "split": "test", "orders": 7, "images": 90,
    }  # fmt: skip


def test_a_calibration_of_another_depth_is_refused():
    async def go():
        async with site(calibration=made_up(3)):
            pass

    with pytest.raises(UsageError, match="has 3 blocks, but the model has 4"):
        asyncio.run(go())
    assert weights_digest(VIT.wrapped()) == weights_digest(VIT.plain())
