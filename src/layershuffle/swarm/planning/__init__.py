"""Which host holds which blocks: placements by throughput, latency or life, and their figures.

`plan` in `planner` is the way in. `hosts` is what people write, and the same in arrays; `placement`
finds placements (its docstring states the exact programme); `report` simulates what was found.
"""

from __future__ import annotations

from layershuffle.swarm.planning.hosts import (
    OBJECTIVES,
    HostsFile,
    HostSpec,
    ModelFacts,
    Objective,
    facts_of,
    read_hosts,
)
from layershuffle.swarm.planning.planner import Planned, plan
from layershuffle.swarm.planning.report import Figures, figures_of, plan_report

__all__ = [
    "OBJECTIVES",
    "Figures",
    "HostSpec",
    "HostsFile",
    "ModelFacts",
    "Objective",
    "Planned",
    "facts_of",
    "figures_of",
    "plan",
    "plan_report",
    "read_hosts",
]
