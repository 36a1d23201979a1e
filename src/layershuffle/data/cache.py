"""A copy of image data at the size that training needs, which is read many times faster.

`build_cache` shrinks every image to `size` pixels on its shorter side and saves it as a JPEG in the
layout that `folder:` reads, in the order of the source within each class, so `fit` holds out the
same images. `verify_cache` reads every file back.

    DIR/cache.json                  source, settings, counts, checksum of the manifest
    DIR/manifest/train-00000.jsonl  one line per image: file, SHA-256, bytes, source
    DIR/train/CLASS/00000012.jpg    image 12 of the training split; likewise val/ and test/

Until it is complete, the directory is called DIR.partial. The command may be killed at any moment
and continues when it is run again, because each image is written atomically and only once.
docs/decisions/019-benchmarks-and-the-cache.md says why `hf:` with `datasets` does not replace it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset

from layershuffle.data.contract import DataOptions
from layershuffle.data.loading import loader_processes, open_data, parse_spec
from layershuffle.data.transforms import ImageTable, TransformedImages
from layershuffle.errors import DataError, UsageError
from layershuffle.files import (
    explained,
    locked,
    names_in,
    remove_stale_stages,
    write_bytes,
    write_text,
)
from layershuffle.image_view import ImageView
from layershuffle.settings import CacheSettings
from layershuffle.text import Progress, shortened, unheard

HEADER, MANIFEST = "cache.json", "manifest"
SOURCE = "source"  # key of the header: image counts and checksum that identify the source
SCHEMA = 1
CHUNK = 128  # images per file of the manifest, the most that are checked again after a kill
# Only its number of channels is used.
_VIEW = ImageView(channels=3, height=1, width=1, mean=(0.0,) * 3, std=(1.0,) * 3)
_FOLDERS = {"train": "train", "holdout": "val", "test": "test"}
Header = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """A complete cache: images per split folder, bytes of all images, and skipped images.

    `written`: number of images that this call wrote.
    """

    out: Path
    images: Mapping[str, int]
    bytes: int
    skipped: tuple[str, ...]
    written: int


@dataclass(frozen=True)
class CachedSplit:
    """One split: its folder in the cache, the table of its images, and class folders by label."""

    folder: str
    table: ImageTable
    classes: tuple[str, ...]

    def file(self, row: int) -> str:
        """Path of image `row`, relative to the cache."""
        return f"{self.folder}/{self.classes[self.table.labels[row]]}/{row:08d}.jpg"


# --- making ---------------------------------------------------------------------------------------


def default_out(spec: str, size: int) -> Path:
    """DIR-256 beside a folder DIR, else NAME-256. Raises UsageError for patterns."""
    place = parse_spec(spec)[1].rstrip("/")
    if Path(place).expanduser().is_dir():
        return Path(f"{place}-{size}").expanduser()
    name = place.rpartition("/")[2].replace(":", "-")
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError("This spec has no default --out", place=spec, hint="add --out DIR")
    return Path(f"{name}-{size}")


def build_cache(
    spec: str, out: Path, *, settings: CacheSettings, progress: Progress = unheard
) -> CacheReport:
    """Make the cache of `spec` in `out`, or continue it; a complete one is not changed.

    Raises UsageError if `out` holds something else or a cache with other settings, and DataError,
    naming the image, for one that cannot be read (unless `settings.skip_corrupt`).
    """
    made_by = {"schema": SCHEMA, "data": spec, "size": settings.size, "quality": settings.quality}
    if not out.exists():
        # Opened first, so no directory is made for a missing source.
        parts, work = _open(spec), partial_of(out)
        with locked(work):
            if not out.exists():  # another process may have made it in the meantime
                return _build(out, made_by, parts=parts, settings=settings, progress=progress)
        # This directory contains only the lock, because the other process has renamed its own.
        shutil.rmtree(work, ignore_errors=True)
    header = read_header(out)
    require_same(out, header, expected=made_by)
    assert header is not None
    return _report(out, header)


def partial_of(out: Path) -> Path:
    """The path of the directory until the cache is complete."""
    return out.with_name(f"{out.name}.partial")


def class_folders(classes: Sequence[str]) -> tuple[str, ...]:
    """A folder name per class, whose sorted order is the order of the classes.

    The class names if they are valid folder names in sorted order, else 000-NAME, 001-NAME, ...
    """
    plain = all(re.fullmatch(r"[^/\0.][^/\0]{0,99}", name) for name in classes)
    if plain and list(classes) == sorted(set(classes)):
        return tuple(classes)
    width = len(str(len(classes) - 1))
    words = [re.sub(r"[^\w.-]+", "-", name).strip("-")[:60] for name in classes]
    return tuple(f"{index:0{width}d}-{word}" for index, word in enumerate(words))


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """The image shrunk to `size` pixels on its shorter side, bicubic; unchanged if smaller."""
    shorter = min(image.size)
    if shorter <= size:
        return image
    width, height = (max(size, round(side * size / shorter)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _build(
    out: Path,
    made_by: Header,
    *,
    parts: Sequence[CachedSplit],
    settings: CacheSettings,
    progress: Progress,
) -> CacheReport:
    work = partial_of(out)
    images = {part.folder: len(part.table.labels) for part in parts}
    begun = {**made_by, SOURCE: {"images": images, "checksum": _source(parts)}}
    for folder in (work, work / MANIFEST, *work.glob("*/*")):
        if folder.is_dir():
            remove_stale_stages(folder)
    header = read_header(work)
    # Files without a header are no cache, and are refused instead of overwritten.
    if header is not None or names_in(work):
        require_same(work, header, expected=begun)
    else:
        write_text(work / HEADER, json.dumps(begun, indent=2))

    chunks = _Chunks(work, parts, settings)
    processes = loader_processes() if settings.workers is None else settings.workers
    written, done = 0, chunks.done
    progress("images", done, chunks.images)
    for new, count in DataLoader(chunks, batch_size=None, num_workers=processes):
        written, done = written + new, done + count
        progress("images", done, chunks.images)

    # The header is completed first, so a directory with the final name is a complete cache.
    header = {**begun, **_counts(work, parts), "versions": {"pillow": version("pillow")}}
    write_text(work / HEADER, json.dumps(header, indent=2))
    with explained(out):
        os.replace(work, out)
        (out / ".lock").unlink()
    return _report(out, header, written=written)


def _open(spec: str) -> list[CachedSplit]:
    """The splits of the source. Raises UsageError for data without image files."""
    data = open_data(spec, _VIEW, options=DataOptions(holdout=None))
    classes, parts = class_folders(data.classes), []
    for name, split in data.splits.items():
        if not isinstance(split.dataset, TransformedImages):
            raise UsageError("these images are in memory, so a cache gains nothing", place=spec)
        table = split.dataset.table
        absent = sorted(set(range(len(classes))) - set(table.labels))
        if absent:
            names = shortened([data.classes[label] for label in absent])
            raise DataError(
                f"{len(absent)} classes have no image in {name}: {names}",
                place=spec,
                hint="folder: could not read the copy; leave these classes out of the source",
            )
        # `folder:` reports val/ without a test/, so the copy has the splits of its source.
        folder = "val" if name == "test" and "holdout" not in data.splits else _FOLDERS[name]
        parts.append(CachedSplit(folder, table, classes))
    return sorted(parts, key=lambda part: ("train", "val", "test").index(part.folder))


def _source(parts: Sequence[CachedSplit]) -> str:
    """A checksum that changes with the images, labels or classes of the source."""
    content = [
        (p.folder, p.classes, [int(label) for label in p.table.labels], p.table.fingerprint())
        for p in parts
    ]
    return hashlib.sha256(json.dumps(content).encode("utf-8")).hexdigest()


class _Chunks(Dataset[tuple[int, int]]):
    """Reading item i makes the i-th missing chunk. Items are (images written, images processed)."""

    def __init__(self, work: Path, parts: Sequence[CachedSplit], settings: CacheSettings) -> None:
        self._work, self._settings = work, settings
        chunks = [
            (part, number, range(start, min(start + CHUNK, len(part.table.labels))))
            for part in parts
            for number, start in enumerate(range(0, len(part.table.labels), CHUNK))
        ]
        self.images = sum(len(rows) for _, _, rows in chunks)
        self._missing = [chunk for chunk in chunks if not self._record(*chunk[:2]).is_file()]
        self.done = self.images - sum(len(rows) for _, _, rows in self._missing)

    def __len__(self) -> int:
        return len(self._missing)

    def __getitem__(self, index: int) -> tuple[int, int]:
        part, number, rows = self._missing[index]
        lines, written = [], 0
        for row in rows:
            path = self._work / part.file(row)
            exists = path.is_file()
            line = self._line(part, row, path.read_bytes() if exists else None)
            written += not exists and "file" in line
            lines.append(json.dumps(line) + "\n")
        # After its images, because a chunk with a record is never checked again.
        write_text(self._record(part, number), "".join(lines))
        return written, len(rows)

    def _record(self, part: CachedSplit, number: int) -> Path:
        return self._work / MANIFEST / f"{part.folder}-{number:05d}.jsonl"

    def _line(self, part: CachedSplit, row: int, content: bytes | None) -> dict[str, str | int]:
        """The manifest's line of an image, which is written first if there is no `content`."""
        source, file = part.table.name(row), part.file(row)
        if content is None:
            try:
                content = self._encoded(part.table, row)
            except DataError as error:
                if not self._settings.skip_corrupt:
                    raise
                return {"skipped": source, "reason": error.cause}
            write_bytes(self._work / file, content)
        digest = hashlib.sha256(content).hexdigest()
        return {"file": file, "sha256": digest, "bytes": len(content), "source": source}

    def _encoded(self, table: ImageTable, row: int) -> bytes:
        size = self._settings.size
        # The decoder may halve large JPEGs down to twice the size, then they are resized.
        image = shrunk(table.image(row, least=2 * size), size)
        image.info = {}  # without comments, profiles and rotation
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self._settings.quality)
        return buffer.getvalue()


def _counts(work: Path, parts: Sequence[CachedSplit]) -> Header:
    """Counts and checksum of a finished cache. Raises DataError for a class without images."""
    images = {part.folder: 0 for part in parts}
    empty = {f"{part.folder}/{name}" for part in parts for name in part.classes}
    skipped, size = [], 0
    for line in (line for part in manifest_parts(work) for line in _read_lines(part)):
        if "skipped" in line:
            skipped.append(f"{line['skipped']} ({line['reason']})")
            continue
        folder, _, _ = line["file"].rpartition("/")
        empty.discard(folder)
        images[folder.partition("/")[0]] += 1
        size += line["bytes"]
    # `folder:` refuses classes without images, so it could not read such a copy.
    if empty:
        raise DataError(
            f"No image could be read of {len(empty)} classes: {shortened(sorted(empty))}",
            place=work,
            hint="repair the source, or leave these classes out of it; then delete this directory",
        )
    digest = _checksum(manifest_parts(work))
    return {"images": images, "bytes": size, "skipped": skipped, "manifest": digest}


def _report(out: Path, header: Header, *, written: int = 0) -> CacheReport:
    return CacheReport(
        out=out,
        images=header["images"],
        bytes=header["bytes"],
        skipped=tuple(header["skipped"]),
        written=written,
    )


# --- files ----------------------------------------------------------------------------------------


def read_header(directory: Path) -> Header | None:
    """The content of `cache.json`, None if it is missing. Raises DataError if it is unreadable."""
    path = directory / HEADER
    try:
        header = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read this file of the cache ({error})", place=path, hint="choose another --out"
        ) from error
    return header if isinstance(header, dict) else None


def require_same(directory: Path, header: Header | None, *, expected: Header) -> None:
    """Raises UsageError if `directory` is no cache, or has another source or settings."""
    if header is None:
        raise UsageError(
            "the directory exists but holds no cache",
            place=directory,
            hint="choose another --out",
        )
    other = [
        f"{key} {header.get(key)!r} there, {expected[key]!r} now"
        for key in expected
        if key != SOURCE and header.get(key) != expected[key]
    ]
    if other:
        raise UsageError(
            f"the cache was made with other settings ({'; '.join(other)})",
            place=directory,
            hint="choose another --out, or delete it",
        )
    if SOURCE not in expected or header.get(SOURCE) == expected[SOURCE]:
        return
    before, now = header.get(SOURCE, {}).get("images", {}), expected[SOURCE]["images"]
    change = f"{_counted(before)} then, {_counted(now)} now"
    if before == now:
        change = "as many images, but other classes, labels, file names or sizes"
    raise UsageError(
        f"the source has changed since this cache was begun ({change})",
        place=directory,
        hint=f"rm -r {directory} and the same command again, or choose another --out",
    )


def _counted(images: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {split}" for split, count in images.items())


def manifest_parts(directory: Path) -> list[Path]:
    """The files of the manifest, sorted."""
    return sorted((directory / MANIFEST).glob("*.jsonl"))


def _read_lines(part: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in part.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the manifest ({error})", place=part) from error


def _checksum(parts: list[Path]) -> str:
    """SHA-256 over the files of the manifest, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes())
    return digest.hexdigest()


# --- checking -------------------------------------------------------------------------------------


def verify_cache(out: Path, *, processes: int = 0, progress: Progress = unheard) -> int:
    """Read every image back and return their number.

    Raises UsageError if `out` is no cache, and DataError if images are missing, differ from the
    manifest or are not in it, or if the manifest itself has changed.
    """
    again = f"delete {out} and make it again"
    header, parts = read_header(out), manifest_parts(out)
    if header is None or "manifest" not in header:
        raise UsageError("the directory is not a cache", place=out, hint="name another --out")
    if _checksum(parts) != header["manifest"]:
        raise DataError("the manifest has changed", place=out / MANIFEST, hint=again)
    total: int = sum(header["images"].values())
    done = 0
    listed: set[str] = set()
    missing: list[str] = []
    changed: list[str] = []
    checks = DataLoader(_Checks(out, parts), batch_size=None, num_workers=processes)
    for files, absent, other in checks:
        listed.update(files)
        missing += absent
        changed += other
        done += len(files)
        progress("images", done, total)
    strange = sorted(set(_files(out, header["images"])) - listed)
    faults = {"missing": missing, "not what was written": changed, "not in the manifest": strange}
    parts_of_message = [
        f"{len(names)} {fault} ({shortened(names)})" for fault, names in faults.items() if names
    ]
    if parts_of_message:
        raise DataError(f"of {total} images {', '.join(parts_of_message)}", place=out, hint=again)
    return total


class _Checks(Dataset[tuple[list[str], list[str], list[str]]]):
    """Item i: (all, missing, changed) images of the i-th file of the manifest."""

    def __init__(self, out: Path, parts: list[Path]) -> None:
        self._out, self._parts = out, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> tuple[list[str], list[str], list[str]]:
        files, missing, changed = [], [], []
        for line in _read_lines(self._parts[index]):
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
