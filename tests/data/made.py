"""Small data sets in the forms that the sources read; picture k has class k % 3."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import datasets
import numpy as np

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
from pictures import file_of, noise

VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
CLASSES = ("ant", "bee", "cat")


def opened(spec: str, view: ImageView = VIEW, **options: object) -> ImageData:
    """The data with a holdout of a fifth."""
    return open_data(spec, view, options=DataOptions(**{"holdout": 0.2, **options}))


def splits_of(root: Path, splits: Mapping[str, Iterable[int]]) -> str:
    """Class folders below the folders of splits."""
    for split, seeds in splits.items():
        for k in seeds:
            path = root / split / CLASSES[k % 3] / f"{k:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file_of(noise(k)))
    return f"folder:{root}"


def rows(count: int, first: int, **labels: list) -> dict:
    """Columns of pictures `first` and following, and of labels."""
    cells = [{"bytes": file_of(noise(first + k)), "path": f"{k}.png"} for k in range(count)]
    return {"img": cells, **labels}


def saved(place: Path, splits: Mapping[str, dict], **kinds: object) -> Path:
    """What `datasets` saves of these columns; `kinds` are the types of the labels."""
    features = datasets.Features({"img": datasets.Image(), **kinds})
    parts = {name: datasets.Dataset.from_dict(part, features) for name, part in splits.items()}
    datasets.DatasetDict(parts).save_to_disk(place / "saved")
    return place / "saved"


def sample(k: int, **members: bytes) -> dict[str, bytes]:
    """The members of one sample of a tar."""
    return {"png": file_of(noise(k)), **members}


def shard(path: Path, *samples: dict[str, bytes], first: int = 0) -> None:
    """A tar as the writer of webdataset makes it: members 0000.KEY, 0001.KEY and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, members in enumerate(samples, start=first):
            for name, content in members.items():
                member = tarfile.TarInfo(f"{number:04d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def idx_files(root: Path) -> None:
    """FashionMNIST: 40 training and 10 test images."""
    raw, draws = root / "FashionMNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 10)):
        for kind, values in (
            ("images-idx3", draws.integers(0, 256, (count, 28, 28), np.uint8)),
            ("labels-idx1", np.arange(count, dtype=np.uint8) % 10),
        ):
            sizes = b"".join(size.to_bytes(4) for size in values.shape)
            header = bytes([0, 0, 8, values.ndim]) + sizes
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + values.tobytes())
