"""Unusable files and directories: errors with cause, place and next step, no tracebacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from layershuffle.cli import main

MODEL = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=32&depth=2&num_heads=2&mlp_ratio=2"
)
DATA = "digit-pairs?train=40&validation=30&test=20"
SHORT = f"--method layershuffle --model {MODEL} --steps 1 --batch-size 4"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text file, a binary file, an empty directory, and files that are no images."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
        for number in range(4):
            (tmp_path / "images" / split / "a" / f"{number}.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        # outputs
        (f"fit {SHORT} --data {DATA} --out file", "A file stands where a directory is needed"),
        (f"fit {SHORT} --data {DATA} --out file/x", "A file stands where a directory is needed"),
        (f"fit {SHORT} --data {DATA} --out /proc/x", "There is no such place"),
        (
            f"analyze norms {MODEL} --data {DATA} --max-images 8 --out /proc/x",
            "There is no such place",
        ),
        ("reproduce digits-quick --out file", "A file stands where a directory is needed"),
        ("cache folder:images --out file", "cannot read this file of the cache"),
        ("swarm drain x --state file", "A file stands where a directory is needed"),
        ("swarm up --state file/x", "A file stands where a directory is needed"),
        # data
        (f"fit {SHORT} --data folder:file --out o", "The data folder is a file"),
        (f"fit {SHORT} --data folder:images --out o", "Cannot read image"),
        (f"fit {SHORT} --data folder:empty --out o", "there is no train/"),
        (f"fit {SHORT} --data hf:images --out o", "no label column"),
        (f"fit {SHORT} --data wds:bytes --out o", "no such folder"),
        (f"fit {SHORT} --data cifar100:file --out o", "CIFAR-100 is not there"),
        # models, recipes and images
        (f"eval file --data {DATA}", "There is no layershuffle.json"),
        (f"eval hf:empty --data {DATA}", "There is no layershuffle.json and no config.json here"),
        (f"eval timm:test_vit?checkpoint=bytes --data {DATA}", "torch refuses this"),
        (f"eval timm:test_vit?checkpoint=none --data {DATA}", "There is no such file"),
        (f"predict {MODEL} empty", "Cannot read image"),
        (f"predict {MODEL} bytes", "Cannot read image"),
        ("reproduce file", "A recipe must be a YAML mapping of settings"),
        ("reproduce bytes", "The recipe cannot be read"),
        ("merge empty --out m", "The recipe cannot be read"),
        ("report empty", "There is no readable study here: no plan.json"),
        (
            "reproduce digits-quick --out images --dry-run",
            "The directory is not empty and holds no",
        ),
        (
            f"merge {MODEL} {MODEL} --random 2 --data {DATA} --out empty",
            "--out must be a file for the scores",
        ),
        ("swarm plan bytes", "The recipe cannot be read"),
    ],
)
def test_what_cannot_be_used(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, cause: str
) -> None:
    assert main(words.split()) in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {cause}")
    assert ". Where: " in error
    assert ". Next: " in error
    assert "weights_only=False" not in error
