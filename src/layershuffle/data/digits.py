"""`digit-pairs`: two real handwritten digits on one small canvas, 100 classes, no download.

scikit-learn ships 1,797 grey digits of 8x8 pixels. They are split by instance (70 / 10 / 20
percent, per class) *before* pairs are made, so no handwriting of the test set is seen in training.
A pair is two digits of one split, one per half of a 12x20 canvas at a random offset; its label is
10 * left + right. With 100 classes top-1 and top-5 are meaningful, and the effect of the paper
(arXiv 2407.04513) is visible in minutes on a CPU.

All draws use one fixed data seed, not the seed of a run, so every run of every method sees the same
images. Pair k depends only on row k of the draws, so a smaller set is a prefix of a larger one.
Spec: `digit-pairs`, or with numbers of pairs
`digit-pairs?train=2000&validation=500&test=1000`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from layershuffle.data.splits import (
    ImageData,
    Item,
    SourceRequest,
    Split,
    limited_test,
    seeded_generator,
)
from layershuffle.data.transforms import PixelFinish, stretched

CANVAS = (12, 20)
DIGIT = 8
LEVELS = 16  # scikit-learn's digits count ink from 0 to 16
DATA_SEED = 0
SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}
PAIRS = {"train": 20_000, "validation": 2_000, "test": 5_000}
CLASSES = tuple(f"{label:02d}" for label in range(100))

# A digit is completely inside its half, so two digits never overlap.
_ROW_OFFSETS = CANVAS[0] - DIGIT + 1
_COLUMN_OFFSETS = CANVAS[1] // 2 - DIGIT + 1


class PairDraws(NamedTuple):
    """The draws of one split: indices of digits, row and column offsets; each int64 [n, 2], left
    then right."""

    digits: Tensor
    rows: Tensor
    columns: Tensor


@cache
def digit_images() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: ink uint8 [1797, 8, 8] in 0..16, values int64 [1797] in 0..9."""
    ink, values = load_digits(return_X_y=True)
    return (
        torch.from_numpy(ink).to(torch.uint8).view(-1, DIGIT, DIGIT),
        torch.from_numpy(values).to(torch.int64),
    )


@cache
def digit_instances() -> dict[str, Tensor]:
    """The indices of the digits of each split: int64 [n], ascending, disjoint, stratified."""
    _, values = digit_images()
    parts: dict[str, list[Tensor]] = {name: [] for name in SHARES}
    for value in range(10):
        members = torch.nonzero(values == value).flatten()
        generator = seeded_generator("digit-split", DATA_SEED, value)
        members = members[torch.randperm(len(members), generator=generator)]
        # Rounded sums of shares, so no digit is left over or used twice.
        first = round(SHARES["train"] * len(members))
        second = round((SHARES["train"] + SHARES["validation"]) * len(members))
        cuts = (members[:first], members[first:second], members[second:])
        for name, cut in zip(SHARES, cuts, strict=True):
            parts[name].append(cut)
    instances = {}
    for name, pieces in parts.items():
        instances[name] = torch.cat(pieces).sort().values
    return instances


def draw_pairs(split: str, count: int) -> PairDraws:
    """The draws of the first `count` pairs of a split, a pure function of its arguments.

    Each pair is a row of six integers, reduced to their ranges by a remainder: with 62 random bits
    the bias is below 1e-15, and row k does not depend on `count`.
    """
    instances = digit_instances()[split]
    generator = seeded_generator("digit-pairs", DATA_SEED, split)
    raw = torch.randint(1 << 62, (count, 6), generator=generator)
    return PairDraws(
        digits=instances[raw[:, 0:2] % len(instances)],
        rows=raw[:, 2:4] % _ROW_OFFSETS,
        columns=raw[:, 4:6] % _COLUMN_OFFSETS,
    )


def compose(draws: PairDraws) -> tuple[Tensor, Tensor]:
    """Canvases uint8 [n, 1, 12, 20] in 0..16 and labels int64 [n] = 10 * left + right.

    One indexed write per half places all its digits at once.
    """
    ink, values = digit_images()
    count = len(draws.digits)
    # 20,000 canvases of one byte per pixel are 4.8 MB, so a whole split stays in memory.
    canvases = torch.zeros(count, *CANVAS, dtype=torch.uint8)
    which = torch.arange(count).view(-1, 1, 1)
    step = torch.arange(DIGIT)
    for side in (0, 1):
        row = draws.rows[:, side].view(-1, 1, 1) + step.view(1, -1, 1)
        column = draws.columns[:, side].view(-1, 1, 1) + step.view(1, 1, -1)
        canvases[which, row, column + side * (CANVAS[1] // 2)] = ink[draws.digits[:, side]]
    tens, ones = values[draws.digits].unbind(1)
    return canvases.unsqueeze(1), 10 * tens + ones


class DigitPairs(Dataset[Item]):
    """Digit pairs in one uint8 tensor of ink; `finish` enlarges them to a larger view, bilinearly.

    `digits` int64 [n, 2]: the handwritten digits of each pair, left and right.
    torch's DataLoader and Subset call `__getitems__`, which fetches a whole batch by one index.
    """

    def __init__(self, split: str, count: int) -> None:
        draws = draw_pairs(split, count)
        self.canvases, self.labels = compose(draws)
        self.digits = draws.digits

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return self.canvases[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        rows = torch.as_tensor(indices)
        labels: list[int] = self.labels[rows].tolist()
        return list(zip(self.canvases[rows].unbind(0), labels, strict=True))


def open_source(request: SourceRequest) -> ImageData:
    """Digit pairs as ImageData: "holdout" are pairs of validation digits."""
    counts = {}
    for name, count in PAIRS.items():
        counts[name] = request.count(name, count)
    test = DigitPairs("test", counts["test"])
    # A digit that is hard to read is hard in all of its pairs, on the left and on the right.
    tested = limited_test(test, limit=request.options.max_test, groups=test.digits)
    splits = {"test": tested}
    if request.options.train:
        for name, source in (("train", "train"), ("holdout", "validation")):
            pairs = DigitPairs(source, counts[source])
            splits[name] = Split(dataset=pairs)
    return ImageData(
        spec=request.spec,
        classes=CLASSES,
        splits=splits,
        # The largest ink is 16, so a division by 255 would give nearly black images.
        finish=PixelFinish(request.view, LEVELS),
        notes=(
            "digit-pairs: digits are split by instance before pairs are made; the holdout are "
            "pairs of validation digits; the images are the same for every seed",
            *stretched(CANVAS, request.view),
        ),
    )
