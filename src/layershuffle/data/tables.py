"""Build named splits from tables of labelled images.

A source only provides image i and its label (an `ImageTable`); everything else (transform,
augmentation, holdout, skipping of unreadable images) is the same for all sources.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

from layershuffle.data.contract import (
    ImageData,
    Item,
    SourceRequest,
    Split,
    check_labels,
    limited_test,
    stratified_holdout,
)
from layershuffle.data.transforms import (
    AugmentedImages,
    ImageTable,
    PixelFinish,
    PixelTransform,
    PlainTransform,
    TransformedImages,
    augment_transform,
)
from layershuffle.errors import DataError
from layershuffle.text import shortened


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of a source.

    `validation`: a separate split that picks the checkpoint instead of a holdout. `test_groups`:
    groups of the test images, int64 [n, k], as in `Split.groups`.
    """

    classes: tuple[str, ...]
    test: ImageTable
    train: ImageTable | None = None
    validation: ImageTable | None = None
    test_groups: Tensor | None = None
    notes: tuple[str, ...] = ()


def assemble(request: SourceRequest, tables: Tables) -> ImageData:
    """The named splits of the tables, according to the request's options.

    Raises DataError for labels out of range, for empty splits, and with `skip_corrupt` if a split
    has no readable image left. Without `skip_corrupt` a bad image raises when it is read.
    """
    options, notes, skipped = request.options, list(tables.notes), 0
    rows: dict[str, list[int]] = {}
    named = {"train": tables.train, "validation": tables.validation, "test": tables.test}
    for name, table in named.items():
        if table is None:
            continue
        check_labels(table.labels, len(tables.classes), place=f"{request.spec} ({name})")
        good, bad = readable_rows(table, check=options.skip_corrupt)
        if not good:
            raise DataError(
                "No image could be read",
                place=f"{request.spec} ({name})",
                hint="run again without --skip-corrupt: it names the first image and its fault",
            )
        if bad:
            skipped += len(bad)
            notes.append(_skip_note(name, table, bad))
        rows[name] = good
    # Scores always use Pillow's pixels; only training uses the faster transform.
    plain = PlainTransform(request.view)
    test = TransformedImages(tables.test, rows["test"], plain)
    groups = None if tables.test_groups is None else tables.test_groups[rows["test"]]
    splits = {"test": limited_test(test, len(test), limit=options.max_test, groups=groups)}
    if options.train and tables.train is not None:
        splits |= _training_splits(request, tables, rows, notes)
    return ImageData(
        spec=request.spec,
        classes=tables.classes,
        splits=splits,
        finish=PixelFinish(request.view),
        notes=tuple(notes),
        skipped=skipped,
    )


def readable_rows(table: ImageTable, *, check: bool) -> tuple[list[int], list[int]]:
    """(readable, unreadable) rows. With `check` every image is decoded once, on all cores.

    Without it all rows count as readable, because checking a million files takes long.
    """
    rows = range(len(table.labels))
    if not check:
        return list(rows), []

    # Threads are enough, because Pillow releases the GIL while it decodes.
    def fails(row: int) -> bool:
        try:
            table.image(row)
        except DataError:
            return True
        return False

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        failed = list(pool.map(fails, rows))
    return [r for r in rows if not failed[r]], [r for r in rows if failed[r]]


def _skip_note(split: str, table: ImageTable, bad: Sequence[int]) -> str:
    names = shortened([table.name(row) for row in bad])
    return f"skipped {len(bad):,} of {len(table.labels):,} images in {split} as unreadable: {names}"


def _training_splits(
    request: SourceRequest, tables: Tables, rows: dict[str, list[int]], notes: list[str]
) -> dict[str, Split]:
    assert tables.train is not None
    options, plain = request.options, PlainTransform(request.view)
    holdout_images: Dataset[Item]
    if tables.validation is not None:
        training = rows["train"]
        holdout_images = TransformedImages(tables.validation, rows["validation"], plain)
        size = len(rows["validation"])
        notes.append("the holdout is the validation split of the data")
    else:
        training, cut = _cut(request, tables, rows["train"], notes)
        holdout_images, size = TransformedImages(tables.train, cut, plain), len(cut)
    # Without a holdout there is no such split, not an empty one.
    uncut = options.holdout is None and tables.validation is None
    _require_images(training, size or uncut, request)
    # torch's nearest pixel differs from Pillow's, which scores use.
    faster = PlainTransform if request.view.interpolation == "nearest" else PixelTransform
    fitted: Dataset[Item] = TransformedImages(tables.train, training, faster(request.view))
    if options.augment:
        augment = augment_transform(request.view)
        fitted = AugmentedImages(tables.train, training, augment, seed=options.seed)
    splits = {"train": Split(dataset=fitted, size=len(training))}
    return splits if uncut else {**splits, "holdout": Split(dataset=holdout_images, size=size)}


def _cut(
    request: SourceRequest, tables: Tables, good: list[int], notes: list[str]
) -> tuple[list[int], list[int]]:
    assert tables.train is not None
    if request.options.holdout is None:
        notes.append("all training images are trained on, none is held out")
        return good, []
    # Among the readable images only, so the share is that of the used images.
    labels = [tables.train.labels[row] for row in good]
    training, cut = stratified_holdout(labels, request.options.holdout)
    notes.append(
        f"the holdout is {len(cut)} of {len(good)} training images, "
        f"a share of {request.options.holdout:g} per class, the same for every seed"
    )
    return [good[i] for i in training], [good[i] for i in cut]


def _require_images(training: Sequence[int], held_out: int, request: SourceRequest) -> None:
    if not training or not held_out:
        raise DataError(
            f"{len(training)} images to train on and {held_out} held out: both must be above 0",
            place=request.spec,
            hint="give more training images, or another holdout share",
        )
