"""`folder:DIR`: one folder per class under DIR/train and DIR/val, as usual for ImageNet.

The class index is the index of the folder's name in sorted order, as in torchvision's ImageFolder.
`validation/` and `test/` are accepted for `val/`; with both a validation and a test folder, the
first picks the checkpoint and the second is reported.

Images of the reported split that are wrong together (frames of one video, photographs of one
patient) can be named in DIR/groups.csv; intervals over images then count the groups. It has the
columns `file` ("val/cat/1.jpg") and `group` (any text).
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from layershuffle.data.contract import ImageData, SourceRequest
from layershuffle.data.decode import mode_for, read_image, read_pixels
from layershuffle.data.tables import Tables, assemble
from layershuffle.errors import DataError
from layershuffle.text import one_line, shortened

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
VALIDATION_NAMES = ("val", "validation")
TEST_NAME = "test"
GROUPS_FILE = "groups.csv"


class FolderTable:
    """The images below one split folder; `files[i]` has class `labels[i]`.

    `others` names the other files, which are no images of a known kind.
    """

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], *, channels: int, others: Sequence[str]
    ) -> None:
        self.files, self.labels, self.channels = files, labels, channels
        self.others = others

    def image(self, index: int, *, least: int | None = None) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming the file."""
        path = Path(self.files[index])
        return read_image(path, self.channels, place=path, least=least)

    def pixels(self, index: int) -> Tensor:
        """Image `index` as pixels uint8 [C, H, W]. Raises DataError naming the file."""
        path = Path(self.files[index])
        return read_pixels(path, self.channels, place=path)

    def name(self, index: int) -> str:
        """The path of image `index`."""
        return self.files[index]

    def fingerprint(self) -> str:
        """SHA-256 over the paths and sizes of the files. Raises DataError if one is missing."""
        digest = hashlib.sha256()
        # Paths and sizes, not contents, because a million files would have to be read.
        for path in self.files:
            try:
                size = os.stat(path).st_size
            except OSError as error:
                raise DataError(
                    f"cannot read the file ({error.strerror})",
                    place=path,
                    hint="let this user read it",
                ) from error
            digest.update(os.fsencode(f"{path}\0{size}\0"))
        return digest.hexdigest()


def open_source(request: SourceRequest) -> ImageData:
    """Class folders as ImageData.

    Raises DataError if DIR, its split folders or images are missing, a class folder is empty, the
    classes of two splits differ, or groups.csv does not name every image of the reported split.
    """
    root = Path(request.place).expanduser()
    channels = request.view.channels
    # For its error, before any folder is listed.
    mode_for(channels)
    train, validation, test = split_folders(root, need_train=request.options.train)
    # Without training data (eval), the classes come from the reported split.
    reference = train or test
    classes = class_names(reference)
    for other in (validation, test):
        if other is not None:
            require_same_classes(reference, other, classes=classes)
    tested = folder_table(test, classes, channels=channels)
    trained = _wanted(request, train, classes)
    validated = _wanted(request, validation, classes)
    notes = [
        _other_files(split, table)
        for split, table in ((test, tested), (train, trained), (validation, validated))
        if split is not None and table is not None and table.others
    ]
    groups = group_numbers(root, tested.files)
    if groups is not None:
        notes.append(
            f"{test.name}: {len(groups)} images in {len(set(groups[:, 0].tolist()))} groups"
        )
    tables = Tables(
        classes=classes,
        test=tested,
        train=trained,
        validation=validated,
        test_groups=groups,
        notes=tuple(notes),
    )
    return assemble(request, tables)


def split_folders(root: Path, *, need_train: bool) -> tuple[Path | None, Path | None, Path]:
    """(train, validation, test) folders of DIR; validation only if there is a test folder too."""
    if not root.is_dir():
        fault = "is a file" if root.exists() else "does not exist"
        raise DataError(
            f"The data folder {fault}",
            place=root,
            hint="pass folder:DIR with the folders DIR/train and DIR/val in it",
        )
    train = root / "train" if (root / "train").is_dir() else None
    reported = [root / name for name in VALIDATION_NAMES if (root / name).is_dir()]
    if len(reported) == 2:
        raise DataError("there are both val/ and validation/", place=root, hint="keep one of them")
    if (root / TEST_NAME).is_dir():
        reported.append(root / TEST_NAME)
    if (train is None and need_train) or not reported:
        splits = {"train", *VALIDATION_NAMES, TEST_NAME}
        if root.name in splits and any((root.parent / n).is_dir() for n in splits - {root.name}):
            raise DataError(
                "This is the folder of one split; others lie beside it",
                place=root,
                hint=f"did you mean folder:{root.parent}?",
            )
        raise _missing_splits(root, train is None, not reported)
    return train, reported[0] if len(reported) == 2 else None, reported[-1]


def class_names(split: Path) -> tuple[str, ...]:
    """Sorted names of the class folders. Raises DataError if there are none."""
    names = tuple(_subfolders(split))
    if not names:
        raise DataError(
            "there are no class folders", place=split, hint="put the images in one folder per class"
        )
    return names


def require_same_classes(left: Path, right: Path, *, classes: Sequence[str]) -> None:
    """Raises DataError if `right` has other class folders than `classes`, those of `left`."""
    # Indices come from the sorted names, so another folder would shift all labels after it.
    other = class_names(right)
    missing = [name for name in classes if name not in set(other)]
    extra = [name for name in other if name not in set(classes)]
    if not missing and not extra:
        return
    sentences = [
        f"{len(names)} in {here.name}/ only ({shortened(names)})"
        for here, names in ((left, missing), (right, extra))
        if names
    ]
    raise DataError(
        f"the class folders of {left.name}/ and {right.name}/ differ: {', '.join(sentences)}",
        place=right,
        hint="give both the same class folders",
    )


def folder_table(split: Path, classes: Sequence[str], *, channels: int) -> FolderTable:
    """All images of a split, in sorted order. Raises DataError for a class without images."""
    files: list[str] = []
    labels: list[int] = []
    left_out: list[str] = []
    for label, name in enumerate(classes):
        images, others = image_files(split / name)
        if not images:
            content = f"only other files, such as {others[0]}" if others else "no files"
            raise DataError(
                f"class folder {name!r} has no images ({content})",
                place=split / name,
                hint=f"add images ({', '.join(EXTENSIONS)}) or remove the folder from every split",
            )
        files += images
        labels += [label] * len(images)
        # Hidden files such as .DS_Store are not worth a note.
        left_out += [f"{name}/{other}" for other in others if not other.startswith(".")]
    return FolderTable(files, labels, channels=channels, others=left_out)


def group_numbers(root: Path, files: Sequence[str]) -> Tensor | None:
    """The group number of every file, int64 [n, 1], from DIR/groups.csv; None without that file.

    Raises DataError if it cannot be read or lacks a file.
    """
    path = root / GROUPS_FILE
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            named = {row["file"]: row["group"] for row in csv.DictReader(file, strict=True)}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError) as error:
        raise DataError(
            f"the groups of images cannot be read ({type(error).__name__}: {one_line(error)})",
            place=path,
            hint="its first line is file,group and another one is for example val/cat/1.jpg,anna",
        ) from error
    names = [Path(file).relative_to(root).as_posix() for file in files]
    # Images without a group would count as independent, or as one group.
    if absent := [name for name in names if not named.get(name)]:
        raise DataError(
            f"{len(absent)} images have no group: {shortened(absent)}",
            place=path,
            hint="add a line for each; an independent image forms its own group",
        )
    numbers = {group: number for number, group in enumerate(sorted(set(named.values())))}
    return torch.tensor([[numbers[named[name]]] for name in names])


def _other_files(split: Path, table: FolderTable) -> str:
    return (
        f"{split.name}: {len(table.others)} files are no images of a known kind and were left out, "
        f"such as {table.others[0]} (known: {', '.join(EXTENSIONS)})"
    )


def image_files(folder: Path) -> tuple[list[str], list[str]]:
    """(image paths, names of other files) anywhere below a folder, sorted."""
    images, others = [], []
    # Sorted in place, because os.walk visits the folders in this order, which must be the same on
    # every file system. Links are followed, as in torchvision's ImageFolder.
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise_unreadable):
        folders.sort()
        for name in sorted(names):
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                images.append(os.path.join(parent, name))
            else:
                others.append(name)
    return images, others


def _wanted(
    request: SourceRequest, split: Path | None, classes: Sequence[str]
) -> FolderTable | None:
    if split is None or not request.options.train:
        return None
    return folder_table(split, classes, channels=request.view.channels)


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # Hidden folders such as .ipynb_checkpoints are no classes.
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"cannot list the folder ({error.strerror})", place=folder, hint="let this user read it"
        ) from error


def _raise_unreadable(error: OSError) -> None:
    raise DataError(
        f"cannot list the folder ({error.strerror})",
        place=str(error.filename),
        hint="let this user read it",
    )


def _missing_splits(root: Path, no_train: bool, no_test: bool) -> DataError:
    absent = ["train/"] * no_train + ["val/ (or validation/ or test/)"] * no_test
    inside = _subfolders(root)
    if no_train and no_test and inside:
        finding = f"found {len(inside):,} other folders ({shortened(inside)})"
        hint = (
            f"if these are the classes, move them into {root}/train and a part of the images of "
            f"each class into the same class folder under {root}/val"
        )
    else:
        finding = f"found {shortened(inside)}" if inside else "found no folders"
        hint = f"add {' and '.join(absent)} with one folder per class"
    return DataError(f"there is no {' and no '.join(absent)}; {finding}", place=root, hint=hint)
