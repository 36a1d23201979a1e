"""What a cache is on disk, and how it is checked.

    DIR/cache.json                  what it was made of and how; counts; checksum of the manifest
    DIR/manifest/train-00000.jsonl  per image a line: file, SHA-256, bytes, source
    DIR/train/CLASS/00000012.jpg    image 12 of the training split; val/ and, with both, test/ alike

While it is made it is called DIR.partial: a DIR that is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from layershuffle.data.contract import shortened
from layershuffle.errors import DataError, UsageError

HEADER, MANIFEST = "cache.json", "manifest"
SOURCE = "source"  # in the header: how many images there were, and what they are known by
SCHEMA = 1

Progress = Callable[[int, int], None]
"""Called with images: those done, and all."""
Header = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """A whole cache: images per split folder, bytes of them all, and what was left out.

    `made`: images that this call made.
    """

    out: Path
    images: Mapping[str, int]
    bytes: int
    skipped: tuple[str, ...]
    made: int


def report_of(out: Path, header: Header, *, made: int = 0) -> CacheReport:
    """The report of the whole cache in `out`."""
    return CacheReport(
        out=out,
        images=header["images"],
        bytes=header["bytes"],
        skipped=tuple(header["skipped"]),
        made=made,
    )


def read_header(directory: Path) -> Header | None:
    """What `cache.json` says; None if there is none. Raises DataError if it cannot be read."""
    path = directory / HEADER
    try:
        header = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read what the cache is ({error})", place=path) from error
    return header if isinstance(header, dict) else None


def require_same(directory: Path, found: Header | None, *, wanted: Header) -> None:
    """Raises UsageError if `directory` is no cache, or one of something else."""
    if found is None:
        raise UsageError(
            "the directory is there and holds no cache",
            place=directory,
            hint="choose another --out",
        )
    other = [
        f"{k} {found.get(k)!r} there, {wanted[k]!r} now"
        for k in wanted
        if k != SOURCE and found.get(k) != wanted[k]
    ]
    if other:
        raise UsageError(
            f"the cache was made from other settings ({'; '.join(other)})",
            place=directory,
            hint="choose another --out, or delete it",
        )
    if SOURCE in wanted and found.get(SOURCE) != wanted[SOURCE]:
        raise UsageError(
            f"the source is not what it was when this cache was begun ({_change(found, wanted)})",
            place=directory,
            hint=f"rm -r {directory} and the same command again, or choose another --out",
        )


def _change(found: Header, wanted: Header) -> str:
    before, now = found.get(SOURCE, {}).get("images", {}), wanted[SOURCE]["images"]
    if before == now:
        return "as many images, but other classes, labels, file names or sizes"
    return f"{_counted(before)} then, {_counted(now)} now"


def _counted(images: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {split}" for split, count in images.items())


def read_lines(part: Path) -> list[dict[str, Any]]:
    """The lines of one file of the manifest. Raises DataError if one cannot be read."""
    try:
        return [json.loads(line) for line in part.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the manifest ({error})", place=part) from error


def manifest_parts(directory: Path) -> list[Path]:
    """The files of the manifest, sorted."""
    return sorted((directory / MANIFEST).glob("*.jsonl"))


def checksum(parts: list[Path]) -> str:
    """SHA-256 over the files of the manifest, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes())
    return digest.hexdigest()


def verify_cache(out: Path, *, processes: int = 0, progress: Progress | None = None) -> int:
    """Read every image back; how many there are.

    Raises DataError, naming a few, if images are missing, differ from the manifest, or are not in
    it, and if the manifest is not what it was.
    """
    header, parts = read_header(out), manifest_parts(out)
    if header is None or "manifest" not in header:
        raise UsageError("the directory is no cache", place=out)
    if checksum(parts) != header["manifest"]:
        raise DataError("the manifest is not what it was", place=out / MANIFEST, hint=_again(out))
    total: int = sum(header["images"].values())
    done = 0
    known: set[str] = set()
    missing: list[str] = []
    changed: list[str] = []
    checks = DataLoader(_Checks(out, parts), batch_size=None, num_workers=processes)
    for files, gone, other in checks:
        known.update(files)
        missing += gone
        changed += other
        done += len(files)
        if progress is not None:
            progress(done, total)
    strange = sorted(set(_files(out, header["images"])) - known)
    faults = {"missing": missing, "not what was written": changed, "not in the manifest": strange}
    told = [f"{len(names)} {what} ({shortened(names)})" for what, names in faults.items() if names]
    if told:
        raise DataError(f"of {total} images {', '.join(told)}", place=out, hint=_again(out))
    return total


class _Checks(Dataset[tuple[list[str], list[str], list[str]]]):
    """Item i: of the i-th file of the manifest, all images, those missing, and those changed."""

    def __init__(self, out: Path, parts: list[Path]) -> None:
        self._out, self._parts = out, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> tuple[list[str], list[str], list[str]]:
        files, missing, changed = [], [], []
        for line in read_lines(self._parts[index]):
            if "file" not in line:
                continue
            files.append(line["file"])
            try:
                content = (self._out / line["file"]).read_bytes()
            except FileNotFoundError:
                missing.append(line["file"])
                continue
            if hashlib.sha256(content).hexdigest() != line["sha256"]:
                changed.append(line["file"])
        return files, missing, changed


def _files(out: Path, splits: Mapping[str, int]) -> Iterator[str]:
    for split in splits:
        for parent, _, names in os.walk(out / split):
            for name in names:
                yield str(Path(parent, name).relative_to(out))


def _again(out: Path) -> str:
    return f"delete {out} and make it again"
