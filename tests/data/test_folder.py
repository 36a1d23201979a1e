"""Class folders: splits, holdouts, and the errors of all mistakes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
from layershuffle.data.transforms import Images
from layershuffle.errors import DataError
from pictures import noise
from refusals import refuses

VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
CLASSES = ("ant", "bee", "cat")


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed, size=(12, 10)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """20 training and 5 validation images for each of three classes."""
    for split, count in (("train", 20), ("val", 5)):
        for label, name in enumerate(CLASSES):
            for k in range(count):
                picture(
                    tmp_path / split / name / f"{k:02d}.png", 1000 * label + k + 500 * (count < 9)
                )
    return tmp_path


def opened(root: Path, view: ImageView = VIEW, **options: object) -> ImageData:
    return open_data(f"folder:{root}", view, options=DataOptions(**{"holdout": 0.2, **options}))


def images_of(data: ImageData, name: str) -> Images:
    dataset = data.splits[name].dataset
    assert isinstance(dataset, Images)
    return dataset


def files_of(data: ImageData, name: str) -> list[str]:
    dataset = images_of(data, name)
    return [dataset.table.name(row) for row in dataset.indices]


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_the_reported_folder(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    assert opened(root).splits["test"].size == 15


def test_validation_beside_test_picks_the_checkpoint(root: Path) -> None:
    for name in CLASSES:
        picture(root / "test" / name / "only.jpg", 1)
    data = opened(root)
    assert {name: split.size for name, split in data.splits.items()} == {
        "test": 3,
        "train": 60,
        "holdout": 15,
    }
    assert "the holdout is the validation split of the data" in data.notes


def test_without_training_only_the_test_split_is_opened(root: Path) -> None:
    shutil.rmtree(root / "train")
    data = opened(root, train=False, max_test=4)
    assert list(data.splits) == ["test"]
    assert data.splits["test"].size == 4
    with refuses(DataError):
        opened(root)


def test_nothing_readable_is_an_error_even_when_skipping(root: Path) -> None:
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with refuses(DataError):
        opened(root, skip_corrupt=True)


def test_a_missing_folder(tmp_path: Path) -> None:
    with refuses(DataError):
        opened(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with refuses(DataError):
        opened(tmp_path / "file")


def test_the_folder_of_one_split_is_not_all_of_the_data(root: Path) -> None:
    with refuses(DataError, root / "train"):
        opened(root / "train")


def test_class_folders_without_splits_are_counted_and_the_next_step_is_named(
    tmp_path: Path,
) -> None:
    for k in range(1000):
        (tmp_path / f"n{k:08d}").mkdir()
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    text = str(error.value)
    assert "no train/ and no val/" in text
    assert "there are 1,000 folders (n00000000, n00000001, n00000002 and 997 more)" in text
    assert f"move them into {tmp_path}/train" in text


def test_an_empty_folder_and_a_split_without_classes(tmp_path: Path) -> None:
    with refuses(DataError):
        opened(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with refuses(DataError):
        opened(tmp_path)


@pytest.mark.parametrize("content", [None, "x.txt"])
def test_an_empty_class_folder_is_named(root: Path, content: str | None) -> None:
    for split in ("train", "val"):
        (root / split / "dog").mkdir()
        if content:
            (root / split / "dog" / content).write_text("hello")
    with refuses(DataError):
        opened(root)


def test_different_classes_are_named(root: Path) -> None:
    (root / "val" / "cat").rename(root / "val" / "dog")
    with refuses(DataError):
        opened(root)


def test_val_and_validation_together_are_ambiguous(root: Path) -> None:
    shutil.copytree(root / "val", root / "validation")
    with refuses(DataError):
        opened(root)


def test_a_class_with_one_image_stays_in_training(root: Path) -> None:
    for path in sorted((root / "train" / "ant").iterdir())[1:]:
        path.unlink()
    data = opened(root)
    assert data.splits["holdout"].size == 8
    assert any("ant" in Path(file).parent.name for file in files_of(data, "train"))


def test_every_file_counts_once_and_hidden_and_special_ones_do_not(root: Path) -> None:
    """Links to folders above and to the same file, pipes, hidden folders, other files."""
    ant = root / "val" / "ant"
    picture(ant / "deep" / "x.PNG", 3)
    picture(ant / ".thumbnails" / "1.png", 4)
    (ant / ".DS_Store").write_bytes(b"x")
    (ant / "words.txt").write_text("x")
    (ant / "loop").symlink_to(".")
    (ant / "up").symlink_to("../..")
    (ant / "again.png").symlink_to("00.png")
    (ant / "gone.png").symlink_to("nowhere")
    os.mkfifo(ant / "pipe.png")
    picture(root / "elsewhere" / "y.png", 5)
    (ant / "linked").symlink_to(root / "elsewhere")
    data = opened(root)
    names = [Path(file).relative_to(root / "val").as_posix() for file in files_of(data, "test")]
    assert len(names) == 15 + 2
    assert {"ant/deep/x.PNG", "ant/linked/y.png"} <= set(names)
    (note,) = [note for note in data.notes if "left out" in note]
    assert note.startswith("val: 8 files or folders")
    assert "ant/.DS_Store" in note


def test_a_test_folder_without_classes_is_left_out(root: Path) -> None:
    picture(root / "test" / "1.png", 1)
    data = opened(root)
    assert data.splits["test"].size == 15
    assert "test/ has no class folders and was left out" in data.notes


@pytest.mark.parametrize("names", [("Train", "Val"), ("training", "testing")])
def test_other_names_of_splits_are_not_taken_for_classes(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    for name in names:
        picture(tmp_path / name / "cat" / "1.png", 1)
    with refuses(DataError):
        opened(tmp_path)


def test_groups_of_test_images_come_from_a_file(root: Path) -> None:
    """With a limit and with skipped images, each image keeps its group."""
    (root / "val" / "bee" / "02.png").write_bytes(b"no image")
    lines = [f"val/{name}/{k:02d}.png,{'ab'[k % 2]}{k // 4}" for name in CLASSES for k in range(5)]
    (root / "groups.csv").write_text("\n".join(["file,group", *lines[::-1], "train/x.png,z"]))
    for options in ({}, {"max_test": 7}, {"skip_corrupt": True}, {"train": False}):
        data = opened(root, **options)
        groups = data.splits["test"].groups
        dataset = data.splits["test"].dataset
        rows = dataset.indices if "max_test" in options else range(len(dataset))
        inner = dataset.dataset if "max_test" in options else dataset
        files = [Path(inner.table.name(inner.indices[row])) for row in rows]
        named = {line.split(",")[0]: line.split(",")[1] for line in lines}
        texts = [named[file.relative_to(root).as_posix()] for file in files]
        same = [[text == other for text in texts] for other in texts]
        assert (groups == groups.T).tolist() == same
        assert "val: 15 images in 3 groups" in data.notes
    assert data.splits["test"].size == 15
    assert opened(root, skip_corrupt=True).splits["test"].size == 14


def test_groups_that_leave_images_out_are_refused(root: Path) -> None:
    path = root / "groups.csv"
    path.write_text("file,group\nval/ant/00.png,a\nval/ant/01.png,\n")
    with refuses(DataError, path):
        opened(root)
    path.write_text("image,group\nval/ant/00.png,a\n")
    with refuses(DataError):
        opened(root)
    path.unlink()
    assert opened(root).splits["test"].groups is None
