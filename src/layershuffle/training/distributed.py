"""The processes that train together, as torchrun starts them, and the messages between them.

One process is the common case; then everything below works without torch.distributed.
Messages go from CPU to CPU over gloo, so no GPU has to be waited for.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from layershuffle.ground.errors import TrainingError, UsageError
from layershuffle.ground.files import staged_directory
from layershuffle.ground.text import one_line

T = TypeVar("T")
_OF_TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_ALONE = "unset WORLD_SIZE RANK LOCAL_RANK"
_PATIENCE_SECONDS = 10.0  # torchrun starts all processes of a machine within these
_log = logging.getLogger("layershuffle")
_GROUPS = itertools.count()  # the groups of processes so far, as many in all of them


@dataclass(frozen=True)
class Ranks:
    """This process has number `rank` of `count`; the first one writes files and reports."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """The first process's `value`, in all processes."""
        if self.count == 1:
            return value
        # torch broadcasts lists of objects only, and fills them in place.
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work` in all processes; only the first one calls it."""
        return self.broadcast(work() if self.first else cast(T, None))

    def any(self, value: bool) -> bool:
        """Whether `value` is true in at least one process."""
        return self.total([float(value)])[0] > 0

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all processes, in float64."""
        if self.count == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def wait(self) -> None:
        """Return when all processes have called this."""
        self.any(False)

    def check_same(self, text: str, *, what: str) -> None:
        """Raises `TrainingError` in all processes unless `text` is the same in all of them."""
        if self.count == 1:
            return
        texts: list[str] = [""] * self.count
        dist.all_gather_object(texts, text)
        different = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if different:
            raise TrainingError(
                f"{what} differ between processes (process 0 against {different}); they would "
                "train wrong weights without an error",
                hint="give every process the same flags",
            )

    @contextmanager
    def stage(self, final: Path) -> Iterator[Path]:
        """A directory that all processes fill and that then takes the place of `final`."""
        if self.first:
            with staged_directory(final) as stage:
                yield self.broadcast(stage)
                self.wait()
        else:
            yield self.broadcast(final)
            self.wait()
        self.wait()  # no process continues before the directory has its final name


def is_first_process() -> bool:
    """Whether torchrun calls this process the first one; true without torchrun."""
    return _number("WORLD_SIZE", 1) == 1 or _number("RANK", 0) == 0


def _number(name: str, default: int) -> int:
    """The whole number that the environment has under this name."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment, and no number", hint=_ALONE)
    return int(text)


@contextmanager
def _said_if_it_waits(count: int) -> Iterator[None]:
    """Within, a warning after some seconds names the processes that are waited for: the number may
    be left from a job that has ended."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    timer = threading.Timer(
        _PATIENCE_SECONDS,
        _log.warning,
        args=(
            "WORLD_SIZE is %d in the environment: waiting at %s for %d other processes of this "
            "training. To train alone: %s",
            count,
            place,
            count - 1,
            _ALONE,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone. `device`: cpu, cuda or mps."""
    count = _number("WORLD_SIZE", 1)
    # A process group that exists already belongs to the caller, who also ends it.
    if count == 1 or dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()
        return
    lacking = [name for name in _OF_TORCHRUN if name not in os.environ]
    if lacking:
        raise UsageError(
            f"WORLD_SIZE is {count} in the environment, and {' and '.join(lacking)} are not there",
            hint=f"{_ALONE}; to train with {count} processes: torchrun",
        )
    if device == "cuda":
        torch.cuda.set_device(_number("LOCAL_RANK", 0))
    try:
        with _said_if_it_waits(count):
            store, rank, count = next(rendezvous("env://"))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f"The {count} processes that WORLD_SIZE names did not come together "
            f"({one_line(error, limit=200)})",
            place=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            hint=_ALONE,
        ) from error
    # torchrun's store outlives a group and keeps its keys, so every group has names of its own.
    store = PrefixStore(f"layershuffle-{next(_GROUPS)}", store)
    # On GPUs both: gradients travel by NCCL, our messages by gloo without waiting for a GPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    if rank:  # a warning is printed once, not once per process
        logging.getLogger("layershuffle").setLevel(logging.ERROR)
    yield Ranks(rank, count)
    # Not in a `finally`: after an error the other processes may never come to this line, and
    # waiting for them would hide the error.
    dist.destroy_process_group()
