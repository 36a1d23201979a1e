"""Classes of data and models are matched by name, and differences are listed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch.utils.data import Dataset
from torchvision.models import ViT_B_16_Weights

from layershuffle.data import DataOptions, ImageData, ImageView, Split, match_classes, open_data
from layershuffle.data.class_names import numbered
from layershuffle.data.contract import Item
from layershuffle.data.transforms import PixelFinish
from layershuffle.errors import DataError
from refusals import refuses

VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)


class Labels(Dataset[Item]):
    """A data set with these labels and empty images."""

    def __init__(self, labels: Sequence[int]) -> None:
        self.labels, self.epoch = labels, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return torch.empty(0), self.labels[index]


def data_of(*classes: str, dataset: Dataset[Item] | None = None) -> ImageData:
    dataset = dataset or Labels([0, 1, 2])
    return ImageData(
        spec="folder:x",
        classes=classes,
        splits={"test": Split(dataset=dataset, size=3)},
        finish=PixelFinish(VIEW),
    )


def labels_of(data: ImageData) -> list[int]:
    dataset = data.splits["test"].dataset
    return [dataset[row][1] for row in range(3)]


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (("stripe", "disk", "grid"), ("stripe", "disk", "grid"), [1, 2, 0]),
        (("Stripe ", "DISK", "grid"), ("Stripe ", "DISK", "grid"), [1, 2, 0]),
        (("disk", "grid", "stripe"), ("disk", "grid", "stripe"), [0, 1, 2]),
        (None, ("disk", "grid", "stripe"), [0, 1, 2]),
    ],
)
def test_data_follow_the_order_of_the_model(
    names: Sequence[str] | None,
    classes: Sequence[str],
    labels: list[int],
) -> None:
    inner = Labels([0, 1, 2])
    data = data_of("disk", "grid", "stripe", dataset=inner)
    matched = match_classes(data, names, outputs=3, place="dir:m")
    assert (matched.classes, labels_of(matched)) == (tuple(classes), labels)
    matched.splits["test"].dataset.set_epoch(4)  # type: ignore[attr-defined]
    assert inner.epoch == 4


def test_data_without_names_are_matched_by_index() -> None:
    matched = match_classes(data_of("0", "1", "2"), ("c", "a", "b"), outputs=3, place="dir:m")
    assert (matched.classes, labels_of(matched)) == (("c", "a", "b"), [0, 1, 2])
    assert matched.notes == ("the data have no names of classes, so number 0 is c, and so on",)


@pytest.mark.parametrize("turned", [False, True])
def test_numbers_in_another_order_are_matched_as_names(turned: bool) -> None:
    """Folders sort as 0, 1, 10, 11, 2, so ten of twelve classes have another index."""
    folders, numbers = tuple(sorted(numbered(12))), numbered(12)
    classes, names = (folders, numbers) if turned else (numbers, folders)
    for start in range(0, 12, 3):
        data = data_of(*classes, dataset=Labels(range(start, start + 3)))
        data = match_classes(data, names, outputs=12, place="dir:m")
        assert [names[label] for label in labels_of(data)] == list(classes[start : start + 3])
    assert data.classes == names


def test_a_model_whose_names_are_numbers_in_order_has_no_names() -> None:
    data = data_of("disk", "grid", "stripe")
    matched = match_classes(data, ("0", "1", "2"), outputs=3, place="dir:m")
    assert (matched.classes, labels_of(matched)) == (("disk", "grid", "stripe"), [0, 1, 2])
    assert matched.notes == ("the model has no names of classes, so number 0 is disk, and so on",)


@pytest.mark.parametrize(
    ("names", "outputs", "words"),
    [
        (None, 1000, "the model has 1000 outputs, the data has 3 classes"),
        (None, 0, "the model has no classifier, the data has 3 classes"),
        (("disk", "grid", "line"), 3, "1 in the model only (line), 1 in the data only (stripe)"),
        (("a", "b", "c"), 3, "3 in the model only (a, b, c), 3 in the data only (disk, grid"),
        (("disk", "grid", "grid"), 3, "1 in the data only (stripe)"),
    ],
)
def test_differing_classes_are_listed(
    names: Sequence[str] | None, outputs: int, words: str
) -> None:
    with pytest.raises(DataError) as error:
        match_classes(data_of("disk", "grid", "stripe"), names, outputs=outputs, place="dir:m")
    assert words in str(error.value)
    assert "layershuffle fit" in str(error.value)
    assert "dir:m and folder:x" in str(error.value)


def test_imagenet_s_folders_are_its_words_and_those_of_torchvision() -> None:
    imagenet = ImageNetInfo("imagenet-1k")
    folders, words = imagenet.label_names(), imagenet.label_descriptions()
    categories = ViT_B_16_Weights.DEFAULT.meta["categories"]
    for classes in (folders, words, categories):
        for names in (folders, words, categories):
            data = match_classes(data_of(*classes), names, outputs=1000, place="dir:m")
            assert labels_of(data) == [0, 1, 2]
    # In another order they are another model's.
    turned = [*words[1:], words[0]]
    with refuses(DataError, "dir:m and folder:x"):
        match_classes(data_of(*folders), turned, outputs=1000, place="dir:m")
    match_classes(data_of(*numbered(1000)), turned, outputs=1000, place="dir:m")


def test_the_holdout_does_not_depend_on_the_order_of_the_model(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("disk", "grid", "stripe")):
            for number in range(6):
                path = tmp_path / split / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8, 3), 40 * label + number, np.uint8)).save(path)
    data = open_data(f"folder:{tmp_path}", VIEW, options=DataOptions(holdout=0.4))
    turned = match_classes(data, ("stripe", "disk", "grid"), outputs=3, place="dir:m")
    for name in ("train", "holdout", "test"):
        ours, theirs = (d.splits[name].dataset for d in (data, turned))
        for row in range(len(ours)):  # type: ignore[arg-type]
            (pixels, label), (same, other) = ours[row], theirs[row]
            assert torch.equal(pixels, same)
            assert data.classes[label] == turned.classes[other]
