# Ran at commit 8550626.
"""Shared by scripts that train small models: parts of their loops, and resumable runs.

A script lists its runs in stages; a stage begins after the previous one has ended. A finished run
is added to a table immediately, and runs that have a row are not trained again.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")
T = TypeVar("T")
WHAT_IS_MISSING = "Train the runs that the results lack."


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training. Its script defines the names of `start`. `rate`: peak learning rate."""

    arm: str
    seed: int
    start: str
    steps: int = 500
    warmup: int = 50
    rate: float = 4e-3


def warm_cosine(step: int, run: TrainingRun) -> float:
    """The factor of the learning rate: a linear rise, then half a cosine down to zero."""
    share = max(0, step - run.warmup) / (run.steps - run.warmup)
    return min((step + 1) / run.warmup, 0.5 * (1 + math.cos(math.pi * share)))


def batches_of(run: TrainingRun, count: int, *, size: int) -> Tensor:
    """Row numbers int64 [steps, size]: random permutations of `count` rows, one after another."""
    generator = torch.Generator().manual_seed(run.seed)
    epochs = math.ceil(run.steps * size / count)
    rows = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return torch.cat(rows)[: run.steps * size].view(run.steps, size)


def stepper(
    weights: Sequence[Tensor], run: TrainingRun, *, clipped: Sequence[Tensor]
) -> Callable[[Tensor], None]:
    """A function that takes an AdamW step of `weights` for a loss, as `fit` does.

    The norm of the gradients of `clipped` is at most 1.
    """
    optimiser = torch.optim.AdamW(weights, lr=run.rate, eps=1e-6, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: warm_cosine(step, run))

    def step_down(loss: Tensor) -> None:
        torch.autograd.backward(loss)
        clip_grad_norm_(clipped, 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()

    return step_down


def finished(table: Path, key: Sequence[str]) -> set[tuple[str, ...]]:
    """The keys of the runs that have a row in `table`."""
    if not table.exists():
        return set()
    with table.open(encoding="utf-8") as file:
        return {tuple(row[column] for column in key) for row in csv.DictReader(file)}


def key_of(run: object, key: Sequence[str]) -> tuple[str, ...]:
    """The values of the columns `key`, which identify a run or its row."""
    return tuple(str(getattr(run, column)) for column in key)


def add_row(row: DataclassInstance, table: Path, key: Sequence[str]) -> None:
    """Add a row to the table, unless it has one of the same key."""
    if key_of(row, key) in finished(table, key):
        return
    values = asdict(row)
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(values)


def in_processes(work: Callable[[R], T], runs: Sequence[R], *, workers: int) -> Iterator[T]:
    """The results of `work` for each run as they finish, each computed in its own process."""
    # A fork saves the import of torch, and is safe while the parent has computed nothing.
    with get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(work, runs)


def train_stages(
    stages: Sequence[Sequence[R]],
    measure: Callable[[R], DataclassInstance],
    *,
    table: Path,
    key: Sequence[str],
    workers: int,
) -> None:
    """Train the runs of each stage, and save and print a row for each."""
    for runs in stages:
        for row in in_processes(measure, runs, workers=workers):
            add_row(row, table, key)
            print(*asdict(row).values(), sep=", ", flush=True)


def train_with_bases(
    stages: Sequence[Sequence[R]],
    measure: Callable[..., DataclassInstance],
    *,
    missing: Callable[..., Sequence[Sequence[R]]],
    table: Path,
    key: Sequence[str],
) -> None:
    """The main function of scripts whose trainings start from weights of others, in a directory.

    `measure(run, directory=)` trains; `missing(stages, directory, finished=)` returns the runs that
    are left, given the keys of finished ones.
    """
    arguments = read_arguments(WHAT_IS_MISSING, directory="for the weights of bases")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    train_stages(
        missing(stages, arguments.directory, finished=finished(table, key)),
        partial(measure, directory=arguments.directory),
        table=table,
        key=key,
        workers=arguments.workers,
    )


def read_arguments(description: str, *, directory: str | None = None) -> argparse.Namespace:
    """Parse the command line: `--workers`, and `directory` if its help text is given."""
    parser = argparse.ArgumentParser(description=description)
    if directory is not None:
        parser.add_argument("directory", type=Path, help=directory)
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    return parser.parse_args()
