"""`torchvision:NAME?root=DIR`: a labelled data set of torchvision, by the name of its class.

FashionMNIST, CIFAR100, Food101 and every other set whose class takes `train` or `split`. `root` is
the directory that torchvision's documentation calls so. Nothing is downloaded without
`&download=yes`.

The files of CIFAR are pickles, which torchvision opens only if their MD5 sums are the published
ones; the other sets are read without unpickling.
"""

from __future__ import annotations

import inspect
from numbers import Integral
from pathlib import Path
from typing import Any

import torchvision.datasets
from PIL import Image

from layershuffle.data.class_names import numbered
from layershuffle.data.splits import ImageData, SourceRequest
from layershuffle.data.tables import assemble
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import did_you_mean, one_line
from layershuffle.images.pixels import decoded, faults_named, read_image

# What sets call their parts, in the order in which they are tried.
_PARTS = {
    "train": ("train", "trainval", "train-standard"),
    "validation": ("val", "valid", "validation"),
    "test": ("test",),
}
_HINT = "name a set of images with one class each, as in torchvision:FashionMNIST?root=DIR"


class SetTable:
    """One part of a data set of torchvision. Raises DataError if its labels are no classes."""

    def __init__(self, data: Any, *, channels: int, place: str, skip_corrupt: bool) -> None:
        self.data = data
        self.channels = channels
        self.place = place
        labels = []
        for row in range(len(data)):
            try:
                labels.append(self._item(row)[1])
            except DataError:
                if not skip_corrupt:
                    raise
                labels.append(-1)  # of nobody: the image will be left out
        self.labels: list[int] = []
        for label in labels:
            if not isinstance(label, Integral):
                raise DataError("The labels are no classes", place=place, hint=_HINT)
            self.labels.append(int(label))

    def image(self, index: int) -> Image.Image:
        """Image `index`. Raises DataError naming it."""
        image = self._item(index)[0]
        if isinstance(image, str):
            return read_image(Path(image), self.channels, place=image)
        return decoded(image, self.channels, place=self.name(index))

    def _item(self, index: int) -> Any:
        """The path of an image, or what a set without `loader` has decoded, and the label."""
        with faults_named(self.name(index)):
            return self.data[index]

    def name(self, index: int) -> str:
        """The row of image `index`."""
        return f"image {index} of {self.place}"

    def identity(self, index: int) -> str:
        """The row: the library compares the files with the published ones."""
        return str(index)


def open_source(request: SourceRequest) -> ImageData:
    """A data set of torchvision as ImageData.

    Raises UsageError for a name that is no such set and without a root, DataError if the files are
    missing or not the published ones.
    """
    kind, fits = _set_named(request)
    wanted = ("train", "validation", "test") if request.options.train else ("test",)
    parts = {}
    for name in wanted:
        parts[name] = _part(kind, request, name, fits)
    if parts["test"] is None and "validation" not in parts:
        parts["validation"] = _part(kind, request, "validation", fits)
    tables = {}
    for name, part in parts.items():
        if part is not None:
            tables[name] = SetTable(
                part,
                channels=request.view.channels,
                place=f"{request.spec} ({name})",
                skip_corrupt=request.options.skip_corrupt,
            )
    parts_read = list(tables.values())
    names: Any = getattr(parts_read[0].data, "classes", None) if parts_read else ()
    if names is None:
        names = numbered(max(max(table.labels) for table in parts_read) + 1)
    classes = []
    for name in names:
        # ImageNet has tuples of synonyms.
        classes.append(", ".join(name) if isinstance(name, tuple) else str(name))
    return assemble(request, tables, classes=classes)


def _set_named(request: SourceRequest) -> tuple[Any, set[str]]:
    """The class of the set, and the names of the options that it takes."""
    sets = torchvision.datasets.__all__
    kind = getattr(torchvision.datasets, request.place) if request.place in sets else None
    fits = _options(kind)
    if not fits & {"train", "split"}:
        guess = "" if kind else did_you_mean(request.place, sets)
        raise UsageError(
            f"torchvision has no data set {request.place!r} with a training and a test part",
            place=request.spec,
            hint=f"{guess} {_HINT}".lstrip(),
        )
    # Elsewhere splits are parts, and those are tried in turn.
    if "split" in request.settings and not fits >= {"train", "split"}:
        raise UsageError(
            f"{request.place} has no kinds to choose by split",
            place=request.spec,
            hint="leave split out; of EMNIST it names the kind of letters",
        )
    if not request.settings.get("root"):
        raise UsageError(
            "It is not said where the files are",
            place=request.spec,
            hint=f"torchvision:{request.place}?root=DIR, and &download=yes to get them",
        )
    if request.settings.get("download", "no") not in ("yes", "no"):
        raise UsageError("download is yes or no", place=request.spec, hint="leave it out for no")
    return kind, fits


def _options(kind: Any) -> set[str]:
    """The names of the parameters of a class, with those that it hands to its bases."""
    names: set[str] = set()
    for base in kind.__mro__ if inspect.isclass(kind) else ():
        names.update(inspect.signature(base).parameters)
    return names


def _part(kind: Any, request: SourceRequest, part: str, fits: set[str]) -> Any:
    """One part of the set; None if it has no such part."""
    settings = request.settings
    # Paths instead of images, because this package opens them.
    options: dict[str, Any] = {"loader": str} if "loader" in fits else {}
    if settings.get("download") == "yes":
        options["download"] = True
    choices: list[dict[str, Any]] = []
    if "train" not in fits:
        choices = [{"split": name} for name in _PARTS[part]]
    elif part != "validation":
        choices = [{"train": part == "train"}]
        # EMNIST calls its kinds of letters splits.
        if "split" in settings:
            choices[0]["split"] = settings["split"]
    for choice in choices:
        try:
            return kind(user_path(settings["root"]), **choice, **options)
        except (RuntimeError, OSError, TypeError, AssertionError, ValueError) as error:
            # Sets refuse the name of a part that they do not have by a ValueError.
            if isinstance(error, ValueError) and "train" not in fits:
                continue
            raise DataError(
                f"{request.place} cannot be opened ({one_line(error)})",
                place=request.spec,
                hint=f"root is the directory that torchvision's documentation of {request.place} "
                "calls so; &download=yes gets the files of most sets",
            ) from error
    return None
