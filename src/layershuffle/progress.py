"""Progress of long work: it calls a function that its caller passes in, and the caller shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float, float | None], object]
"""Called with the unit (such as "images"), how many are done, and the total (`None` if unknown).
A new unit begins a new stage, which is counted from its first number."""


def unheard(*stage: object) -> None:
    """A `Progress` that ignores all calls."""
    del stage
