"""How long work says how far it is: by a function that it is given, and whose caller shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float, float | None], object]
"""Called with what is counted, as "images", how many are done, and how many in all (`None`: not
known). A new word begins a new stage, which is counted from the number that comes first."""


def unheard(*stage: object) -> None:
    """The `Progress` of work that nobody watches."""
    del stage
