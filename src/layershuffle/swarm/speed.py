"""The time of a block on this machine: measured once, then stored.

The same input must always give the same plan, but no two measurements are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from layershuffle.files import write_text
from layershuffle.machine import processor


def store_path() -> Path:
    """The path of the stored measurements, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "layershuffle" / "block-times.json"


def stored_ms(program: bytes, measure: Callable[[], float]) -> float:
    """Milliseconds of a block with this program: the stored value, else that of `measure`.

    It is measured again for another processor, number of threads or version of torch.
    """
    facts = (processor(), str(torch.get_num_threads()), torch.__version__)
    key = hashlib.sha256(program + "\n".join(facts).encode()).hexdigest()
    path = store_path()
    stored = _read(path)
    if key not in stored:
        # Rounded as it is printed, because more digits of a time are not meaningful.
        stored[key] = float(f"{measure():.3g}")
        write_text(path, json.dumps(stored, indent=1))
    return stored[key]


def _read(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # An unreadable cache is measured again.
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: ms for key, ms in content.items() if isinstance(ms, float) and ms > 0}
