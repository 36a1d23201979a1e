"""Claim: a hundred merges of twelve models add less than five percent to their memory."""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections.abc import Iterable, Iterator

from _clocks import PICO, SMOKE, WIDTH_192, Effort
from _harness import Bound, Claim, ClaimRow, run_claim
from _workload import make_workload
from torch import nn

from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import sample_plans


def storages(models: Iterable[nn.Module]) -> int:
    """Bytes of the tensors of `models`; views of one tensor do not count twice."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Bytes are counted, not timed: one measurement says it all."""
    spec, merges = (PICO, 3) if effort is SMOKE else (WIDTH_192, 100)
    model = make_workload(spec, batch_size=1).model
    # Copies are enough, because the memory of a merge does not depend on the values.
    group = MergeGroup([model, *(copy.deepcopy(model) for _ in range(11))])
    plans = sample_plans(len(group.donors), group.depth, count=merges, seed=0)
    group.merge(plans[0])  # one-time imports and caches are not counted
    donors = storages(group.donors)
    gc.collect()
    tracemalloc.start()
    begun, _ = tracemalloc.get_traced_memory()
    views = [group.merge(plan) for plan in plans]
    objects = tracemalloc.get_traced_memory()[0] - begun
    tracemalloc.stop()
    tensors = storages([*group.donors, *views]) - donors
    yield ClaimRow(
        name=f"memory of {merges} merges",
        what="added to 12 models:",
        values=(100 * (tensors + objects) / donors,),
        unit="%",
        bound=Bound("at_most", 5.0),
        settings={"model": spec},
        facts={
            "donors, bytes": donors,
            "tensors, bytes": tensors,
            "Python objects, bytes": objects,
        },
    )


CLAIM = Claim(theme="merges", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
