"""The swarm in simulated time: the same policy, hosts that come and go, up to 10,000 of them.

`simulate` in `engine` is the way in. `scenario` says what is simulated, `machines` are the hosts,
`gateway` is the router on simulated time, `outcome` the figures.
"""

from __future__ import annotations

from layershuffle.swarm.simulation.engine import simulate
from layershuffle.swarm.simulation.outcome import Outcome, outcome_report
from layershuffle.swarm.simulation.scenario import (
    Arrivals,
    Churn,
    HostTimes,
    Profile,
    profile_of,
    scaled,
)

__all__ = [
    "Arrivals",
    "Churn",
    "HostTimes",
    "Outcome",
    "Profile",
    "outcome_report",
    "profile_of",
    "scaled",
    "simulate",
]
