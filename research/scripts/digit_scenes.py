# Ran at commit 8550626.
"""`digit-scenes`: one to five handwritten digits of several sizes and clutter on 32x32 pixels.

scikit-learn's digits are split by instance before scenes are made, by the split of
`layershuffle.data.digits`, so no digit of the test scenes occurs in training, nor in that of
`bundled:digits`. A scene is a pure function of its seed, split and index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from layershuffle.data.contract import generator_for
from layershuffle.data.digits import LEVELS, digit_images, digit_instances

SIDE, MOST = 32, 5
SIZES = (8, 10, 12, 16)
"""Sides of a digit's square in pixels; the first is scikit-learn's own."""
BACKGROUND, CLASSES = 0, 11
"""Class 0 of a mask is the background, and 1 to 10 are the digits 0 to 9."""
MASK_INK = 5
"""The least ink (of `LEVELS`) of a pixel in a mask, which includes about half of an edge."""
_TRIES, _STROKES, _STROKE = 12, 8, 4


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Scenes of one split.

    `ink` uint8 [n, 1, 32, 32] in 0..16; `mask` uint8 [n, 32, 32], class of each pixel; `boxes`
    float32 [n, 5, 4], left, top, right, bottom in pixels, right and bottom exclusive; `values`
    int64 [n, 5], the digit in each box, -1 where a scene has fewer; `digits` int64 [n, 5], their
    indices in scikit-learn's digits, -1 likewise.
    """

    ink: Tensor
    mask: Tensor
    boxes: Tensor
    values: Tensor
    digits: Tensor


def scenes(split: str, indices: Iterable[int], *, seed: int = 0) -> Scenes:
    """The scenes of these indices. `split`: "train", "validation" or "test", else `KeyError`."""
    singles = [_scene(split, index, seed) for index in indices]
    ink, mask, boxes, values, digits = (torch.stack(part) for part in zip(*singles, strict=True))
    return Scenes(ink=ink, mask=mask, boxes=boxes, values=values, digits=digits)


def _scene(split: str, index: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = generator_for("digit-scenes", seed, split, index)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    images, labels = digit_images()
    instances = digit_instances()[split]
    mask = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    boxes = torch.zeros(MOST, 4)
    values, digits = torch.full((MOST,), -1), torch.full((MOST,), -1)
    ink = _clutter(below)
    free = torch.ones(SIDE, SIDE, dtype=torch.bool)
    placed = 0
    # The number is drawn first. Some scenes have fewer digits, because no place was free.
    for _ in range(1 + below(MOST)):
        digit = int(instances[below(len(instances))])
        for _ in range(_TRIES):
            size = SIZES[below(len(SIZES))]
            top, left = below(SIDE - size + 1), below(SIDE - size + 1)
            square = (slice(top, top + size), slice(left, left + size))
            if not bool(free[square].all()):
                continue
            drawn = _resized(images[digit], size)
            own = drawn >= MASK_INK
            # Squares do not overlap, so no digit covers another one.
            free[square] = False
            ink[square] = torch.maximum(ink[square], drawn)
            mask[square] = own.to(torch.uint8) * (1 + int(labels[digit]))
            rows, columns = own.any(1).nonzero().flatten(), own.any(0).nonzero().flatten()
            boxes[placed] = torch.stack(
                [left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1]
            )
            values[placed], digits[placed] = labels[digit], digit
            placed += 1
            break
    return ink.unsqueeze(0), mask, boxes, values, digits


def _resized(ink: Tensor, size: int) -> Tensor:
    """A digit uint8 [8, 8], resized to [size, size] by bilinear interpolation."""
    sized = F.interpolate(ink[None, None].float(), size=(size, size), mode="bilinear")
    return sized[0, 0].round().to(torch.uint8)


def _clutter(below: Callable[[int], int]) -> Tensor:
    """A canvas uint8 [32, 32] with short strokes, as dark as those of digits or lighter."""
    ink = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    for _ in range(_STROKES):
        top, left = below(SIDE - _STROKE), below(SIDE - _STROKE)
        steps = torch.arange(_STROKE)
        # One of four directions: along a row, along a column, and both diagonals.
        down, across = ((0, 1), (1, 0), (1, 1), (-1, 1))[below(4)]
        rows = top + (steps if down >= 0 else _STROKE - 1 - steps) * abs(down)
        ink[rows, left + steps * across] = LEVELS // 4 + below(LEVELS // 2)
    return ink
