"""The swarm in virtual time: the real router over simulated hosts that come and go, up to 10,000.

`simulate` in `run` is the way in. `scenario` says what is simulated, `hosts` are the hosts,
`outcome` the figures, and `clock` is the event loop whose time jumps.
"""

from __future__ import annotations

from layershuffle.swarm.simulation.outcome import (
    SimulationOutcome,
    outcome_json,
    outcome_report,
)
from layershuffle.swarm.simulation.run import simulate
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
    "Profile",
    "SimulationOutcome",
    "outcome_json",
    "outcome_report",
    "profile_of",
    "scaled",
    "simulate",
]
