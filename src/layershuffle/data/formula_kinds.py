"""Draw images from formulas: orbits, fractals and coordinate nets, a whole batch at a time.

A kind maps the parameters of a class and the noise of an instance to ink, 0 to 1 per pixel:

- `orbits`: wavy rings around a centre, as in VisualAtom (arXiv 2303.01112), drawn per pixel by the
  distance to the next ring;
- `fractal`: the points of an iterated function system of four affine maps, given by their singular
  values as in arXiv 2110.03091. Every address of the maps is visited once, so nothing is drawn at
  random as in a chaos game;
- `coordinates`: a small net of waves from a pixel's place to its ink, in the manner of the
  shaders of arXiv 2211.16412.

Only + - * /, comparisons, rounding and integers are used, which every kernel rounds in the same
way, and no sum is over several pixels. So an image has the same bits in every batch, with every
number of threads. torch's sine, square root (with MKL a fifth of its results differ by a bit) and
matrix products do not guarantee that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF
_STRIDE = 0x9E3779B1  # odd, so counters below 2 ** 32 are distinct
PLACE_UNITS, COLOUR_UNITS = 5, 6
MAPS = 4  # of a fractal
WIDTH = 6  # units of a hidden layer of a coordinate net


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


def angle(x: Tensor, y: Tensor) -> Tensor:
    """The direction of (x, y) in turns, -0.25 to 0.75, along a diamond instead of a circle."""
    share = y / (x.abs() + y.abs() + 1e-6)
    turned: Tensor = torch.where(x < 0, 2.0 - share, share)
    return turned * 0.25


def length(x: Tensor, y: Tensor) -> Tensor:
    """The length of (x, y), within a thousandth: a linear estimate and a Newton step."""
    longer, shorter = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    near = 0.96 * longer + 0.4 * shorter + 1e-6
    return 0.5 * (near + (x * x + y * y) / near)


@dataclass(frozen=True, kw_only=True)
class AffineMap:
    """Affine maps of instances: x' = xx x + xy y + x0, and y' likewise; each [n, 1]."""

    xx: Tensor
    xy: Tensor
    yx: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The images [n, m] of points [n, m] or [1, m]."""
        return self.xx * x + self.xy * y + self.x0, self.yx * x + self.yy * y + self.y0


def placement(noise: Tensor) -> AffineMap:
    """A small rotation, zoom, stretch and shift; `noise` [n, 5] in [-0.5, 0.5)."""
    turn, zoom, stretch, x0, y0 = noise.unsqueeze(-1).unbind(1)
    # At most a 24th of a turn, because classes may be copies that are rotated by more.
    turn = turn * (1 / 12)
    cosine, sine = wave(turn + 0.25), wave(turn)
    across, down = 1.0 + 0.3 * zoom + 0.2 * stretch, 1.0 + 0.3 * zoom - 0.2 * stretch
    return AffineMap(
        xx=across * cosine,
        xy=across * -sine,
        yx=down * sine,
        yy=down * cosine,
        x0=0.3 * x0,
        y0=0.3 * y0,
    )


@cache
def _pixels(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x and y of the pixel centres, each [1, size * size], from -1 to 1."""
    # Computed on the CPU, because CUDA multiplies by a reciprocal instead of dividing.
    with torch.inference_mode(False):
        line = (2.0 * torch.arange(size) + 1.0 - size) / size
        y, x = torch.meshgrid(line, line, indexing="ij")
        return x.reshape(1, -1).to(device), y.reshape(1, -1).to(device)


@dataclass(frozen=True, kw_only=True)
class Instances:
    """The input of a kind: parameters of classes [n, p] in [0, 1), noise [n, p] in [-0.5, 0.5)."""

    classes: Tensor
    noise: Tensor
    place: AffineMap
    size: int

    def value(self, index: int, span: tuple[float, float], *, noise: float) -> Tensor:
        """Parameter `index` [n, 1], scaled to `span` and moved by at most `noise` / 2."""
        base = self.classes[:, index : index + 1] * (span[1] - span[0]) + span[0]
        return base + self.noise[:, index : index + 1] * noise

    def whole(self, index: int, span: tuple[int, int]) -> Tensor:
        """Parameter `index` [n, 1] as an integer of `span` (inclusive), without noise."""
        count = float(span[1] - span[0] + 1)
        return (self.classes[:, index : index + 1] * count).floor() + float(span[0])

    def places(self) -> tuple[Tensor, Tensor]:
        """x and y [n, size * size] of the pixels, transformed by `place`."""
        return self.place(*_pixels(self.size, self.classes.device))


def orbits(instances: Instances) -> Tensor:
    """Ink [n, size * size] of 2 to 7 rings around the centre, whose radii follow two waves."""
    x, y = instances.places()
    turns = angle(x, y)
    slow = wave(turns * instances.whole(0, (1, 6)) + instances.value(1, (0, 1), noise=0.1))
    fast = wave(turns * instances.whole(2, (7, 16)) + instances.value(3, (0, 1), noise=0.2))
    bend = slow * instances.value(4, (0.05, 0.35), noise=0.05) + fast * instances.value(
        5, (0.02, 0.12), noise=0.02
    )
    count = instances.whole(6, (2, 7))
    inner = instances.value(7, (0.1, 0.4), noise=0.05)
    gap = (0.95 - inner) / count
    ring = (length(x, y) - bend - inner) / gap
    nearest = torch.minimum(ring.round().clamp(min=0.0), count - 1.0)
    width = instances.value(8, (0.12, 0.38), noise=0.05)
    # The edge is about a pixel and a half wide, so a ring does not become dotted.
    edge = gap * (instances.size / 3)
    return ((width - (ring - nearest).abs()) * edge + 0.5).clamp(0.0, 1.0)


def fractal(instances: Instances) -> Tensor:
    """Ink [n, size * size]: the number of the 4 ** 7 or 4 ** 8 points of a system in each pixel."""
    size = instances.size
    maps = [_contraction(instances, 6 * index) for index in range(MAPS)]
    x = y = torch.zeros(len(instances.classes), 1, device=instances.classes.device)
    levels = 7 if size <= 128 else 8
    for _ in range(levels):
        moved = [step(x, y) for step in maps]
        x, y = torch.cat([a for a, _ in moved], dim=1), torch.cat([b for _, b in moved], dim=1)
    # Scaled to fill the image. By extremes, which unlike sums do not depend on an order.
    (left, right), (top, bottom) = x.aminmax(dim=1, keepdim=True), y.aminmax(dim=1, keepdim=True)
    scale = 1.7 / (torch.maximum(right - left, bottom - top) + 1e-6)
    x, y = instances.place((x - (left + right) * 0.5) * scale, (y - (top + bottom) * 0.5) * scale)
    column, row = ((x + 1.0) * (size / 2)).floor(), ((y + 1.0) * (size / 2)).floor()
    inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
    cells = torch.where(inside, row * size + column, 0.0).long()
    # Sums of ones are exact in any order.
    counts = torch.zeros(len(x), size * size, device=x.device).scatter_add_(
        1, cells, inside.float()
    )
    shown: Tensor = counts * (0.3 * size * size / MAPS**levels)
    return shown.clamp(max=1.0)


def _contraction(instances: Instances, first: int) -> AffineMap:
    """rotation (a) * scaling (s, t) * rotation (b), then a shift, from six parameters."""
    a, b = (instances.value(first + index, (0, 1), noise=0.03) for index in (0, 1))
    s, t = (
        instances.value(first + 2, (0.45, 0.7), noise=0.04),
        instances.value(first + 3, (0.2, 0.5), noise=0.04),
    )
    cos_a, sin_a, cos_b, sin_b = wave(a + 0.25), wave(a), wave(b + 0.25), wave(b)
    return AffineMap(
        xx=cos_a * s * cos_b - sin_a * t * sin_b,
        xy=-(cos_a * s * sin_b) - sin_a * t * cos_b,
        yx=sin_a * s * cos_b + cos_a * t * sin_b,
        yy=cos_a * t * cos_b - sin_a * s * sin_b,
        x0=instances.value(first + 4, (-1, 1), noise=0.1),
        y0=instances.value(first + 5, (-1, 1), noise=0.1),
    )


def coordinates(instances: Instances) -> Tensor:
    """Ink [n, size * size] of a net 2 -> 6 -> 6 -> 1 whose units are waves."""
    layer = torch.stack(instances.places(), dim=1)
    used = 0
    for inputs, outputs, reach in ((2, WIDTH, 1.2), (WIDTH, WIDTH, 0.35), (WIDTH, 1, 0.35)):
        rows = []
        for unit in range(outputs):
            first = used + unit * (inputs + 1)
            bias = instances.value(first + inputs, (0, 1), noise=0.1)
            total = bias + torch.zeros_like(layer[:, 0])
            # No matrix product, whose order of additions may depend on the batch.
            for index in range(inputs):
                weight = instances.value(first + index, (-reach, reach), noise=0.1 * reach)
                total = total + weight * layer[:, index]
            rows.append(wave(total))
        layer = torch.stack(rows, dim=1)
        used += outputs * (inputs + 1)
    return layer[:, 0] * 0.5 + 0.5


@dataclass(frozen=True, kw_only=True)
class FormulaKind:
    """A kind of formula: its number of parameters, and the function that draws its ink."""

    parameters: int
    ink: Callable[[Instances], Tensor]


KINDS = {
    "orbits": FormulaKind(parameters=9, ink=orbits),
    "fractal": FormulaKind(parameters=6 * MAPS, ink=fractal),
    "coordinates": FormulaKind(parameters=3 * WIDTH + (WIDTH + 1) * (WIDTH + 1), ink=coordinates),
}


def ink(kind: str, classes: Tensor, *, drawn: Tensor, size: int) -> Tensor:
    """Ink float32 [n, size, size] in [0, 1] of parameters [n, p] and units `drawn` [n, 5 + p].

    With all units 0.5, the instance has no noise.
    """
    noise = drawn - 0.5
    place, own = placement(noise[:, :PLACE_UNITS]), noise[:, PLACE_UNITS:]
    instances = Instances(classes=classes, noise=own, place=place, size=size)
    return KINDS[kind].ink(instances).view(-1, size, size)


def painted(shown: Tensor, drawn: Tensor) -> Tensor:
    """Images float32 [n, 3, h, w] in [0, 1]: ink `shown` in a light colour on a dark one."""
    light, dark = (0.55 + 0.45 * drawn[:, :3]), 0.45 * drawn[:, 3:COLOUR_UNITS]
    dark = dark[:, :, None, None]
    return dark + (light[:, :, None, None] - dark) * shown[:, None]
