"""CIFAR-100: only files with the published checksum are unpickled; errors; the data set."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR100

from layershuffle.data import DataOptions, ImageView, open_data
from layershuffle.errors import DataError
from refusals import refuses

VIEW = ImageView(channels=3, height=32, width=32, mean=(0.0,) * 3, std=(1.0,) * 3)
PUBLISHED = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
NAMES = [f"class{k:03d}" for k in range(100)]


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """500 training and 100 test images in CIFAR-100's layout.

    The real files are not available, so torchvision's checksums are replaced by those of these.
    """
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    labels = list(range(100))
    content = {
        "train": {"data": pixels(500, 0), "fine_labels": labels * 5},
        "test": {"data": pixels(100, 1), "fine_labels": labels},
        "meta": {"fine_label_names": NAMES},
    }
    sums = {}
    for name, value in content.items():
        (folder / name).write_bytes(pickle.dumps(value))
        sums[name] = hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})
    return tmp_path


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_splits_labels_and_pixels(fake: Path) -> None:
    data = open_data(f"cifar100:{fake}", VIEW, options=DataOptions(holdout=0.2))
    assert data.classes == tuple(NAMES)
    sizes = {name: split.size for name, split in data.splits.items()}
    assert sizes == {"train": 400, "holdout": 100, "test": 100}
    held_out = data.splits["holdout"].dataset
    assert sorted(held_out[k][1] for k in range(100)) == list(range(100))
    image, label = data.splits["test"].dataset[42]
    assert label == 42
    expected = torch.from_numpy(pixels(100, 1)[42].reshape(3, 32, 32))
    assert torch.equal(image, expected)


def test_the_folder_itself_may_be_named_and_training_left_out(fake: Path) -> None:
    spec = f"cifar100:{fake}/cifar-100-python"
    data = open_data(spec, VIEW, options=DataOptions(train=False, max_test=7))
    assert {name: split.size for name, split in data.splits.items()} == {"test": 7}


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_a_file_that_is_not_the_published_one_is_never_unpickled(fake: Path, name: str) -> None:
    trap = fake / "trap"
    bomb = pickle.dumps(Bomb(trap))
    (fake / "cifar-100-python" / name).write_bytes(bomb)
    with refuses(DataError):
        open_data(f"cifar100:{fake}", VIEW)
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.is_dir(), "the bomb of this test does not work"


def test_torchvision_knows_the_published_sums() -> None:
    assert dict(CIFAR100.train_list + CIFAR100.test_list) == PUBLISHED
    assert CIFAR100.meta["md5"] == "7973b15100ade9c7d40fb424638fde48"


def test_missing_and_unpacked_archives_say_what_to_do(tmp_path: Path) -> None:
    with refuses(DataError):
        open_data(f"cifar100:{tmp_path}", VIEW)
    archive = tmp_path / "cifar-100-python.tar.gz"
    archive.write_bytes(b"x")
    with refuses(DataError):
        open_data(f"cifar100:{tmp_path}", VIEW)
    (tmp_path / "cifar-100-python").mkdir()
    with refuses(DataError):
        open_data(f"cifar100:{tmp_path}", VIEW)
