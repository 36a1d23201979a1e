"""`hf:NAME_OR_DIR[:CONFIG]`: any labelled images that the Hugging Face `datasets` library reads.

A hub name, a local folder (class folders, parquet) or a `save_to_disk` directory, as tables or with
`streaming`. This package decodes the records, so errors name corrupt images. With a validation and
a test split, the first picks the checkpoint; a
test split without labels (all -1, as ImageNet's) does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from layershuffle.data.columns import (
    Columns,
    HubTable,
    image_column,
    label_column,
    label_meaning,
    record_reader,
)
from layershuffle.data.contract import ImageData, SourceRequest
from layershuffle.data.decode import mode_for
from layershuffle.data.streams import Streams, assemble_streams
from layershuffle.data.tables import Tables, assemble
from layershuffle.errors import DataError
from layershuffle.text import one_line

TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("validation", "valid", "val", "dev")
TEST_NAMES = ("test", "testing")

# DatasetsError is the library's own tree; OSError has its ConnectionError and FileNotFoundError.
LOAD_ERRORS = (DatasetsError, OSError, ValueError)


def open_source(request: SourceRequest) -> ImageData:
    """Hugging Face data as ImageData. Raises DataError if it is missing or unlabelled."""
    mode_for(request.view.channels)
    splits = load_splits(request)
    return splits_to_data(request, splits)


def splits_to_data(request: SourceRequest, splits: Mapping[str, Any]) -> ImageData:
    """ImageData of the loaded splits, as tables or as streams."""
    train = _first(splits, TRAIN_NAMES)
    if train is None and request.options.train:
        raise _no_split("train", splits, request.spec)
    columns = find_columns(request, splits, train=train)
    validation, test, notes = reported_splits(request, splits, columns=columns)
    # Only now, because the training split also names the classes in an evaluation.
    if not request.options.train:
        train = validation = None
    parts = {"train": train, "validation": validation, "test": test}
    parts = {name: part for name, part in parts.items() if part is not None}
    if request.options.streaming:
        return _streamed(request, parts, columns, notes)
    tables = {
        name: HubTable(part, columns, channels=request.view.channels, place=request.spec)
        for name, part in parts.items()
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
    """All splits by name, map-style or streams. Raises DataError."""
    place, config = split_config(request.place)
    root = Path(place).expanduser()
    streaming = request.options.streaming
    # datasets would treat a mistyped path as the name of a data set on the hub.
    if place.startswith(("/", "~", ".")) and not root.is_dir():
        raise DataError(
            "The data folder does not exist",
            place=root,
            hint="correct the path; hub names look like owner/name",
        )
    try:
        # load_dataset refuses directories of save_to_disk, and load_from_disk reads only those.
        if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
            loaded = datasets.load_from_disk(str(root))
            named = loaded if isinstance(loaded, Mapping) else {"train": loaded}
            if streaming:
                return {name: split.to_iterable_dataset() for name, split in named.items()}
            return named
        target = str(root) if root.is_dir() else place
        loaded = datasets.load_dataset(target, name=config, streaming=streaming)
    except LOAD_ERRORS as error:
        raise _load_failure(request, root, error) from error
    return dict(loaded.items())


def split_config(place: str) -> tuple[str, str | None]:
    """("name", "config") of "name:config"; an existing directory is not split."""
    if Path(place).expanduser().is_dir() or ":" not in place:
        return place, None
    name, _, config = place.rpartition(":")
    return name, config or None


def find_columns(request: SourceRequest, splits: Mapping[str, Any], *, train: Any) -> Columns:
    """Image and label columns and the classes, from the training split if there is one."""
    reference = train if train is not None else next(iter(splits.values()))
    features = reference.features
    if features is None:  # some streams learn their columns from the first record
        features = reference._resolve_features().features
    image = image_column(features, column=request.settings.get("image"), place=request.spec)
    label = label_column(features, column=request.settings.get("label"), place=request.spec)
    classes, index = label_meaning(features[label], lambda: _cells(reference, label))
    if not classes:
        raise DataError(
            f"Column {label!r} holds no labels",
            place=request.spec,
            hint="name another column (?label=COLUMN)",
        )
    return Columns(image=image, label=label, classes=classes, index=index)


def reported_splits(
    request: SourceRequest, splits: Mapping[str, Any], *, columns: Columns
) -> tuple[Any, Any, tuple[str, ...]]:
    """(validation or None, test, notes). Raises DataError if both are missing or classes differ."""
    validation, test = _first(splits, VALIDATION_NAMES), _first(splits, TEST_NAMES)
    notes: tuple[str, ...] = ()
    if validation is not None and test is not None and _unlabelled(test, columns):
        test, notes = None, ("the test split has no labels; the validation split is reported",)
    for split in (validation, test):
        if split is not None:
            _require_same_names(split, columns, request.spec)
    if test is None:
        # A validation split without a test split is reported, as in other sources.
        validation, test = None, validation
    if test is None:
        raise _no_split("validation or test", splits, request.spec)
    return validation, test, notes


def _streamed(
    request: SourceRequest, parts: Mapping[str, Any], columns: Columns, notes: tuple[str, ...]
) -> ImageData:
    reader = record_reader(columns, channels=request.view.channels, place=request.spec)
    undecoded = datasets.Image(decode=False)
    raw = {name: part.cast_column(columns.image, undecoded) for name, part in parts.items()}
    readers = dict.fromkeys(raw, reader)
    return assemble_streams(
        request, Streams(classes=columns.classes, readers=readers, notes=notes, **raw)
    )


def _cells(data: Any, label: str) -> Iterable[Any]:
    if isinstance(data, datasets.Dataset):
        return list(data[label])
    return (record[label] for record in data.select_columns([label]))


def _unlabelled(data: Any, columns: Columns) -> bool:
    if columns.label not in (data.column_names or [columns.label]):
        return True
    if isinstance(data, datasets.Dataset):
        return all(columns.index(cell) < 0 for cell in data[columns.label])
    # Only the first, because all labels of a stream would take a pass over the data.
    first = next(iter(data.select_columns([columns.label])), None)
    return first is None or columns.index(first[columns.label]) < 0


def _require_same_names(data: Any, columns: Columns, place: str) -> None:
    feature = (data.features or {}).get(columns.label)
    # With other names, an index would mean different classes in the splits.
    if isinstance(feature, datasets.ClassLabel) and tuple(feature.names) != columns.classes:
        raise DataError(
            f"splits have different classes: {len(columns.classes)} in training, "
            f"{len(feature.names)} in another",
            place=place,
            hint="give all splits the same list of classes",
        )


def _first(splits: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((splits[name] for name in names if name in splits), None)


def _no_split(split: str, splits: Mapping[str, Any], place: str) -> DataError:
    return DataError(
        f"there is no {split} split; found {', '.join(splits) or 'none'}",
        place=place,
        hint="use data that has one, or keep such parts in folders and pass folder:DIR",
    )


def _load_failure(request: SourceRequest, root: Path, error: BaseException) -> DataError:
    if root.is_dir():
        hint = "put class folders under train/ and test/ in it, or save it with save_to_disk"
    else:
        hint = (
            "without a network, point at a copy: hf:DIR (a folder or a save_to_disk directory) or "
            "folder:DIR; or set HF_HOME to a cache that has it and HF_HUB_OFFLINE=1. "
            "With a network, check the name and unset HF_HUB_OFFLINE"
        )
    return DataError(f"Cannot open the data set ({one_line(error)})", place=request.spec, hint=hint)
