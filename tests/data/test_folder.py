"""Class folders: splits, holdouts, groups, and which files count."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made import CLASSES, opened, splits_of

from layershuffle.data import ImageData
from layershuffle.errors import DataError
from pictures import noise
from refusals import refuses


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed, size=(12, 10)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """20 training and 5 validation images for each of three classes."""
    splits_of(tmp_path, {"train": range(60), "val": range(900, 915)})
    return tmp_path


def files_of(data: ImageData, name: str) -> list[str]:
    dataset = data.splits[name].dataset
    return [dataset.table.name(row) for row in dataset.indices]


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_other_names_of_the_reported_folder(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    assert opened(f"folder:{root}").splits["test"].size == 15


def test_the_share_of_a_holdout_of_few_images_is_said(tmp_path: Path) -> None:
    data = opened(splits_of(tmp_path, {"train": range(9), "val": range(3)}), holdout=0.05)
    assert (
        "the holdout is 3 of 9 training images (33%; 0.05 of each class, but at least one image), "
        "the same for every seed" in data.notes
    )


def test_validation_beside_test_picks_the_checkpoint(root: Path) -> None:
    for name in CLASSES:
        picture(root / "test" / name / "only.jpg", 1)
    data = opened(f"folder:{root}")
    sizes = {name: split.size for name, split in data.splits.items()}
    assert sizes == {"test": 3, "train": 60, "holdout": 15}
    assert "the holdout is the validation split of the data" in data.notes


def test_without_training_only_the_test_split_is_opened(root: Path) -> None:
    shutil.rmtree(root / "train")
    data = opened(f"folder:{root}", train=False, max_test=4)
    assert list(data.splits) == ["test"]
    assert data.splits["test"].size == 4


def test_a_class_with_one_image_stays_in_training(root: Path) -> None:
    for path in sorted((root / "train" / "ant").iterdir())[1:]:
        path.unlink()
    data = opened(f"folder:{root}")
    assert data.splits["holdout"].size == 8
    assert any("ant" in Path(file).parent.name for file in files_of(data, "train"))


def test_every_file_counts_once_and_hidden_and_special_ones_do_not(root: Path) -> None:
    """Links to the folder itself, to the same file and to another class, pipes, hidden folders,
    other files."""
    ant = root / "val" / "ant"
    picture(ant / "deep" / "x.PNG", 3)
    picture(ant / ".thumbnails" / "1.png", 4)
    (ant / ".DS_Store").write_bytes(b"x")
    (ant / "words.txt").write_text("x")
    (ant / "loop").symlink_to(".")
    (ant / "again.png").symlink_to("900.png")
    (ant / "gone.png").symlink_to("nowhere")
    os.mkfifo(ant / "pipe.png")
    (ant / "bees").symlink_to("../bee")
    os.link(ant / "900.png", root / "val" / "bee" / "hard.png")
    picture(root / "elsewhere" / "y.png", 5)
    (ant / "linked").symlink_to(root / "elsewhere")
    data = opened(f"folder:{root}")
    names = [Path(file).relative_to(root / "val").as_posix() for file in files_of(data, "test")]
    assert len(names) == 15 + 2
    assert {"ant/deep/x.PNG", "ant/linked/y.png"} <= set(names)
    (note,) = [note for note in data.notes if "left out" in note]
    assert "ant/.DS_Store" in note


def test_a_shell_that_reads_names_as_ascii_is_named(root: Path) -> None:
    """And not the names, which are UTF-8."""
    for split in ("train", "val"):
        (root / split / "bee").rename(root / split / "b\u00e9e")
    words = f"from layershuffle.data.folder import *; class_folders(Path({str(root / 'val')!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", words],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "reads names of files as ascii, not as UTF-8" in ran.stderr


def test_a_test_folder_without_classes_is_left_out(root: Path) -> None:
    picture(root / "test" / "1.png", 1)
    data = opened(f"folder:{root}")
    assert data.splits["test"].size == 15
    assert "test/ has no class folders and was left out" in data.notes


def test_groups_of_test_images_come_from_a_file(root: Path) -> None:
    """With a limit and with skipped images, each image keeps its group."""
    (root / "val" / "bee" / "904.png").write_bytes(b"no image")
    lines = [f"val/{CLASSES[k % 3]}/{k}.png,{'ab'[k % 2]}{k // 910}" for k in range(900, 915)]
    (root / "groups.csv").write_text("\n".join(["file,group", *lines[::-1], "train/x.png,z"]))
    for options in ({}, {"max_test": 7}, {"skip_corrupt": True}, {"train": False}):
        data = opened(f"folder:{root}", **options)
        groups = data.splits["test"].groups
        dataset = data.splits["test"].dataset
        rows = dataset.indices if "max_test" in options else range(len(dataset))
        inner = dataset.dataset if "max_test" in options else dataset
        files = [Path(inner.table.name(inner.indices[row])) for row in rows]
        named = {line.split(",")[0]: line.split(",")[1] for line in lines}
        texts = [named[file.relative_to(root).as_posix()] for file in files]
        same = [[text == other for text in texts] for other in texts]
        assert (groups == groups.T).tolist() == same
        assert "val: 15 images in 4 groups" in data.notes
    assert data.splits["test"].size == 15
    assert opened(f"folder:{root}", skip_corrupt=True).splits["test"].size == 14


def test_accents_in_two_ways_and_names_that_are_no_text(root: Path) -> None:
    """Both look right in a list of folders."""
    (root / "train" / "cat").rename(root / "train" / "caf\u00e9")
    (root / "val" / "cat").rename(root / "val" / "cafe\u0301")
    with refuses(DataError, root / "val"):
        opened(f"folder:{root}")
    (root / "train" / "caf\u00e9").rename(root / "train" / os.fsdecode(b"caf\xe9"))
    with refuses(DataError, root / "train"):
        opened(f"folder:{root}")
