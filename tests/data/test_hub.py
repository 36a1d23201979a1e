"""Hugging Face data without a network: splits, labels, tars, and the errors of mistakes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
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


def opened(place: Path | str, **options: object) -> ImageData:
    return open_data(f"hf:{place}", VIEW, options=DataOptions(**{"holdout": 0.2, **options}))


def sizes(data: ImageData) -> dict[str, int]:
    return {name: split.size for name, split in data.splits.items()}


def test_validation_beside_test_is_the_holdout(three_splits: Path) -> None:
    data = opened(three_splits)
    assert sizes(data) == {"train": 30, "holdout": 9, "test": 6}
    for name, row, seed in (("holdout", 4, 104), ("test", 2, 202)):
        image, _ = data.splits[name].dataset[row]
        assert image.permute(1, 2, 0).numpy().tobytes() == noise(seed).tobytes()
    assert sizes(opened(three_splits, train=False, max_test=4)) == {"test": 4}


def test_a_test_split_without_labels_does_not_count(tmp_path: Path) -> None:
    splits = {
        "train": rows(30, 0, label=[0, 1, 2] * 10),
        "validation": rows(3, 50, label=[0, 1, 2]),
        "test": rows(5, 70, label=[-1] * 5),
    }
    data = opened(saved(tmp_path, splits, label=datasets.ClassLabel(names=list(CLASSES))))
    assert sizes(data) == {"train": 24, "holdout": 6, "test": 3}
    assert "the test split has no labels; the validation split is reported" in data.notes


def test_integer_labels_are_numbered_and_checked(tmp_path: Path) -> None:
    splits = {"train": rows(6, 0, label=[0, 1, 3] * 2), "test": rows(2, 50, label=[0, 4])}
    with refuses(DataError):
        opened(saved(tmp_path, splits, label=datasets.Value("int64")))


def test_labels_that_training_does_not_have_are_named(tmp_path: Path) -> None:
    words = {
        "train": rows(4, 0, label=["cat", "dog"] * 2),
        "test": rows(2, 9, label=["cat", "cow"]),
    }
    with refuses(DataError):
        opened(saved(tmp_path / "a", words, label=datasets.Value("string")))
    words["train"]["label"][3] = None
    with refuses(DataError):
        opened(saved(tmp_path / "b", words, label=datasets.Value("string")))


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (datasets.List(datasets.ClassLabel(names=["a", "b"])), [[0], [1]]),
        (datasets.Value("float32"), [0.0, 1.0]),
        (datasets.Value("bool"), [False, True]),
        (datasets.Value("string"), [None, None]),
        (datasets.Value("int64"), [-1, -1]),
    ],
)
def test_columns_that_hold_no_labels_are_refused(tmp_path: Path, kind: object, cells: list) -> None:
    splits = {name: rows(2, 0, label=cells) for name in ("train", "test")}
    with refuses(DataError):
        opened(saved(tmp_path, splits, label=kind))


def test_no_column_is_taken_for_the_label_by_its_type(tmp_path: Path) -> None:
    """Captions and ages are no classes, unless they are named."""
    kinds = {"caption": datasets.Value("string"), "age": datasets.Value("int64")}
    splits = {
        name: rows(6, 0, caption=["a photo", "a cat", "a dog"] * 2, age=[4, 1, 0] * 2)
        for name in ("train", "test")
    }
    place = saved(tmp_path, splits, **kinds)
    with refuses(DataError):
        opened(place)
    assert opened(f"{place}?label=caption", holdout=0.5).classes == ("a cat", "a dog", "a photo")
    assert opened(f"{place}?label=age", holdout=0.5).classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("nested", [True, False])
def test_class_folders_win_over_the_columns_of_a_metadata_file(
    tmp_path: Path, nested: bool
) -> None:
    for split, count in (("train", 8), ("test", 4)):
        lines = []
        for k in range(count):
            name = f"{('cat', 'dog')[k % 2]}/{k}.png" if nested else f"{k}.png"
            path = tmp_path / "photos" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file_of(noise(k)))
            row = {"file_name": name, "caption": "a photo", "label": ("ape", "bat")[k % 2]}
            lines.append(json.dumps(row))
        (tmp_path / "photos" / split / "metadata.jsonl").write_text("\n".join(lines))
    data = opened(tmp_path / "photos", holdout=0.5)
    assert data.classes == (("cat", "dog") if nested else ("ape", "bat"))
    other = opened(f"{tmp_path}/photos?label=caption", holdout=0.5)
    assert other.classes == ("a photo",)


def test_folders_of_splits_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "flat" / split).mkdir(parents=True)
        for k in range(3):
            (tmp_path / "flat" / split / f"{k}.png").write_bytes(file_of(noise(k)))
    with refuses(DataError):
        opened(tmp_path / "flat")


def shard(path: Path, *samples: dict[str, bytes]) -> None:
    """A tar with members 0000.KEY, 0001.KEY and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for name, content in sample.items():
                member = tarfile.TarInfo(f"{number:04d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def sample(k: int, **members: bytes) -> dict[str, bytes]:
    return {"png": file_of(noise(k)), **members}


def test_labels_of_tars_in_json_members_and_a_choice_of_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        samples = [
            {**sample(k, json=json.dumps({"label": k % 2, "text": "x"}).encode()), "seg.png": b"-"}
            for k in range(6)
        ]
        shard(tmp_path / "tars" / split / "0.tar", *samples)
    with refuses(UsageError):
        opened(tmp_path / "tars")
    data = opened(f"{tmp_path}/tars?image=png")
    assert data.classes == ("0", "1")
    assert [label for _, label in data.splits["test"].dataset] == [0, 1] * 3


def test_samples_without_a_label_and_broken_tars_are_named(tmp_path: Path) -> None:
    good = [sample(k, cls=b"1") for k in range(8)]
    shard(tmp_path / "tars" / "train-0.tar", *good, sample(8), sample(9, cls=b"0"))
    shard(tmp_path / "tars" / "val-0.tar", *good)
    with refuses(DataError, f"sample 0008 of {tmp_path}/tars/train-0.tar"):
        opened(tmp_path / "tars")
    (tmp_path / "tars" / "train-0.tar").write_bytes(b"no tar" * 200)
    with refuses(DataError):
        opened(tmp_path / "tars")


def test_a_row_without_an_image_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    test = rows(3, 50, label=[0, 1, 2])
    test["img"][1] = None
    splits = {"train": rows(30, 0, label=[0, 1, 2] * 10), "test": test}
    place = saved(tmp_path, splits, label=datasets.ClassLabel(names=list(CLASSES)))
    with refuses(DataError, f"row 1 of hf:{place} (test)"):
        list(opened(place).splits["test"].dataset)
    assert opened(place, skip_corrupt=True).splits["test"].size == 2


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


def test_a_colon_names_a_configuration_unless_it_is_part_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(place: str, *, name: str | None) -> None:
        asked.append((place, name))
        raise ValueError("stop")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    (tmp_path / "a:b").mkdir()
    for place in ("org/set:small", "org/set", f"{tmp_path}/a:b"):
        with pytest.raises(DataError):
            opened(place)
    assert asked == [("org/set", "small"), ("org/set", None), (f"{tmp_path}/a:b", None)]
