"""The settings of `fit` are made once and read where they are used: who reads them, in which order.

FILES lists them; a run verifies the list.
"""

import sys
from itertools import groupby, pairwise
from pathlib import Path

from runs import BASE

import layershuffle
from layershuffle.settings import FitSettings
from layershuffle.training import fit

PACKAGE = Path(layershuffle.__file__).parent
# Beside cli/fit.py, and training/warmup.py where blocks are compiled or memory ends.
FILES = {
    "settings.py",
    *(f"training/{name}.py" for name in ("fit", "checkpoints", "job", "state", "loop")),
}
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


def test_settings_are_read_in_few_places(tmp_path):
    run = WatchedSettings(**{**BASE, "method": "layershuffle"})
    READS.clear()  # of the checks of its making
    fit(run, tmp_path / "run")
    stops = [file for file, _ in groupby(file for file, _, _ in READS)]
    assert set(stops) == FILES
    assert len(stops) <= STOPS, stops
    # settings.py lies below training/, whose files stand side by side.
    climbs = sum(low == "settings.py" != high for low, high in pairwise(stops))
    assert climbs <= CLIMBS, stops
