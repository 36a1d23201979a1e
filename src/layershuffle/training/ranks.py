"""The processes that train together, as torchrun starts them, and what they tell each other.

One process is the common case: then every question below is answered on the spot. What they tell
each other goes from host to host (gloo), so no GPU has to be waited for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from layershuffle.errors import TrainingError
from layershuffle.files import staged_directory

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process is number `rank` of `count`; the first one writes and speaks for all."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def agreed(self, value: T) -> T:
        """The first process's `value`, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, the only one to do it, in all of them."""
        return self.agreed(work() if self.first else cast(T, None))

    def any(self, value: bool) -> bool:
        """Whether `value` is true in one of them."""
        return self.total([float(value)])[0] > 0

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all of them, in float64."""
        if self.count == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def wait(self) -> None:
        """Until all are here."""
        self.any(False)

    def check_same(self, text: str, *, what: str) -> None:
        """Raises `TrainingError`, in all of them, unless `text` is the same in all."""
        if self.count == 1:
            return
        found: list[str] = [""] * self.count
        dist.all_gather_object(found, text)
        different = [rank for rank, other in enumerate(found) if other != found[0]]
        if different:
            raise TrainingError(
                f"{what} differ between processes (the first one against {different}): they would "
                "train wrong weights without an error",
                hint="give every process the same flags and LAYERSHUFFLE_* variables",
            )

    @contextmanager
    def stage(self, final: Path) -> Iterator[Path]:
        """A directory that all of them fill and that then takes the place of `final`."""
        if self.first:
            with staged_directory(final) as stage:
                yield self.agreed(stage)
                self.wait()
        else:
            yield self.agreed(final)
            self.wait()
        self.wait()  # until it stands where it belongs


def is_first_process() -> bool:
    """Whether torchrun calls this process the first one; true without torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, this one alone without torchrun; GPUs for "cuda"."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if rank:  # warnings once, not once per process
        logging.getLogger("layershuffle").setLevel(logging.ERROR)
    yield Ranks(rank, count)
    # Not after an error: the others may never come to say goodbye.
    dist.destroy_process_group()
