"""Hugging Face data without a network: image folders, saved data sets, streams, errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
from layershuffle.data.hub import split_config
from layershuffle.errors import DataError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
CLASSES = ("ant", "bee", "cat")


def rows(count: int, first: int, **labels: list) -> dict:
    return {
        "img": [{"bytes": file_of(noise(first + k)), "path": f"{k}.png"} for k in range(count)],
        **labels,
    }


def features(**labels: object) -> datasets.Features:
    return datasets.Features({"img": datasets.Image(), **labels})


def saved(tmp_path: Path, splits: dict[str, dict], **labels: object) -> Path:
    parts = {
        name: datasets.Dataset.from_dict(part, features=features(**labels))
        for name, part in splits.items()
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def three_splits(tmp_path: Path) -> Path:
    splits = {
        "train": rows(30, 0, label=[k % 3 for k in range(30)]),
        "validation": rows(9, 100, label=[k % 3 for k in range(9)]),
        "test": rows(6, 200, label=[k % 3 for k in range(6)]),
    }
    return saved(tmp_path, splits, label=datasets.ClassLabel(names=list(CLASSES)))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    for split, count, first in (("train", 20, 0), ("test", 4, 900)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                (folder / f"{k:02d}.png").write_bytes(file_of(noise(first + 50 * label + k)))
    return tmp_path / "images"


def opened(place: Path | str, **options: object) -> ImageData:
    return open_data(f"hf:{place}", VIEW, options=DataOptions(**{"holdout": 0.2, **options}))


def sizes(data: ImageData) -> dict[str, int]:
    return {name: split.size for name, split in data.splits.items()}


def whole(image: torch.Tensor) -> bytes:
    return image.permute(1, 2, 0).numpy().tobytes()


def test_an_image_folder_gives_a_cut_holdout(image_folder: Path) -> None:
    data = opened(image_folder)
    assert data.classes == CLASSES
    assert sizes(data) == {"train": 48, "holdout": 12, "test": 12}
    held_out = [label for _, label in data.splits["holdout"].dataset]
    assert torch.bincount(torch.tensor(held_out)).tolist() == [4, 4, 4]
    image, label = data.splits["test"].dataset[5]
    assert label == 1
    assert whole(image) == noise(900 + 50 + 1).tobytes()


def test_validation_beside_test_is_the_holdout(three_splits: Path) -> None:
    data = opened(three_splits)
    assert sizes(data) == {"train": 30, "holdout": 9, "test": 6}
    assert whole(data.splits["holdout"].dataset[4][0]) == noise(104).tobytes()
    assert whole(data.splits["test"].dataset[2][0]) == noise(202).tobytes()
    assert sizes(opened(three_splits, train=False, max_test=4)) == {"test": 4}


def test_a_single_reported_split_is_the_test(tmp_path: Path) -> None:
    labels = {"label": datasets.ClassLabel(names=list(CLASSES))}
    splits = {"train": rows(30, 0, label=[0, 1, 2] * 10), "dev": rows(3, 50, label=[0, 1, 2])}
    assert sizes(opened(saved(tmp_path, splits, **labels))) == {
        "train": 24,
        "holdout": 6,
        "test": 3,
    }


def test_a_test_split_without_labels_does_not_count(tmp_path: Path) -> None:
    splits = {
        "train": rows(30, 0, label=[0, 1, 2] * 10),
        "validation": rows(3, 50, label=[0, 1, 2]),
        "test": rows(5, 70, label=[-1] * 5),
    }
    data = opened(saved(tmp_path, splits, label=datasets.ClassLabel(names=list(CLASSES))))
    assert sizes(data) == {"train": 24, "holdout": 6, "test": 3}
    assert "the test split has no labels; the validation split is reported" in data.notes


def test_string_labels_are_sorted_classes(tmp_path: Path) -> None:
    splits = {
        "train": rows(6, 0, label=["dog", "ape", "cow"] * 2),
        "test": rows(2, 50, label=["cow", "ape"]),
    }
    place = saved(tmp_path, splits, label=datasets.Value("string"))
    data = opened(place, holdout=0.5)
    assert data.classes == ("ape", "cow", "dog")
    assert [label for _, label in data.splits["test"].dataset] == [1, 0]


def test_integer_labels_are_numbered_and_checked(tmp_path: Path) -> None:
    splits = {"train": rows(6, 0, label=[0, 1, 3] * 2), "test": rows(2, 50, label=[0, 4])}
    with refuses(DataError):
        opened(saved(tmp_path, splits, label=datasets.Value("int64")))


def test_two_label_columns_need_a_choice(tmp_path: Path) -> None:
    kinds = {
        "fine": datasets.ClassLabel(names=list(CLASSES)),
        "coarse": datasets.ClassLabel(names=["x", "y"]),
    }
    splits = {name: rows(6, 0, fine=[0, 1, 2] * 2, coarse=[0, 1] * 3) for name in ("train", "test")}
    place = saved(tmp_path, splits, **kinds)
    with refuses(UsageError):
        opened(place)
    assert opened(f"{place}?label=coarse", holdout=0.5).classes == ("x", "y")
    with refuses(UsageError):
        opened(f"{place}?label=medium")


def test_splits_with_other_class_lists_are_refused(tmp_path: Path) -> None:
    for name, order in (("train", CLASSES), ("test", CLASSES[::-1])):
        kind = datasets.ClassLabel(names=list(order))
        data = datasets.Dataset.from_dict(rows(3, 0, label=[0, 1, 2]), features(label=kind))
        data.save_to_disk(tmp_path / "odd" / name)
    (tmp_path / "odd" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refuses(DataError):
        opened(tmp_path / "odd")


def test_a_corrupt_image_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    test = rows(3, 50, label=[0, 1, 2])
    test["img"][1] = {"bytes": file_of(noise(51))[:90], "path": "broken.png"}
    splits = {"train": rows(30, 0, label=[0, 1, 2] * 10), "test": test}
    place = saved(tmp_path, splits, label=datasets.ClassLabel(names=list(CLASSES)))
    with refuses(DataError, f"row 1 of hf:{place} (test) (broken.png)"):
        list(opened(place).splits["test"].dataset)
    data = opened(place, skip_corrupt=True)
    assert (data.skipped, data.splits["test"].size) == (1, 2)
    assert [label for _, label in data.splits["test"].dataset] == [0, 2]


def test_data_sets_can_be_pickled_for_workers(three_splits: Path) -> None:
    data = opened(three_splits)
    again = pickle.loads(pickle.dumps(data.splits["test"].dataset))
    assert torch.equal(again[0][0], data.splits["test"].dataset[0][0])


def test_a_hub_name_offline_names_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # The libraries read HF_HUB_OFFLINE when they are imported, into these variables.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as error:
        opened("nobody/nothing")
    text = str(error.value)
    assert "Cannot open the data set" in text
    assert "hf:nobody/nothing" in text
    for hint in ("hf:DIR", "folder:DIR", "HF_HOME", "HF_HUB_OFFLINE"):
        assert hint in text


def test_local_places_without_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refuses(DataError):
        opened(tmp_path / "nowhere")
    with refuses(DataError):
        opened(tmp_path / "empty")


def test_missing_splits_and_columns(tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=list(CLASSES))
    place = saved(tmp_path, {"train": rows(3, 0, label=[0, 1, 2])}, label=kind)
    with refuses(DataError):
        opened(place)
    splits = {"train": {"text": ["a"]}, "test": {"text": ["b"]}}
    parts = {name: datasets.Dataset.from_dict(part) for name, part in splits.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "words")
    with refuses(DataError):
        opened(tmp_path / "words")


def test_configs(tmp_path: Path) -> None:
    assert split_config("org/set:small") == ("org/set", "small")
    assert split_config("org/set") == ("org/set", None)
    (tmp_path / "a:b").mkdir()
    assert split_config(f"{tmp_path}/a:b") == (f"{tmp_path}/a:b", None)
