"""How fast work goes and how long it still takes, as people read it."""

from __future__ import annotations

import pytest

from layershuffle.cli.progress import pace_text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (1234.4, "1,234 passes/s"),
        (10.0, "10 passes/s"),
        (9.0, "540 passes/min"),
        (0.4, "24 passes/min"),
        (0.16, "576 passes/h"),
        (1 / 7200, "0.5 passes/h"),
    ],
)
def test_slow_work_has_a_pace_too(per_second: float, text: str) -> None:
    """A pass of a large model takes seconds: "0 passes/s" says nothing."""
    assert pace_text(per_second, "passes") == text
