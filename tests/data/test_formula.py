"""Images from formulas against a plain loop per pixel, in every batch, class by class."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from layershuffle.data import DataOptions, ImageView, formula, open_data
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
from refusals import refuses

F = np.float32
BITS = 0xFFFFFFFF
# A view that leaves colours 0..1 unchanged.
PLAIN = ImageView(channels=3, height=16, width=16, mean=(0.0,) * 3, std=(1.0,) * 3)
# SHA-256 of images 0..7 of classes 0..7, 16 pixels a side, as bytes.
GOLDEN = "907715cf9aa1bbf0eb3997aa048efbfd716385c75c5cfb97e2a7740a155c07fc"


def keys(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs)


def finish(*, classes: int = 12, view: ImageView = PLAIN) -> FormulaFinish:
    return FormulaFinish(view=view, classes=classes, size=16)


def slow_hash(value: int) -> int:
    for _ in range(2):
        value = (value ^ value >> 16) * 0x45D9F3B & BITS
    return value ^ value >> 16


def slow_units(state: int, count: int) -> list[np.float32]:
    hashes = [slow_hash((state + (j * 0x9E3779B1 & BITS)) & BITS) for j in range(count)]
    return [F(drawn >> 8) * F(2**-24) for drawn in hashes]


def slow_wave(turns: np.float32) -> np.float32:
    part = turns - np.round(turns)
    return part * (F(8) - F(16) * abs(part))


def slow_length(x: np.float32, y: np.float32) -> np.float32:
    longer, shorter = max(abs(x), abs(y)), min(abs(x), abs(y))
    near = F(0.96) * longer + F(0.4) * shorter + F(1e-6)
    return F(0.5) * (near + (x * x + y * y) / near)


class SlowImage:
    """One image computed with 32-bit scalars, in the order of the formulas."""

    def __init__(self, label: int, instance: int, *, classes: int, size: int) -> None:
        self.size = size
        self.classes = [F(value) for value in class_table(classes)[label].tolist()]
        base = formula.derived_seed("formula", 0, "orbits") & BITS
        drawn = slow_units(slow_hash(slow_hash(label ^ base) ^ instance), 6 + 5 + len(self.classes))
        self.colours, noise = drawn[:6], [value - F(0.5) for value in drawn[6:]]
        self.place_noise, self.noise = noise[:5], noise[5:]

    def value(self, index: int, low: float, high: float, noise: float) -> np.float32:
        base = self.classes[index] * F(high - low) + F(low)
        return base + self.noise[index] * F(noise)

    def whole(self, index: int, low: int, high: int) -> np.float32:
        return np.floor(self.classes[index] * F(high - low + 1)) + F(low)

    def placed(self, x: np.float32, y: np.float32) -> tuple[np.float32, np.float32]:
        turn, zoom, stretch, x0, y0 = self.place_noise
        turn = turn * F(1 / 12)
        cosine, sine = slow_wave(turn + F(0.25)), slow_wave(turn)
        across = F(1) + F(0.3) * zoom + F(0.2) * stretch
        down = F(1) + F(0.3) * zoom - F(0.2) * stretch
        return (
            across * cosine * x + across * -sine * y + F(0.3) * x0,
            down * sine * x + down * cosine * y + F(0.3) * y0,
        )

    def centres(self):
        """(row, column, x, y) of every pixel."""
        line = [F(2 * i + 1 - self.size) / F(self.size) for i in range(self.size)]
        return (
            (i, j, *self.placed(line[j], line[i]))
            for i in range(len(line))
            for j in range(len(line))
        )

    def orbits(self) -> np.ndarray:
        shown = np.zeros((self.size, self.size), dtype=F)
        count, inner = self.whole(6, 2, 7), self.value(7, 0.1, 0.4, 0.05)
        gap, width = (F(0.95) - inner) / count, self.value(8, 0.12, 0.38, 0.05)
        for i, j, x, y in self.centres():
            share = y / (abs(x) + abs(y) + F(1e-6))
            turns = (F(2) - share if x < 0 else share) * F(0.25)
            slow = slow_wave(turns * self.whole(0, 1, 6) + self.value(1, 0, 1, 0.1))
            fast = slow_wave(turns * self.whole(2, 7, 16) + self.value(3, 0, 1, 0.2))
            bend = slow * self.value(4, 0.05, 0.35, 0.05) + fast * self.value(5, 0.02, 0.12, 0.02)
            ring = (slow_length(x, y) - bend - inner) / gap
            nearest = min(max(np.round(ring), F(0)), count - F(1))
            off = (width - abs(ring - nearest)) * (gap * F(self.size / 3)) + F(0.5)
            shown[i, j] = min(max(off, F(0)), F(1))
        return shown

    def image(self) -> np.ndarray:
        shown = self.orbits()
        light = [F(0.55) + F(0.45) * unit for unit in self.colours[:3]]
        dark = [F(0.45) * unit for unit in self.colours[3:]]
        return np.stack([low + (high - low) * shown for high, low in zip(light, dark, strict=True)])


def test_images_are_those_of_a_loop_over_pixels() -> None:
    pairs = [(0, 0), (7, 3), (11, 2**31 + 5)]
    drawn = draw_images(keys(*pairs), classes=12, size=16)
    for image, (label, instance) in zip(drawn, pairs, strict=True):
        slow = SlowImage(label, instance, classes=12, size=16).image()
        off = np.abs(image.numpy() - slow)
        assert off.max() == 0, f"{label} {instance}: at most {off.max()}, mean {off.mean()}"


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
    assert hashlib.sha256(content).hexdigest() == GOLDEN


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


def test_a_nearest_mean_finds_most_classes() -> None:
    """40 classes by the mean ink of 30 training images: chance is 2.5 percent."""
    data = open_data(
        "formula?classes=40&size=16&train=1200&test=400",
        ImageView(channels=1, height=16, width=16, mean=(0.0,), std=(1.0,)),
    )
    parts = {}
    for name, size in (("train", 1200), ("test", 400)):
        ((items, labels),) = DataLoader(data.splits[name].dataset, batch_size=size)
        images = data.finish(items).flatten(1)
        # Without brightness and contrast, which are independent of the class.
        images = images - images.mean(dim=1, keepdim=True)
        parts[name] = images / images.norm(dim=1, keepdim=True), labels
    (trained, labels), (tested, truth) = parts["train"], parts["test"]
    means = torch.stack([trained[labels == label].mean(dim=0) for label in range(40)])
    guessed = (tested @ (means / means.norm(dim=1, keepdim=True)).T).argmax(dim=1)
    assert (guessed == truth).float().mean() > 0.25


def test_images_are_fitted_to_the_view_and_limited() -> None:
    view = ImageView(channels=1, height=24, width=20, mean=(0.5,), std=(0.5,))
    options = DataOptions(train=False, max_test=5)
    data = open_data("formula?classes=12&size=16&test=24", view, options=options)
    assert set(data.splits) == {"test"}
    assert data.splits["test"].size == 5
    assert data.finish(keys((0, 1), (1, 1))).shape == (2, 1, 24, 20)
    assert "images of 16x16 were stretched to 24x20" in data.notes[1]


@pytest.mark.parametrize(
    "spec",
    [
        "formula?kind=orbits",
        "formula?classes=1",
        "formula?classes=99999",
        "formula?size=8",
        "formula?train=0",
        pytest.param("formula?test=" + "9" * 5000, id="5000 digits"),
        "formula?seed=3",
    ],
)
def test_invalid_formula_specs_are_refused(spec: str) -> None:
    with refuses(UsageError):
        open_data(spec, PLAIN)
