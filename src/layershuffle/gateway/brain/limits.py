"""Every time-out, bound and weight of the swarm, in one place. Plain data, no torch.

Times are in milliseconds. Nothing in the swarm waits longer than these limits.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from layershuffle.ground.settings import Settings, Share

Milliseconds = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(gt=1)]


class Limits(Settings):
    """Time limits and trust of the router, and of the processes of hosts."""

    deadline_ms: Milliseconds = 2000.0
    """Deadline of a request that names none."""
    max_deadline_ms: Milliseconds = 30_000.0
    """Longest deadline that a request may ask for."""
    # Slower heads get more: `RemoteModel` measures them.
    reserve_ms: Milliseconds = 30.0
    """Kept back at the end of a deadline for the model's head and the answer."""

    # A factor alone would give up a fast host at its first delay, and wait too long for a slow one.
    # On a busy machine delays of 100 ms are usual and do not indicate a failure.
    hop_factor: Factor = 4.0
    """A visit is given up after this many times its expected time plus the recent lag of visits
    ..."""
    hop_floor_ms: Milliseconds = 100.0
    """... but not sooner than this ..."""
    hop_cap_ms: Milliseconds = 1000.0
    """... and not later than this."""
    # The pauses double, so that a bad host costs users one hop limit per pause, not one per
    # request.
    suspect_ms: Milliseconds = 50.0
    """A host that failed a visit gets none for this long; doubled at every further failure ..."""
    suspect_max_ms: Milliseconds = 2000.0
    """... up to this."""
    # Most processes are back within a few seconds. A host that is dead for longer may never come
    # back, and every request would wait for it until its deadline.
    return_ms: Milliseconds = 10_000.0
    """A request with too few blocks waits for a host whose process died at most this long ago."""
    probe_ms: Milliseconds = 500.0
    """Longest answer time of a probe that brings a suspect back."""
    canary_every_ms: Milliseconds = 2000.0
    """Every host computes one block on a random state, whose result is known here, this often."""
    # A host that answers only canaries correctly can only be found by audits. An audit
    # costs the gateway one image through the blocks of the visit.
    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of visits that are computed again at the gateway, off the request's path, and compared;
    more of a new host's first ones. 0: none."""
    # Whoever is shut out may come back under another name, as often as it likes.
    first_audits: Annotated[int, Field(ge=0)] = 8
    """What a new process answers counts only once it was computed again at the gateway, until so
    many of its visits have passed."""

    start_ms: Milliseconds = 120_000.0
    """Longest time for the first answer of a block that was loaded."""

    load_ms: Milliseconds = 15_000.0
    """A host that is to load blocks and has loaded none of them for this long counts for what it
    has loaded alone, and others get the rest. It has as much more time ..."""
    load_bytes_per_second: Annotated[float, Field(gt=0)] = 250_000.0
    """... as the weights of a block take at this speed."""

    lag_fade: Share = 0.005
    """Share by which a visit reduces the longest recent lag: it halves in 140 visits."""
    # A start costs half a second of processor time, which the other hosts would lack.
    restart_ms: Milliseconds = 200.0
    """Pause before a process that ended is restarted; doubled at every further end ..."""
    restart_max_ms: Milliseconds = 30_000.0
    """... up to this ..."""
    stable_ms: Milliseconds = 60_000.0
    """... and reset for a process that ran for this long."""
    average_weight: Share = 0.2
    """Weight of the newest measurement in the averages of compute and link times."""
    prior_compute_ms: Milliseconds = 5.0
    """Assumed time of a block on an unmeasured host, if no other host was measured."""
    prior_link_ms: Milliseconds = 5.0
    """Assumed time of a visit beyond its compute, likewise."""

    # Canaries travel as float32, and a block gives the same result in a batch as alone to within
    # 1e-5 (measured), so no honest host comes near this.
    tolerance: Annotated[float, Field(ge=0)] = 1e-3
    """Largest difference between an answer and the known result, relative to its largest value."""

    def restart_pause_ms(self, ends: int) -> float:
        """The pause after so many ends in a row, none of them after `stable_ms`: at least one."""
        # Bounded, or the power would eventually overflow a float.
        return min(self.restart_ms * 2.0 ** min(ends - 1, 64), self.restart_max_ms)
