"""Find the image and label columns of a Hugging Face data set, and the meaning of the labels.

By feature type, not by name, because names vary: image, img, jpg; label, fine_label, class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
from PIL import Image
from torch import Tensor

from layershuffle.data.class_names import numbered
from layershuffle.data.decode import read_image, read_pixels
from layershuffle.data.streams import RecordReader
from layershuffle.errors import DataError, UsageError

Features = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The image and label columns and the classes, in the order of their indices.

    `index` converts a cell of the label column to a class index; -1 means "no such class". It can
    be pickled, for DataLoader workers that are not forked.
    """

    image: str
    label: str
    classes: tuple[str, ...]
    index: Callable[[Any], int]


def image_column(features: Features, *, column: str | None, place: str) -> str:
    """The only image column. Raises DataError if there is none, UsageError if there are several."""
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    return _chosen(images, features, role="image", column=column, place=place)


def label_column(features: Features, *, column: str | None, place: str) -> str:
    """The label column: the only ClassLabel, else "label", else the only integers or strings."""
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not labels:
        # webdataset's own columns (__key__, __url__) are strings too.
        plain = [name for name, kind in features.items() if _plain_label(kind)]
        labels = [name for name in plain if not name.startswith("__")]
        # Among other strings and numbers (captions, sizes), this name identifies it.
        if "label" in labels:
            labels = ["label"]
    return _chosen(labels, features, role="label", column=column, place=place)


def label_meaning(
    feature: Any, values: Callable[[], Iterable[Any]]
) -> tuple[tuple[str, ...], Callable[[Any], int]]:
    """(classes, cell -> class index) of a label column.

    ClassLabel: its names. Strings: the sorted values of the training split. Integers: numbers up to
    the largest training label. `values` is only called for the last two.
    """
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names), as_index
    present = {value for value in values() if value is not None}
    if feature.dtype in ("string", "large_string"):
        names = tuple(sorted(present))
        table = {name: index for index, name in enumerate(names)}
        # A partial, because loader processes that are not forked cannot pickle a closure.
        return names, partial(_looked_up, table)
    return numbered(max(present, default=-1) + 1), as_index


class HubTable:
    """A map-style Hugging Face split; images are decoded when they are read."""

    def __init__(self, data: Any, columns: Columns, *, channels: int, place: str) -> None:
        # Labels are read once, as a column, because reading rows would decode every image.
        self.labels = [columns.index(cell) for cell in data[columns.label]]
        names = [name for name in (columns.image, "__key__") if name in data.column_names]
        # Reading a row reads all of its columns, so the others are dropped.
        data = data.select_columns(names)
        self.data = data.cast_column(columns.image, datasets.Image(decode=False))
        self.reader = record_reader(columns, channels=channels, place=place)

    def image(self, index: int) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming it."""
        content, place = self._content(index)
        return read_image(content, self.reader.channels, place=place)

    def pixels(self, index: int) -> Tensor:
        """Image `index` as pixels uint8 [C, H, W]. Raises DataError naming it."""
        content, place = self._content(index)
        return read_pixels(content, self.reader.channels, place=place)

    def name(self, index: int) -> str:
        """Place, row and, if it has one, the path or key of image `index`."""
        return f"row {index} of {self.reader.name(self.data[index])}"

    def _content(self, index: int) -> tuple[bytes, str]:
        record = self.data[index]  # read once: it holds the whole file
        return self.reader.content(record), f"row {index} of {self.reader.name(record)}"


def record_reader(
    columns: Columns, *, channels: int, place: str, key: str | None = None
) -> RecordReader:
    """The reader of undecoded records with these columns."""
    return RecordReader(
        image=columns.image,
        label=columns.label,
        index=columns.index,
        channels=channels,
        classes=len(columns.classes),
        place=place,
        key=key,
    )


def as_index(cell: Any) -> int:
    """The integer in a cell; -1 for an empty one."""
    # Hugging Face itself marks an unknown label by -1, as in ImageNet's test split.
    return -1 if cell is None else int(cell)


def _looked_up(table: Mapping[str, int], cell: Any) -> int:
    return table.get(cell, -1)


def _plain_label(kind: Any) -> bool:
    kinds = ("int", "uint", "string", "large_string")
    return isinstance(kind, datasets.Value) and str(kind.dtype).startswith(kinds)


def _chosen(
    candidates: list[str], features: Features, *, role: str, column: str | None, place: str
) -> str:
    columns = ", ".join(features)
    if column is not None:
        if column not in features:
            raise UsageError(
                f"There is no column {column!r}", place=place, hint=f"columns: {columns}"
            )
        return column
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise DataError(
            f"no {role} column among: {columns}",
            place=place,
            hint=f"name it (hf:DIR?{role}=COLUMN), or give images in folders of classes",
        )
    raise UsageError(
        f"several columns could be the {role}: {', '.join(candidates)}",
        place=place,
        hint=f"choose one, for example {place}?{role}={candidates[0]}",
    )
