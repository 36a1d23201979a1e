"""What every source promises, shown on the same pictures in every form that a source reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from made import CLASSES, idx_files, opened, shard, splits_of

from layershuffle.data import ImageData, ImageView
from layershuffle.errors import DataError
from pictures import file_of, noise

pytestmark = pytest.mark.usefixtures("own_cache")
SPLITS = {"train": range(30), "test": range(100, 106)}  # seeds of pictures; the class is k % 3
BAD = 101


def content(k: int, *, broken: bool) -> bytes:
    file = file_of(noise(k))
    return file[:100] if broken and k == BAD else file


def folders(root: Path, broken: bool) -> str:
    spec = splits_of(root, SPLITS)
    (root / "test" / CLASSES[BAD % 3] / f"{BAD}.png").write_bytes(content(BAD, broken=broken))
    return spec


def class_folders(root: Path, broken: bool) -> str:
    return f"hf:{folders(root, broken).removeprefix('folder:')}"


def tables(root: Path, broken: bool, *, parquet: bool) -> str:
    kinds = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    parts = datasets.DatasetDict()
    for split, seeds in SPLITS.items():
        images = [{"bytes": content(k, broken=broken), "path": f"{k}.png"} for k in seeds]
        labels = [k % 3 for k in seeds]
        parts[split] = datasets.Dataset.from_dict({"img": images, "label": labels}, features=kinds)
        if parquet:
            root.mkdir(exist_ok=True)
            parts[split].to_parquet(root / f"{split}-00000.parquet")
    if not parquet:
        parts.save_to_disk(root)
    return f"hf:{root}"


def tars(root: Path, broken: bool) -> str:
    shards = {"train-000": range(15), "train-001": range(15, 30), "val-000": SPLITS["test"]}
    for name, seeds in shards.items():
        members = [{"cls": str(k % 3).encode(), "png": content(k, broken=broken)} for k in seeds]
        shard(root / f"{name}.tar", *members, first=seeds[0])
    return f"hf:{root}"


def imagenette(root: Path, broken: bool) -> str:
    """A set of torchvision that is read from class folders."""
    names = ("n01440764", "n02102040", "n02979186")
    for split, seeds in SPLITS.items():
        for k in seeds:
            part = {"train": "train", "test": "val"}[split]
            path = root / "imagenette2" / part / names[k % 3] / f"{k:03d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(k, broken=broken))
    return f"torchvision:Imagenette?root={root}"


SOURCES: dict[str, Callable[[Path, bool], str]] = {
    "folder": folders,
    "class folders": class_folders,
    "parquet": lambda root, broken: tables(root, broken, parquet=True),
    "save_to_disk": lambda root, broken: tables(root, broken, parquet=False),
    "tars": tars,
    "torchvision": imagenette,
}
every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def items(data: ImageData, name: str) -> list[tuple[bytes, int]]:
    dataset = data.splits[name].dataset
    read = [dataset[row] for row in range(data.splits[name].size)]
    assert len(dataset) == len(read)
    return [(image.permute(1, 2, 0).numpy().tobytes(), label) for image, label in read]


def expected(split: str) -> list[tuple[bytes, int]]:
    return sorted((noise(k).tobytes(), k % 3) for k in SPLITS[split])


@every_source
def test_all_forms_of_the_same_images_are_the_same_data(tmp_path: Path, make: Callable) -> None:
    spec = make(tmp_path / "data", False)
    data = opened(spec)
    names = {tars: ("0", "1", "2"), imagenette: ("tench", "English springer", "cassette player")}
    assert [name.split(",")[0] for name in data.classes] == list(names.get(make, CLASSES))
    held_out = items(data, "holdout")
    assert sorted(items(data, "train") + held_out) == expected("train")
    assert sorted(label for _, label in held_out) == [0, 0, 1, 1, 2, 2]
    assert sorted(items(data, "test")) == expected("test")
    assert any("6 of 30 training images" in note for note in data.notes)
    assert items(opened(spec, seed=1), "holdout") == held_out, "donors of a merge must share it"
    assert set(opened(spec, holdout=None).splits) == {"train", "test"}
    few = opened(spec, train=False, max_test=4)
    assert {name: split.size for name, split in few.splits.items()} == {"test": 4}
    again = pickle.loads(pickle.dumps(data.splits["test"].dataset))
    assert torch.equal(again[2][0], data.splits["test"].dataset[2][0])


@every_source
def test_a_corrupt_image_is_named_when_read_and_left_out_on_request(
    tmp_path: Path, make: Callable
) -> None:
    spec = make(tmp_path / "data", True)
    with pytest.raises(DataError) as error:
        items(opened(spec), "test")
    name = str(error.value.place)
    assert "101" in name or name.endswith("(101.png)") or "image 2" in name
    assert "--skip-corrupt" in str(error.value)
    data = opened(spec, skip_corrupt=True)
    assert data.splits["test"].size == 5
    left = [item for item in expected("test") if item[0] != noise(BAD).tobytes()]
    assert sorted(items(data, "test")) == left
    assert any(note.startswith("skipped 1 of 6 images in test") for note in data.notes)


@every_source
def test_augmentation_touches_training_alone(tmp_path: Path, make: Callable) -> None:
    spec = make(tmp_path / "data", False)
    data, plain = opened(spec, augment=True), opened(spec)
    for name in ("train", "holdout", "test"):
        assert (items(data, name) == items(plain, name)) == (name != "train")


def test_a_set_of_torchvision_in_memory(tmp_path: Path) -> None:
    idx_files(tmp_path)
    view = ImageView(channels=1, height=28, width=28, mean=(0.0,), std=(1.0,))
    data = opened(f"torchvision:FashionMNIST?root={tmp_path}", view, holdout=0.25)
    sizes = {name: split.size for name, split in data.splits.items()}
    assert sizes == {"train": 30, "holdout": 10, "test": 10}
    assert data.classes[:2] == ("T-shirt/top", "Trouser")
    assert [data.splits["test"].dataset[k][1] for k in range(10)] == list(range(10))
    raw = np.fromfile(tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte", np.uint8)[16:]
    image = data.splits["test"].dataset[7][0]
    assert image.flatten().tolist() == raw.reshape(10, -1)[7].tolist()
