"""Images that are made here: frozen bytes, slow loops beside them, the same in every batch."""

from __future__ import annotations

import hashlib
import pickle
from itertools import combinations

import numpy as np
import pytest
import torch

from layershuffle.data import DataOptions, ImageView, formula, open_data
from layershuffle.data.digits import DigitPairs, compose, digit_images, digit_instances, draw_pairs
from layershuffle.data.formula import (
    MARGIN,
    FormulaFinish,
    class_table,
    draw_images,
    mixed,
    units,
    wave,
)
from layershuffle.errors import UsageError
from pictures import DIGIT_VIEW
from refusals import refuses

# SHA-256 of the first 256 canvases (uint8, ink 0..16) and labels (int64, little endian).
PAIRS = {
    "train": "33f130b9f06d38e88cd31a541a1917d039c2407c8a189deeed981000a6050ab9",
    "validation": "c288f1baf34c0bd2138471dc6d318a3c3d5f7ada52f2b56cdf74a62a40703846",
    "test": "8fc77c0158f0a07061faf6badf0a88ed6cab8553e43f216cb21627f229312b9b",
}
# SHA-256 of images 0..7 of classes 0..7, 16 pixels a side, as bytes.
ORBITS = "907715cf9aa1bbf0eb3997aa048efbfd716385c75c5cfb97e2a7740a155c07fc"


# --- digit pairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", PAIRS)
def test_the_first_pairs_never_change_and_are_those_of_a_slow_loop(split: str) -> None:
    draws = draw_pairs(split, 256)
    canvases, labels = compose(draws)
    content = canvases.numpy().tobytes() + labels.numpy().astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == PAIRS[split]
    ink, values = digit_images()
    for k in range(200):
        canvas = [[0] * 20 for _ in range(12)]
        for side in (0, 1):
            digit = ink[draws.digits[k, side]].tolist()
            top, left = int(draws.rows[k, side]), int(draws.columns[k, side]) + 10 * side
            for i in range(8):
                for j in range(8):
                    canvas[top + i][left + j] += digit[i][j]
        assert canvases[k, 0].tolist() == canvas, f"pair {k}"
        tens, ones = (int(values[d]) for d in draws.digits[k])
        assert int(labels[k]) == 10 * tens + ones
    # A smaller set is the beginning of a larger one.
    assert torch.equal(compose(draw_pairs(split, 10))[0], canvases[:10])


def test_digits_are_split_by_instance_and_by_class() -> None:
    parts = digit_instances()
    sizes = {name: len(part) for name, part in parts.items()}
    assert sizes == {"train": 1258, "validation": 180, "test": 359}
    for left, right in combinations(parts.values(), 2):
        assert not set(left.tolist()) & set(right.tolist())
    values = digit_images()[1]
    whole = torch.bincount(values, minlength=10)
    for name, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        counts = torch.bincount(values[parts[name]], minlength=10)
        off = (counts - share * whole).abs().max()
        assert off <= 1, f"{name}: a class is {off:.2f} digits away from its share"


@pytest.mark.parametrize(("channels", "size"), [(1, (12, 20)), (3, (32, 32)), (3, (224, 224))])
def test_a_batch_equals_its_items_bit_for_bit(channels: int, size: tuple[int, int]) -> None:
    mean, std = (0.2,) * channels, (0.35,) * channels
    view = ImageView(channels=channels, height=size[0], width=size[1], mean=mean, std=std)
    data = open_data("digit-pairs?train=20&validation=5&test=5", view)
    dataset = data.splits["train"].dataset
    assert isinstance(dataset, DigitPairs)
    items = [dataset[index][0] for index in (4, 0, 17)]
    batch = torch.stack([item for item, _ in dataset.__getitems__([4, 0, 17])])
    assert torch.equal(batch, torch.stack(items))
    images = data.finish(torch.stack(items))
    for image, item in zip(images, items, strict=True):
        assert image.shape == (channels, *size)
        assert torch.equal(image, data.finish(item[None])[0])
    assert any("stretched" in note for note in data.notes) == (size != (12, 20))


def test_pairs_name_the_digits_that_they_are_made_of() -> None:
    """The groups of the first 7 pairs of the fixed shuffle are their digits."""
    options = DataOptions(train=False, max_test=7)
    split = open_data("digit-pairs?test=40", DIGIT_VIEW, options=options).splits["test"]
    assert split.groups is not None
    assert split.groups.shape == (7, 2)
    tens, ones = digit_images()[1][split.groups].unbind(1)
    assert (10 * tens + ones).tolist() == [label for _, label in split.dataset]  # type: ignore[attr-defined]


# --- formulas -------------------------------------------------------------------------------------

F, BITS = np.float32, 0xFFFFFFFF
# A view that leaves colours 0..1 unchanged.
PLAIN = ImageView(channels=3, height=16, width=16, mean=(0.0,) * 3, std=(1.0,) * 3)


def keys(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs)


def finish(*, classes: int = 12) -> FormulaFinish:
    return FormulaFinish(view=PLAIN, classes=classes, size=16)


def slow_hash(value: int) -> int:
    for _ in range(2):
        value = (value ^ value >> 16) * 0x45D9F3B & BITS
    return value ^ value >> 16


def slow_units(state: int, count: int) -> list[np.float32]:
    hashes = [slow_hash((state + (j * 0x9E3779B1 & BITS)) & BITS) for j in range(count)]
    return [F(drawn >> 8) * F(2**-24) for drawn in hashes]


def test_draws_are_those_of_whole_numbers_of_python() -> None:
    values = [0, 1, 12345, BITS]
    assert mixed(torch.tensor(values)).tolist() == [slow_hash(value) for value in values]
    assert units(torch.tensor([7, BITS]), 5).tolist() == [slow_units(s, 5) for s in (7, BITS)]
    # Uniform: the mean of 40,000 draws has a standard deviation of 0.0014.
    drawn = units(mixed(torch.arange(10_000)), 4)
    assert abs(float(drawn.mean()) - 0.5) < 0.006
    assert 0 <= float(drawn.min()) < 0.001 < 0.999 < float(drawn.max()) < 1
    turns = torch.linspace(-2, 2, 4001)
    assert (wave(turns) - torch.sin(2 * torch.pi * turns)).abs().max() < 0.06


def test_the_first_images_never_change() -> None:
    drawn = draw_images(
        keys(*((label, k) for label in range(8) for k in range(8))), classes=8, size=16
    )
    content = (drawn * 255).round().byte().numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == ORBITS


def test_an_image_has_the_same_bits_in_every_batch(monkeypatch) -> None:
    pairs = keys(*((label, k) for label in range(12) for k in (0, 1, 2**30)))
    whole = finish()(pairs)
    for part in (slice(0, 1), slice(3, 20), slice(17, 36)):
        assert torch.equal(finish()(pairs[part]), whole[part])
    assert torch.equal(finish()(pairs.flip(0)), whole.flip(0))
    # Nor does it depend on the number of classes, parts of batches or threads.
    assert torch.equal(finish(classes=20)(pairs), whole)
    monkeypatch.setattr(formula, "_CPU_PIXELS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(pickle.loads(pickle.dumps(finish()))(pairs), whole)
    finally:
        torch.set_num_threads(threads)


def test_classes_differ_by_the_margin() -> None:
    table = class_table(60)
    sketches = torch.stack(list(formula._sketches(table))).double()
    gaps = (sketches[:, None] - sketches).abs().mean(-1)
    gaps.fill_diagonal_(255)
    assert gaps.min() >= MARGIN
    assert torch.equal(class_table(20), table[:20])


def test_near_duplicates_are_left_out(monkeypatch) -> None:
    ordinary = class_table(30)
    # A larger margin rejects more candidates; the first of each pair stays.
    monkeypatch.setattr(formula, "MARGIN", 45)
    strict = class_table.__wrapped__(30)
    assert not torch.equal(strict, ordinary)
    assert torch.equal(strict[0], ordinary[0])
    monkeypatch.setattr(formula, "MARGIN", 120)
    with refuses(UsageError):
        class_table.__wrapped__(30)


def test_the_splits_have_no_instance_in_common() -> None:
    data = open_data("formula?classes=7&size=16&train=50&validation=20&test=30", PLAIN)
    seen: set[tuple[int, ...]] = set()
    for name, size in (("train", 50), ("holdout", 20), ("test", 30)):
        split = data.splits[name]
        assert split.size == size == len(split.dataset)
        items = [split.dataset[index] for index in range(size)]
        assert all(int(key[0]) == label for key, label in items)
        mine = {tuple(key.tolist()) for key, _ in items}
        assert len(mine) == size
        assert not seen & mine
        seen |= mine
    assert data.classes[0] == "orbits-0"
    assert data.classes[-1] == "orbits-6"


def test_images_are_fitted_to_the_view_and_limited() -> None:
    view = ImageView(channels=1, height=24, width=20, mean=(0.5,), std=(0.5,))
    options = DataOptions(train=False, max_test=5)
    data = open_data("formula?classes=12&size=16&test=24", view, options=options)
    assert set(data.splits) == {"test"}
    assert data.splits["test"].size == 5
    assert data.finish(keys((0, 1), (1, 1))).shape == (2, 1, 24, 20)
    assert "images of 16x16 were stretched to 24x20" in data.notes[1]
