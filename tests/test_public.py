"""The public names, and that importing them is fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layershuffle as ls

HEAVY = ("torch", "timm", "transformers", "torchvision", "numpy", "scipy", "sklearn", "datasets")
PROMISED = {
    "ExecutionOrder", "Sequential", "Shuffled", "LayerDrop", "Kept", "Fixed", "wrap", "unwrap",
    "running", "tap", "blocks_of", "depth_of", "load", "save", "add_position", "EncodingForm",
    "PredictionForm", "LayerShuffleError", "Method", "tie", "fit", "predict", "evaluate",
}  # fmt: skip


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
        "import layershuffle.files, layershuffle.core.policies, layershuffle.core.position_forms",
    ],
)
def test_no_heavy_import_until_needed(statement: str) -> None:
    assert not loaded_after(statement) & set(HEAVY)


def test_data_need_no_model_library() -> None:
    """Images are read in separate processes, in which timm would cost seconds."""
    assert not loaded_after("import layershuffle.data") & {"timm", "transformers"}


def test_the_check_above_can_fail() -> None:
    assert "numpy" in loaded_after("import layershuffle, numpy")


@pytest.mark.parametrize("name", ls.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(ls, name) is getattr(ls, name)
    assert name in dir(ls)


def test_everything_promised_is_public() -> None:
    assert set(ls.__all__) >= PROMISED


def test_star_import_and_unknown_names() -> None:
    with pytest.raises(AttributeError):
        ls.shuffle  # noqa: B018
    with pytest.raises(ImportError):
        exec("from layershuffle import nothing_of_that_name")


def test_names_of_modules_are_the_functions() -> None:
    """`predict` is a module, too, which commands import."""
    code = "import layershuffle.predict, layershuffle as ls; print(ls.predict.__qualname__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "predict\n"


def test_version() -> None:
    numbers = ls.__version__.split(".")
    assert len(numbers) >= 3
    assert all(number.isdigit() for number in numbers[:2])
