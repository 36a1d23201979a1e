"""Batches of a split on the model's device, for any number of passes.

Loader processes read the pixels, which are copied as bytes and become float32 on the device. A
split that is read repeatedly (the holdout between training steps, a test split for many merges)
stays on the device, if it takes no more than a share of the free memory there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from layershuffle.data.contract import Split

# The remaining memory is for activations; ImageNet's 50,000 test images take 7.5 GB.
GPU_SHARE = 0.25  # of the GPU memory that is free when the first batch arrives
HOST_BYTES = 1 << 30


class DeviceBatches:
    """Iterates over batches (images float32 [n, *view], labels int64 [n]) on `device`.

    With `keep` the pixels are kept after the first complete pass: on the GPU if they take at most a
    quarter of its free memory, else in main memory if they take at most 1 GiB; otherwise every
    pass reads the files again. `processes`: number of loader processes.
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
                in_memory = size <= HOST_BYTES
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
