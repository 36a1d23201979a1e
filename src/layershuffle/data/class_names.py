"""Match the classes of data and models by name, or by index if one of them has no names.

The indices of classes come from sorted folder names or from the data set, but a model may have
another order. Without matching, all of its answers would silently count as wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unicodedata import normalize

from torch.utils.data import Dataset

from layershuffle.data.splits import ImageData, Item
from layershuffle.ground.errors import DataError
from layershuffle.ground.text import shortened

ClassNames = Sequence[str]
_IMAGENET_CLASSES = 1000


def numbered(count: int) -> tuple[str, ...]:
    """The names "0", "1", ... for classes without names."""
    return tuple(str(index) for index in range(count))


def have_names(classes: ClassNames) -> bool:
    """Whether the classes have names other than "0", "1", ..."""
    return tuple(classes) != numbered(len(classes))


def match_classes(
    data: ImageData, names: ClassNames | None, *, outputs: int, place: str, some: bool = False
) -> ImageData:
    """`data` with the classes of a model, in the order of its outputs.

    `names`: the names of the model's classes, `None` if it has none; `outputs`: the number of
    outputs of its head. Where one side has numbers alone, they are matched by number, and a note
    says so. `some`: the data may have a part of the model's classes, by name. Raises `DataError`
    with the differences.
    """
    classes = data.classes
    both = f"{place} and {data.spec}"
    hint = f"layershuffle fit MODEL --data {data.spec} makes a new head; "
    hint += "or use data with the model's classes"
    if some and names is not None and 0 < len(classes) < outputs == len(names):
        part = _indices_by_name(names, classes)
        if part is not None:
            note = (
                f"the data have {len(classes)} of the {outputs} classes of the model; its answers, "
                f"and top-1, are over all {outputs}"
            )
            return replace(_renumbered(data, part), classes=tuple(names), notes=(*data.notes, note))
    if len(classes) != outputs:
        head = f"{outputs} outputs" if outputs else "no classifier"
        cause = f"the model has {head}, the data has {len(classes)} classes"
        raise DataError(cause, place=both, hint=hint)
    if names is None:
        return data
    # Also for numbers, because folders are sorted as 0, 1, 10, 2, as in the names of their model.
    indices = _indices(classes, names)
    if indices is None and have_names(classes) and have_names(names):
        listed = listed_difference({"the model": names, "the data": classes}, same=_plain)
        cause = "the classes of model and data have other names: "
        cause += listed or "some stand for several classes"
        raise DataError(cause, place=both, hint=hint)
    if indices is None:
        unnamed = "the model has" if have_names(classes) else "the data have"
        classes = classes if have_names(classes) else tuple(names)
        note = f"{unnamed} no names of classes, so number 0 is {classes[0]}, and so on"
        return replace(data, classes=classes, notes=(*data.notes, note))
    if indices != list(range(len(names))):
        data = _renumbered(data, indices)
    return replace(data, classes=tuple(names))


def listed_difference(sides: Mapping[str, ClassNames], *, same: Callable[[str], str] = str) -> str:
    """The names that only one of the sides has, for messages; empty if there are none.

    Names are compared as `same` writes them.
    """
    written = [set(map(same, names)) for names in sides.values()]
    common = set.intersection(*written)
    parts: list[str] = []
    lone_names: set[str] = set()
    composed: set[frozenset[str]] = set()
    for side, names in sides.items():
        composed_side = set()
        lone = []
        for name in names:
            composed_side.add(normalize("NFC", name))
            if same(name) not in common:
                lone.append(name)
                lone_names.add(normalize("NFC", name))
        composed.add(frozenset(composed_side))
        if lone:
            parts.append(f"{len(lone)} in {side} only ({shortened(lone)})")
    if lone_names and len(composed) == 1:
        accented = shortened(sorted(lone_names))
        return (
            f"accents are written in two forms (NFC and NFD: convmv --nfc mends it) in {accented}"
        )
    return ", ".join(parts)


def _renumbered(data: ImageData, indices: Sequence[int]) -> ImageData:
    """`data` with `indices[i]` in place of label i."""
    splits = {}
    for name, split in data.splits.items():
        splits[name] = replace(split, dataset=RenumberedImages(split.dataset, indices))
    return replace(data, splits=splits)


def _indices_by_name(names: ClassNames, classes: ClassNames) -> list[int] | None:
    """The index in `names` of every class, `None` unless each of them is there once."""
    written = list(map(_plain, names))
    often = Counter(written)
    places = {}
    for index, name in enumerate(written):
        if often[name] == 1:
            places[name] = index
    if _is_imagenet(names):
        from timm.data import ImageNetInfo  # timm takes seconds to import

        # A model may describe its classes, whose folders are n01440764 and the like.
        for index, folder in enumerate(ImageNetInfo("imagenet-1k").label_names()):
            places[folder] = index
    plain = list(map(_plain, classes))
    if len(set(plain)) < len(plain) or not places.keys() >= set(plain):
        return None
    return [places[name] for name in plain]


def _indices(classes: ClassNames, names: ClassNames) -> list[int] | None:
    """The index in `names` of every class, `None` unless both name the same classes."""
    # Checked first, because two classes of ImageNet have the name "crane".
    if tuple(classes) == tuple(names) or (_is_imagenet(classes) and _is_imagenet(names)):
        return list(range(len(names)))
    places = dict(zip(map(_plain, names), range(len(names)), strict=True))
    plain = list(map(_plain, classes))
    if len(places) < len(names) or sorted(places) != sorted(plain):
        return None
    return [places[name] for name in plain]


def _plain(name: str) -> str:
    return name.strip().replace("_", " ").casefold()


def _is_imagenet(names: ClassNames) -> bool:
    """Whether these are the 1,000 classes of ImageNet in its order, as folders or descriptions.

    A model's name may be "tench" or "tench, Tinca tinca", a folder's n01440764.
    """
    if len(names) != _IMAGENET_CLASSES:
        return False
    from timm.data import ImageNetInfo  # timm takes seconds to import

    imagenet = ImageNetInfo("imagenet-1k")
    folders = imagenet.label_names()
    descriptions = imagenet.label_descriptions()
    for name, folder, description in zip(names, folders, descriptions, strict=True):
        if name != folder and not _words(name) & _words(description):
            return False
    return True


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.casefold()))


class RenumberedImages(Dataset[Item]):
    """A data set whose label i is `indices[i]` of the original's."""

    def __init__(self, dataset: Dataset[Item], indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def set_epoch(self, epoch: int) -> None:
        """Use the augmentation of `epoch`, if the data set has any."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def contents(self, classes: Sequence[str]) -> dict[str, tuple[int, str]]:
        """As `Images.contents`; empty if the data set is made and not read."""
        named = [classes[index] for index in self.indices]
        return self.dataset.contents(named) if hasattr(self.dataset, "contents") else {}

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch declares no length

    def __getitem__(self, index: int) -> Item:
        pixels, label = self.dataset[index]
        return pixels, self.indices[label]
