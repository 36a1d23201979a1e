"""Which columns of a Hugging Face data set are the image and the label, and what the labels mean.

By feature type, not by name: data sets call them image, img, jpg; label, fine_label, class.
"""

from __future__ import annotations

import os
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

    `index` turns a cell of the label column into a class index; -1 means "no such class". It can be
    pickled, as DataLoader workers that are not forked need.
    """

    image: str
    label: str
    classes: tuple[str, ...]
    index: Callable[[Any], int]


def image_column(features: Features, *, column: str | None, place: str) -> str:
    """The one column of images. Raises DataError if there is none, UsageError if it is unclear."""
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    return _chosen(images, features, role="image", column=column, place=place)


def label_column(features: Features, *, column: str | None, place: str) -> str:
    """The label column: the one ClassLabel, else "label", else the one of integers or strings."""
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not labels:
        # webdataset's own columns (__key__, __url__) are strings too.
        plain = [name for name, kind in features.items() if _plain_label(kind)]
        labels = [name for name in plain if not name.startswith("__")]
        # Beside other texts and numbers (captions, sizes) only this name says what it is.
        if "label" in labels:
            labels = ["label"]
    return _chosen(labels, features, role="label", column=column, place=place)


def label_meaning(
    feature: Any, values: Callable[[], Iterable[Any]]
) -> tuple[tuple[str, ...], Callable[[Any], int]]:
    """(classes, cell -> class index) of a label column.

    ClassLabel: its own names. Strings: the sorted values of the training split. Integers: numbered
    up to the largest training label. `values` is only called for the last two.
    """
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names), as_index
    present = {value for value in values() if value is not None}
    if feature.dtype in ("string", "large_string"):
        names = tuple(sorted(present))
        table = {name: index for index, name in enumerate(names)}
        # A partial, not a closure: loader processes that are not forked must pickle it.
        return names, partial(_looked_up, table)
    return numbered(max(present, default=-1) + 1), as_index


class HubTable:
    """One map-style Hugging Face split; images stay undecoded until they are read."""

    def __init__(self, data: Any, columns: Columns, *, channels: int, place: str) -> None:
        # Labels are read once, in whole columns: row by row would decode every image.
        self.labels = [columns.index(cell) for cell in data[columns.label]]
        names = [name for name in (columns.image, "__key__") if name in data.column_names]
        # Reading a row reads all of its columns, and only these are needed from here on.
        data = data.select_columns(names)
        self.data = data.cast_column(columns.image, datasets.Image(decode=False))
        self.reader = record_reader(columns, channels=channels, place=place)

    def image(self, index: int, *, least: int | None = None) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming it."""
        content, place = self._content(index)
        return read_image(content, self.reader.channels, place=place, least=least)

    def pixels(self, index: int) -> Tensor:
        """Image `index` as pixels uint8 [C, H, W]. Raises DataError naming it."""
        content, place = self._content(index)
        return read_pixels(content, self.reader.channels, place=place)

    def name(self, index: int) -> str:
        """Place, row and, if it has one, the path or key of image `index`."""
        return f"row {index} of {self.reader.name(self.data[index])}"

    def fingerprint(self) -> str:
        """What the library knows the data by, and the sizes of the files that it keeps them in."""
        # The fingerprint says how the data came about, not whether its files are still the same.
        sizes = [os.stat(file["filename"]).st_size for file in self.data.cache_files]
        return f"{self.data._fingerprint} {sizes}"

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
