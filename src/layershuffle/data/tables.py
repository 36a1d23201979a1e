"""Build named splits from tables of labelled images.

A source only provides image i and its label (an `ImageTable`); everything else (transform,
augmentation, holdout, skipping of unreadable images) is the same for all sources.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from layershuffle.data.splits import (
    ImageData,
    SourceRequest,
    Split,
    limited_test,
    stratified_holdout,
)
from layershuffle.data.transforms import (
    Images,
    ImageTable,
    PixelFinish,
    PixelTransform,
    PlainTransform,
    augment_transform,
)
from layershuffle.ground.errors import DataError
from layershuffle.ground.text import shortened
from layershuffle.images.pixels import resized_size
from layershuffle.images.view import ImageView


def assemble(
    request: SourceRequest,
    tables: Mapping[str, ImageTable],
    *,
    classes: Sequence[str],
    test_groups: Tensor | None = None,
    notes: Sequence[str] = (),
) -> ImageData:
    """The named splits of the tables "train", "validation" and "test", as the options say.

    A validation table beside a test table picks the checkpoint instead of a holdout; without one it
    is reported. `test_groups`: groups of the reported images, int64 [n, k], as in `Split.groups`.
    Raises DataError for missing and empty splits, and with `skip_corrupt` if a split has no
    readable image left. Without `skip_corrupt` a bad image raises when it is read.
    """
    options = request.options
    view = request.view
    sentences = list(notes)
    parts = dict(tables)
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    wanted = ("train", "validation", "test") if options.train else ("test",)
    absent = []
    for name in ("train", "test"):
        if name in wanted and name not in parts:
            absent.append(name)
    if absent:
        raise DataError(
            f"There is no {' and no '.join(absent)} split",
            place=request.spec,
            hint="name files or folders by their split: train/ and val/, or train-0.tar and so on",
        )
    rows = {}
    for name in wanted:
        if name not in parts:
            continue
        rows[name] = [*range(len(parts[name].labels))]
        bad = list[int]()
        # Not always, because checking a million files takes long.
        if options.skip_corrupt:
            rows[name], bad = readable_rows(parts[name], view)
        if not rows[name]:
            raise DataError(
                "No image could be read",
                place=f"{request.spec} ({name})",
                hint="run again without --skip-corrupt: it names the first image and its fault",
            )
        if bad:
            skipped = []
            for row in bad:
                skipped.append(parts[name].name(row))
            sentences.append(
                f"skipped {len(bad):,} of {len(parts[name].labels):,} images in {name} as "
                f"unreadable: {shortened(skipped)}"
            )
    # Scores always use Pillow's pixels; only training uses the faster transform.
    plain = PlainTransform(view)
    groups = None if test_groups is None else test_groups[rows["test"]]
    tested = Images(parts["test"], rows["test"], plain)
    splits = {"test": limited_test(tested, limit=options.max_test, groups=groups)}
    if options.train:
        splits |= _training_splits(request, parts, rows, sentences)
    return ImageData(
        spec=request.spec,
        classes=tuple(classes),
        splits=splits,
        finish=PixelFinish(view),
        notes=tuple(sentences),
    )


def _training_splits(
    request: SourceRequest,
    parts: Mapping[str, ImageTable],
    rows: Mapping[str, list[int]],
    sentences: list[str],
) -> dict[str, Split]:
    options = request.options
    view = request.view
    train = parts["train"]
    plain = PlainTransform(view)
    training = rows["train"]
    held_out = None
    if "validation" in parts:
        held_out = Images(parts["validation"], rows["validation"], plain)
        sentences.append("the holdout is the validation split of the data")
    elif options.holdout is None:
        sentences.append("all training images are trained on, none is held out")
    else:
        # Among the readable images only, so the share is that of the used images.
        left, cut = stratified_holdout([train.labels[row] for row in training], options.holdout)
        sentences.append(
            f"the holdout is {len(cut)} of {len(training)} training images "
            f"({len(cut) / len(training):.0%}; {options.holdout:g} of each class, but at least one "
            "image), the same for every seed"
        )
        if not cut:
            raise DataError(
                "No image can be held out: every class has a single training image",
                place=request.spec,
                hint="give more training images, or a validation split",
            )
        held_out = Images(train, [training[i] for i in cut], plain)
        training = [training[i] for i in left]
    # torch's nearest pixel differs from Pillow's, which scores use; others it does not have.
    fast = view.interpolation in ("bilinear", "bicubic")
    fitted = Images(train, training, PixelTransform(view) if fast else plain)
    if options.augment:
        fitted = Images(train, training, augment_transform(view), seed=options.seed)
    splits = {"train": Split(dataset=fitted)}
    if held_out is not None:
        splits["holdout"] = Split(dataset=held_out)
    return splits


def readable_rows(table: ImageTable, view: ImageView) -> tuple[list[int], list[int]]:
    """(rows whose image fits the view, others): every image is decoded once, on all cores."""
    rows = range(len(table.labels))

    # Threads are enough, because Pillow releases the GIL while it decodes.
    def fails(row: int) -> bool:
        try:
            resized_size(table.image(row).size, view)
        except DataError:
            return True
        return False

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        failed = list(pool.map(fails, rows))
    readable = []
    others = []
    for row in rows:
        if failed[row]:
            others.append(row)
        else:
            readable.append(row)
    return readable, others
