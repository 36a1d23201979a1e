"""`formula`: images from formulas, drawn on the model's device, any number of classes, no files.

An image shows wavy rings around a centre, as in VisualAtom (arXiv 2303.01112), drawn per pixel by
the distance to the next ring. A class is one draw of the rings' parameters; an instance varies the
parameters, the place and the colours slightly. Image k of class c is a pure function of (data seed,
c, k). The splits use disjoint ranges of k, and similar classes are left out. Items are the pairs
(c, k) of 16 bytes; `FormulaFinish` draws whole batches of them on the device of the model.

Only + - * /, comparisons, rounding and integers are used, which every kernel rounds in the same
way, and no sum is over several pixels. So an image has the same bits in every batch, with every
number of threads. torch's sine, square root (with MKL a fifth of its results differ by a bit) and
matrix products do not guarantee that.

Spec: `formula`, or with numbers `formula?classes=1000&size=224&train=3000000`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils.data import Dataset

from layershuffle.data.contract import (
    ImageData,
    Item,
    SourceRequest,
    Split,
    derived_seed,
    limited_test,
)
from layershuffle.data.transforms import fit_images, stretched
from layershuffle.errors import UsageError
from layershuffle.image_view import ImageView

DATA_SEED = 0
RANGE = 1 << 30  # instances of a class that each split may use
FIRST = {"train": 0, "validation": RANGE, "test": 2 * RANGE}
PER_CLASS = {"train": 1000, "validation": 10, "test": 20}  # default numbers of images

# Least mean absolute difference of ink, 0 to 255, between the instances of two classes without
# noise; a class whose ink deviates less from its mean is nearly empty.
MARGIN = 32
_SKETCH = 32  # side of the compared images in pixels
_TRIES = 4  # candidates per class

_NAME = "orbits"  # part of the seeds and of the names of classes
_PARAMETERS, _PLACE_UNITS, _COLOUR_UNITS = 9, 5, 6
_BITS = 0xFFFFFFFF
_STRIDE = 0x9E3779B1  # odd, so counters below 2 ** 32 are distinct

# Pixels drawn at a time; on a CPU, intermediate values must fit into its cache.
_CPU_PIXELS, _GPU_PIXELS = 1 << 16, 1 << 24


@cache
def class_table(count: int) -> Tensor:
    """Parameters float32 [count, 9] of the first candidates, each unlike all before it by `MARGIN`.

    So a smaller set of classes is a prefix of a larger one. Raises UsageError if too few candidates
    differ.
    """
    base = derived_seed("formula-classes", DATA_SEED, _NAME) & _BITS
    # A cached tensor that is created in inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        states = mixed(torch.arange(_TRIES * count) ^ base)
        candidates = units(states, _PARAMETERS)
        sketches = torch.empty(count, _SKETCH * _SKETCH, dtype=torch.int16)
        chosen: list[int] = []
        for number, sketch in enumerate(_sketches(candidates)):
            own = (sketch - sketch.sum() // sketch.numel()).abs()
            gaps = torch.cat([own[None], (sketches[: len(chosen)] - sketch).abs()])
            # Integers, so the classes do not depend on a processor's rounding.
            if int(gaps.sum(dim=1).min()) < MARGIN * sketch.numel():
                continue
            sketches[len(chosen)] = sketch
            chosen.append(number)
            if len(chosen) == count:
                return candidates[chosen]
    raise UsageError(
        f"Only {len(chosen)} of {len(candidates)} candidates differ enough to be classes",
        place=f"formula?classes={count}",
        hint=f"ask for at most {len(chosen)} classes",
    )


def _sketches(parameters: Tensor) -> Iterator[Tensor]:
    """The ink int16 [1024] in 0..255 of each class without noise."""
    for rows in torch.split(parameters, 64):
        still = torch.zeros(len(rows), _PLACE_UNITS + _PARAMETERS)
        shown = orbits(rows, noise=still, size=_SKETCH)
        yield from (shown * 255.0).round().to(torch.int16).flatten(1)


@cache
def _parameters(count: int, device: torch.device) -> Tensor:
    """The parameters of the classes on a device, cached."""
    with torch.inference_mode(False):
        return class_table(count).to(device)


def draw_images(keys: Tensor, *, classes: int, size: int) -> Tensor:
    """Images float32 [n, 3, size, size] in [0, 1] of keys int64 [n, 2], (class, instance).

    Every image depends only on its key, not on its batch, bit for bit on a CPU. On a GPU it may
    differ by rounding.
    """
    labels, instances = keys.unbind(1)
    base = derived_seed("formula", DATA_SEED, _NAME) & _BITS
    # Both steps are bijections, so no two instances of a class have the same state.
    states = mixed(mixed(labels ^ base) ^ instances)
    parameters = _parameters(classes, keys.device)[labels]
    drawn = units(states, _COLOUR_UNITS + _PLACE_UNITS + _PARAMETERS)
    shown = orbits(parameters, noise=drawn[:, _COLOUR_UNITS:] - 0.5, size=size)
    light, dark = (0.55 + 0.45 * drawn[:, :3]), 0.45 * drawn[:, 3:_COLOUR_UNITS]
    dark = dark[:, :, None, None]
    return dark + (light[:, :, None, None] - dark) * shown[:, None]


def orbits(classes: Tensor, *, noise: Tensor, size: int) -> Tensor:
    """Ink float32 [n, size, size] in [0, 1]: 2 to 7 rings around a centre, bent by two waves.

    `classes` [n, 9] in [0, 1): parameters. `noise` [n, 5 + 9] in [-0.5, 0.5): of the place, then of
    the parameters; with zeros the instance has no noise.
    """
    place, own = noise[:, :_PLACE_UNITS], noise[:, _PLACE_UNITS:]

    def value(index: int, low: float, high: float, noise: float) -> Tensor:
        base = classes[:, index : index + 1] * (high - low) + low
        return base + own[:, index : index + 1] * noise

    def whole(index: int, low: int, high: int) -> Tensor:
        return (classes[:, index : index + 1] * float(high - low + 1)).floor() + float(low)

    x, y = _placed(place, size)
    # The direction in turns, along a diamond instead of a circle.
    share = y / (x.abs() + y.abs() + 1e-6)
    turns = torch.where(x < 0, 2.0 - share, share) * 0.25
    # The distance to the centre, within a thousandth: a linear estimate and a Newton step.
    longer, shorter = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    near = 0.96 * longer + 0.4 * shorter + 1e-6
    distance = 0.5 * (near + (x * x + y * y) / near)
    slow = wave(turns * whole(0, 1, 6) + value(1, 0, 1, noise=0.1))
    fast = wave(turns * whole(2, 7, 16) + value(3, 0, 1, noise=0.2))
    bend = slow * value(4, 0.05, 0.35, noise=0.05) + fast * value(5, 0.02, 0.12, noise=0.02)
    count = whole(6, 2, 7)
    inner = value(7, 0.1, 0.4, noise=0.05)
    gap = (0.95 - inner) / count
    ring = (distance - bend - inner) / gap
    nearest = torch.minimum(ring.round().clamp(min=0.0), count - 1.0)
    width = value(8, 0.12, 0.38, noise=0.05)
    # The edge is about a pixel and a half wide, so a ring does not become dotted.
    edge = gap * (size / 3)
    shown = ((width - (ring - nearest).abs()) * edge + 0.5).clamp(0.0, 1.0)
    return shown.view(-1, size, size)


def _placed(noise: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x and y [n, size * size] of the pixels, slightly turned, zoomed, stretched and shifted."""
    x, y = _pixels(size, noise.device)
    turn, zoom, stretch, x0, y0 = noise.unsqueeze(-1).unbind(1)
    # At most a 24th of a turn, because classes may be copies that are rotated by more.
    turn = turn * (1 / 12)
    cosine, sine = wave(turn + 0.25), wave(turn)
    across, down = 1.0 + 0.3 * zoom + 0.2 * stretch, 1.0 + 0.3 * zoom - 0.2 * stretch
    return (
        across * cosine * x + across * -sine * y + 0.3 * x0,
        down * sine * x + down * cosine * y + 0.3 * y0,
    )


def mixed(values: Tensor) -> Tensor:
    """Thomas Mueller's hash of 32-bit integers, held in int64: a bijection of 0..2**32-1."""
    # The factor is below 2 ** 31, so a product is below 2 ** 63 and does not overflow.
    for _ in range(2):
        values = (((values >> 16) ^ values) * 0x45D9F3B) & _BITS
    return (values >> 16) ^ values


def units(states: Tensor, count: int) -> Tensor:
    """float32 [n, count] in [0, 1), drawn from states int64 [n]: a pure function of each state."""
    counters = (torch.arange(count, device=states.device) * _STRIDE) & _BITS
    drawn = mixed((states[:, None] + counters) & _BITS)
    # A float32 represents 24 bits exactly.
    return (drawn >> 8).float() * 2**-24


def wave(turns: Tensor) -> Tensor:
    """A sine made of two parabolas, one period per turn; within 0.06 of sin(2 pi turns)."""
    part = turns - turns.round()
    return part * (8.0 - 16.0 * part.abs())


@cache
def _pixels(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x and y of the pixel centres, each [1, size * size], from -1 to 1."""
    # Computed on the CPU, because CUDA multiplies by a reciprocal instead of dividing.
    with torch.inference_mode(False):
        line = (2.0 * torch.arange(size) + 1.0 - size) / size
        y, x = torch.meshgrid(line, line, indexing="ij")
        return x.reshape(1, -1).to(device), y.reshape(1, -1).to(device)


@dataclass(frozen=True, kw_only=True)
class FormulaFinish:
    """Draws the images of keys, on the keys' device, and fits them to the view."""

    view: ImageView
    classes: int
    size: int

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Keys int64 [n, 2] as float32 [n, *view], normalised."""
        pixels_at_once = _CPU_PIXELS if pixels.device.type == "cpu" else _GPU_PIXELS
        at_once = max(1, pixels_at_once // self.size**2)
        drawn = [
            draw_images(keys, classes=self.classes, size=self.size)
            for keys in torch.split(pixels, at_once)
        ]
        return fit_images(torch.cat(drawn), self.view)


class FormulaKeys(Dataset[Item]):
    """The keys of one split: image i is instance i // classes of class i % classes."""

    def __init__(self, split: str, size: int, *, classes: int) -> None:
        self._first, self._size, self._classes = FIRST[split], size, classes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Item:
        label = index % self._classes
        return torch.tensor([label, self._first + index // self._classes]), label


def open_source(request: SourceRequest) -> ImageData:
    """Formula images as ImageData: "holdout" are the validation instances."""
    classes = request.number("classes", 100, low=2, high=2048)
    size = request.number("size", 64, low=16, high=512)
    counts = {n: request.number(n, share * classes, high=RANGE) for n, share in PER_CLASS.items()}
    parts = {name: FormulaKeys(name, count, classes=classes) for name, count in counts.items()}
    splits = {"test": limited_test(parts["test"], limit=request.options.max_test)}
    if request.options.train:
        splits["train"] = Split(dataset=parts["train"])
        splits["holdout"] = Split(dataset=parts["validation"])
    class_table(classes)  # for its error, before a training starts
    digits = len(str(classes - 1))
    return ImageData(
        spec=request.spec,
        classes=tuple(f"{_NAME}-{label:0{digits}d}" for label in range(classes)),
        splits=splits,
        finish=FormulaFinish(view=request.view, classes=classes, size=size),
        notes=(
            "formula: the splits have instances of their own, the same for every seed",
            *stretched((size, size), request.view),
        ),
    )
