"""Who is class 3: data and models are matched by name; else the order is said, or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.models._hub import save_for_hf
from torch.utils.data import Dataset
from torchvision.models import ViT_B_16_Weights
from transformers import BeitConfig, BeitForImageClassification

import layershuffle as ls
from common import DIGITS_VIT, FAMILIES, SIZE, images, redraw
from layershuffle.data import DataOptions, ImageData, ImageView, Split, match_classes, open_data
from layershuffle.data.class_names import numbered
from layershuffle.data.splits import Item
from layershuffle.data.transforms import PixelFinish
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.merging.scoring import score_ensemble
from layershuffle.merging.settings import EnsembleSettings
from layershuffle.models import name_classes, set_class_names
from layershuffle.scoring.evaluate_spec import evaluate_spec, matched
from layershuffle.scoring.settings import EvalSettings
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
        splits={"test": Split(dataset=dataset)},
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


@pytest.mark.parametrize(
    ("classes", "names", "unnamed"),
    [
        (("0", "1", "2"), ("c", "a", "b"), "the data have"),
        (("disk", "grid", "stripe"), ("0", "1", "2"), "the model has"),
    ],
)
def test_classes_without_names_are_matched_by_index(
    classes: Sequence[str], names: Sequence[str], unnamed: str
) -> None:
    matched = match_classes(data_of(*classes), names, outputs=3, place="dir:m")
    given = names if unnamed == "the data have" else classes
    assert (matched.classes, labels_of(matched)) == (tuple(given), [0, 1, 2])
    note = f"{unnamed} no names of classes, so number 0 is {given[0]}, and so on"
    assert matched.notes == (note,)


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


def test_some_of_the_classes_of_a_model_are_scored_over_all_of_them() -> None:
    names = ("grid", "line", "stripe", "dot", "disk")
    data = data_of("disk", "grid", "stripe", dataset=Labels([0, 1, 2]))
    matched = match_classes(data, names, outputs=5, place="dir:m", some=True)
    assert (matched.classes, labels_of(matched)) == (names, [4, 0, 2])
    assert "3 of the 5 classes" in matched.notes[-1]
    for bad in (("grid", "line", "stripe", "dot"), ("disk", "disk", "grid", "stripe")):
        with refuses(DataError):
            match_classes(data, bad, outputs=4, place="dir:m", some=True)
    with refuses(DataError):  # a training makes a new head of these classes
        match_classes(data, names, outputs=5, place="dir:m")


def test_folders_of_imagenet_are_classes_of_a_model_that_describes_them() -> None:
    info = ImageNetInfo("imagenet-1k")
    names = tuple(info.label_descriptions())
    data = data_of("n01440764", "n03888257", dataset=Labels([0, 1, 1]))
    matched = match_classes(data, names, outputs=1000, place="hf:m", some=True)
    assert [info.label_names()[label] for label in labels_of(matched)] == [
        "n01440764",
        "n03888257",
        "n03888257",
    ]


@pytest.mark.parametrize(
    ("names", "outputs"),
    [
        (None, 1000),
        (None, 0),
        (("disk", "grid", "line"), 3),
        (("a", "b", "c"), 3),
        (("disk", "grid", "grid"), 3),
    ],
)
def test_differing_classes_are_listed(names: Sequence[str] | None, outputs: int) -> None:
    with refuses(DataError, "dir:m and folder:x"):
        match_classes(data_of("disk", "grid", "stripe"), names, outputs=outputs, place="dir:m")


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
                Image.new("RGB", (8, 8), (40 * label + number,) * 3).save(path)
    data = open_data(f"folder:{tmp_path}", VIEW, options=DataOptions(holdout=0.4))
    turned = match_classes(data, ("stripe", "disk", "grid"), outputs=3, place="dir:m")
    for name in ("train", "holdout", "test"):
        ours, theirs = (d.splits[name].dataset for d in (data, turned))
        for row in range(len(ours)):  # type: ignore[arg-type]
            (pixels, label), (same, other) = ours[row], theirs[row]
            assert torch.equal(pixels, same)
            assert data.classes[label] == turned.classes[other]


# --- models without names -------------------------------------------------------------------------


# As timm sorts them; by code point species10 would be the second.
NATURAL = ("species1", "species2", "species3", "Species4", "species10")
SPEC = "timm:vit_tiny_patch16_224?img_size=32&patch_size=8&embed_dim=32&depth=4&num_heads=2"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model in every form, and images in the folders of the classes that it gives them."""
    model, draw = redraw(FAMILIES["timm-vit"].plain(), seed=4), torch.Generator().manual_seed(0)
    files = [tmp_path / f"{number}.png" for number in range(60)]
    for file in files:
        pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((40, 40), Image.Resampling.BICUBIC).save(file)
    # No class is more probable than another on average, so each one gets images.
    for answer in ls.predict(ls.wrap(model), files):
        for ranked in answer.top:
            model.head.bias.data[ranked.index] -= math.log(ranked.probability) / len(files)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model_best.pth.tar")
    save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    ls.save(model, tmp_path / "ours")
    set_class_names(model, NATURAL)
    ls.save(model, tmp_path / "named")
    for file, answer in zip(files, ls.predict(ls.wrap(model), files), strict=True):
        place = tmp_path / "data" / "val" / answer.top[0].label
        place.mkdir(parents=True, exist_ok=True)
        file.rename(place / file.name)
    assert {path.name for path in (tmp_path / "data" / "val").iterdir()} == set(NATURAL)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "right", "order"),
    [
        (f"{SPEC}&num_classes=5&checkpoint={{}}/model_best.pth.tar", True, "in natural order"),
        ("hf:{}/timm", True, "in natural order"),
        ("dir:{}/named", True, None),
        # Whatever sorted its classes is unknown, so the order of the data is taken, and said.
        (
            "dir:{}/ours",
            False,
            "for Species4, species1, species10 and 2 more, in the order of the data",
        ),
    ],
)
def test_the_order_of_classes(spec: str, right: bool, order: str | None, saved: Path) -> None:
    settings = EvalSettings(modes="sequential")
    result = evaluate_spec(spec.format(saved), f"folder:{saved / 'data'}", settings=settings)
    assert (result.scores[0].top1 == 100.0) == right
    assert any(order in note for note in result.data.notes) if order else not result.data.notes


def test_a_file_names_the_classes(saved: Path) -> None:
    """With a mark of byte order and the line ends of Windows, as some editors write."""
    file = saved / "classes.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*NATURAL, ""]).encode())
    for place in ("ours", "timm", "named"):
        settings = EvalSettings(modes="sequential", classes=file)
        result = evaluate_spec(
            f"dir:{saved / place}", f"folder:{saved / 'data'}", settings=settings
        )
        assert (result.scores[0].top1, result.data.notes) == (100.0, ())


@pytest.mark.parametrize(
    ("place", "lines"),
    [
        ("named", [*reversed(NATURAL)]),  # another order than that of the model itself
        ("ours", NATURAL[:4]),
        ("ours", [*NATURAL[:2], "", *NATURAL[3:]]),
        ("ours", None),
    ],
)
def test_names_that_do_not_fit_are_refused(
    place: str, lines: Sequence[str] | None, saved: Path
) -> None:
    file = saved / "classes.txt"
    if lines is not None:
        file.write_text("\n".join(lines), encoding="utf-8")
    with refuses(UsageError, file):
        name_classes(ls.load(saved / place), file, place=place)


def test_an_ensemble_of_a_model_with_names_and_one_without(saved: Path) -> None:
    """By number, the member without names would answer species10 where it means species2."""
    models = [f"dir:{saved / place}" for place in ("named", "timm")]
    data, settings = f"folder:{saved / 'data'}", EnsembleSettings(modes="sequential")
    (score,), opened = score_ensemble(models, data, settings=settings)
    assert score.top1 == 100.0
    assert "in natural order" in opened.notes[0]
    # A member whose order nobody knows has that of the first one, or of the data.
    models = [models[0], f"dir:{saved / 'ours'}"]
    (score,), opened = score_ensemble(models, data, settings=settings)
    assert (score.top1, f"in the order of {models[0]}" in opened.notes[0]) == (100.0, True)
    with refuses(UsageError):
        score_ensemble(models[::-1], data, settings=settings)


def test_a_model_can_be_trained_after_it_was_asked(tmp_path: Path) -> None:
    """BEiT keeps its indices of relative positions from the first images."""
    file = tmp_path / "1.png"
    Image.new("RGB", (SIZE, SIZE)).save(file)
    config = BeitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=SIZE, patch_size=16, use_relative_position_bias=True,
    )  # fmt: skip
    model = ls.wrap(BeitForImageClassification(config))
    ls.predict(model, [file])
    loss = ls.Method("layershuffle").loss(model.train(), images(4), torch.zeros(4).long(), step=0)
    loss.backward()


def test_folders_that_are_numbers_are_the_outputs_of_these_numbers() -> None:
    """Of a model without names: in the order of the folders, 10 would be output 2."""
    model = ls.load(DIGITS_VIT, num_classes=11)
    folders = tuple(sorted(numbered(11)))
    fitting = matched(model, data_of(*folders, dataset=Labels([2, 3, 10])), name="m")
    assert [fitting.classes[label] for label in labels_of(fitting)] == ["10", "2", "9"]
    assert labels_of(fitting) == [10, 2, 9]
    assert "by their numbers" in fitting.notes[0]


def test_a_model_with_one_output_names_no_class() -> None:
    with refuses(UsageError):
        ls.predict(ls.load(DIGITS_VIT, num_classes=1), ["bundled:digit-pair.png"])
