"""The settings of `fit` are made once and read where they are used: who reads them, in which order.

docs/architecture.md lists these files; here a run verifies the list.
"""

import re
import sys
from itertools import groupby, pairwise
from pathlib import Path

from runs import BASE

import layershuffle
from layershuffle.settings import FitSettings
from layershuffle.training import fit

PACKAGE = Path(layershuffle.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Before `fit`, and where blocks are compiled or a batch does not fit the memory.
NOT_IN_THIS_RUN = {"cli/fit.py", "training/warmup.py"}
STOPS, CLIMBS = 25, 5
READS: dict[tuple[str, str, str], None] = {}  # in the order of the first read


class WatchedSettings(FitSettings):
    """Settings that note every read: file, function and name, once each."""

    def __getattribute__(self, name):
        code = sys._getframe(1).f_code
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            READS.setdefault((str(path.relative_to(PACKAGE)), code.co_qualname, name))
        return super().__getattribute__(name)


def documented():
    """The files in the table of the settings."""
    section = PAGE.read_text("utf-8").split("## The settings of `fit`")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])}


def test_settings_are_read_in_few_places(tmp_path):
    run = WatchedSettings(**{**BASE, "method": "layershuffle"})
    READS.clear()  # of the checks of its making
    fit(run, tmp_path / "run")
    stops = [file for file, _ in groupby(file for file, _, _ in READS)]
    assert set(stops) == documented() - NOT_IN_THIS_RUN
    assert len(stops) <= STOPS, stops
    # settings.py lies below training/, whose files stand side by side.
    climbs = sum(low == "settings.py" != high for low, high in pairwise(stops))
    assert climbs <= CLIMBS, stops
