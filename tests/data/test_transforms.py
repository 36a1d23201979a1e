"""Plain and augmented transforms against slow paths and torchvision, and their seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode

from layershuffle.data import ImageView
from layershuffle.data.contract import derived_seed
from layershuffle.data.transforms import (
    Images,
    PixelFinish,
    PixelTransform,
    PlainTransform,
    augment_transform,
    seeded_globals,
)
from layershuffle.image_view import Resize

VIEW = ImageView(
    channels=3,
    height=16,
    width=16,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    interpolation="bicubic",
    crop_pct=0.9,
)


def noise(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


class NoiseTable:
    """Twelve images of noise, three classes."""

    def __init__(self, mode: str = "RGB") -> None:
        self.mode = mode
        self.labels = [row % 3 for row in range(12)]

    def image(self, index: int) -> Image.Image:
        return noise(40, 30, seed=index, mode=self.mode)

    def name(self, index: int) -> str:
        return f"noise {index}"


def augmented(seed: int = 3) -> Images:
    return Images(NoiseTable(), range(12), augment_transform(VIEW), seed=seed)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(40, 30), (30, 40), (17, 100), (9, 7), (16, 16), (18, 18)])
def test_crop_equals_torchvision(size: tuple[int, int], interpolation: str) -> None:
    view = ImageView(**{**VIEW.__dict__, "interpolation": interpolation})
    reference = tv.Compose(
        [
            tv.Resize(int(16 / 0.9), InterpolationMode(interpolation)),
            tv.CenterCrop(16),
            tv.ToTensor(),
            tv.Normalize(view.mean, view.std),
        ]
    )
    image = noise(*size)
    pixels = PixelFinish(view)(PlainTransform(view)(image)[None])[0]
    off = (pixels - reference(image)).abs()
    assert off.max() == 0, f"max {off.max():.2e}, mean {off.mean():.2e}"


def test_seeded_globals_put_every_generator_back_even_after_an_error() -> None:
    def states() -> tuple:
        state = np.random.get_state()
        return random.getstate(), state[1].tolist(), state[2], torch.get_rng_state().tolist()

    def draw() -> tuple:
        return random.random(), np.random.rand(), torch.rand(()).item()

    before = states()
    with seeded_globals(5):
        first = draw()
    with seeded_globals(5):
        second = draw()
    with pytest.raises(KeyError), seeded_globals(6):  # noqa: PT012
        assert draw() != first
        raise KeyError
    assert first == second
    assert states() == before


def test_an_augmented_item_is_a_function_of_seed_epoch_and_index_alone() -> None:
    forward, backward = augmented(), augmented()
    for epoch in (0, 1):
        forward.set_epoch(epoch)
        backward.set_epoch(epoch)
        there = {i: forward[i][0] for i in range(12)}
        random.seed(1)  # the state of the global generators does not matter
        back = {i: backward[i][0] for i in reversed(range(12))}
        assert all(torch.equal(there[i], back[i]) for i in range(12))
    other = augmented(seed=4)
    other.set_epoch(1)
    forward.set_epoch(0)
    assert not torch.equal(there[5], forward[5][0])
    assert not torch.equal(there[5], other[5][0])


def test_augmentation_leaves_global_generators_alone_and_follows_table_rows() -> None:
    data = augmented()
    before = random.getstate(), torch.get_rng_state()
    item = data[7]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    part = Images(NoiseTable(), [7, 2], augment_transform(VIEW), seed=3)
    assert torch.equal(part[0][0], item[0])
    assert part[0][1] == item[1] == 1


def test_augmentation_is_timms_with_the_views_numbers() -> None:
    """Items finished in a batch equal those that timm normalises, bit for bit."""
    names = [type(step).__name__ for step in augment_transform(VIEW).transforms]
    assert names[:3] == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "ColorJitter",
    ]
    timms = create_transform(
        (3, 16, 16), is_training=True, interpolation="bicubic", mean=VIEW.mean, std=VIEW.std
    )
    data = augmented()
    batch = torch.stack([data[row][0] for row in range(12)])
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous()
    finished = PixelFinish(VIEW)(batch)
    for row in range(12):
        with seeded_globals(derived_seed("augment", 3, 0, row)):
            assert torch.equal(finished[row], timms(NoiseTable().image(row)))


def smooth(width: int, height: int, *, seed: int, mode: str = "RGB") -> Image.Image:
    """Noise at an eighth of the size, enlarged, with fine grain: as rough as a photograph."""
    coarse = noise(width // 8 + 2, height // 8 + 2, seed=seed, mode=mode)
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)
    grain = np.random.default_rng(seed).normal(0, 8, pixels.shape[:2])
    grain = grain if mode == "L" else grain[..., None]
    return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_by_torch_equal_pillow_up_to_rounding(
    interpolation: str, resize: Resize, mode: str
) -> None:
    """The tolerance that PixelTransform promises: 1 of 255, and in few bytes."""
    channels = len(mode) if mode == "RGB" else 1
    view = ImageView(
        channels=channels, height=64, width=64, mean=(0.5,) * channels, std=(0.5,) * channels,
        interpolation=interpolation, crop_pct=0.875, resize=resize,
    )  # fmt: skip
    off = []
    for seed, size in enumerate([(250, 188), (188, 250), (140, 73), (73, 73), (64, 64)]):
        image = smooth(*size, seed=seed, mode=mode)
        plain = PlainTransform(view)(image)
        fast = PixelTransform(view)(image)
        assert fast.shape == plain.shape == (channels, 64, 64)
        assert fast.dtype == torch.uint8
        assert fast.is_contiguous()
        off.append((fast.int() - plain.int()).abs())
    every = torch.cat(off).float()
    assert every.max() <= 1
    assert (every > 0).float().mean() < 0.02


# Workers are forked from a process with threads; newer Pythons warn although ours only read.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_outlive_an_epoch_show_what_the_main_process_shows() -> None:
    data = augmented()
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for epoch in (0, 1):
        data.set_epoch(epoch)
        seen = torch.cat([images for images, _ in loader])
        own = torch.stack([data[i][0] for i in range(12)])
        assert torch.equal(seen, own), f"epoch {epoch}"


def test_accelerates_loader_sets_the_epoch() -> None:
    from accelerate.data_loader import DataLoaderShard

    data = augmented()
    loader = DataLoaderShard(data, batch_size=12)
    loader.set_epoch(2)
    images, _ = next(iter(loader))
    data.set_epoch(2)
    assert torch.equal(images, torch.stack([data[i][0] for i in range(12)]))
