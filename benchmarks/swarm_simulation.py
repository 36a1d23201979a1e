"""Claim: while a third of the hosts is away, a swarm answers what a fair pipeline loses.

In virtual time, with the router, the health checks and the assignment of the gateway. Hosts die and
come back at random; the pipeline (`tests/simulation/pipeline.py`) meets the same failures at the
same times. Each block has two copies. What is right comes from the calibration of the packaged
model; a request without an answer counts as wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.gateway.brain.settings import DEFAULT_MODEL
from layershuffle.gateway.calibration.calibration import rounds_of
from layershuffle.gateway.hosts.served_model import ServedModel, served_directory

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # where the simulation is

from simulation.hosts import SimulatedDevice
from simulation.run import simulate

HOSTS, COPIES, SEED = 6, 2, 0
DEPTH = 10
"""The blocks of the packaged model that hosts serve; its first and last keep their place."""
REQUESTS = 4000
PER_SECOND = 0.5
CHURN = 60.0, 30.0  # mean seconds up and down
RIGHT_AT_LEAST = 90.0
FACTS = ("answered", "degraded", "failed", "mean_blocks", "ms_median", "ms_p99", "seconds")


def row(requests: int, *, pipeline: bool, take_over: bool) -> ClaimRow:
    """What came of the requests.

    `take_over`: whether hosts that are up get the blocks of those that are away.
    """
    calibration = ServedModel(served_directory(DEFAULT_MODEL)).calibration
    assert calibration is not None
    devices = {
        f"host-{host + 1}": SimulatedDevice(
            frozenset(block for block in range(DEPTH) if (host - block) % HOSTS < COPIES)
        )
        for host in range(HOSTS)
    }
    outcome = simulate(
        devices,
        requests=requests,
        seed=SEED,
        pipeline=pipeline,
        take_over=take_over,
        rate=PER_SECOND,
        churn=CHURN,
        top1={row.cell: row.top1 for row in calibration.rows},
        rounds=rounds_of(calibration),
    )
    right = outcome.figures["right_of_requests"]
    assert right is not None
    copies = "two copies, blocks given on" if take_over else "two copies"
    return ClaimRow(
        name=f"{copies}: {'pipeline' if pipeline else 'swarm'}",
        what="right of all requests",
        values=(right,),
        unit="%",
        bound=None if pipeline else Bound("at_least", RIGHT_AT_LEAST),
        settings={
            "hosts": HOSTS, "up_s": CHURN[0], "down_s": CHURN[1], "requests": requests,
            "requests_per_s": PER_SECOND, "seed": SEED,
        },
        facts={name: outcome.figures[name] for name in FACTS},
    )  # fmt: skip


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """The swarm and the pipeline, without and with giving on the blocks of hosts that are away."""
    requests = 20 if effort is SMOKE else REQUESTS
    for take_over in (False, True):
        for pipeline in (False, True):
            yield row(requests, pipeline=pipeline, take_over=take_over)


CLAIM = Claim(
    theme="swarm-simulation", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows
)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
