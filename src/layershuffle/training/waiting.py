"""How much of the time of the steps went into waiting for data, by the host's clock alone.

No GPU is asked anything. That is enough: a host that is ahead of its GPU is held back where it
launches work, so that in the long run it only waits for data when the GPU does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WaitingShare:
    """Percent of the time since the last `take` that was spent inside `waiting`.

    The first time begins with the first `waiting`, not with what a run does before. What happens
    inside `aside` (evaluation, checkpoints) is no part of the steps and left out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._waited = self._aside = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for the next batch."""
        begun = self._clock()
        if self._begun is None:
            self._begun = begun
        yield
        self._waited += self._clock() - begun

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around whatever is not training."""
        begun = self._clock()
        yield
        self._aside += self._clock() - begun

    def take(self) -> float:
        """The share in percent; the next one counts from here."""
        if self._begun is None:
            return 0.0
        now = self._clock()
        seconds = now - self._begun - self._aside
        share = 100.0 * self._waited / seconds if seconds > 0 else 0.0
        self._begun, self._waited, self._aside = now, 0.0, 0.0
        return share
