"""Mistakes of new users, and the next step in the error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layershuffle as ls
from common import FAMILIES
from layershuffle.errors import DataError, StackError, UsageError
from refusals import refuses

VIT = FAMILIES["timm-vit"]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: ls.wrap("timm:vit_tiny_patch16_224"),
        lambda m: ls.depth_of("timm:x"),
        lambda m: ls.wrap([1]),
        lambda m: ls.running(m, None).__enter__(),
        lambda m: ls.running(m, 3).__enter__(),
        lambda m: ls.running(m, ls.Shuffled()).__enter__(),
    ],
)
def test_invalid_models_and_orders(call: Any) -> None:
    with refuses((StackError, UsageError)):
        call(VIT.wrapped())


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, 8, 8), {"pixel_values": torch.zeros(2)}])
def test_batches_without_labels(batch: Any) -> None:
    with refuses(DataError):
        ls.evaluate(VIT.wrapped(), [batch], modes="sequential")


# --- types ----------------------------------------------------------------------------------------

TYPED = """
import layershuffle as ls
from torch import nn


class Mine(nn.Module):
    pass


def keeps_its_type(model: Mine) -> Mine:
    return ls.unwrap(ls.wrap(model))


def misspelt(model: Mine) -> None:
    ls.wrapp(model)


def caught() -> type[Exception]:
    return ls.StackError
"""


def test_types_are_kept_and_misspelt_names_are_found(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(TYPED)
    # With the settings of `scripts/check`, whose cache has the package already.
    words = [sys.executable, "-m", "mypy", str(file)]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.partition("error: ")[2] for line in errors] == [
        'Module has no attribute "wrapp"; maybe "wrap"?  [attr-defined]'
    ], done.stdout
