"""Hugging Face data without a network: splits, labels, tars, and the errors of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import CLASSES, opened, rows, sample, saved, shard

from layershuffle.data import ImageData
from layershuffle.data.transforms import Images
from layershuffle.errors import DataError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
LABELS = datasets.ClassLabel(names=list(CLASSES))


def sizes(data: ImageData) -> dict[str, int]:
    return {name: split.size for name, split in data.splits.items()}


def test_validation_beside_test_is_the_holdout(tmp_path: Path) -> None:
    splits = {
        "train": rows(30, 0, label=[0, 1, 2] * 10),
        "validation": rows(9, 100, label=[0, 1, 2] * 3),
        "test": rows(6, 200, label=[0, 1, 2] * 2),
    }
    place = saved(tmp_path, splits, label=LABELS)
    data = opened(f"hf:{place}")
    assert sizes(data) == {"train": 30, "holdout": 9, "test": 6}
    for name, row, seed in (("holdout", 4, 104), ("test", 2, 202)):
        image, _ = data.splits[name].dataset[row]
        assert image.permute(1, 2, 0).numpy().tobytes() == noise(seed).tobytes()
    assert sizes(opened(f"hf:{place}", train=False, max_test=4)) == {"test": 4}


@pytest.mark.parametrize("plain", [False, True])
def test_images_of_a_parquet_file_that_does_not_say_so(plain: bool, tmp_path: Path) -> None:
    """As dask and pandas write them: bytes and a path, or bytes alone."""
    files = [file_of(noise(seed)) for seed in range(6)]
    cells = files if plain else [{"bytes": file, "path": "x.png"} for file in files]
    for split in ("train", "test"):
        table = pa.table({"image": cells, "label": [0, 1, 2] * 2})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    data = opened(f"hf:{tmp_path}", holdout=0.5)
    assert sizes(data) == {"train": 3, "holdout": 3, "test": 6}
    image, label = data.splits["test"].dataset[4]
    assert (image.permute(1, 2, 0).numpy().tobytes(), label) == (noise(4).tobytes(), 1)


def test_other_images_in_the_same_rows_are_noticed(tmp_path: Path) -> None:
    """By the size of the files of their split, which are not read for it."""
    digests = []
    for name, seed, side in (("a", 0, 8), ("b", 0, 8), ("c", 30, 9)):
        images = [file_of(noise(seed + row, size=(side, 8))) for row in range(6)]
        for split in ("train", "test"):
            table = pa.table({"image": images, "label": [0, 1, 2] * 2})
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(table, tmp_path / name / f"{split}.parquet")
        tested = opened(f"hf:{tmp_path / name}", holdout=0.5).splits["test"].dataset
        assert isinstance(tested, Images)
        digests.append(tested.contents(("0", "1", "2")))
    assert digests[0] == digests[1] != digests[2]


def test_a_test_split_without_labels_does_not_count(tmp_path: Path) -> None:
    splits = {
        "train": rows(30, 0, label=[0, 1, 2] * 10),
        "validation": rows(3, 50, label=[0, 1, 2]),
        "test": rows(5, 70, label=[-1] * 5),
    }
    data = opened(f"hf:{saved(tmp_path, splits, label=LABELS)}")
    assert sizes(data) == {"train": 24, "holdout": 6, "test": 3}
    assert "the test split has no labels; the validation split is reported" in data.notes


def test_a_column_that_is_named_is_the_label(tmp_path: Path) -> None:
    kinds = {"caption": datasets.Value("string"), "age": datasets.Value("int64")}
    splits = {
        name: rows(6, 0, caption=["a photo", "a cat", "a dog"] * 2, age=[4, 1, 0] * 2)
        for name in ("train", "test")
    }
    place = saved(tmp_path, splits, **kinds)
    assert opened(f"hf:{place}?label=caption", holdout=0.5).classes == ("a cat", "a dog", "a photo")
    assert opened(f"hf:{place}?label=age", holdout=0.5).classes == ("0", "1", "2", "3", "4")


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
    data = opened(f"hf:{tmp_path}/photos", holdout=0.5)
    assert data.classes == (("cat", "dog") if nested else ("ape", "bat"))
    other = opened(f"hf:{tmp_path}/photos?label=caption", holdout=0.5)
    assert other.classes == ("a photo",)


def test_labels_of_tars_in_json_members_and_a_choice_of_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        samples = [
            {**sample(k, json=json.dumps({"label": k % 2, "text": "x"}).encode()), "seg.png": b"-"}
            for k in range(6)
        ]
        shard(tmp_path / "tars" / split / "0.tar", *samples)
    with refuses(UsageError):
        opened(f"hf:{tmp_path}/tars")
    data = opened(f"hf:{tmp_path}/tars?image=png")
    assert data.classes == ("0", "1")
    assert [label for _, label in data.splits["test"].dataset] == [0, 1] * 3


def test_a_row_without_an_image_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    test = rows(3, 50, label=[0, 1, 2])
    test["img"][1] = None
    splits = {"train": rows(30, 0, label=[0, 1, 2] * 10), "test": test}
    place = saved(tmp_path, splits, label=LABELS)
    with refuses(DataError, f"row 1 of hf:{place} (test)"):
        list(opened(f"hf:{place}").splits["test"].dataset)
    assert opened(f"hf:{place}", skip_corrupt=True).splits["test"].size == 2


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
            opened(f"hf:{place}")
    assert asked == [("org/set", "small"), ("org/set", None), (f"{tmp_path}/a:b", None)]
