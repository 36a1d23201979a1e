"""`bench merge`: merges of twelve models, which are views of them: time and memory."""

from __future__ import annotations

import copy
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import nn

from layershuffle.bench.choices import Chosen, subject_of
from layershuffle.bench.report import Report, throughput
from layershuffle.bench.subjects import converted
from layershuffle.machine import versions
from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import sample_plans
from layershuffle.stack import depth_of

DONORS, MERGES = 12, 100


@dataclass(frozen=True, kw_only=True)
class Added:
    """What merges added to the memory of their donors, in bytes: tensors by their storages, Python
    objects by tracemalloc.
    """

    donors: int
    tensors: int
    objects: int

    @property
    def share(self) -> float:
        """Of the donors, in percent."""
        return 100.0 * (self.tensors + self.objects) / self.donors


def family_of(model: nn.Module, donors: int) -> MergeGroup:
    """`donors` models with weights of their own."""
    return MergeGroup([model, *(copy.deepcopy(model) for _ in range(donors - 1))])


def memory_of_merges(family: MergeGroup, *, merges: int) -> Added:
    """What `merges` random merges add."""
    plans = sample_plans(len(family.donors), family.depth, count=merges, seed=0)
    family.merge(plans[0])  # what is imported or cached once
    before = _storages(family.donors)
    gc.collect()
    tracemalloc.start()
    try:
        begun, _ = tracemalloc.get_traced_memory()
        views = [family.merge(plan) for plan in plans]
        objects = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    donors = sum(before.values())
    return Added(
        donors=donors,
        tensors=sum(_storages([*family.donors, *views]).values()) - donors,
        objects=objects,
    )


def _storages(models: Iterable[nn.Module]) -> dict[int, int]:
    """Bytes by storage."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def bench_merge(chosen: Chosen) -> Report:
    """Merges per second, and what a hundred of them add to the memory of twelve models."""
    on = converted(subject_of(chosen), chosen.precision)
    family = family_of(on.model, DONORS)
    plans = sample_plans(DONORS, depth_of(on.model), count=chosen.steps + 1, seed=1)
    family.merge(plans[0])
    seconds = [_seconds(partial(family.merge, plan)) for plan in plans[1:]]
    added = memory_of_merges(family, merges=MERGES)
    return Report(
        kind="merge",
        conditions=chosen.conditions(),
        rate=throughput(seconds, 1, unit="merges"),
        facts={
            "memory": f"{MERGES} merges add {added.share:.2f} % to the {added.donors / 2**20:,.0f} "
            f"MiB of {DONORS} models: {added.tensors / 2**20:.2f} MiB of tensors, "
            f"{added.objects / MERGES / 2**10:.1f} KiB of Python objects each"
        },
        versions=versions(),
    )


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
