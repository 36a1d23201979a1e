"""Images that are made here: frozen bytes, slow loops beside them, the same in every batch."""

from __future__ import annotations

import hashlib
from itertools import combinations

import pytest
import torch

from layershuffle.data import DataOptions, ImageView, open_data
from layershuffle.data.digits import DigitPairs, compose, digit_images, digit_instances, draw_pairs
from pictures import DIGIT_VIEW

# SHA-256 of the first 256 canvases (uint8, ink 0..16) and labels (int64, little endian).
PAIRS = {
    "train": "33f130b9f06d38e88cd31a541a1917d039c2407c8a189deeed981000a6050ab9",
    "validation": "c288f1baf34c0bd2138471dc6d318a3c3d5f7ada52f2b56cdf74a62a40703846",
    "test": "8fc77c0158f0a07061faf6badf0a88ed6cab8553e43f216cb21627f229312b9b",
}


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
