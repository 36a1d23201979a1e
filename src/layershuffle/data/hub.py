"""`hf:NAME_OR_DIR[:CONFIG]`: labelled images that the library `datasets` reads.

A name on the hub, or a directory: class folders, parquet files, webdataset's tars, or what
`save_to_disk` wrote. This package decodes the records, so errors name corrupt images. With a
validation and a test split, the first picks the checkpoint; a test split without labels (all -1, as
ImageNet's) does not count.

The label is never guessed: class folders, else the only `ClassLabel`, else a column named "label"
("cls" or a "label" in "json" in tars), else the one that `?label=COLUMN` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError
from PIL import Image

from layershuffle.data.class_names import numbered
from layershuffle.data.contract import ImageData, SourceRequest
from layershuffle.data.pixels import SKIP_HINT, mode_for, read_image
from layershuffle.data.tables import Tables, assemble
from layershuffle.errors import DataError, UsageError
from layershuffle.text import one_line, shortened

TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("validation", "valid", "val", "dev")
TEST_NAMES = ("test", "testing")
LABEL_NAMES = ("label", "cls", "json.label")
_KEY, _TAR = "__key__", "__url__"  # columns of the library's reader of tars

# DatasetsError is the library's own tree; OSError has its ConnectionError and FileNotFoundError.
LOAD_ERRORS = (DatasetsError, OSError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The image and label columns, and the classes in the order of their indices.

    `index` converts a cell of the label column to a class index; None means "no such class".
    """

    image: str
    label: str
    classes: tuple[str, ...]
    index: Callable[[Any], int | None]


class HubTable:
    """One split; images are decoded when they are read.

    Raises DataError for rows without a label of the classes.
    """

    def __init__(self, data: Any, columns: Columns, *, channels: int, place: str) -> None:
        self.image_column, self.channels, self.place = columns.image, channels, place
        names = [name for name in (columns.image, _KEY, _TAR) if name in data.column_names]
        # Reading a row reads all of its columns, so the others are dropped.
        self.data = data.select_columns(names).cast_column(
            columns.image, datasets.Image(decode=False)
        )
        # Labels are read once, as a column, because reading rows would read every image.
        cells = _cells(data, columns.label)
        labels = [columns.index(cell) for cell in cells]
        self.labels = [label for label in labels if label is not None]
        if len(self.labels) < len(labels):
            raise self._unlabelled(cells, labels, columns)

    def image(self, index: int) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming it."""
        cell = self.data[index][self.image_column] or {}
        if (content := cell.get("bytes")) is not None:
            return read_image(content, self.channels, place=self.name(index))
        if cell.get("path") is None:
            raise DataError("There is no image", place=self.name(index), hint=SKIP_HINT)
        return read_image(Path(cell["path"]), self.channels, place=self.name(index))

    def name(self, index: int) -> str:
        """The tar and the sample, or the place, the row and the path, of image `index`."""
        row = self.data[index]
        if _TAR in row:
            return f"sample {row[_KEY]} of {row[_TAR]}"
        path = (row[self.image_column] or {}).get("path")
        return f"row {index} of {self.place}" + (f" ({path})" if path else "")

    def _unlabelled(
        self, cells: Sequence[Any], labels: Sequence[int | None], columns: Columns
    ) -> DataError:
        rows = [row for row, label in enumerate(labels) if label is None]
        unknown = sorted({str(cells[row]) for row in rows if cells[row] not in (None, -1)})
        cause = f"{len(rows)} of {len(labels)} images have no label"
        if unknown:
            cause = f"labels are not among those of the training images: {shortened(unknown)}"
        return DataError(
            cause,
            place=self.name(rows[0]),
            hint=f"correct column {columns.label!r}, or name another one (?label=COLUMN)",
        )


def open_source(request: SourceRequest) -> ImageData:
    """Data of Hugging Face `datasets` as ImageData. Raises DataError if they are missing or
    unlabelled, UsageError if several columns could be meant."""
    channels = request.view.channels
    mode_for(channels)
    splits = {name: _plain(split) for name, split in load_splits(request).items()}
    train = _first(splits, TRAIN_NAMES)
    if train is None and request.options.train:
        raise _no_split("train", splits, request.spec)
    columns = find_columns(request, next(iter(splits.values())) if train is None else train)
    validation, test, notes = reported_splits(request, splits, columns=columns)
    # Only now, because the training split also names the classes in an evaluation.
    if not request.options.train:
        train = validation = None
    named = {"train": train, "validation": validation, "test": test}
    tables = {
        name: HubTable(part, columns, channels=channels, place=f"{request.spec} ({name})")
        for name, part in named.items()
        if part is not None
    }
    return assemble(
        request,
        Tables(
            classes=columns.classes,
            test=tables["test"],
            train=tables.get("train"),
            validation=tables.get("validation"),
            notes=notes,
        ),
    )


def load_splits(request: SourceRequest) -> Mapping[str, Any]:
    """All splits by name. Raises DataError."""
    place, config = split_config(request.place)
    root = Path(place).expanduser()
    # datasets would treat a mistyped path as the name of a data set on the hub.
    if place.startswith(("/", "~", ".")) and not root.is_dir():
        raise DataError(
            "The data folder does not exist",
            place=root,
            hint="correct the path; hub names look like owner/name",
        )
    target = str(root) if root.is_dir() else place
    try:
        # load_dataset refuses directories of save_to_disk, and load_from_disk reads only those.
        if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
            loaded = datasets.load_from_disk(str(root))
            return loaded if isinstance(loaded, Mapping) else {"train": loaded}
        builder = datasets.load_dataset_builder(target, name=config)
        # Images as files: the library leaves the classes of folders out beside a metadata file, and
        # takes the folders of splits for classes if there are no others.
        if hasattr(builder.config, "drop_metadata"):
            folders = datasets.load_dataset(target, name=config, drop_metadata=True)
            if request.settings.get("label", "label") == "label" and _has_classes(folders):
                return dict(folders)
            return dict(datasets.load_dataset(target, name=config, drop_labels=True))
        return dict(datasets.load_dataset(target, name=config))
    except LOAD_ERRORS as error:
        raise _load_failure(request, root, error) from error


def split_config(place: str) -> tuple[str, str | None]:
    """("name", "config") of "name:config"; an existing directory is not split."""
    if Path(place).expanduser().is_dir() or ":" not in place:
        return place, None
    name, _, config = place.rpartition(":")
    return name, config or None


def find_columns(request: SourceRequest, data: Any) -> Columns:
    """Image and label columns and the classes of a split, the training split if there is one.

    Classes of a ClassLabel are its names, of strings their sorted values, of integers the numbers
    up to the largest.
    """
    features = data.features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    image = _chosen("image", images, features, request)
    kinds = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    usual = [name for name in LABEL_NAMES if name in (kinds or features)]
    label = _chosen("label", usual[:1] or kinds, features, request)
    kind = features[label]
    index: Callable[[Any], int | None]
    if kind in (datasets.Value("string"), datasets.Value("large_string")):
        classes = tuple(sorted(set(data[label]) - {None}))
        index = {name: number for number, name in enumerate(classes)}.get
    elif isinstance(kind, datasets.ClassLabel) or _is_integer(kind):
        named = isinstance(kind, datasets.ClassLabel)
        cells = [] if named else [cell for cell in data[label] if cell is not None]
        classes = tuple(kind.names) if named else numbered(max(cells, default=-1) + 1)
        numbers = set(range(len(classes)))

        def index(cell: Any) -> int | None:
            return cell if cell in numbers else None
    else:
        words = "lists" if isinstance(kind, datasets.List | datasets.LargeList) else f"{kind}"
        raise DataError(
            f"Column {label!r} holds {words}; a label is one integer or one text per image",
            place=request.spec,
            hint=_name_it("label", request),
        )
    if not classes:
        raise DataError(
            f"Column {label!r} is empty", place=request.spec, hint=_name_it("label", request)
        )
    return Columns(image=image, label=label, classes=classes, index=index)


def reported_splits(
    request: SourceRequest, splits: Mapping[str, Any], *, columns: Columns
) -> tuple[Any, Any, tuple[str, ...]]:
    """(validation or None, test, notes). Raises DataError if both are missing or classes differ."""
    validation, test = _first(splits, VALIDATION_NAMES), _first(splits, TEST_NAMES)
    notes: tuple[str, ...] = ()
    cells = () if test is None or validation is None else _cells(test, columns.label)
    if cells and all(cell in (None, -1) for cell in cells):
        test, notes = None, ("the test split has no labels; the validation split is reported",)
    for split in (validation, test):
        kind = None if split is None else split.features.get(columns.label)
        # With other names, an index would mean different classes in the splits.
        if isinstance(kind, datasets.ClassLabel) and tuple(kind.names) != columns.classes:
            raise DataError(
                f"splits have different classes: {shortened(columns.classes)} and "
                f"{shortened(kind.names)}",
                place=request.spec,
                hint="give all splits the same list of classes",
            )
    if test is None:
        # A validation split without a test split is reported, as in other sources.
        validation, test = None, validation
    if test is None:
        raise _no_split("validation or test", splits, request.spec)
    return validation, test, notes


def _cells(data: Any, label: str) -> Sequence[Any]:
    return data[label][:] if label in data.column_names else [None] * len(data)


def _is_integer(kind: Any) -> bool:
    return isinstance(kind, datasets.Value) and kind.dtype.startswith(("int", "uint"))


def _has_classes(splits: Mapping[str, Any]) -> bool:
    """Whether the labels of all splits are class folders, not the folders of the splits."""
    kinds = [split.features.get("label") for split in splits.values()]
    names = {name for kind in kinds if kind is not None for name in kind.names}
    return None not in kinds and not names <= {*TRAIN_NAMES, *VALIDATION_NAMES, *TEST_NAMES}


def _plain(split: Any) -> Any:
    """The split with the members of a tar's .json files as columns of their own."""
    return split.flatten() if isinstance(split.features.get("json"), dict) else split


def _chosen(role: str, candidates: Sequence[str], features: Any, request: SourceRequest) -> str:
    column, columns = request.settings.get(role), ", ".join(features)
    if column is not None:
        if column not in features:
            raise UsageError(
                f"There is no column {column!r}", place=request.spec, hint=f"columns: {columns}"
            )
        return column
    if len(candidates) > 1:
        raise UsageError(
            f"several columns could be the {role}: {', '.join(candidates)}",
            place=request.spec,
            hint=_name_it(role, request, candidates[0]),
        )
    if not candidates:
        raise DataError(
            f"no {role} column among: {columns}",
            place=request.spec,
            hint=f"{_name_it(role, request)}, or give images in folders of classes",
        )
    return candidates[0]


def _name_it(role: str, request: SourceRequest, column: str = "COLUMN") -> str:
    settings = {**request.settings, role: column}
    query = "&".join(f"{key}={value}" for key, value in settings.items())
    return f"name one, as in hf:{request.place}?{query}"


def _first(splits: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((splits[name] for name in names if name in splits), None)


def _no_split(split: str, splits: Mapping[str, Any], place: str) -> DataError:
    return DataError(
        f"there is no {split} split; found {', '.join(splits) or 'none'}",
        place=place,
        hint="name files or folders by their split: train-000.tar or train/, val-000.tar or val/",
    )


def _load_failure(request: SourceRequest, root: Path, error: BaseException) -> DataError:
    if root.is_dir():
        hint = "put class folders, parquet files or tars under train/ and test/ in it"
    else:
        hint = (
            "without a network, point at a copy: hf:DIR (a folder or a save_to_disk directory) or "
            "folder:DIR; or set HF_HOME to a cache that has it and HF_HUB_OFFLINE=1. "
            "With a network, check the name and unset HF_HUB_OFFLINE"
        )
    # The library wraps the error that explains the failure.
    reason = one_line(error.__cause__ or error)
    return DataError(f"Cannot open the data set ({reason})", place=request.spec, hint=hint)
