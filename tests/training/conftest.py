"""Runs of the tests of training leave a page without curves, but for the test of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layershuffle.training import history


@pytest.fixture(scope="module", autouse=True)
def without_curves() -> Iterator[None]:
    """As where matplotlib is missing: to draw them takes as long as the steps of most runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "missing", lambda *names: names)
        yield
