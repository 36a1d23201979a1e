"""A process in which some packages appear not to be installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

_PROLOGUE = """
import gc, sys
gc.disable()  # a quarter of the time of importing torch
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in {absent!r}
        return None if absent else super().find_spec(name, path, target)

# In the finder's own place: whoever asks whether a package is there is told no, as where it is not.
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_without(
    absent: Collection[str], code: str, *, at: Path
) -> subprocess.CompletedProcess[str]:
    """Run `code` in the directory `at`, in a new process without the modules `absent`."""
    prologue = _PROLOGUE.replace("{absent!r}", repr(set(absent)))
    return subprocess.run(
        [sys.executable, "-c", prologue + code],
        cwd=at, capture_output=True, text=True, check=False,
    )  # fmt: skip
