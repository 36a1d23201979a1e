"""The share of the training steps' time that is spent waiting for data, by the host's clock.

Asking the GPU would make every step wait for it. The host's clock is enough: a host that runs ahead
of its GPU is held back where it launches work, so in the long run it waits for data only when the
GPU does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DataWaitMeter:
    """Percent of the time since the last `reset` that was spent inside `waiting`.

    The time begins with the first `waiting`, not with what a run does before it. What happens
    inside `exclude` (scoring, checkpoints) is not part of the steps.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin: float | None = None
        self._waited = self._excluded = self._earlier = 0.0

    def seconds(self) -> float:
        """The time of all steps up to now."""
        return self._earlier + self._since_reset()

    def _since_reset(self) -> float:
        return 0.0 if self._begin is None else self._clock() - self._begin - self._excluded

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for the next batch."""
        begin = self._clock()
        if self._begin is None:
            self._begin = begin
        yield
        self._waited += self._clock() - begin

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Leave the time inside out of the time of the steps."""
        begin = self._clock()
        yield
        self._excluded += self._clock() - begin

    def reset(self) -> float:
        """The share in percent up to now; the next one counts from here."""
        if self._begin is None:
            return 0.0
        seconds = self._since_reset()
        share = 100.0 * self._waited / seconds if seconds > 0 else 0.0
        self._earlier += seconds
        self._begin, self._waited, self._excluded = self._clock(), 0.0, 0.0
        return share
