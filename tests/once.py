"""Files and directories that are made once for all pytest workers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
