"""What every source refuses: specs, options, class folders, columns, tars and sets."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torchvision.datasets
from made import CLASSES, VIEW, idx_files, opened, rows, sample, saved, shard, splits_of

from layershuffle.data import DataOptions, ImageView, open_data
from layershuffle.data.loading import parse_spec
from layershuffle.ground.errors import DataError, LayerShuffleError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
LABELS = datasets.ClassLabel(names=list(CLASSES))
WORDS, WHOLE = datasets.Value("string"), datasets.Value("int64")


@pytest.mark.parametrize(
    "spec",
    [
        "digit-pair", "flder:/data", "/data/imagenet", "", "hf:x?lable=y", "folder:", "torchvision",
        "digit-pairs:x", "digit-pairs?train=0", "digit-pairs?test=many", "digit-pairs?trian=5",
        pytest.param("digit-pairs?test=" + "9" * 5000, id="5000 digits"),
        "torchvision:FashionMnist?root=x", "torchvision:CocoDetection?root=x",
        "torchvision:FashionMNIST", "torchvision:FashionMNIST?root=x&download=maybe",
        "digit-pairs?train=10&train=20", "digit-pairs?train",
        "torchvision:OxfordIIITPet?root=x&split=test", "torchvision:FashionMNIST?root=x&split=test",
    ],
)  # fmt: skip
def test_specs(spec: str) -> None:
    with refuses(UsageError):
        open_data(spec, VIEW)


def test_a_place_is_taken_as_it_is_written() -> None:
    place = "/data/c++/100%25"
    spec = f"torchvision:FashionMNIST?root={place}&download=true"
    assert parse_spec(spec) == ("torchvision", "FashionMNIST", {"root": place, "download": "true"})


def test_options_and_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"holdout": 0.0}, {"holdout": 1.0}, {"max_test": 0}):
        with refuses(UsageError):
            DataOptions(**change)
    with refuses(UsageError):
        opened("digit-pairs", augment=True)
    with refuses(UsageError):  # before anything is read
        open_data("folder:nowhere", ImageView(channels=4, height=8, width=8, mean=(0.0,) * 4,
                                              std=(1.0,) * 4))  # fmt: skip
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    with refuses(UsageError):
        open_data("shapes", VIEW)


def groups(*lines: str) -> Callable[[Path], object]:
    return lambda root: (root / "groups.csv").write_text("\n".join(lines))


def each_split(name: str, content: bytes | None = None) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        for split in ("train", "val"):
            (root / split / name).mkdir()
            if content:
                (root / split / name / "x.txt").write_bytes(content)

    return change


def renamed(**names: str) -> Callable[[Path], object]:
    return lambda root: [(root / old).rename(root / new) for old, new in names.items()]


def deeper(place: Path) -> None:
    """All of a folder in a folder of its own within it, as archives often have it."""
    place.rename(place.with_name("moved"))
    place.mkdir()
    place.with_name("moved").rename(place / "images")


def file_in_its_place(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("x")


def without_classes(root: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(root / split)
        (root / split).mkdir()


# What is wrong with two images of each class in train/ and val/; what is opened; and as what.
FOLDERS: dict[str, tuple[Callable[[Path], Any], str, Mapping[str, Any]]] = {
    "no training": (lambda root: shutil.rmtree(root / "train"), "", {}),
    "nothing readable": (
        lambda root: [path.write_bytes(b"") for path in (root / "val").rglob("*.png")],
        "", {"skip_corrupt": True},
    ),
    "absent": (shutil.rmtree, "", {}),
    "a file": (file_in_its_place, "", {}),
    "one split": (lambda _: None, "/train", {}),
    "classes without splits": (lambda _: None, "/classes", {}),
    "no folder": (lambda root: [shutil.rmtree(root / split) for split in ("train", "val")], "", {}),
    "no classes": (without_classes, "", {}),
    "an empty class": (each_split("dog"), "", {}),
    "a class of other files": (each_split("dog", b"hello"), "", {}),
    "classes one level deeper": (
        lambda root: [deeper(root / split) for split in ("train", "val")], "", {},
    ),
    "splits one level deeper": (deeper, "", {}),
    "other classes": (lambda root: (root / "val/cat").rename(root / "val/dog"), "", {}),
    "val and validation": (
        lambda root: shutil.copytree(root / "val", root / "validation"), "", {},
    ),
    "capital splits": (renamed(train="Train", val="Val"), "", {}),
    "other splits": (renamed(train="training", val="testing"), "", {}),
    "no group": (groups("file,group", "val/ant/100.png,a", "val/ant/103.png,"), "", {}),
    "two groups of a file": (
        groups("file,group", "val/ant/100.png,a", "train/ant/0.png,b", "val/ant/100.png,b"), "", {},
    ),
    "no column of files": (groups("image,group", "val/ant/100.png,a"), "", {}),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDERS)
def test_folders(what: str, tmp_path: Path) -> None:
    change, below, options = FOLDERS[what]
    spec = splits_of(tmp_path / "data", {"train": range(6), "val": range(100, 106)})
    for name in "vwxyz":
        (tmp_path / "data" / "classes" / name).mkdir(parents=True)
    if what != "classes without splits":
        shutil.rmtree(tmp_path / "data" / "classes")
    change(tmp_path / "data")
    with refuses(DataError):
        opened(spec + below, **options)


def both(count: int, **labels: list) -> dict[str, dict]:
    return {"train": rows(count, 0, **labels), "test": rows(count, 50, **labels)}


# Splits and the kinds of their columns, and what is opened of them.
TABLES: dict[str, tuple[dict[str, dict], dict[str, Any], str, type[Exception]]] = {
    "a number beyond": (
        {"train": rows(3, 0, label=[0, 1, 3]), "test": rows(2, 50, label=[0, 4])},
        {"label": WHOLE}, "", DataError,
    ),
    "a word beyond": (
        {"train": rows(2, 0, label=["cat", "dog"]), "test": rows(2, 9, label=["cat", "cow"])},
        {"label": WORDS}, "", DataError,
    ),
    "no label": (
        {"train": rows(2, 0, label=["cat", None]), "test": rows(1, 9, label=["cat"])},
        {"label": WORDS}, "", DataError,
    ),
    "lists": (both(2, label=[[0], [1]]), {"label": datasets.List(LABELS)}, "", DataError),
    "fractions": (both(2, label=[0.0, 1.0]), {"label": datasets.Value("float32")}, "", DataError),
    "no numbers": (both(2, label=[-1, -1]), {"label": WHOLE}, "", DataError),
    "captions and ages": (
        both(2, caption=["a", "b"], age=[4, 1]), {"caption": WORDS, "age": WHOLE}, "", DataError,
    ),
    "two labels": (both(2, a=[0, 1], b=[1, 0]), {"a": LABELS, "b": LABELS}, "", UsageError),
    "no such column": (both(2, a=[0, 1]), {"a": LABELS}, "?label=medium", UsageError),
    "one split": ({"train": rows(3, 0, label=[0, 1, 2])}, {"label": LABELS}, "", DataError),
    "two names of a split": (
        {**both(2, a=[0, 1]), "dev": rows(2, 9, a=[0, 1]), "valid": rows(2, 9, a=[0, 1])},
        {"a": LABELS}, "", DataError,
    ),
    "images of labels": (both(2, a=[0, 1]), {"a": LABELS}, "?image=a", DataError),
}  # fmt: skip


@pytest.mark.parametrize("what", TABLES)
def test_tables(what: str, tmp_path: Path) -> None:
    splits, kinds, query, error = TABLES[what]
    with refuses(error):
        opened(f"hf:{saved(tmp_path, splits, **kinds)}{query}")


def test_splits_with_other_class_lists(tmp_path: Path) -> None:
    for name, order in (("train", CLASSES), ("test", CLASSES[::-1])):
        kinds = datasets.Features(
            {"img": datasets.Image(), "label": datasets.ClassLabel(names=list(order))}
        )
        data = datasets.Dataset.from_dict(rows(3, 0, label=[0, 1, 2]), kinds)
        data.save_to_disk(tmp_path / "odd" / name)
    (tmp_path / "odd" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refuses(DataError, f"hf:{tmp_path}/odd (test)"):
        opened(f"hf:{tmp_path}/odd")


def test_places_of_the_hub_s_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        (tmp_path / "flat" / split).mkdir(parents=True)
        (tmp_path / "flat" / split / "1.png").write_bytes(file_of(noise(1)))
    (tmp_path / "empty").mkdir()
    words = {name: datasets.Dataset.from_dict({"text": ["a"]}) for name in ("train", "test")}
    datasets.DatasetDict(words).save_to_disk(tmp_path / "words")
    for name in ("flat", "nowhere", "empty", "words"):
        with refuses(DataError, tmp_path / name if name == "nowhere" else f"hf:{tmp_path}/{name}"):
            opened(f"hf:{tmp_path}/{name}")
    # The libraries read HF_HUB_OFFLINE when they are imported, into these variables.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses(DataError, "hf:nobody/nothing"):
        opened("hf:nobody/nothing")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the folder, in which nothing is missing. /sys takes no files, even of root."""
    for split in ("train", "test"):
        for name in CLASSES:
            place = tmp_path / "data" / split / name / "1.png"
            place.parent.mkdir(parents=True)
            place.write_bytes(file_of(noise(1)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/sys/absent")
    with refuses(LayerShuffleError, "/sys/absent"):
        opened(f"hf:{tmp_path}/data")


def test_samples_without_a_label_and_broken_tars(tmp_path: Path) -> None:
    good = [sample(k, cls=b"1") for k in range(8)]
    shard(tmp_path / "tars" / "train-0.tar", *good, sample(8), sample(9, cls=b"0"))
    shard(tmp_path / "tars" / "val-0.tar", *good)
    with refuses(DataError, f"sample 0008 of {tmp_path}/tars/train-0.tar"):
        opened(f"hf:{tmp_path}/tars")
    (tmp_path / "tars" / "train-0.tar").write_bytes(b"no tar" * 200)
    with refuses(DataError, f"hf:{tmp_path}/tars"):
        opened(f"hf:{tmp_path}/tars")


@pytest.mark.parametrize("apart", [0, 7])
def test_samples_in_several_parts_of_a_tar(apart: int, tmp_path: Path) -> None:
    """All labels behind all images, or the label of one behind the other samples."""
    images = [(f"{k:04d}.png", file_of(noise(k))) for k in range(8)]
    labels = [(f"{k:04d}.cls", b"%d" % (k % 2)) for k in range(8)]
    beside = [*itertools.chain.from_iterable(zip(images[:apart], labels, strict=False))]
    place = tmp_path / "tars"
    place.mkdir()
    for split in ("train", "val"):
        with tarfile.open(place / f"{split}-0.tar", "w") as archive:
            for name, content in [
                *beside,
                *images[apart:],
                ("9.png", file_of(noise(9))),
                *labels[apart:],
            ]:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    with refuses(DataError) as caught:
        opened(f"hf:{place}")
    assert "--sort=name" in caught.value.hint


def test_absent_and_damaged_files_of_a_set(tmp_path: Path) -> None:
    idx_files(tmp_path)
    with refuses(DataError, f"torchvision:KMNIST?root={tmp_path}"):
        opened(f"torchvision:KMNIST?root={tmp_path}")
    path = tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with refuses(DataError, f"torchvision:FashionMNIST?root={tmp_path}"):
        opened(f"torchvision:FashionMNIST?root={tmp_path}")


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_files_of_cifar_that_are_not_the_published_ones_are_never_unpickled(
    tmp_path: Path, name: str
) -> None:
    kind = getattr(torchvision.datasets, name)
    folder, trap = tmp_path / kind.base_folder, pickle.dumps(Trap(tmp_path / "trap"))
    folder.mkdir()
    for file, _ in (*kind.train_list, *kind.test_list, (kind.meta["filename"], "")):
        (folder / file).write_bytes(trap)
    with refuses(DataError):
        opened(f"torchvision:{name}?root={tmp_path}")
    assert not (tmp_path / "trap").exists()
    pickle.loads(trap)
    assert (tmp_path / "trap").is_dir(), "the trap of this test does not work"
