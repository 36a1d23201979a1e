"""`folder:DIR`: one folder per class under DIR/train and DIR/val, as usual for ImageNet.

The class index is the index of the folder's name in sorted order, as in torchvision's ImageFolder.
`valid/`, `validation/` and `test/` are accepted for `val/`; with both a validation and a test
folder, the first picks the checkpoint and the second is reported.

Images of the reported split that are wrong together (frames of one video, photographs of one
patient) can be named in DIR/groups.csv; intervals over images then count the groups. It has the
columns `file` ("val/cat/1.jpg") and `group` (any text).
"""

from __future__ import annotations

import csv
import hashlib
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from layershuffle.data.class_names import listed_difference
from layershuffle.data.splits import ImageData, SourceRequest
from layershuffle.data.tables import assemble
from layershuffle.ground.errors import DataError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import counted, one_line, shortened
from layershuffle.images.pixels import extensions, read_image

VALIDATION_NAMES = ("val", "valid", "validation")
TEST_NAME = "test"
GROUPS_FILE = "groups.csv"
_MOST_COMPARED = 20_000  # files; reading these takes seconds
_LIKE_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}


@dataclass(frozen=True, kw_only=True)
class FolderTable:
    """The images below one split folder; `files[i]` has class `labels[i]` and `sizes[i]` bytes."""

    root: Path
    channels: int
    files: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def image(self, index: int) -> Image.Image:
        """Image `index`, decoded. Raises DataError naming the file."""
        path = Path(self.files[index])
        return read_image(path, self.channels, place=path)

    def name(self, index: int) -> str:
        """The path of image `index`."""
        return self.files[index]

    def identity(self, index: int) -> str:
        """The path below the folder of the split, and the size in bytes."""
        return f"{os.path.relpath(self.files[index], self.root)} {self.sizes[index]}"


def open_source(request: SourceRequest) -> ImageData:
    """Class folders as ImageData.

    Raises DataError if DIR, its split folders or images are missing, a class folder is empty, the
    classes of two splits differ, or groups.csv does not name every image of the reported split.
    """
    root = user_path(request.place)
    training = request.options.train
    folders, notes = split_folders(root, need_train=training)
    # Without training data (eval), the classes come from the reported split.
    reference = folders.get("train", folders["test"])
    classes = class_folders(reference)
    if not classes:
        raise DataError(
            "there are no class folders",
            place=reference,
            hint="put the images in one folder per class",
        )
    for split in folders.values():
        refuse_deeper_classes(split)
    tables: dict[str, FolderTable] = {}
    for name, split in folders.items():
        # Indices come from the sorted names, so another folder would shift all labels after it.
        sides = {f"{reference.name}/": classes, f"{split.name}/": class_folders(split)}
        if listed := listed_difference(sides):
            raise DataError(
                f"the class folders differ: {listed}",
                place=split,
                hint="give all splits the same class folders",
            )
        if training or name == "test":
            tables[name], left_out = folder_table(split, classes, channels=request.view.channels)
            if left_out:
                notes.append(
                    f"{split.name}: {len(left_out)} files or folders are no images of a known "
                    "kind, hidden, special or counted already, and were left out: "
                    f"{shortened(left_out)}"
                )
    twice = in_both(tables["train"], tables["test"]) if training else []
    if twice:
        images = len(tables["test"].files)
        notes.append(
            f"{folders['test'].name}: {len(twice)} of {counted(images, 'image')} "
            f"are training images, too, so scores are too high: {shortened(twice)}"
        )
    groups = group_numbers(root, tables["test"].files)
    if groups is not None:
        count = len(set(groups[:, 0].tolist()))
        notes.append(f"{folders['test'].name}: {len(groups)} images in {count} groups")
    return assemble(request, tables, classes=classes, test_groups=groups, notes=notes)


def split_folders(root: Path, *, need_train: bool) -> tuple[dict[str, Path], list[str]]:
    """(the folders of "train", "validation" and "test", notes); "test" is the reported one."""
    if not root.is_dir():
        fault = "is a file" if root.exists() else "does not exist"
        raise DataError(
            f"The data folder {fault}",
            place=root,
            hint="pass folder:DIR with the folders DIR/train and DIR/val in it",
        )
    inside = class_folders(root)
    notes = []
    reported = [root / name for name in (*VALIDATION_NAMES, TEST_NAME) if name in inside]
    if len(reported) > 1 and not class_folders(reported[-1]):
        notes.append(f"{reported.pop().name}/ has no class folders and was left out")
    several = [name for name in VALIDATION_NAMES if name in inside]
    if len(several) > 1:
        raise DataError(f"there are {'/ and '.join(several)}/", place=root, hint="keep one of them")
    absent = []
    if need_train and "train" not in inside:
        absent.append("train/")
    if not reported:
        absent.append("val/ (or validation/ or test/)")
    if absent:
        if len(inside) == 1 and (root / inside[0] / "train").is_dir():
            raise DataError(
                "The folders of the splits lie one level deeper",
                place=root,
                hint=f"did you mean folder:{root / inside[0]}?",
            )
        splits = {"train", *VALIDATION_NAMES, TEST_NAME}
        others = splits - {root.name}
        if root.name in splits and any((root.parent / name).is_dir() for name in others):
            raise DataError(
                "This is the folder of one split; others lie beside it",
                place=root,
                hint=f"did you mean folder:{root.parent}?",
            )
        hint = f"name the folders {' and '.join(absent)}, with one folder per class in each"
        if len(absent) == 2 and inside and not {name.lower() for name in inside} & _LIKE_SPLITS:
            hint = (
                f"if these are the classes, move them into {root}/train and a part of the images "
                f"of each class into the same class folder under {root}/val"
            )
        cause = f"there is no {' and no '.join(absent)}; there are {counted(len(inside), 'folder')}"
        cause += f" ({shortened(inside)})" if inside else ""
        raise DataError(cause, place=root, hint=hint)
    folders = {}
    if "train" in inside:
        folders["train"] = root / "train"
    if len(reported) == 2:
        folders["validation"] = reported[0]
    folders["test"] = reported[-1]
    return folders, notes


def refuse_deeper_classes(split: Path) -> None:
    """Raises DataError where the one class folder of a split holds folders and no image.

    They are the classes then, and all images would have the same one.
    """
    inside = class_folders(split)
    if len(inside) != 1:
        return
    only = split / inside[0]
    below = class_folders(only)
    names = os.listdir(only)
    if len(below) > 1 and not any(name.lower().endswith(extensions()) for name in names):
        raise DataError(
            f"the only class folder, {inside[0]!r}, holds no image, and {len(below)} folders "
            f"({shortened(below)})",
            place=split,
            hint=f"if these are the classes, move them one level up, into {split}",
        )


def in_both(train: FolderTable, test: FolderTable) -> list[str]:
    """Paths of images of `test` whose bytes are those of an image of `train`.

    Only files of one size can be the same. Where these are many, only those that have a common
    name, too, are read: it would take as long as an epoch.
    """
    sizes = set(train.sizes) & set(test.sizes)
    trained = _of_sizes(train, sizes)
    tested = _of_sizes(test, sizes)
    if len(trained) + len(tested) > _MOST_COMPARED:
        names = set(map(os.path.basename, trained)) & set(map(os.path.basename, tested))
        trained = [file for file in trained if os.path.basename(file) in names]
        tested = [file for file in tested if os.path.basename(file) in names]
    digests = set(map(_digest, trained))
    return [file for file in tested if _digest(file) in digests]


def _of_sizes(table: FolderTable, sizes: set[int]) -> list[str]:
    """The files of a table whose number of bytes is one of `sizes`."""
    files = []
    for file, size in zip(table.files, table.sizes, strict=True):
        if size in sizes:
            files.append(file)
    return files


def _digest(file: str) -> bytes:
    """The SHA-256 of a file; of one that cannot be read that of its path."""
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError:  # it is named when it is read as an image
        return hashlib.sha256(os.fsencode(file)).digest()


def class_folders(split: Path) -> tuple[str, ...]:
    """Sorted names of the folders in `split`, without hidden ones such as .ipynb_checkpoints.

    Raises DataError for a folder that cannot be listed, and for a name that no model can carry.
    """
    try:
        with os.scandir(split) as entries:
            names = []
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith("."):
                    names.append(entry.name)
            names.sort()
    except OSError as error:
        raise _unlisted(error) from error
    # From bytes, because Python reads them as the shell says, and models store text.
    try:
        decoded = tuple(os.fsencode(name).decode("utf-8") for name in names)
    except UnicodeDecodeError as error:
        raise DataError(
            f"the folder name {error.object!r} is not UTF-8",
            place=split,
            hint="rename it, as by convmv -r -f latin1 -t utf-8 --notest DIR",
        ) from error
    if decoded != tuple(names):
        raise DataError(
            f"this shell reads names of files as {sys.getfilesystemencoding()}, not as UTF-8",
            place=split,
            hint="export PYTHONUTF8=1, or LC_ALL=C.UTF-8",
        )
    return decoded


def folder_table(
    split: Path, classes: Sequence[str], *, channels: int
) -> tuple[FolderTable, list[str]]:
    """(All images of a split in sorted order, what was left out).

    Raises DataError for a class without images.
    """
    table = FolderTable(root=split, channels=channels)
    left_out = list[str]()
    seen: set[tuple[int, int]] = set()
    for name in classes:
        folder = split / name
        # Those above it too: a link back to one of them would give its images again.
        for place in (folder, *folder.resolve().parents):
            status = os.stat(place)
            seen.add((status.st_dev, status.st_ino))
    for label, name in enumerate(classes):
        images, others = image_files(split / name, seen)
        if not images:
            content = f"only other files, such as {others[0]}" if others else "no files"
            raise DataError(
                f"class folder {name!r} has no images ({content})",
                place=split / name,
                hint="add images (jpg, png, webp, tif and others) or remove the folder from every "
                "split",
            )
        table.files.extend(images)
        table.sizes.extend(images.values())
        table.labels.extend([label] * len(images))
        for other in others:
            left_out.append(f"{name}/{other}")
    return table, left_out


def image_files(folder: Path, seen: set[tuple[int, int]]) -> tuple[dict[str, int], list[str]]:
    """(bytes by path of an image, paths of what was left out) anywhere below a folder, sorted.

    Links are followed, as in torchvision's ImageFolder, but every file and folder counts once, by
    its device and inode, and `seen` gets them: a link back to a folder above would give its images
    again and again, and one to another class the labels of two.
    """
    images: dict[str, int] = {}
    others: list[str] = []

    def refuse(error: OSError) -> None:
        raise _unlisted(error) from error

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        listed = sorted([*folders, *names])
        # os.walk goes on with what is put here, in an order that is the same on every file system.
        folders.clear()
        for name in listed:
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError:  # of a link to nothing, to itself or out of bounds
                status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            place = (status.st_dev, status.st_ino)
            is_image = kind == stat.S_IFREG and path.lower().endswith(extensions())
            if name.startswith(".") or place in seen or not (is_image or kind == stat.S_IFDIR):
                others.append(os.path.relpath(path, folder))
                continue
            seen.add(place)
            if is_image:
                images[path] = status.st_size
            else:
                folders.append(name)
    return images, others


def group_numbers(root: Path, files: Sequence[str]) -> Tensor | None:
    """The group number of every file, int64 [n, 1], from DIR/groups.csv; None without that file.

    Raises DataError if it cannot be read, lacks a file or has two groups for one.
    """
    path = root / GROUPS_FILE
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file, restval="", strict=True)
            rows = []
            for line in lines:
                rows.append((line["file"], line["group"]))
    except (OSError, UnicodeDecodeError, csv.Error, KeyError) as error:
        raise DataError(
            f"the groups of images cannot be read ({type(error).__name__}: {one_line(error)})",
            place=path,
            hint="its first line is file,group and another one is for example val/cat/1.jpg,anna",
        ) from error
    named = dict(rows)
    several = set()
    for image, group in rows:
        if named[image] != group:
            several.add(image)
    if several:
        raise DataError(
            f"files are in several groups: {shortened(sorted(several))}",
            place=path,
            hint="keep one line for each",
        )
    names = []
    absent = []
    for path_of_image in files:
        name = Path(path_of_image).relative_to(root).as_posix()
        names.append(name)
        if not named.get(name):
            absent.append(name)
    # Images without a group would count as independent, or as one group.
    if absent:
        raise DataError(
            f"{len(absent)} images have no group: {shortened(absent)}",
            place=path,
            hint="add a line for each; an independent image forms its own group",
        )
    groups = sorted(set(named.values()))
    numbers = dict(zip(groups, range(len(groups)), strict=True))
    column = [numbers[named[name]] for name in names]
    return torch.tensor(column)[:, None]


def _unlisted(error: OSError) -> DataError:
    return DataError(
        f"cannot list the folder ({error.strerror})",
        place=str(error.filename),
        hint="let this user read it",
    )
