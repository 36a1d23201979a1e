"""What every source promises, shown on the same pictures in every form that a source reads."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torchvision.datasets

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
from layershuffle.errors import DataError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
CLASSES = ("ant", "bee", "cat")
SPLITS = {"train": range(30), "test": range(100, 106)}  # seeds of pictures; the class is k % 3
BAD = 101


def content(k: int, *, broken: bool) -> bytes:
    file = file_of(noise(k))
    return file[:100] if broken and k == BAD else file


def folders(root: Path, broken: bool) -> str:
    for split, seeds in SPLITS.items():
        for k in seeds:
            path = root / split / CLASSES[k % 3] / f"{k:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(k, broken=broken))
    return f"folder:{root}"


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
    """Two training shards as the writer of webdataset makes them."""
    root.mkdir()
    shards = {"train-000": range(15), "train-001": range(15, 30), "val-000": SPLITS["test"]}
    for name, seeds in shards.items():
        with tarfile.open(root / f"{name}.tar", "w") as archive:
            for k in seeds:
                members = {"cls": str(k % 3).encode(), "png": content(k, broken=broken)}
                for ending, data in members.items():
                    member = tarfile.TarInfo(f"{k:06d}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
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


def opened(spec: str, **options: object) -> ImageData:
    return open_data(spec, VIEW, options=DataOptions(**{"holdout": 0.2, **options}))


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
    assert (data.skipped, data.splits["test"].size) == (1, 5)
    left = [item for item in expected("test") if item[0] != noise(BAD).tobytes()]
    assert sorted(items(data, "test")) == left
    assert any(note.startswith("skipped 1 of 6 images in test") for note in data.notes)


@every_source
def test_augmentation_touches_training_alone(tmp_path: Path, make: Callable) -> None:
    spec = make(tmp_path / "data", False)
    data, plain = opened(spec, augment=True), opened(spec)
    for name in ("train", "holdout", "test"):
        assert (items(data, name) == items(plain, name)) == (name != "train")


@pytest.mark.parametrize("spec", ["digit-pairs", "formula?classes=3&size=16"])
def test_images_that_are_made_here_have_no_place_and_no_augmentation(spec: str) -> None:
    with refuses(UsageError):
        open_data(spec.replace("?", ":x?") if "?" in spec else f"{spec}:x", VIEW)
    with refuses(UsageError):
        opened(spec, augment=True)


def test_a_model_with_four_channels_is_refused_before_anything_is_read() -> None:
    view = ImageView(channels=4, height=8, width=8, mean=(0.0,) * 4, std=(1.0,) * 4)
    with refuses(UsageError):
        open_data("folder:nowhere", view)


# --- torchvision ----------------------------------------------------------------------------------


def idx(path: Path, values: np.ndarray) -> None:
    """A file of the MNIST family."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4) for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    raw, draws = tmp_path / "FashionMNIST" / "raw", np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        idx(raw / f"{part}-images-idx3-ubyte", draws.integers(0, 256, (count, 28, 28), np.uint8))
        idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return tmp_path


def test_a_set_in_memory(fashion: Path) -> None:
    view = ImageView(channels=1, height=28, width=28, mean=(0.0,), std=(1.0,))
    options = DataOptions(holdout=0.25)
    data = open_data(f"torchvision:FashionMNIST?root={fashion}", view, options=options)
    assert {name: split.size for name, split in data.splits.items()} == {
        "train": 30, "holdout": 10, "test": 10,
    }  # fmt: skip
    assert data.classes[:2] == ("T-shirt/top", "Trouser")
    assert [data.splits["test"].dataset[k][1] for k in range(10)] == list(range(10))
    raw = np.fromfile(fashion / "FashionMNIST/raw/t10k-images-idx3-ubyte", np.uint8)[16:]
    image = data.splits["test"].dataset[7][0]
    assert image.flatten().tolist() == raw.reshape(10, -1)[7].tolist()


@pytest.mark.parametrize(
    "spec",
    [
        "torchvision:FashionMnist?root=x",
        "torchvision:CocoDetection?root=x",
        "torchvision:FashionMNIST",
        "torchvision:FashionMNIST?root=x&download=maybe",
    ],
)
def test_wrong_names_and_places_of_sets_are_refused(spec: str) -> None:
    with refuses(UsageError):
        opened(spec)


def test_absent_and_damaged_files_of_a_set_are_refused(fashion: Path) -> None:
    with refuses(DataError):
        opened(f"torchvision:KMNIST?root={fashion}")
    path = fashion / "FashionMNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with refuses(DataError):
        opened(f"torchvision:FashionMNIST?root={fashion}")


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
