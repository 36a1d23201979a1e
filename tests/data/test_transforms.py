"""What all sources share: views, the holdout, transforms against slow paths, seeds and batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode

from layershuffle.data import ImageView, Split
from layershuffle.data.loading import parse_spec
from layershuffle.data.splits import DeviceBatches, derived_seed, stratified_holdout
from layershuffle.data.transforms import (
    Images,
    PixelFinish,
    PixelTransform,
    PlainTransform,
    augment_transform,
    fit_images,
    match_channels,
    seeded_globals,
)
from layershuffle.ground.errors import UsageError
from layershuffle.images.view import Resize
from refusals import refuses

VIEW = ImageView(
    channels=3, height=16, width=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3),
    interpolation="bicubic", crop_pct=0.9,
)  # fmt: skip


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
    resized = tv.Resize(int(16 / 0.9), InterpolationMode(interpolation))
    normalised = tv.Normalize(view.mean, view.std)
    reference = tv.Compose([resized, tv.CenterCrop(16), tv.ToTensor(), normalised])
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
    before = random.getstate(), torch.get_rng_state()
    assert not torch.equal(there[5], forward[5][0])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not torch.equal(there[5], other[5][0])
    part = Images(NoiseTable(), [7, 2], augment_transform(VIEW), seed=3)  # rows of the table count
    assert torch.equal(part[0][0], forward[7][0])
    assert part[0][1] == 1


def test_augmentation_is_timms_with_the_views_numbers() -> None:
    """Items finished in a batch equal those that timm normalises, bit for bit."""
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
        data, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
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


# --- specs, views, seeds, the holdout -------------------------------------------------------------


GREY = {"channels": 1, "height": 4, "width": 6, "mean": (0.25,), "std": (0.5,)}


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("digit-pairs", ("digit-pairs", "", {})),
        ("digit-pairs?train=5&test=6", ("digit-pairs", "", {"train": "5", "test": "6"})),
        ("folder:/data/a b?c", ("folder", "/data/a b?c", {})),
        ("hf:org/set:conf?label=fine", ("hf", "org/set:conf", {"label": "fine"})),
    ],
)
def test_specs(spec: str, parts: tuple[str, str, dict[str, str]]) -> None:
    assert parse_spec(spec) == parts


def test_a_seed_is_the_written_down_hash() -> None:
    # First 8 bytes of SHA-256 of "augment/7/3", by another tool, without the lowest bit.
    assert derived_seed("augment", 7, 3) == 6618477723628042639
    assert derived_seed("a", 1) != derived_seed("a", 11) != derived_seed("a1", 1)


def test_holdout_is_disjoint_and_stratified() -> None:
    labels = [0] * 100 + [1] * 10 + [2] * 2 + [3]
    training, held_out = stratified_holdout(labels, 0.2)
    assert sorted(training + held_out) == list(range(113))
    counts = torch.bincount(torch.tensor(labels)[held_out], minlength=4).tolist()
    assert counts == [20, 2, 1, 0]
    # Each class has draws of its own, so what other classes have moves none of its images.
    assert stratified_holdout(labels[:110], 0.2)[1] == held_out[:22]
    # Nor is the last image of a class ever taken.
    training, held_out = stratified_holdout([0, 0, 1, 1, 1], 0.99)
    assert (len(training), len(held_out)) == (2, 3)
    assert {(0, 0, 1, 1, 1)[row] for row in training} == {0, 1}


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 3},
        {"std": (0.5, 0.5)},
        {"std": (0.0,)},
        {"height": 0},
        {"interpolation": "lanczos3"},
        {"crop_pct": 0.0},
        {"crop_pct": 1.5},
        {"resize": "stretch"},
    ],
)
def test_a_view_that_does_not_fit_together_is_refused(change: dict) -> None:
    with refuses(UsageError, "ImageView"):
        ImageView(**{**GREY, **change})


def test_images_are_fitted_grey_is_repeated_and_rgb_becomes_luma() -> None:
    grey = torch.rand(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(match_channels(grey, 3), torch.cat([grey] * 3, dim=1))
    rgb = torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1)
    assert match_channels(rgb, 1).item() == pytest.approx(0.299 + 0.5 * 0.114, abs=1e-7)
    view = ImageView(channels=3, height=8, width=12, mean=(0.5,) * 3, std=(0.25,) * 3)
    out = fit_images(torch.ones(5, 1, 4, 6, dtype=torch.uint8), view)
    assert (out.shape, out.dtype) == ((5, 3, 8, 12), torch.float32)
    assert (out - 2.0).abs().max() < 1e-5


# --- batches --------------------------------------------------------------------------------------


SMALL = ImageView(channels=3, height=6, width=5, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (11, 3, 6, 5), dtype=np.uint8))
BYTES = PIXELS.numel()


class Counted(Dataset):
    """Images 0 to 10 with labels 0 to 10; counts reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return PIXELS[index], index


def batches(dataset: Dataset, *, device: str = "cpu", **options) -> DeviceBatches:
    split = Split(dataset=dataset)
    return DeviceBatches(split, PixelFinish(SMALL), batch_size=4, device=device, **options)


def one_by_one() -> torch.Tensor:
    """Every image normalised alone, as loader processes used to do it, in numpy and torch."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (SMALL.mean, SMALL.std))
    images = [torch.from_numpy(np.array(p, dtype=np.float32) / 255) for p in PIXELS.numpy()]
    return torch.stack([(image - mean) / std for image in images])


def joined(batches: DeviceBatches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images).cpu(), torch.cat(labels).cpu()


def test_constants_made_in_an_evaluation_do_in_training() -> None:
    view = ImageView(channels=1, height=1, width=1, mean=(0.123,), std=(0.77,))
    pixels = torch.full((1, 1, 1, 1), 7, dtype=torch.uint8)
    with torch.inference_mode():
        there = PixelFinish(view)(pixels)
    weight = torch.ones(1, requires_grad=True)
    here = PixelFinish(view)(pixels)
    (here * weight).sum().backward()
    assert weight.grad.item() == here.item() == there.item()


@pytest.mark.parametrize(
    ("keep", "most", "reads"), [(False, BYTES, 33), (True, BYTES, 11), (True, BYTES - 1, 33)]
)
def test_a_cached_split_is_read_once(
    keep: bool, most: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layershuffle.data.splits.MEMORY_BYTES", most)
    dataset = Counted()
    device_batches = batches(dataset, keep=keep)
    for _ in range(3):
        images, labels = joined(device_batches)
        assert images.dtype == torch.float32
        assert torch.equal(images, one_by_one())
        assert labels.tolist() == list(range(11))
    assert dataset.reads == reads


def test_an_interrupted_pass_caches_nothing() -> None:
    dataset = Counted()
    device_batches = batches(dataset, keep=True)
    next(iter(device_batches))
    begun = dataset.reads
    for _ in range(2):
        assert torch.equal(joined(device_batches)[0], one_by_one())
        assert dataset.reads == begun + 11


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_split_is_kept_there_and_the_numbers_are_the_same() -> None:
    dataset = Counted()
    device_batches = batches(dataset, device="cuda", keep=True)
    for _ in range(3):
        images, labels = joined(device_batches)
        assert torch.equal(images, one_by_one())
        assert labels.tolist() == list(range(11))
    assert dataset.reads == 11
    assert next(iter(device_batches))[0].is_cuda
    finish, pixels = PixelFinish(SMALL), PIXELS.cuda()
    finish(pixels)
    torch.cuda.set_sync_debug_mode("error")  # finishing does not wait
    try:
        finish(pixels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
