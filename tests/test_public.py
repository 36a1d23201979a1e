"""The public names: importing them is fast, and their types are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import layershuffle as ls

HEAVY = ("torch", "timm", "transformers", "torchvision", "numpy", "scipy", "sklearn", "datasets")


def loaded_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that runs `statement`."""
    code = f"{statement}; import sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import layershuffle",
        "import layershuffle as ls; ls.ExecutionOrder.sequential(3); ls.LayerShuffleError",
        "import layershuffle as ls; ls.Shuffled().draw(12, seed=0, step=0); ls.EncodingForm()",
        "import layershuffle.ground.files, layershuffle.core.policies",
    ],
)
def test_no_heavy_import_until_needed(statement: str) -> None:
    assert not loaded_after(statement) & set(HEAVY)


def test_data_need_no_model_library() -> None:
    """Images are read in separate processes, in which timm would cost seconds."""
    assert not loaded_after("import layershuffle.data") & {"timm", "transformers"}


def test_the_check_above_can_fail() -> None:
    assert "numpy" in loaded_after("import layershuffle, numpy")


def test_every_public_name_resolves() -> None:
    for name in ls.__all__:
        assert getattr(ls, name) is not None
        assert name in dir(ls)


def test_names_of_modules_are_the_functions() -> None:
    """`predict` is a module, too, which commands import."""
    code = "import layershuffle.scoring.predict, layershuffle as ls; print(ls.predict.__qualname__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "predict\n"


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
