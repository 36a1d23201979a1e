"""Which host holds which blocks: placements by throughput, latency or life, and their figures.

`plan` in `planner` is the way in. `hosts` is what people write, `problem` the same in arrays,
`exact` the mixed-integer programme (its docstring states it), `bounds` what cannot be beaten,
`greedy` for large swarms, `pipeline` the classical way to compare with, `prediction` the figures,
`report` the text.
"""

from __future__ import annotations

from layershuffle.swarm.planning.hosts import HostsFile, HostSpec, ModelFacts, facts_of, read_hosts
from layershuffle.swarm.planning.planner import plan
from layershuffle.swarm.planning.prediction import Figures, Prediction
from layershuffle.swarm.planning.problem import OBJECTIVES, Objective
from layershuffle.swarm.planning.report import plan_report

__all__ = [
    "OBJECTIVES",
    "Figures",
    "HostSpec",
    "HostsFile",
    "ModelFacts",
    "Objective",
    "Prediction",
    "facts_of",
    "plan",
    "plan_report",
    "read_hosts",
]
