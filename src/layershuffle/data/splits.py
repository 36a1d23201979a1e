"""Named splits of labelled images: what every source makes, and batches of it on a device.

A source is a function `SourceRequest -> ImageData`. Items are pixels as bytes, which loader
processes read; `ImageData.finish` converts whole batches of them to the model's input, on the
model's device (`DeviceBatches`).

The split names state the purpose of each part, so a checkpoint is never picked on the images whose
score is reported: "train" is fitted, "holdout" (a part of the training data) picks the checkpoint,
"test" is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import one_line
from layershuffle.images.view import ImageView

Item = tuple[Tensor, int]  # pixels uint8 [C, H, W]; class index

# The holdout does not depend on the seed of a run: sibling models whose blocks are merged must have
# trained on the same images, and the held-out images must be new to all of them.
HOLDOUT_SEED = 0
# Bounds on the pixels that stay between passes. The remaining memory is for activations; ImageNet's
# 50,000 test images take 7.5 GB.
GPU_SHARE = 0.25  # of the GPU memory that is free when the first batch arrives
MEMORY_BYTES = 1 << 30
_MOST_IMAGES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of a source.

    seed: drives augmentation (never the content of `digit-pairs`).
    holdout: share of the training images held out, the same ones for every seed, for sources
    without a validation split beside a test split; None trains on all of them. max_test: first n of
    one fixed shuffle. train=False opens only "test".
    Raises UsageError if a value is out of range.
    """

    seed: int = 0
    holdout: float | None = 0.05
    augment: bool = False
    skip_corrupt: bool = False
    max_test: int | None = None
    train: bool = True

    def __post_init__(self) -> None:
        # `FitSettings` checks these too, but users of the Python interface do not use it.
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise UsageError(
                f"holdout is a share between 0 and 1, not {self.holdout}",
                hint="0.05 holds out 5 percent of the training images",
            )
        if self.max_test is not None and self.max_test < 1:
            raise UsageError(
                f"max_test is at least 1, not {self.max_test}", hint="leave it out for all"
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """One part of the data.

    `groups` int64 [size, k]: images with a number in common may be wrong together (pairs of one
    handwritten digit, frames of one video); None if images are treated as independent.
    """

    dataset: Dataset[Item]
    groups: Tensor | None = None

    @property
    def size(self) -> int:
        """The number of images."""
        return len(self.dataset)  # type: ignore[arg-type]  # torch declares no length

    def independent(self, right: Tensor) -> list[float]:
        """As how many independent images those of the split count, for each column of `right`.

        `right` bool [size, k]: which images were answered right, as `evaluate` says of every score.
        Raises `ValueError` for another number of images.
        """
        # scipy takes a second to import, and data are opened without it.
        from layershuffle.ground.stats import independent_images

        groups = None if self.groups is None else self.groups.numpy()
        counts: list[float] = independent_images(right.numpy(), groups).tolist()
        return counts


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labelled images, fitted to a view.

    `finish` converts a batch of items to float32 [n, *view], normalised.
    `notes` are sentences for the report (where the holdout came from, what was skipped).
    """

    spec: str
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    finish: Callable[[Tensor], Tensor]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """One parsed data spec: `place` is what follows "scheme:", `settings` what follows "?"."""

    spec: str
    place: str
    view: ImageView
    options: DataOptions
    settings: Mapping[str, str] = field(default_factory=dict)

    def count(self, name: str, default: int) -> int:
        """The setting `name` as a number of images. Raises `UsageError` if it is none."""
        text = self.settings.get(name, str(default))
        # isdecimal alone would also accept the digits of other scripts; int refuses 5,000 digits.
        is_number = text.isascii() and text.isdecimal() and len(text) < 12
        if is_number and 1 <= int(text) <= _MOST_IMAGES:
            return int(text)
        raise UsageError(
            f"{name}={one_line(text, limit=20)} is not a whole number from 1 to {_MOST_IMAGES}",
            place=self.spec.partition("?")[0],
            hint=f"leave it out for {default:,}",
        )


class DeviceBatches:
    """Iterates over batches (images float32 [n, *view], labels int64 [n]) on `device`, repeatedly.

    `keep` is for a split that is read repeatedly (the holdout between training steps, a test split
    for many merges): its pixels are kept after the first complete pass, on the GPU if they take at
    most a quarter of its free memory, else in main memory if they take at most 1 GiB; otherwise
    every pass reads the files again. `processes`: number of loader processes.
    """

    def __init__(
        self,
        split: Split,
        finish: Callable[[Tensor], Tensor],
        *,
        batch_size: int,
        device: torch.device | str,
        processes: int = 0,
        keep: bool = False,
    ) -> None:
        self.split = split
        self.finish = finish
        self.device = torch.device(device)
        self._keep = keep
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self._loader = DataLoader(
            split.dataset,
            batch_size=batch_size,
            num_workers=processes,
            # Only copies from pinned memory to the GPU are asynchronous.
            pin_memory=self.device.type == "cuda",
            # Every pass draws a seed for its processes: not from the generator of dropout, or
            # weights would depend on how often they were scored.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._kept is None:
            yield from self._read()
            return
        for pixels, labels in self._kept:
            yield self._finished(pixels, labels)

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        stored: list[tuple[Tensor, Tensor]] = []
        on_gpu = in_memory = False
        for number, (pixels, labels) in enumerate(self._loader):
            if number == 0 and self._keep:
                size = self.split.size * pixels[0].numel()
                if self.device.type == "cuda":
                    on_gpu = size <= GPU_SHARE * torch.cuda.mem_get_info(self.device)[0]
                in_memory = size <= MEMORY_BYTES
            sent = self._sent(pixels), self._sent(labels)
            if on_gpu or in_memory:
                # Bytes, because float32 images would take four times the memory.
                stored.append(sent if on_gpu else (pixels, labels))
            yield self._finished(*sent)
        if on_gpu or in_memory:
            # Only after a complete pass, or a reader that stops early would shorten the next ones.
            self._kept = stored

    def _finished(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.finish(self._sent(pixels)), self._sent(labels)

    def _sent(self, tensor: Tensor) -> Tensor:
        # Asynchronous: torch does not reuse pinned memory before the GPU has read it.
        return tensor.to(self.device, non_blocking=True)


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from `parts`: the first 63 bits of SHA-256 over "a/b/c".

    Stateless, and the same on every machine and library version.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode("ascii")).digest()
    # 63 bits, so the seed fits a signed 64-bit integer.
    return int.from_bytes(digest[:8], "big") >> 1


def seeded_generator(*parts: int | str) -> torch.Generator:
    """A fresh CPU generator seeded by `derived_seed(*parts)`."""
    return torch.Generator().manual_seed(derived_seed(*parts))


def stratified_holdout(labels: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """(training, held-out) ascending indices, each class cut at `share` by its own shuffle.

    Per class round(share * n), but at least one image, and never the last one: a class with two
    or more images is in both parts, a class with a single image stays in the training part.
    """
    table = torch.tensor(labels)
    training = []
    held_out = []
    for label in torch.unique(table).tolist():
        members = torch.nonzero(table == label).flatten()
        count = len(members)
        cut = min(max(round(share * count), 1), count - 1)
        # Each class has its own draws, so another class does not move images of this one.
        shuffle = torch.randperm(count, generator=seeded_generator("holdout", HOLDOUT_SEED, label))
        held_out += members[shuffle[:cut]].tolist()
        training += members[shuffle[cut:]].tolist()
    return sorted(training), sorted(held_out)


def limited_test(
    dataset: Dataset[Item], *, limit: int | None, groups: Tensor | None = None
) -> Split:
    """The test split, or the first `limit` images of one fixed shuffle of it."""
    whole = Split(dataset=dataset, groups=groups)
    if limit is None or limit >= whole.size:
        return whole
    # The same images for every seed of a run, so scores are comparable.
    shuffle = torch.randperm(whole.size, generator=seeded_generator("max_test", 0))
    rows = sorted(shuffle[:limit].tolist())
    of_rows = None if groups is None else groups[rows]
    return Split(dataset=Subset(dataset, rows), groups=of_rows)
