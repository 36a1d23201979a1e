"""`wds:SHARDS`: tar shards in webdataset form, read by the `datasets` library.

A sample is the members of one tar that share a name: an image, and a `.cls` (an integer) or a
`.json` with "label". Classes are numbered, or named by a classes.txt beside the training shards.
Without `streaming` the library copies the samples into its cache and gives random access.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch

from layershuffle.data.class_names import numbered
from layershuffle.data.columns import (
    Columns,
    HubTable,
    as_index,
    image_column,
    record_reader,
)
from layershuffle.data.contract import (
    HOLDOUT_SEED,
    ImageData,
    SourceRequest,
    generator_for,
)
from layershuffle.data.decode import mode_for
from layershuffle.data.hub import LOAD_ERRORS
from layershuffle.data.shards import (
    find_shards,
    json_label,
    largest_label,
    read_classes,
    require_tar,
)
from layershuffle.data.streams import IdentityCut, Streams, assemble_streams, identity
from layershuffle.data.tables import Tables, assemble
from layershuffle.errors import DataError
from layershuffle.text import one_line, shortened

Shards = dict[str, list[Path]]

_IMAGE, _KEY, _SHARD = "image", "__key__", "__url__"


def open_source(request: SourceRequest) -> ImageData:
    """Shards as ImageData. Raises DataError for missing or unreadable shards, images or labels."""
    mode_for(request.view.channels)
    shards = find_shards(request.place)
    if "train" not in shards and request.options.train:
        raise DataError(
            "There are no training shards",
            place=request.spec,
            hint="name a folder with train shards, or score with layershuffle eval",
        )
    # A small test set may lack the last classes, so they are counted in the training shards.
    counted = shards.get("train", shards["test"])
    classes = read_classes(counted) or numbered(largest_label(counted) + 1)
    if not request.options.train:
        shards = {"test": shards["test"]}
    if request.options.streaming:
        return _streamed(request, shards, classes)
    return _tabled(request, shards, classes)


def held_out_shards(count: int, share: float) -> list[int] | None:
    """The indices of the held-out shards of `count`; None if the share is below half a shard."""
    # At least one shard is left for training.
    number = min(round(share * count), count - 1)
    if number == 0:
        return None
    order: list[int] = torch.randperm(
        count, generator=generator_for("shards", HOLDOUT_SEED)
    ).tolist()
    return sorted(order[:number])


def _tabled(request: SourceRequest, shards: Shards, classes: tuple[str, ...]) -> ImageData:
    loaded = {name: _load(request, paths, classes) for name, paths in shards.items()}
    channels = request.view.channels
    tables = {
        name: HubTable(data, columns, channels=channels, place=request.spec)
        for name, (data, columns) in loaded.items()
    }
    cut, notes = None, ""
    if "train" in loaded and "validation" not in loaded:
        cut, notes = _cut(request, loaded["train"][0], shards["train"])
    named = Tables(
        classes=classes,
        test=tables["test"],
        train=tables.get("train"),
        validation=tables.get("validation"),
        holdout=cut,
        notes=(notes,) * bool(notes),
    )
    return assemble(request, named)


def _cut(
    request: SourceRequest, train: Any, shards: Sequence[Path]
) -> tuple[tuple[list[int], list[int]], str]:
    """((training rows, held-out rows), note): by whole shards if possible, else by keys."""
    share = request.options.holdout
    if share is None:
        return (list(range(len(train))), []), ""
    # By whole shards, which a stream can skip, so tables and streams hold out the same images.
    held_out = held_out_shards(len(shards), share)
    if held_out is not None:
        # __url__ is the library's column: the path of the shard that a row came from.
        names = {str(shards[index]) for index in held_out}
        out = [shard in names for shard in train[_SHARD]]
        note = _shard_note(held_out, shards)
    else:
        rule = IdentityCut(share=share, held_out=True)
        out = [rule.keeps(identity(key.encode("utf-8"))) for key in train[_KEY]]
        note = (
            f"the holdout is {sum(out)} of {len(out)} training images, "
            f"about {share:g}, chosen by the hash of their key, the same for every seed"
        )
    training = [row for row, is_out in enumerate(out) if not is_out]
    return (training, [row for row, is_out in enumerate(out) if is_out]), note


def _streamed(request: SourceRequest, shards: Shards, classes: tuple[str, ...]) -> ImageData:
    note = ""
    if "train" in shards and "validation" not in shards:
        train, share = shards["train"], request.options.holdout
        held_out = None if share is None else held_out_shards(len(train), share)
        if held_out is not None:
            note = _shard_note(held_out, train)
            training = [path for index, path in enumerate(train) if index not in held_out]
            validation = [train[index] for index in held_out]
            shards = shards | {"train": training, "validation": validation}
    loaded = {name: _load(request, paths, classes) for name, paths in shards.items()}
    raw = datasets.Image(decode=False)
    readers, streams = {}, {}
    for name, (data, columns) in loaded.items():
        streams[name] = data.cast_column(_IMAGE, raw)
        readers[name] = record_reader(
            columns, channels=request.view.channels, place=request.spec, key=_KEY
        )
    named = Streams(
        classes=classes,
        readers=readers,
        test=streams["test"],
        train=streams.get("train"),
        validation=streams.get("validation"),
        notes=(note,) * bool(note),
    )
    return assemble_streams(request, named)


def _load(
    request: SourceRequest, shards: Sequence[Path], classes: tuple[str, ...]
) -> tuple[Any, Columns]:
    """One split with its image column called "image". Raises DataError."""
    # Checked one by one, because the library's error does not name the damaged shard.
    for path in shards:
        require_tar(path)
    files = {"train": [str(path) for path in shards]}  # the library's name for "the only split"
    try:
        data = datasets.load_dataset(
            "webdataset", data_files=files, split="train", streaming=request.options.streaming
        )
    except (*LOAD_ERRORS, tarfile.TarError) as error:
        raise DataError(
            # datasets wraps the error that explains the failure.
            f"cannot read the shards ({one_line(error.__cause__ or error)})",
            place=shortened([str(path) for path in shards]),
            hint=f"try tar -tf {shards[0]} and the like; samples need an image and a .cls or .json",
        ) from error
    image = image_column(data.features, column=None, place=str(shards[0]))
    label = next((name for name in ("cls", "json") if name in data.features), None)
    if label is None:
        raise DataError(
            f"samples have no label among: {', '.join(data.features)}",
            place=shards[0],
            hint='give each sample a .cls member (an integer) or a .json member with "label"',
        )
    index = as_index if label == "cls" else partial(json_label, place=request.spec)
    renamed = data if image == _IMAGE else data.rename_column(image, _IMAGE)
    return renamed, Columns(image=_IMAGE, label=label, classes=classes, index=index)


def _shard_note(held_out: Sequence[int], shards: Sequence[Path]) -> str:
    names = ", ".join(shards[index].name for index in held_out[:5])
    return (
        f"the holdout is {len(held_out)} of {len(shards)} training shards, "
        f"the same for every seed: {names}"
    )
