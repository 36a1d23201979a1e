"""The errors of this project in tests: their class and their place. What they say may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from layershuffle.ground.errors import LayerShuffleError

E = TypeVar("E", bound=LayerShuffleError)


@contextmanager
def refuses(
    error: type[E] | tuple[type[E], ...], place: str | Path | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises` for our own errors: exactly this class, and this place where one is given.

    >>> with refuses(DataError, tmp_path / "a.png"):
    ...     read_image(tmp_path / "a.png")
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    value = caught.value
    classes = error if isinstance(error, tuple) else (error,)
    assert type(value) in classes, repr(value)
    assert "\n" not in str(value), "an error is one paragraph"
    if place is not None:
        assert str(value.place) == str(place)
