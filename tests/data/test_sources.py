"""What every source promises, on the same pictures in every form; then folders, then tables."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from made import CLASSES, idx_files, opened, rows, sample, saved, shard, splits_of
from PIL import ExifTags, Image

from layershuffle.data import ImageData, ImageView
from layershuffle.data.transforms import Images
from layershuffle.ground.errors import DataError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
LABELS = datasets.ClassLabel(names=list(CLASSES))
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
    kinds = datasets.Features({"img": datasets.Image(), "label": LABELS})
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


def pets(root: Path, broken: bool) -> str:
    """A set of torchvision that opens images itself. They lie on their side."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name in ("images", "annotations"):
        (root / "oxford-iiit-pet" / name).mkdir(parents=True)
    for split, seeds in SPLITS.items():
        lines = []
        for k in seeds:
            file = file_of(noise(k).transpose(Image.Transpose.ROTATE_90), exif=exif)
            path = root / "oxford-iiit-pet" / "images" / f"{CLASSES[k % 3]}_{k}.jpg"
            # Of a file that is cut off, torchvision would leave the handle open.
            path.write_bytes(b"no image" if broken and k == BAD else file)
            lines.append(f"{path.stem} {k % 3 + 1} 1 1\n")
        part = {"train": "trainval", "test": "test"}[split]
        (root / "oxford-iiit-pet" / "annotations" / f"{part}.txt").write_text("".join(lines))
    return f"torchvision:OxfordIIITPet?root={root}"


SOURCES: dict[str, Callable[[Path, bool], str]] = {
    "folder": folders,
    "class folders": class_folders,
    "parquet": lambda root, broken: tables(root, broken, parquet=True),
    "save_to_disk": lambda root, broken: tables(root, broken, parquet=False),
    "tars": tars,
    "torchvision": imagenette,
    "pets": pets,
}
every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def sizes(data: ImageData) -> dict[str, int]:
    return {name: split.size for name, split in data.splits.items()}


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
    names = {
        tars: ("0", "1", "2"),
        imagenette: ("tench", "English springer", "cassette player"),
        pets: ("Ant", "Bee", "Cat"),
    }
    assert [name.split(",")[0] for name in data.classes] == list(names.get(make, CLASSES))
    held_out = items(data, "holdout")
    assert sorted(items(data, "train") + held_out) == expected("train")
    assert sorted(label for _, label in held_out) == [0, 0, 1, 1, 2, 2]
    assert sorted(items(data, "test")) == expected("test")
    assert any("6 of 30 training images" in note for note in data.notes)
    assert items(opened(spec, seed=1), "holdout") == held_out, "donors of a merge must share it"
    assert sizes(opened(spec, holdout=None)) == {"train": 30, "test": 6}
    assert sizes(opened(spec, train=False, max_test=4)) == {"test": 4}
    again = pickle.loads(pickle.dumps(data.splits["test"].dataset))
    assert torch.equal(again[2][0], data.splits["test"].dataset[2][0])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@every_source
def test_a_corrupt_image_is_named_when_read_and_left_out_on_request(
    tmp_path: Path, make: Callable
) -> None:
    spec = make(tmp_path / "data", True)
    with pytest.raises(DataError) as error:
        items(opened(spec), "test")
    name = str(error.value.place)
    places = ("101", "image 1 of", "image 4 of torchvision")  # torchvision 0.21 names no file
    assert any(place in name for place in places)
    assert "--skip-corrupt" in str(error.value)
    data = opened(spec, skip_corrupt=True)
    assert data.splits["test"].size == 5
    left = [item for item in expected("test") if item[0] != noise(BAD).tobytes()]
    assert sorted(items(data, "test")) == left
    assert any(note.startswith("skipped 1 of 6 images in test") for note in data.notes)
    del error
    gc.collect()  # closes here what torchvision 0.21 leaves open, not in a later test


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
    assert sizes(data) == {"train": 30, "holdout": 10, "test": 10}
    assert data.classes[:2] == ("T-shirt/top", "Trouser")
    assert [data.splits["test"].dataset[k][1] for k in range(10)] == list(range(10))
    raw = np.fromfile(tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte", np.uint8)[16:]
    image = data.splits["test"].dataset[7][0]
    assert image.flatten().tolist() == raw.reshape(10, -1)[7].tolist()


# --- class folders --------------------------------------------------------------------------------


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


def test_other_names_of_the_reported_folder_and_no_training(root: Path) -> None:
    for old, new in (("val", "valid"), ("valid", "validation"), ("validation", "test")):
        (root / old).rename(root / new)
        assert opened(f"folder:{root}").splits["test"].size == 15
    shutil.rmtree(root / "train")
    assert sizes(opened(f"folder:{root}", train=False, max_test=4)) == {"test": 4}


def test_the_share_of_a_holdout_of_few_images_is_said(tmp_path: Path) -> None:
    data = opened(splits_of(tmp_path, {"train": range(9), "val": range(3)}), holdout=0.05)
    assert (
        "the holdout is 3 of 9 training images (33%; 0.05 of each class, but at least one image), "
        "the same for every seed" in data.notes
    )


def test_validation_beside_test_picks_the_checkpoint(root: Path) -> None:
    picture(root / "test" / "1.png", 1)
    data = opened(f"folder:{root}")
    assert data.splits["test"].size == 15
    assert "test/ has no class folders and was left out" in data.notes
    for name in CLASSES:
        picture(root / "test" / name / "only.jpg", 1)
    data = opened(f"folder:{root}")
    assert sizes(data) == {"test": 3, "train": 60, "holdout": 15}
    assert "the holdout is the validation split of the data" in data.notes


def test_an_image_in_both_splits_is_said(root: Path) -> None:
    assert not any("too high" in note for note in opened(f"folder:{root}").notes)
    first, second = sorted((root / "train" / "ant").iterdir())[:2]
    shutil.copy(first, root / "val" / "ant" / "copy.png")
    (root / "val" / "ant" / "link.png").symlink_to(second)
    (note,) = [note for note in opened(f"folder:{root}").notes if "too high" in note]
    assert note.startswith("val: 2 of 17 images ")
    assert "val/ant/copy.png" in note


def test_a_class_with_one_image_stays_in_training(root: Path) -> None:
    for path in sorted((root / "train" / "ant").iterdir())[1:]:
        path.unlink()
    data = opened(f"folder:{root}")
    assert data.splits["holdout"].size == 8
    assert any("ant" in Path(file).parent.name for file in files_of(data, "train"))


def test_every_file_counts_once_and_hidden_and_special_ones_do_not(root: Path) -> None:
    """Links to the folder itself, to themselves, to the same file and to another class, pipes,
    hidden folders, other files."""
    ant = root / "val" / "ant"
    picture(ant / "deep" / "x.PNG", 3)
    picture(ant / ".thumbnails" / "1.png", 4)
    (ant / ".DS_Store").write_bytes(b"x")
    (ant / "words.txt").write_text("x")
    (ant / "loop").symlink_to(".")
    (ant / "again.png").symlink_to("900.png")
    (ant / "gone.png").symlink_to("nowhere")
    (ant / "own.png").symlink_to("own.png")
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


def test_groups_of_test_images_come_from_a_file(root: Path) -> None:
    """With a limit and with skipped images, each image keeps its group."""
    (root / "val" / "bee" / "904.png").write_bytes(b"no image")
    lines = [f"val/{CLASSES[k % 3]}/{k}.png,{'ab'[k % 2]}{k // 910}" for k in range(900, 915)]
    (root / "groups.csv").write_text(
        "\n".join(["file,group", *lines[::-1], "train/x.png,z", "train/y.png"])
    )
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


def test_an_image_too_thin_for_the_model_is_named_and_can_be_left_out(root: Path) -> None:
    """With its short side at 8 pixels, it would have 96 million."""
    thin = root / "val" / "ant" / "thin.png"
    Image.new("1", (1_500_000, 1)).save(thin)
    with refuses(DataError, thin):
        list(opened(f"folder:{root}").splits["test"].dataset)
    assert opened(f"folder:{root}", skip_corrupt=True).splits["test"].size == 15


def test_accents_in_two_ways_and_names_that_are_no_text(root: Path) -> None:
    """Both look right in a list of folders."""
    (root / "train" / "cat").rename(root / "train" / "caf\u00e9")
    (root / "val" / "cat").rename(root / "val" / "cafe\u0301")
    with refuses(DataError, root / "val"):
        opened(f"folder:{root}")
    (root / "train" / "caf\u00e9").rename(root / "train" / os.fsdecode(b"caf\xe9"))
    with refuses(DataError, root / "train"):
        opened(f"folder:{root}")


# --- tables and tars ------------------------------------------------------------------------------


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


def test_validation_is_the_holdout_beside_a_test_split_with_labels(tmp_path: Path) -> None:
    train, validation = rows(30, 0, label=[0, 1, 2] * 10), rows(3, 50, label=[0, 1, 2])
    splits = {"train": train, "validation": validation, "test": rows(5, 70, label=[-1] * 5)}
    data = opened(f"hf:{saved(tmp_path, splits, label=LABELS)}")
    assert sizes(data) == {"train": 24, "holdout": 6, "test": 3}
    assert "the test split has no labels; the validation split is reported" in data.notes
    splits["test"] = rows(6, 200, label=[0, 1, 2] * 2)
    data = opened(f"hf:{saved(tmp_path / 'labelled', splits, label=LABELS)}")
    assert sizes(data) == {"train": 30, "holdout": 3, "test": 6}
    assert items(data, "holdout")[1] == (noise(51).tobytes(), 1)


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


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}])
def test_a_row_without_an_image_is_named_and_can_be_left_out(
    cell: dict | None, tmp_path: Path
) -> None:
    columns, place = rows(6, 50, label=[0, 1, 2] * 2), tmp_path / "tables"
    place.mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.table(columns), place / f"{split}.parquet")
        columns["img"][1] = cell
    with refuses(DataError, f"row 1 of hf:{place} (test)"):
        list(opened(f"hf:{place}").splits["test"].dataset)
    assert opened(f"hf:{place}", skip_corrupt=True).splits["test"].size == 5


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
