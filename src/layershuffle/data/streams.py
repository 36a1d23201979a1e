"""Streams of data: shuffled through a buffer, split and augmented by identity.

Row numbers of a stream depend on the number of workers. So the held-out images and the augmentation
of an image in an epoch are decided by an identity, the SHA-256 of the record's key or, without
keys, of the image's bytes. Both are pure functions of (seed, epoch, identity).
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datasets.exceptions import DatasetsError
from datasets.utils.file_utils import xopen
from torch.utils.data import IterableDataset

from layershuffle.data.contract import (
    HOLDOUT_SEED,
    TEST_SHUFFLE_SEED,
    ImageData,
    Item,
    SharedEpoch,
    SourceRequest,
    Split,
    derived_seed,
)
from layershuffle.data.decode import read_image, read_pixels
from layershuffle.data.transforms import (
    PixelFinish,
    PixelTransform,
    PlainTransform,
    Transform,
    augment_transform,
    plain_training_transform,
    seeded_globals,
)
from layershuffle.errors import DataError, UsageError
from layershuffle.text import one_line

# Number of undecoded images, about 200 MB of ImageNet.
SHUFFLE_BUFFER = 2_000

# Raised for a truncated shard, a lost file or connection, or a column of another type.
STREAM_ERRORS = (tarfile.TarError, OSError, EOFError, DatasetsError)

Record = Mapping[str, Any]


def identity(content: bytes) -> str:
    """SHA-256 in hexadecimal, which identifies a record independently of its position."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Reads the image (in Hugging Face's undecoded form), the label and the key of a record.

    `index` converts a cell of the label column to a class index.
    """

    image: str
    label: str
    index: Callable[[Any], int]
    channels: int
    classes: int
    place: str
    key: str | None = None

    def identity(self, record: Record, content: bytes) -> str:
        """The identity of the record's key or, without one, of its image."""
        return identity(content if self.key is None else str(record[self.key]).encode("utf-8"))

    def content(self, record: Record) -> bytes:
        """The undecoded image. Raises DataError if the record has none."""
        cell = record[self.image]
        if cell is None:
            raise DataError(
                "A record has no image",
                place=self.name(record),
                hint="remove the record from the data",
            )
        # Shards and parquet files contain the bytes; class folders only name the file.
        if cell["bytes"] is not None:
            return bytes(cell["bytes"])
        try:
            with xopen(cell["path"], "rb") as file:  # also opens remote files
                return bytes(file.read())
        except OSError as error:
            raise DataError(
                f"Cannot read image ({error})",
                place=self.name(record),
                hint="replace the image, or leave --streaming out and pass --skip-corrupt",
            ) from error

    def name(self, record: Record) -> str:
        """The name of a record for messages."""
        cell = record[self.image]
        path = (cell or {}).get("path") or record.get("__key__") or "an unnamed record"
        return f"{self.place} ({path})"

    def checked_label(self, record: Record) -> int:
        """The class index. Raises DataError if it is out of range."""
        label = self.index(record[self.label])
        if not 0 <= label < self.classes:
            raise DataError(
                f"label {label} is not one of the {self.classes} classes, 0 to {self.classes - 1}",
                place=self.name(record),
                hint="correct the label or the list of classes",
            )
        return label


@dataclass(frozen=True, kw_only=True)
class IdentityCut:
    """Keeps the images whose identity falls into the held-out share, or all the others."""

    share: float
    held_out: bool

    def keeps(self, digest: str) -> bool:
        """Whether an image with this identity belongs to the part."""
        # Derived seeds are uniform below 2**63, so this holds for `share` of all identities.
        falls_in = derived_seed("holdout", HOLDOUT_SEED, digest) < self.share * 2**63
        return falls_in == self.held_out


class StreamedImages(IterableDataset[Item]):
    """A Hugging Face stream as (image, label) items.

    `cut` drops the images of the other part; with `augment_seed`, `transform` is random and seeded
    per image and epoch. `set_epoch` reshuffles the stream and changes the augmentation.
    """

    def __init__(
        self,
        stream: Any,
        reader: RecordReader,
        transform: Transform | PixelTransform,
        *,
        cut: IdentityCut | None = None,
        augment_seed: int | None = None,
    ) -> None:
        self.stream, self.reader, self.transform = stream, reader, transform
        self.cut, self.augment_seed = cut, augment_seed
        self._epoch = SharedEpoch()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle and augment as in `epoch` from now on."""
        self._epoch.set(epoch)
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Item]:
        for record in self._records():
            content = self.reader.content(record)
            digest = self.reader.identity(record, content)
            # Before decoding, to save the decoding of images of the other part.
            if self.cut is None or self.cut.keeps(digest):
                yield self._item(record, content, digest)

    def _records(self) -> Iterator[Record]:
        try:
            # This `try` contains only the reading, because bad images have their own error.
            yield from self.stream
        except STREAM_ERRORS as error:
            raise DataError(
                f"the stream was interrupted ({one_line(error)})",
                place=self.reader.place,
                hint="check the files or the network, then run the same command again",
            ) from error

    def _item(self, record: Record, content: bytes, digest: str) -> Item:
        label = self.reader.checked_label(record)
        channels, place = self.reader.channels, self.reader.name(record)
        if isinstance(self.transform, PixelTransform):
            return self.transform(read_pixels(content, channels, place=place)), label
        image = read_image(content, channels, place=place)
        if self.augment_seed is None:
            return self.transform(image), label
        with seeded_globals(derived_seed("augment", self.augment_seed, self._epoch.get(), digest)):
            return self.transform(image).contiguous(), label


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The splits of a source as Hugging Face streams of undecoded records, with their readers.

    Without `validation` the holdout is cut from `train` by identity.
    """

    classes: tuple[str, ...]
    readers: Mapping[str, RecordReader]
    test: Any
    train: Any = None
    validation: Any = None
    notes: tuple[str, ...] = ()


def assemble_streams(request: SourceRequest, streams: Streams) -> ImageData:
    """The named splits as streams; their sizes are None. Raises UsageError with `skip_corrupt`."""
    options = request.options
    # Unlike a table, a stream could only skip images silently.
    if options.skip_corrupt:
        raise UsageError(
            "unreadable images of a stream cannot be counted beforehand",
            place=request.spec,
            hint="use --skip-corrupt without --streaming",
        )
    plain, notes = PlainTransform(request.view), list(streams.notes)
    test = streams.test
    if options.max_test is not None:
        # The first records of a stream may all be of one class, hence the shuffle.
        test = test.shuffle(seed=TEST_SHUFFLE_SEED, buffer_size=SHUFFLE_BUFFER)
        test = test.take(options.max_test)
        notes.append(f"test: the first {options.max_test} images of a buffered, fixed shuffle")
    parts = {"test": StreamedImages(test, streams.readers["test"], plain)}
    if options.train and streams.train is not None:
        parts["train"] = _train_part(request, streams, notes)
        if streams.validation is not None or options.holdout is not None:
            parts["holdout"] = _holdout_part(request, streams, notes)
    return ImageData(
        spec=request.spec,
        classes=streams.classes,
        splits={name: Split(dataset=part, size=None) for name, part in parts.items()},
        finish=PixelFinish(request.view),
        notes=tuple(notes),
    )


def _train_part(request: SourceRequest, streams: Streams, notes: list[str]) -> StreamedImages:
    options, view = request.options, request.view
    notes.append(f"training images are shuffled through a buffer of {SHUFFLE_BUFFER}")
    return StreamedImages(
        streams.train.shuffle(seed=options.seed, buffer_size=SHUFFLE_BUFFER),
        streams.readers["train"],
        augment_transform(view) if options.augment else plain_training_transform(view, notes),
        cut=None if streams.validation is not None else _identity_cut(request, held_out=False),
        augment_seed=options.seed if options.augment else None,
    )


def _holdout_part(request: SourceRequest, streams: Streams, notes: list[str]) -> StreamedImages:
    options, plain = request.options, PlainTransform(request.view)
    if streams.validation is not None:
        return StreamedImages(streams.validation, streams.readers["validation"], plain)
    reader = streams.readers["train"]
    notes.append(
        f"the holdout is about {options.holdout:g} of the training images, chosen by the hash of "
        f"their {'content' if reader.key is None else 'key'}, the same for every seed"
    )
    # Not shuffled, because every score reads all held-out images.
    cut = _identity_cut(request, held_out=True)
    return StreamedImages(streams.train, reader, plain, cut=cut)


def _identity_cut(request: SourceRequest, *, held_out: bool) -> IdentityCut | None:
    share = request.options.holdout
    return None if share is None else IdentityCut(share=share, held_out=held_out)
