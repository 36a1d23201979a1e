"""Workloads: models with random weights, generated images, orders. Nothing is downloaded."""

from __future__ import annotations

import copy
import gc
import random
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from layershuffle.bench.machine import DTYPES
from layershuffle.bench.timing import Effort, Pairs, paired, timed_on
from layershuffle.core.forwards import block_runs, run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import running
from layershuffle.core.tensors import logits_of
from layershuffle.data.transforms import PixelFinish
from layershuffle.errors import UsageError
from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import sample_plans
from layershuffle.models import image_view, load, num_classes_of
from layershuffle.models.spec import parse_spec

PICO = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=10&img_size=32&patch_size=16"
    "&embed_dim=16&num_heads=2&depth=12"
)
"""For smoke tests: 12 tiny blocks."""
WIDTH_64 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=64&num_heads=4&mlp_ratio=2&depth=12"
)
"""The model of the digits recipes: 12 blocks, 16 tokens, 0.41 M parameters."""
WIDTH_192 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&img_size=32&patch_size=4&depth=12"
)
"""A ViT-Ti for images of 32 pixels: 12 blocks, 65 tokens, 5.4 M parameters."""
VIT_B = "timm:vit_base_patch16_224?pretrained=false"
"""The paper's model: 12 blocks, 197 tokens, 86.6 M parameters."""

PHOTO, JPEG_QUALITY = (500, 375), 90


# --- a model and a batch --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A wrapped model and a batch for it.

    `pixels` uint8 `[batch, channels, height, width]` and `labels` int64 `[batch]` are on the host,
    pinned if the model is on a GPU; `finish` converts pixels to `images`, on the model's device.
    """

    spec: str
    model: nn.Module
    pixels: Tensor
    labels: Tensor
    finish: PixelFinish
    images: Tensor

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for the result file."""
        return {"model": self.spec, "batch": len(self.pixels)}


def make_workload(spec: str, *, batch: int, device: str = "cpu") -> Workload:
    """The model of `spec` on `device`, in eval mode, with a batch of noise.

    Raises `UsageError` for a spec with trained weights.
    """
    model = load(random_spec(spec), seed=0)
    return workload_around(model, spec=spec, batch=batch, device=device)


def workload_around(model: nn.Module, *, spec: str, batch: int, device: str = "cpu") -> Workload:
    """As `make_workload`, for an existing wrapped model."""
    model.to(device)
    view = image_view(model)
    generator = torch.Generator().manual_seed(0)
    shape = (batch, view.channels, view.height, view.width)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(num_classes_of(model), (batch,), generator=generator)
    # As from a loader: copies from pinned memory are asynchronous.
    if device == "cuda":
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    finish = PixelFinish(view)
    images = finish(pixels.to(device))
    return Workload(
        spec=spec, model=model, pixels=pixels, labels=labels, finish=finish, images=images
    )


def converted(workload: Workload, precision: str) -> Workload:
    """The workload with weights and images in `precision`; converts its model in place."""
    dtype = DTYPES[precision]
    workload.model.to(dtype)
    return replace(workload, images=workload.images.to(dtype))


def random_spec(spec: str) -> str:
    """`spec` with random weights instead of trained ones, on which speed does not depend."""
    parsed = parse_spec(spec)
    name = {"timm": "pretrained", "hf": "pretrained", "torchvision": "weights"}.get(parsed.scheme)
    # Models of bundled: and dir: are local, so nothing is downloaded.
    if name is None:
        return spec
    weights = parsed.settings.get(name)
    if weights not in (None, False, "none"):
        raise UsageError(
            f"{spec!r} requests trained weights, but speed is measured with random ones",
            hint=f"leave {name} out",
        )
    if name in parsed.settings:
        return spec
    value = "none" if name == "weights" else "false"
    return f"{spec}{'&' if '?' in spec else '?'}{name}={value}"


# --- orders ---------------------------------------------------------------------------------------


def in_order_subsets(count: int, depth: int) -> list[ExecutionOrder]:
    """Every choice of `count` blocks, ascending."""
    return [ExecutionOrder(blocks, depth) for blocks in combinations(range(depth), count)]


def sweeps(depth: int) -> dict[str, Sequence[ExecutionOrder]]:
    """Typical sets of orders in evaluations, by name."""
    shuffle, blocks = random.Random(0), range(depth)
    return {
        "all truncations": [ExecutionOrder(tuple(blocks[: n + 1]), depth) for n in blocks],
        "leave-one-out and base": [
            *in_order_subsets(depth, depth), *in_order_subsets(depth - 1, depth),
        ],
        "leave-two-out": in_order_subsets(depth - 2, depth),
        "64 random orders": [
            ExecutionOrder(tuple(shuffle.sample(blocks, depth)), depth) for _ in range(64)
        ],
    }  # fmt: skip


def compare_forwards(
    workload: Workload, orders: Sequence[ExecutionOrder], *, effort: Effort
) -> tuple[Pairs, dict[str, Any]]:
    """Compare separate forwards with `run_many`: times, and numbers of block runs.

    Raises `AssertionError` unless both give the same logits, bit for bit.
    """
    model, images = workload.model, workload.images

    def one_by_one() -> list[Tensor]:
        outputs = []
        for order in orders:
            with running(model, order):
                outputs.append(logits_of(model(images)))
        return outputs

    def together() -> list[Tensor]:
        logits = dict(run_many(model, images, orders=orders))
        return [logits[index] for index in range(len(orders))]

    assert all(map(torch.equal, one_by_one(), together())), "outputs are bit-equal"
    sides = (timed_on(images.device.type, work) for work in (one_by_one, together))
    pairs = paired(*sides, effort=effort)
    runs = [sum(map(len, orders)), block_runs(orders)]
    return pairs, {"block runs": runs, "outputs": "bit-equal"}


# --- files ----------------------------------------------------------------------------------------


def photograph(seed: int, size: tuple[int, int] = PHOTO) -> Image.Image:
    """An image of soft shapes with grain, whose JPEG is about as large as that of a photograph."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (size[1] // 16 + 1, size[0] // 16 + 1, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
    grain = draw.normal(0, 10, (*soft.shape[:2], 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def write_photographs(directory: Path, count: int) -> None:
    """Write `count` generated JPEG files of 500 x 375 in two class folders under train and val."""
    for number in range(count):
        # `folder:` requires both splits, although only train is read.
        part, group = ("val" if number % 8 < 2 else "train"), number % 2
        folder = directory / part / f"class-{group}"
        folder.mkdir(parents=True, exist_ok=True)
        photograph(number).save(folder / f"{number}.jpg", quality=JPEG_QUALITY)


# --- merges ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AddedMemory:
    """Bytes of the donors, and those that merges add: tensors by storage, objects by tracemalloc.

    Merges are views of their donors, so they should add hardly any memory.
    """

    donors: int
    tensors: int
    objects: int

    @property
    def share(self) -> float:
        """The added bytes, in percent of the donors'."""
        return 100.0 * (self.tensors + self.objects) / self.donors


def merge_group(model: nn.Module, donors: int) -> MergeGroup:
    """A group of `donors` models with separate weights."""
    # Copies are enough, because memory and time of a merge do not depend on the values.
    return MergeGroup([model, *(copy.deepcopy(model) for _ in range(donors - 1))])


def memory_of_merges(group: MergeGroup, *, merges: int) -> AddedMemory:
    """The memory that `merges` random merges add."""
    plans = sample_plans(len(group.donors), group.depth, count=merges, seed=0)
    group.merge(plans[0])  # one-time imports and caches are not counted
    before = _storages(group.donors)
    gc.collect()
    tracemalloc.start()
    try:
        begun, _ = tracemalloc.get_traced_memory()
        views = [group.merge(plan) for plan in plans]
        objects = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    donors = sum(before.values())
    tensors = sum(_storages([*group.donors, *views]).values()) - donors
    return AddedMemory(donors=donors, tensors=tensors, objects=objects)


def _storages(models: Iterable[nn.Module]) -> dict[int, int]:
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    # By address, because views of one tensor must not count twice.
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
