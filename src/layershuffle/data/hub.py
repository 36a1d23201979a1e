"""`hf:NAME_OR_DIR[:CONFIG]`: labelled images that the library `datasets` reads.

A name on the hub, or a directory: class folders, parquet files, webdataset's tars, or what
`save_to_disk` wrote. This package decodes the records, so errors name corrupt images. With a
validation and a test split, the first picks the checkpoint; a test split without labels (all -1, as
ImageNet's) does not count.

The label is never guessed: class folders, else the only `ClassLabel`, else a column named "label"
("cls" or a "label" in "json" in tars), else the one that `?label=COLUMN` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError
from PIL import Image

from layershuffle.data.class_names import listed_difference, numbered
from layershuffle.data.splits import ImageData, SourceRequest
from layershuffle.data.tables import assemble
from layershuffle.ground.errors import DataError, UsageError, of_the_machine
from layershuffle.ground.files import user_path
from layershuffle.ground.text import counted, one_line, shortened
from layershuffle.images.pixels import SKIP_HINT, read_image

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
LABEL_NAMES = ("label", "cls", "json.label")
# Columns of the library's reader of tars.
_KEY = "__key__"
_TAR = "__url__"

_SIDE_BY_SIDE = (
    "write the tars again with the members of a sample (7.png, 7.cls) behind each other, as "
    "tar --sort=name does"
)

# DatasetsError is the library's own tree; OSError has its ConnectionError and FileNotFoundError.
LOAD_ERRORS = (DatasetsError, OSError, ValueError)


class HubTable:
    """One split; images are decoded when they are read. `labels`: the class of every row.

    Raises DataError for a column that can hold no images.
    """

    def __init__(
        self, data: Any, labels: Sequence[int], *, column: str, channels: int, place: str
    ) -> None:
        self.labels = labels
        self.column = column
        self.channels = channels
        self.place = place
        self.size = 0
        for file in data.cache_files:
            self.size += Path(file["filename"]).stat().st_size
        names = [name for name in (column, _KEY, _TAR) if name in data.column_names]
        try:
            # Reading a row reads all of its columns, so the others are dropped.
            self.data = data.select_columns(names).cast_column(column, datasets.Image(decode=False))
        except NotImplementedError as error:  # of Arrow
            raise DataError(
                f"Column {column!r} holds no images, but {data.features[column]}",
                place=place,
                hint="name another one (?image=COLUMN)",
            ) from error

    def image(self, index: int) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming it."""
        cell = self.data[index][self.column]
        place = self.name(index)
        if not any((cell or {}).values()):
            raise DataError("There is no image", place=place, hint=SKIP_HINT)
        # The library stores bytes, or the path of a file.
        source = Path(cell["path"]) if cell["bytes"] is None else cell["bytes"]
        return read_image(source, self.channels, place=place)

    def name(self, index: int) -> str:
        """The tar and the sample, or the place, the row and the path, of image `index`."""
        row = self.data[index]
        if _TAR in row:
            return f"sample {row[_KEY]} of {row[_TAR]}"
        path = (row[self.column] or {}).get("path")
        return f"row {index} of {self.place}" + (f" ({path})" if path else "")

    def identity(self, index: int) -> str:
        """The row, and the bytes of its split: to know more of it is to read it."""
        return f"{index} of {self.size}"


def open_source(request: SourceRequest) -> ImageData:
    """Data of Hugging Face `datasets` as ImageData.

    Raises DataError if they are missing or unlabelled, UsageError if several columns could be
    meant.
    """
    splits = load_splits(request)
    parts = {}
    for part, names in SPLITS.items():
        present = [name for name in names if name in splits]
        if len(present) > 1:
            raise DataError(
                f"There are the splits {' and '.join(present)}",
                place=request.spec,
                hint="keep one of them, or give the others another name",
            )
        if present:
            parts[part] = splits[present[0]]
    # The training split also names the classes in an evaluation.
    reference = next(iter((parts or splits).values()))
    features = reference.features
    images: list[str] = []
    raw_images: list[str] = []
    labels: list[str] = []
    for name, kind in features.items():
        if isinstance(kind, datasets.Image):
            images.append(name)
        if isinstance(kind, datasets.ClassLabel):
            labels.append(name)
        # Other writers of parquet files leave out that a column holds images.
        if _holds_bytes(kind):
            raw_images.append(name)
    image = _chosen("image", images or raw_images, features, request)
    usual = [name for name in LABEL_NAMES if name in (labels or features)]
    label = _chosen("label", usual[:1] or labels, features, request)
    classes, numbers = _classes(reference, label, request)
    notes: list[str] = []
    tables: dict[str, HubTable] = {}
    for name, part in parts.items():
        cells = part[label][:] if label in part.column_names else [None] * len(part)
        if name == "test" and "validation" in parts and set(cells) <= {None, -1}:
            notes.append("the test split has no labels; the validation split is reported")
            continue
        tables[name] = HubTable(
            part,
            [numbers.get(cell, -1) for cell in cells],
            column=image,
            channels=request.view.channels,
            place=f"{request.spec} ({name})",
        )
        kind = part.features.get(label)
        # With other names, an index would mean different classes in the splits.
        if isinstance(kind, datasets.ClassLabel) and tuple(kind.names) != classes:
            listed = listed_difference({"training": classes, "this split": kind.names})
            raise DataError(
                f"The splits have different classes: {listed or 'in another order'}",
                place=tables[name].place,
                hint="give all splits the same list of classes",
            )
        if -1 in tables[name].labels:
            raise _unlabelled(tables[name], cells, label)
    return assemble(request, tables, classes=classes, notes=notes)


def _unlabelled(table: HubTable, cells: Sequence[Any], label: str) -> DataError:
    rows = []
    unknown = set()
    for row, number in enumerate(table.labels):
        if number == -1:
            rows.append(row)
            if cells[row] not in (None, -1):
                unknown.add(str(cells[row]))
    cause = f"{len(rows)} of {len(cells)} images have no label"
    if unknown:
        listed = shortened(sorted(unknown))
        cause = f"Labels are not among those of the training images: {listed}"
    return DataError(
        cause,
        place=table.name(rows[0]),
        hint=f"correct column {label!r}, or name another one (?label=COLUMN)",
    )


def load_splits(request: SourceRequest) -> dict[str, Any]:
    """All splits by name. Raises DataError."""
    place = request.place
    config = None
    root = user_path(request.place)
    if ":" in place and not root.is_dir():
        place, _, config = place.rpartition(":")
    # datasets would treat a mistyped path as the name of a data set on the hub.
    if place.startswith(("/", "~", ".")) and not root.is_dir():
        raise DataError(
            "There is no such folder", place=root, hint="hub names look like owner/name"
        )
    target = str(root) if root.is_dir() else place
    try:
        # load_dataset refuses directories of save_to_disk, and load_from_disk reads only those.
        if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
            loaded = datasets.load_from_disk(str(root))
            return dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
        builder = datasets.load_dataset_builder(target, name=config)
        # Images as files: beside a metadata file the library leaves the classes of folders out, so
        # it is told another name for that file. Without class folders, it takes those of splits.
        if hasattr(builder.config, "metadata_filenames"):
            folders = datasets.load_dataset(target, name=config, metadata_filenames=["-"])
            if request.settings.get("label", "label") == "label" and _has_classes(folders):
                return dict(folders)
            return dict(datasets.load_dataset(target, name=config, drop_labels=True))
        loaded = dict(datasets.load_dataset(target, name=config))
    except LOAD_ERRORS as error:
        raise of_the_machine(error) or _load_failure(request, root, error) from error
    for name, split in loaded.items():
        _refuse_scattered(split, place=f"{request.spec} ({name})")
    # The members of a tar's .json files become columns of their own.
    has_members = False
    for split in loaded.values():
        if isinstance(split.features.get("json"), dict):
            has_members = True
    if has_members:
        for name, split in loaded.items():
            loaded[name] = split.flatten()
    return loaded


def _refuse_scattered(split: Any, *, place: str) -> None:
    """Raises DataError for tars whose samples lie in several parts, of which each is read as a
    sample: an image without a label, and a label without an image."""
    if _KEY not in split.column_names or _TAR not in split.column_names:
        return
    often = Counter(zip(split[_TAR][:], split[_KEY][:], strict=True))
    scattered = [key for (_, key), times in often.items() if times > 1]
    if scattered:
        raise DataError(
            f"{counted(len(scattered), 'sample')} in the tars lie in several parts, such as "
            f"{scattered[0]}",
            place=place,
            hint=_SIDE_BY_SIDE,
        )


def _classes(
    data: Any, label: str, request: SourceRequest
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """(names of the classes, number of the class of a cell) of a label column.

    Classes are those of a ClassLabel, the sorted texts, or the integers up to the largest. Raises
    DataError for a column of something else.
    """
    kind = data.features[label]
    if isinstance(kind, datasets.ClassLabel):
        return tuple(kind.names), dict(enumerate(range(len(kind.names))))
    cells: list[Any] = []
    for cell in data[label][:]:
        if cell not in (None, -1):
            cells.append(cell)
    plain = cells and isinstance(kind, datasets.Value)
    if plain and "string" in kind.dtype:
        names = tuple(sorted(set(cells)))
        return names, dict(zip(names, range(len(names)), strict=True))
    if plain and "int" in kind.dtype and max(cells) >= 0:
        count = max(cells) + 1
        return numbered(count), dict(enumerate(range(count)))
    raise DataError(
        f"Column {label!r} holds no labels, one integer or text per image, but {kind}"
        if cells
        else f"No cell of column {label!r} names a class",
        place=request.spec,
        hint=_name_it("label", request),
    )


def _holds_bytes(kind: Any) -> bool:
    if isinstance(kind, dict):
        return kind.keys() == {"bytes", "path"}
    return isinstance(kind, datasets.Value) and "binary" in kind.dtype


def _has_classes(splits: Mapping[str, Any]) -> bool:
    """Whether the labels of all splits are class folders, not the folders of the splits."""
    names: set[str] = set()
    for split in splits.values():
        kind = split.features.get("label")
        if kind is None:
            return False
        names.update(kind.names)
    names_of_splits: set[str] = set()
    for usual in SPLITS.values():
        names_of_splits.update(usual)
    return not names <= names_of_splits


def _chosen(role: str, candidates: Sequence[str], features: Any, request: SourceRequest) -> str:
    column = request.settings.get(role)
    columns = shortened(features, limit=9)
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


def _load_failure(request: SourceRequest, root: Path, error: BaseException) -> DataError:
    hint = "put class folders, parquet files or tars under train/ and test/ in it"
    if not root.is_dir():
        hint = (
            "check the name and unset HF_HUB_OFFLINE, or, without a network, point at a copy "
            "(hf:DIR, folder:DIR) or at a cache that has it (HF_HOME, HF_HUB_OFFLINE=1)"
        )
    if "WebDataset format" in str(error):
        hint = _SIDE_BY_SIDE
    # The library wraps the error that explains the failure.
    reason = one_line(error.__cause__ or error)
    return DataError(f"Cannot open the data set ({reason})", place=request.spec, hint=hint)
