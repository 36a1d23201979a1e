"""Batches of a split on the model's device, as often as they are wanted.

Loader processes read the pixels, which travel as bytes and become float32 on the device. A split
that is read again and again (the holdout between training steps, a test split under many merges)
stays on the device, if it takes no more than a share of the memory that is free there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from layershuffle.data.contract import BatchFinish, Split

PixelPlace = Literal["gpu", "host"]
# The activations of a training need the rest; ImageNet's 50,000 test images are 7.5 GB.
GPU_SHARE = 0.25  # of the GPU's memory that is free when the first batch arrives


class DeviceBatches:
    """Iterates over batches (images float32 [n, *view], labels int64 [n]) on `device`.

    With `keep` the pixels stay after the first whole pass: on the GPU if all of them take at most
    a quarter of its free memory, else in main memory if they take at most `host_bytes`; otherwise
    every pass reads the files again. `processes` loader processes read ahead.
    """

    def __init__(
        self,
        split: Split,
        finish: BatchFinish,
        *,
        batch_size: int,
        device: torch.device | str,
        processes: int = 0,
        keep: bool = False,
        host_bytes: int = 0,
    ) -> None:
        self.split, self.finish, self.device = split, finish, torch.device(device)
        self._keep, self._host_bytes = keep, host_bytes
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self._loader = DataLoader(
            split.dataset,
            batch_size=batch_size,
            num_workers=processes,
            # Only from pinned memory can a copy to the GPU run without the host waiting for it.
            pin_memory=self.device.type == "cuda",
        )

    @property
    def kept(self) -> bool:
        """Whether the next pass reads no files."""
        return self._kept is not None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._kept is None:
            yield from self._read()
            return
        for pixels, labels in self._kept:
            yield self._finished(pixels, labels)

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        stored: list[tuple[Tensor, Tensor]] = []
        place = None
        for number, (pixels, labels) in enumerate(self._loader):
            if number == 0 and self._keep:
                place = self._place(pixels)
            sent = self._sent(pixels), self._sent(labels)
            if place is not None:
                # Bytes, not finished images: in float32 they would take four times the memory.
                stored.append(sent if place == "gpu" else (pixels, labels))
            yield self._finished(*sent)
        if place is not None:
            # Only after a whole pass: a reader that stops early must not shorten the next ones.
            self._kept = stored

    def _finished(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.finish(self._sent(pixels)), self._sent(labels)

    def _sent(self, tensor: Tensor) -> Tensor:
        # The host does not wait: torch does not reuse pinned memory before the GPU has read it.
        return tensor.to(self.device, non_blocking=True)

    def _place(self, pixels: Tensor) -> PixelPlace | None:
        # A stream has no length, so it is unknown beforehand whether it fits.
        if self.split.size is None:
            return None
        size = self.split.size * pixels[0].numel()
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        return place_for(size, gpu_free=free, host_bytes=self._host_bytes)


def place_for(size: int, *, gpu_free: int | None, host_bytes: int) -> PixelPlace | None:
    """Where `size` bytes are kept: on the GPU, in main memory, or nowhere.

    `gpu_free`: bytes free on the GPU, None without one.
    """
    if gpu_free is not None and size <= GPU_SHARE * gpu_free:
        return "gpu"
    return "host" if size <= host_bytes else None
