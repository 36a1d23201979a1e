"""Saved directories for the tests of models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_models import LIBRARIES

import layershuffle as ls
from common import FAMILIES


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    """A stock transformers directory of a ViT with 5 classes."""
    FAMILIES["hf-vit"].plain().save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good directory of each library, with position parts."""
    root = tmp_path_factory.mktemp("good")
    for name in LIBRARIES:
        model = ls.add_position(
            FAMILIES[name].wrapped(),
            encoding=ls.EncodingForm(features=4),
            prediction=ls.PredictionForm(),
        )
        ls.save(model, root / name, record={"method": "baseline"})
    return root


@pytest.fixture
def good(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A fresh copy of a good directory."""
    return lambda name: shutil.copytree(originals / name, tmp_path / name)
