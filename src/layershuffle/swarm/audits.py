"""Choose the visits to audit: some at random, others because they look odd for their host.

A random audit of 2 % of the visits catches a host that lies in one visit of a hundred once in 5,000
visits. But its false answers rarely look like its other ones, so half of the audits go to visits
that are odd by two cheap measures of what the blocks added to the state. Oddness proves nothing:
only the audit, which computes the visit again, does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from layershuffle.swarm.messages import State

_TINY = 1e-12
_WEIGHT = 0.05  # of the newest visit in a host's habits
_KNOWN = 20  # visits after which oddness is judged; new hosts are audited anyway
_NARROW = 0.01  # least spread, because after two equal answers any third one would be odd
_FIRST_BOUND, _STEP = 4.0, 0.5


def measures(before: State, after: State) -> tuple[float, float]:
    """Length of the change relative to the state (natural logarithm), and its direction.

    The direction is the cosine of the angle between state and change, over all values of the state.
    """
    start = before.ravel()
    added = after.ravel() - start
    # Not by `linalg.norm`, which takes four times as long for a small state.
    length, growth = math.sqrt(start.dot(start)), math.sqrt(added.dot(added))
    ratio = math.log((growth + _TINY) / (length + _TINY))
    return ratio, float(start.dot(added)) / (growth * length + _TINY)


@dataclass(eq=False, slots=True)
class Habit:
    """What the visits of one process were like.

    `passed`: those that passed an audit; the more, the more it is trusted. `bound` is the oddness
    above which a visit is audited; it adapts to the share of audits.
    """

    visits: int = 0
    passed: int = 0
    centre: list[float] = field(default_factory=lambda: [0.0, 0.0])
    spread: list[float] = field(default_factory=lambda: [0.0, 0.0])
    bound: float = _FIRST_BOUND

    def audits(
        self, before: State, after: State, *, share: float, chance: np.random.Generator
    ) -> bool:
        """Whether the visit with these states `[images, tokens, width]` around it is audited.

        In the long run a fraction `share` of visits is, drawn from the secret generator `chance`;
        if it is small, half of these are chosen for their oddness, and none if it is 1.
        """
        for_oddness = share * (1 - share) / 2
        odd = self._is_odd(before, after, share=for_oddness)
        # Always drawn, so the answers of one host do not shift the draws of others.
        drawn = bool(chance.random() < max(share - for_oddness, 1 / (1 + self.passed)))
        return drawn or odd

    def _is_odd(self, before: State, after: State, *, share: float) -> bool:
        """Whether a visit is among the oddest; updates the statistics."""
        self.visits += 1
        # The first visits have equal weights, or the very first would dominate for long.
        weight = max(_WEIGHT, 1 / self.visits)
        oddness = 0.0
        for at, value in enumerate(measures(before, after)):
            off = abs(value - self.centre[at])
            oddness = max(oddness, off / max(self.spread[at], _NARROW))
            self.centre[at] += weight * (value - self.centre[at])
            self.spread[at] += weight * (off - self.spread[at])
        if self.visits <= _KNOWN:
            return False
        odd = oddness > self.bound
        # Steps up and down balance where a fraction `share` of the visits lies above.
        self.bound *= 1 + _STEP if odd else (1 + _STEP) ** (-share / (1 - share))
        return odd
