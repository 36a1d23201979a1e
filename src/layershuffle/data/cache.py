"""`build_cache`: a copy of image data at the size that training needs, read many times faster.

Every image is brought to `size` pixels on its shorter side (never enlarged) and kept as a JPEG in
the layout that `folder:` reads, in the order of the source within each class, so that the same
images are held out. It takes several processes, can be killed at any moment, and goes on where it
was: an image is there whole or not at all, and one that is there is not made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from torch.utils.data import DataLoader, Dataset

from layershuffle.data.cache_files import (
    HEADER,
    MANIFEST,
    SCHEMA,
    SOURCE,
    CacheReport,
    Header,
    Progress,
    checksum,
    manifest_parts,
    read_header,
    read_lines,
    report_of,
    require_same,
)
from layershuffle.data.contract import DataOptions, shortened
from layershuffle.data.loading import loader_processes, open_data, parse_spec
from layershuffle.data.tables import ImageTable, TrainingImages, TransformedImages
from layershuffle.data.view import ImageView
from layershuffle.errors import DataError, UsageError
from layershuffle.files import explained, locked, remove_stale_stages, write_bytes, write_text
from layershuffle.settings import CacheSettings

CHUNK = 128  # images whose lines in the manifest are written together
_VIEW = ImageView(channels=3, height=1, width=1, mean=(0.0,) * 3, std=(1.0,) * 3)
_FOLDERS = {"train": "train", "holdout": "val", "test": "test"}


@dataclass(frozen=True)
class Part:
    """One split: its folder in the cache, the table its images come from, folders by label."""

    folder: str
    table: ImageTable
    classes: tuple[str, ...]

    def file(self, row: int) -> str:
        """Where image `row` goes, relative to the cache."""
        return f"{self.folder}/{self.classes[self.table.labels[row]]}/{row:08d}.jpg"


def default_out(spec: str, size: int) -> Path:
    """A folder's neighbour (DIR-256), or NAME-256 here. Raises UsageError for patterns."""
    place = parse_spec(spec)[1].rstrip("/")
    if Path(place).expanduser().is_dir():
        return Path(f"{place}-{size}").expanduser()
    name = place.rpartition("/")[2].replace(":", "-")
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError("this spec gives the cache no name", place=spec, hint="add --out DIR")
    return Path(f"{name}-{size}")


def build_cache(
    spec: str, out: Path, *, settings: CacheSettings, progress: Progress | None = None
) -> CacheReport:
    """Make the cache of `spec` in `out`, or go on with it; a whole one is left as it is.

    Raises UsageError if `out` holds something else or a cache made in another way, DataError,
    naming it, for an image that cannot be read (unless `settings.skip_corrupt`).
    """
    made_by = {"schema": SCHEMA, "data": spec, "size": settings.size, "quality": settings.quality}
    if not out.exists():
        parts, work = _open(spec), partial_of(out)  # nothing is made for a source that is not there
        with locked(work):
            if not out.exists():  # another process may have made it while we waited
                return _build(out, made_by, parts=parts, settings=settings, progress=progress)
        shutil.rmtree(work, ignore_errors=True)
    header = read_header(out)
    require_same(out, header, wanted=made_by)
    assert header is not None
    return report_of(out, header)


def partial_of(out: Path) -> Path:
    """What the cache is called until it is whole."""
    return out.with_name(f"{out.name}.partial")


def class_folders(classes: Sequence[str]) -> tuple[str, ...]:
    """A folder name per class, whose sorted order is the order of the classes.

    The names themselves where they can be, as those of folders can; else 000-NAME, 001-NAME, ...
    """
    plain = all(re.fullmatch(r"[^/\0.][^/\0]{0,99}", name) for name in classes)
    if plain and list(classes) == sorted(set(classes)):
        return tuple(classes)
    width = len(str(len(classes) - 1))
    words = [re.sub(r"[^\w.-]+", "-", name).strip("-")[:60] for name in classes]
    return tuple(f"{index:0{width}d}-{word}" for index, word in enumerate(words))


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """The image with `size` pixels on its shorter side, bicubic; untouched if it has no more."""
    shorter = min(image.size)
    if shorter <= size:
        return image
    wanted = tuple(max(size, round(side * size / shorter)) for side in image.size)
    return image.resize((wanted[0], wanted[1]), Image.Resampling.BICUBIC)


def _build(
    out: Path,
    made_by: Header,
    *,
    parts: Sequence[Part],
    settings: CacheSettings,
    progress: Progress | None,
) -> CacheReport:
    work = partial_of(out)
    images = {part.folder: len(part.table.labels) for part in parts}
    begun = {**made_by, SOURCE: {"images": images, "checksum": _source(parts)}}
    _clear_stages(work)
    found = read_header(work)
    if found is not None or any(path.name != ".lock" for path in work.iterdir()):
        require_same(work, found, wanted=begun)
    else:
        write_text(work / HEADER, json.dumps(begun, indent=2))
    made = _make_all(_Chunks(work, parts, settings), settings, progress)
    header = {**begun, **_counts(work, parts), "versions": {"pillow": version("pillow")}}
    write_text(work / HEADER, json.dumps(header, indent=2))
    with explained(out):
        os.replace(work, out)
        (out / ".lock").unlink()
    return report_of(out, header, made=made)


def _open(spec: str) -> list[Part]:
    """The splits of the source. Raises UsageError for data that is no image files."""
    data = open_data(spec, _VIEW, options=DataOptions(holdout=None))
    classes, parts = class_folders(data.classes), []
    for name, split in data.splits.items():
        if not isinstance(split.dataset, TransformedImages | TrainingImages):
            raise UsageError("these images are in memory, a cache gains nothing", place=spec)
        table = split.dataset.table
        absent = sorted(set(range(len(classes))) - set(table.labels))
        if absent:
            names = shortened([data.classes[label] for label in absent])
            raise DataError(
                f"{len(absent)} classes have no image in {name}: {names}",
                place=spec,
                hint="folder: could not read the copy; leave these classes out of the source",
            )
        folder = "val" if name == "test" and "holdout" not in data.splits else _FOLDERS[name]
        parts.append(Part(folder, table, classes))
    return sorted(parts, key=lambda part: ("train", "val", "test").index(part.folder))


def _source(parts: Sequence[Part]) -> str:
    """What shows that a source has changed in between: image 12 might be another one now."""
    facts = [
        (p.folder, p.classes, [int(label) for label in p.table.labels], p.table.fingerprint())
        for p in parts
    ]
    return hashlib.sha256(json.dumps(facts).encode("utf-8")).hexdigest()


def _clear_stages(work: Path) -> None:
    for folder in (work, work / MANIFEST, *work.glob("*/*")):
        if folder.is_dir():
            remove_stale_stages(folder)


def _make_all(chunks: _Chunks, settings: CacheSettings, progress: Progress | None) -> int:
    """Make what is missing; how many images that were."""
    processes = loader_processes() if settings.workers is None else settings.workers
    made, done, total = 0, chunks.done, chunks.images
    if progress is not None:
        progress(done, total)
    for new, count in DataLoader(chunks, batch_size=None, num_workers=processes):
        made, done = made + new, done + count
        if progress is not None:
            progress(done, total)
    return made


class _Chunks(Dataset[tuple[int, int]]):
    """Reading item i makes chunk i of those missing: (images made, images dealt with)."""

    def __init__(self, work: Path, parts: Sequence[Part], settings: CacheSettings) -> None:
        self._work, self._settings = work, settings
        every = [
            (part, number, range(start, min(start + CHUNK, len(part.table.labels))))
            for part in parts
            for number, start in enumerate(range(0, len(part.table.labels), CHUNK))
        ]
        self.images = sum(len(rows) for _, _, rows in every)
        self._missing = [one for one in every if not self._record(one[0], one[1]).is_file()]
        self.done = self.images - sum(len(rows) for _, _, rows in self._missing)

    def __len__(self) -> int:
        return len(self._missing)

    def __getitem__(self, index: int) -> tuple[int, int]:
        part, number, rows = self._missing[index]
        lines, made = [], 0
        for row in rows:
            path = self._work / part.file(row)
            there = path.is_file()
            line = self._line(part, row, path.read_bytes() if there else None)
            made += not there and "file" in line
            lines.append(json.dumps(line) + "\n")
        write_text(self._record(part, number), "".join(lines))
        return made, len(rows)

    def _record(self, part: Part, number: int) -> Path:
        return self._work / MANIFEST / f"{part.folder}-{number:05d}.jsonl"

    def _line(self, part: Part, row: int, content: bytes | None) -> dict[str, str | int]:
        """What the manifest says of an image, which is made if there is no `content`."""
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
        image = shrunk(table.image(row, least=2 * size), size)
        image.info = {}  # no comments, profiles or rotation: pixels alone
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self._settings.quality)
        return buffer.getvalue()


def _counts(work: Path, parts: Sequence[Part]) -> Header:
    """Counts and checksum of a cache that is done. Raises DataError if a class came out empty."""
    images = {part.folder: 0 for part in parts}
    empty = {f"{part.folder}/{name}" for part in parts for name in part.classes}
    skipped, size = [], 0
    for line in (line for part in manifest_parts(work) for line in read_lines(part)):
        if "skipped" in line:
            skipped.append(f"{line['skipped']} ({line['reason']})")
            continue
        folder, _, _ = line["file"].rpartition("/")
        empty.discard(folder)
        images[folder.partition("/")[0]] += 1
        size += line["bytes"]
    if empty:
        raise DataError(
            f"no image could be read of {len(empty)} classes: {shortened(sorted(empty))}",
            place=work,
            hint="repair the source, or leave these classes out of it; then delete this directory",
        )
    digest = checksum(manifest_parts(work))
    return {"images": images, "bytes": size, "skipped": skipped, "manifest": digest}
