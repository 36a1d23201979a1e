"""Finished batches equal items normalised one by one; cached splits are read once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from layershuffle.data import ImageView, Split
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.transforms import PixelFinish

VIEW = ImageView(channels=3, height=6, width=5, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (11, 3, 6, 5), dtype=np.uint8))
BYTES = PIXELS.numel()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counted(Dataset):
    """Images 0 to 10 with labels 0 to 10; counts reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return PIXELS[index], index


def batches(dataset: Dataset, *, size: int = 11, device: str = "cpu", **options) -> DeviceBatches:
    split = Split(dataset=dataset, size=size)
    return DeviceBatches(split, PixelFinish(VIEW), batch_size=4, device=device, **options)


def one_by_one() -> torch.Tensor:
    """Every image normalised alone, as loader processes used to do it, in numpy and torch."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (VIEW.mean, VIEW.std))
    images = [torch.from_numpy(np.array(p, dtype=np.float32) / 255) for p in PIXELS.numpy()]
    return torch.stack([(image - mean) / std for image in images])


def joined(batches: DeviceBatches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images).cpu(), torch.cat(labels).cpu()


def test_batches_equal_images_normalised_one_by_one_bit_for_bit() -> None:
    images, labels = joined(batches(Counted()))
    assert images.dtype == torch.float32
    assert torch.equal(images, one_by_one())
    assert labels.tolist() == list(range(11))


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
    ("options", "reads"),
    [
        ({}, 33),
        ({"keep": True}, 33),  # on a CPU nothing is cached by default
        ({"keep": True, "host_bytes": BYTES}, 11),
        ({"keep": True, "host_bytes": BYTES - 1}, 33),
    ],
)
def test_a_cached_split_is_read_once(options: dict, reads: int) -> None:
    dataset = Counted()
    device_batches = batches(dataset, **options)
    for _ in range(3):
        images, labels = joined(device_batches)
        assert torch.equal(images, one_by_one())
        assert labels.tolist() == list(range(11))
    assert dataset.reads == reads


def test_an_interrupted_pass_caches_nothing() -> None:
    dataset = Counted()
    device_batches = batches(dataset, keep=True, host_bytes=BYTES)
    next(iter(device_batches))
    begun = dataset.reads
    for _ in range(2):
        assert torch.equal(joined(device_batches)[0], one_by_one())
        assert dataset.reads == begun + 11


@needs_gpu
def test_on_a_gpu_a_split_is_kept_there_and_the_numbers_are_the_same() -> None:
    dataset = Counted()
    device_batches = batches(dataset, device="cuda", keep=True)
    for _ in range(3):
        images, labels = joined(device_batches)
        assert torch.equal(images, one_by_one())
        assert labels.tolist() == list(range(11))
    assert dataset.reads == 11
    assert next(iter(device_batches))[0].is_cuda


@needs_gpu
def test_finishing_on_a_gpu_does_not_wait() -> None:
    finish, pixels = PixelFinish(VIEW), PIXELS.cuda()
    finish(pixels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        finish(pixels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
