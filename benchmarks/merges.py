"""Claim: a hundred merges of twelve models add less than five percent to their memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.bench.workloads import (
    PICO,
    WIDTH_192,
    make_workload,
    memory_of_merges,
    merge_group,
)


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Bytes are counted, not timed: one measurement says it all."""
    spec, merges = (PICO, 3) if effort is SMOKE else (WIDTH_192, 100)
    group = merge_group(make_workload(spec, batch=1).model, 12)
    added = memory_of_merges(group, merges=merges)
    yield ClaimRow(
        name=f"memory of {merges} merges",
        what="added to 12 models:",
        values=(added.share,),
        unit="%",
        bound=Bound("at_most", 5.0),
        settings={"model": spec},
        facts={
            "donors, bytes": added.donors,
            "tensors, bytes": added.tensors,
            "Python objects, bytes": added.objects,
        },
    )


CLAIM = Claim(theme="merges", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
