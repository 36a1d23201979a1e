"""`formula`: images from formulas, drawn on the model's device, any number of classes, no files.

A class is one draw of a formula's parameters; an instance varies the parameters, the phases, the
place and the colours slightly. Image k of class c is a pure function of (data seed, c, k). The
splits use disjoint ranges of k, and similar classes are left out. Items are the pairs (c, k) of 16
bytes; `FormulaFinish` draws whole batches of them on the device of the model.

Spec: `formula`, or `formula?kind=fractal&classes=1000&size=224&train=3000000`; the kinds are in
`layershuffle.data.formula_kinds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from layershuffle.data.formula_kinds import (
    COLOUR_UNITS,
    KINDS,
    PLACE_UNITS,
    ink,
    mixed,
    painted,
    units,
)
from layershuffle.data.transforms import fit_images
from layershuffle.errors import UsageError
from layershuffle.image_view import ImageView
from layershuffle.text import did_you_mean, one_line

DATA_SEED = 0
RANGE = 1 << 30  # instances of a class that each split may use
FIRST = {"train": 0, "validation": RANGE, "test": 2 * RANGE}
PER_CLASS = {"train": 1000, "validation": 10, "test": 20}  # default numbers of images
DEFAULTS = {"kind": "orbits", "classes": "100", "size": "64"}
LIMITS = {"classes": (2, 2048), "size": (16, 512)}

# Least mean absolute difference of ink, 0 to 255, between the instances of two classes without
# noise; a class whose ink deviates less from its mean is nearly empty.
MARGIN = 32
_SKETCH = 32  # side of the compared images in pixels
_TRIES = 4  # candidates per class, before a kind is exhausted

# Pixels drawn at a time; on a CPU, intermediate values must fit into its cache.
_CPU_PIXELS, _GPU_PIXELS = 1 << 16, 1 << 24


@dataclass(frozen=True, kw_only=True)
class ClassTable:
    """Parameters float32 [classes, p] of the classes, and the number of rejected candidates."""

    parameters: Tensor
    rejected: int


@cache
def class_table(kind: str, count: int) -> ClassTable:
    """The first `count` candidates that differ from all previous ones by `MARGIN`.

    So a smaller set of classes is a prefix of a larger one. Raises UsageError if too few candidates
    differ.
    """
    base = derived_seed("formula-classes", DATA_SEED, kind) & 0xFFFFFFFF
    # A cached tensor that is created in inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        states = mixed(torch.arange(_TRIES * count) ^ base)
        candidates = units(states, KINDS[kind].parameters)
        sketches = torch.empty(count, _SKETCH * _SKETCH, dtype=torch.int16)
        chosen: list[int] = []
        for number, sketch in enumerate(_sketches(kind, candidates)):
            own = (sketch - sketch.sum() // sketch.numel()).abs()
            gaps = torch.cat([own[None], (sketches[: len(chosen)] - sketch).abs()])
            # Integers, so the classes do not depend on a processor's rounding.
            if int(gaps.sum(dim=1).min()) < MARGIN * sketch.numel():
                continue
            sketches[len(chosen)] = sketch
            chosen.append(number)
            if len(chosen) == count:
                rejected = number + 1 - count
                return ClassTable(parameters=candidates[chosen], rejected=rejected)
    raise UsageError(
        f"Only {len(chosen)} of {len(candidates)} candidates differ enough to be classes",
        place=f"formula?kind={kind}&classes={count}",
        hint=f"ask for at most {len(chosen)} classes",
    )


def _sketches(kind: str, parameters: Tensor) -> Iterator[Tensor]:
    """The ink int16 [1024] in 0..255 of each class without noise."""
    for rows in torch.split(parameters, 64):
        still = torch.full((len(rows), PLACE_UNITS + rows.shape[1]), 0.5)
        shown = ink(kind, rows, drawn=still, size=_SKETCH)
        yield from (shown * 255.0).round().to(torch.int16).flatten(1)


@cache
def _parameters(kind: str, count: int, device: torch.device) -> Tensor:
    """The parameters of the classes on a device, cached."""
    with torch.inference_mode(False):
        return class_table(kind, count).parameters.to(device)


def draw_images(keys: Tensor, *, kind: str, classes: int, size: int) -> Tensor:
    """Images float32 [n, 3, size, size] in [0, 1] of keys int64 [n, 2], (class, instance).

    Every image depends only on its key, not on its batch, bit for bit on a CPU. On a GPU it may
    differ by rounding.
    """
    labels, instances = keys.unbind(1)
    base = derived_seed("formula", DATA_SEED, kind) & 0xFFFFFFFF
    # Both steps are bijections, so no two instances of a class have the same state.
    states = mixed(mixed(labels ^ base) ^ instances)
    parameters = _parameters(kind, classes, keys.device)[labels]
    drawn = units(states, COLOUR_UNITS + PLACE_UNITS + parameters.shape[1])
    shown = ink(kind, parameters, drawn=drawn[:, COLOUR_UNITS:], size=size)
    return painted(shown, drawn[:, :COLOUR_UNITS])


@dataclass(frozen=True, kw_only=True)
class FormulaFinish:
    """Draws the images of keys, on the keys' device, and fits them to the view."""

    view: ImageView
    kind: str
    classes: int
    size: int

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Keys int64 [n, 2] as float32 [n, *view], normalised."""
        pixels_at_once = _CPU_PIXELS if pixels.device.type == "cpu" else _GPU_PIXELS
        at_once = max(1, pixels_at_once // self.size**2)
        drawn = [
            draw_images(keys, kind=self.kind, classes=self.classes, size=self.size)
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
        # Required by iteration: `for item in keys` would not end otherwise.
        if not 0 <= index < self._size:
            raise IndexError(index)
        label = index % self._classes
        return torch.tensor([label, self._first + index // self._classes]), label

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        rows = torch.as_tensor(indices)
        labels = rows % self._classes
        instances = self._first + rows // self._classes
        return list(zip(torch.stack([labels, instances], dim=1), labels.tolist(), strict=True))


def open_source(request: SourceRequest) -> ImageData:
    """Formula images as ImageData: "holdout" are the validation instances.

    Raises UsageError for a place, augmentation, an unknown kind, and numbers out of range.
    """
    if request.place:
        raise UsageError(
            f"formula takes no place, got {request.place!r}",
            hint="write formula?kind=orbits&classes=100&size=64",
        )
    if request.options.augment:
        raise UsageError(
            "formula has no augmentation: its instances differ in place, shape and colour already",
            hint="leave out --augment",
        )
    settings = {**DEFAULTS, **request.settings}
    kind = _kind(settings["kind"])
    classes, size = (_number(name, settings[name], *LIMITS[name]) for name in LIMITS)
    counts = {
        name: _number(name, settings.get(name, str(share * classes)), 1, RANGE)
        for name, share in PER_CLASS.items()
    }
    table = class_table(kind, classes)
    parts = {name: FormulaKeys(name, count, classes=classes) for name, count in counts.items()}
    splits = {"test": limited_test(parts["test"], counts["test"], limit=request.options.max_test)}
    if request.options.train:
        splits["train"] = Split(dataset=parts["train"], size=counts["train"])
        splits["holdout"] = Split(dataset=parts["validation"], size=counts["validation"])
    digits = len(str(classes - 1))
    return ImageData(
        spec=request.spec,
        classes=tuple(f"{kind}-{label:0{digits}d}" for label in range(classes)),
        splits=splits,
        finish=FormulaFinish(view=request.view, kind=kind, classes=classes, size=size),
        notes=_notes(request.view, table, size=size),
    )


def _kind(text: str) -> str:
    if text not in KINDS:
        guess = did_you_mean(text, KINDS)
        raise UsageError(
            f"formula has no kind {text!r}",
            place="formula",
            hint=f"{guess} known: {', '.join(KINDS)}".lstrip(),
        )
    return text


def _number(name: str, text: str, low: int, high: int) -> int:
    # isdecimal alone would also accept the digits of other scripts; int refuses 5,000 digits.
    if text.isascii() and text.isdecimal() and len(text) < 12 and low <= int(text) <= high:
        return int(text)
    raise UsageError(
        f"{name}={one_line(text, limit=20)} is not a whole number from {low} to {high}",
        place="formula",
        hint="write for example formula?kind=orbits&classes=100&size=64",
    )


def _notes(view: ImageView, table: ClassTable, *, size: int) -> tuple[str, ...]:
    note = (
        "formula: the splits have instances of their own, the same for every seed; "
        f"{table.rejected} candidates were left out because they are nearly empty or resemble a "
        f"class before them (mean difference of ink below {MARGIN} of 255)"
    )
    if view.size == (size, size):
        return (note,)
    return (note, f"{size}x{size} images were stretched to {view.height}x{view.width} (bilinear)")
