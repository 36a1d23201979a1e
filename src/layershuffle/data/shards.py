"""Names of tar shards and the labels in them, with the standard library only."""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layershuffle.errors import DataError, UsageError
from layershuffle.text import one_line

CLASSES_FILE = "classes.txt"
TRAIN_NAMES = ("train",)
VALIDATION_NAMES = ("val", "validation")
TEST_NAMES = ("test",)

# These 25 lines replace a dependency on braceexpand (decision 019).
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_HINT = (
    "write wds:DIR/train-{000..009}.tar,DIR/val-{000..001}.tar, or wds:DIR with train-*.tar and "
    "val-*.tar (or train/*.tar and val/*.tar) in it"
)


def expand_braces(pattern: str) -> list[str]:
    """Every name of "a-{000..002}.tar" or "{a,b}.tar", in order; zero padding is kept."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    names = [before + choice for choice in _choices(match.group(1))]
    return [name + rest for name in names for rest in expand_braces(after)]


def split_patterns(text: str) -> list[str]:
    """The parts of "train,val", split at commas outside of braces."""
    return [part for part in re.split(r",(?![^{}]*\})", text) if part]


def find_shards(place: str) -> dict[str, list[Path]]:
    """Shards by "train", "validation", "test"; a single reported part is called "test".

    Raises DataError for missing files, UsageError for a place without a second pattern.
    """
    if "://" in place:
        raise UsageError("shards are read from local files", place=place, hint="copy them here")
    if Path(place).expanduser().is_dir():
        return _in_folder(Path(place).expanduser())
    patterns = split_patterns(place)
    if len(patterns) != 2:
        missing = len(patterns) == 1 and not Path(place).suffix
        cause = "no such folder" if missing else "two shard patterns are needed: train,val"
        raise UsageError(cause, place=f"wds:{place}", hint=_HINT)
    return {
        name: existing_shards(part) for name, part in zip(("train", "test"), patterns, strict=True)
    }


def existing_shards(pattern: str) -> list[Path]:
    """The files of one pattern (braces, then * and ?). Raises DataError for a missing file."""
    paths: list[Path] = []
    for name in expand_braces(str(Path(pattern).expanduser())):
        files = sorted(glob.glob(name)) if any(c in name for c in "*?[") else [name]
        missing = [path for path in files if not Path(path).is_file()]
        if missing or not files:
            raise DataError("a shard is missing", place=(missing or [name])[0], hint=_HINT)
        paths += [Path(path) for path in files]
    return paths


def read_classes(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """The names in classes.txt beside the shards, one per line; None if there is no such file."""
    path = shards[0].parent / CLASSES_FILE
    if not path.is_file():
        return None
    names = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    if not names or len(set(names)) != len(names):
        raise DataError(
            "the list of classes is empty or repeats a name",
            place=path,
            hint="one name per line, each once",
        )
    return names


def largest_label(shards: Sequence[Path]) -> int:
    """The largest label in the shards; only label members are read.

    Raises DataError if a shard is no tar archive or there is no label.
    """
    label = max((label for path in shards for label in _labels(path)), default=-1)
    if label < 0:
        raise DataError(
            "no sample has a label",
            place=shards[0],
            hint='give each sample a .cls member (an integer) or a .json member with "label"',
        )
    return label


def require_tar(path: Path) -> None:
    """Raises DataError if the file at `path` does not begin with a tar header."""
    try:
        with tarfile.open(path):
            return
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"cannot read the shard ({one_line(error)})",
            place=path,
            hint="copy or create the shard again",
        ) from error


def json_label(cell: Any, *, place: str | Path) -> int:
    """The "label" of a decoded .json member. Raises DataError if it is missing or no integer."""
    label = cell.get("label") if isinstance(cell, Mapping) else None
    # In Python True is an integer; as a label it is a mistake.
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(
            'a .json member has no integer "label"',
            place=place,
            hint="write the shard again with a label from 0 on, or use .cls members",
        )
    return label


def _labels(path: Path) -> Iterator[int]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                # Split at the first dot, as in webdataset: a.b.cls is member "b.cls" of sample "a".
                kind = Path(member.name).name.partition(".")[2]
                if kind in ("cls", "json") and (file := archive.extractfile(member)) is not None:
                    yield _label(file.read(), kind, f"{path} ({member.name})")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"cannot read the shard ({one_line(error)})",
            place=path,
            hint="copy or create the shard again",
        ) from error


def _label(content: bytes, kind: str, place: str) -> int:
    try:
        if kind == "cls":
            return int(content)
        return json_label(json.loads(content), place=place)
    except ValueError as error:
        raise DataError(
            "the label is not an integer",
            place=place,
            hint="write the shard again with labels from 0 on",
        ) from error


def _in_folder(root: Path) -> dict[str, list[Path]]:
    # Shards are in one folder or in a folder per split; both layouts are in use.
    splits: dict[str, list[Path]] = {}
    kinds = {"train": TRAIN_NAMES, "validation": VALIDATION_NAMES, "test": TEST_NAMES}
    for kind, names in kinds.items():
        shards = [p for n in names for p in (*root.glob(f"{n}-*.tar"), *root.glob(f"{n}/*.tar"))]
        if shards:
            splits[kind] = sorted(shards)
    # A single reported part is the one that is scored, as in other sources.
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if "test" not in splits:
        inside = sorted(path.name for path in root.iterdir())[:5]
        raise DataError(
            f"no val-*.tar or val/*.tar; found {', '.join(inside) or 'nothing'}",
            place=root,
            hint=_HINT,
        )
    return splits


def _choices(inside: str) -> list[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",")
    first, last = match.groups()
    # Only a leading zero means padding: {8..12} is 8, 9, 10, ..., as in a shell.
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    step = 1 if int(first) <= int(last) else -1
    return [f"{n:0{width}d}" for n in range(int(first), int(last) + step, step)]
