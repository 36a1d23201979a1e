"""The shipped model as ONNX files, made once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from layershuffle.export import export_model
from once import once

SHIPPED = "bundled:digits-swarm"


def exported_digits(factory: pytest.TempPathFactory) -> Path:
    """The directory of the files; no test may change them."""
    return once(factory, "exported-digits", lambda path: export_model(SHIPPED, path))
