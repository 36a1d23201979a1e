"""Models as ONNX files, made once for all tests."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from layershuffle.core.stack import stack_of
from layershuffle.export import export_model
from layershuffle.models import load, save
from once import SHARED, once

SHIPPED = "bundled:digits-swarm"
HOSTED = range(1, 11)
"""The blocks of the shipped model that hosts serve; the first and the last keep their place."""


def exported_digits(factory: pytest.TempPathFactory) -> Path:
    """The directory of the shipped model's files; no test may change them."""
    return once(factory, "exported-digits", lambda path: export_model(SHIPPED, path))


def exported_without_ends() -> Path:
    """The same weights in a model that draws all twelve blocks, so that hosts serve all of them."""
    place = Path(os.environ[SHARED])
    path = place / "without-ends"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():  # an export takes its name when it is whole
            model = load(SHIPPED)
            stack_of(model).fixed = (0, 0)
            save(model, place / "model")
            export_model(f"dir:{place / 'model'}", path)
    return path
