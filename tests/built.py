"""The wheel and the sdist, built once for all tests that use them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from once import once


def built_package(repository: Path, factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist; hatchling needs no network for them."""
    return once(factory, "dist", lambda place: build(repository, place), room="package")


def build(source: Path, place: Path, *flags: str) -> None:
    """Build from the project at `source` into `place`."""
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(place), *flags]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
