"""Fixtures of tests that open data by Hugging Face `datasets`."""

from pathlib import Path

import datasets
import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from, or left in, the user's cache; no progress bars in the output."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    datasets.disable_progress_bars()
