"""Files and directories that are made once for all pytest workers, such as the package."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED = "LAYERSHUFFLE_TESTS"
"""The variable with the directory that all processes of a run of pytest share (`conftest.py`)."""


def once(
    factory: pytest.TempPathFactory,
    name: str,
    make: Callable[[Path], None],
    *,
    room: str = "clusters",
) -> Path:
    """The file or directory `name`, made by `make(path)` for the first worker that needs it.

    What shares a room is made one after the other: clusters starve side by side.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = shared / name
    with (shared / f"{room}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = shared / f"{name}.whole"
        if not whole.exists():
            make(path)
            whole.touch()
    return path


def built_package(repository: Path, factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist; hatchling needs no network for them."""
    return once(factory, "dist", lambda place: build(repository, place), room="package")


def build(source: Path, place: Path, *flags: str) -> None:
    """Build from the project at `source` into `place`."""
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(place), *flags]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
