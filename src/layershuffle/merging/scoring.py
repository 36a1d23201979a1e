"""Score several models alone, merged, as soups and as ensembles, on the same images.

The scores of the paper's Table 2 and Figure 5. The same settings give the same rows on the same
machine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.evaluation import Score, evaluate
from layershuffle.core.policies import Mode, OrderMode
from layershuffle.core.position import backbone_of
from layershuffle.data import DataOptions, ImageData, match_classes, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.loading import loader_processes
from layershuffle.errors import DataError, UsageError
from layershuffle.image_view import resized_as
from layershuffle.machine import Device, choose_precision, device_of
from layershuffle.merging.compatibility import check_members, shared_record
from layershuffle.merging.ensembles import EnsembleScore, Variant, evaluate_ensembles
from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import orders_seed, sample_plans
from layershuffle.merging.rows import MergingRow
from layershuffle.merging.settings import (
    Combine,
    EnsembleOrders,
    EnsembleSettings,
    MergingSettings,
)
from layershuffle.merging.soups import greedy_soup, uniform_soup
from layershuffle.models import class_names_of, image_view, load, num_classes_of
from layershuffle.models.origin import trained_with
from layershuffle.scoring import compiler_for, prepare
from layershuffle.text import Progress, unheard

_IN_MEMORY_BYTES = 1 << 30  # limit for decoded images in CPU memory
_SMALL_BYTES = 1 << 24  # not worth loader processes
# Kinds of models with separate orders (`orders_seed`): otherwise a merge and a donor of the same
# number would run in the same order, as would held-out and reported scores.
_DONORS, _MERGES, _SOUPS, _HOLDOUT, _ENSEMBLES = range(5)
_COMBINE: tuple[Combine, ...] = ("logits", "probabilities")
_ORDERS: tuple[EnsembleOrders, ...] = ("same", "independent")


def score_merging(
    donors: Sequence[str],
    data: str,
    *,
    settings: MergingSettings,
    mode: OrderMode = "arbitrary",
    base: str | None = None,
    names: Sequence[str] | None = None,
    device: Device = "auto",
    progress: Progress = unheard,
    note: Callable[[str], None] | None = None,
) -> list[MergingRow]:
    """Score donors, merges, soups and ensembles on the test split of `data`, all in one order mode.

    `donors` and `base` are model specs; `base` is used for "base" ends (default: the base that the
    donors name). `names` replace the specs in the rows. The greedy soup is chosen on the held-out
    split. `progress` is called with the models scored, `note` with every remark for the reader.
    Raises `UsageError` for donors that do not fit together or impossible settings, `DataError` if
    the data have another number of classes than the models.
    """
    needs_base = "base" in settings.ends
    group = load_group(donors, base=base, needs_base=needs_base, mixed=settings.mixed, names=names)
    # Before the data are opened, because impossible counts are refused here.
    plans = [
        sample_plans(
            len(donors), group.depth, count=settings.merges, seed=settings.seed,
            replacement=settings.replacement, end=end, slots=slots,
        )
        for end, slots in settings.variants
    ]  # fmt: skip
    opened = _open(group.donors, data, settings=settings, holdout=settings.soups, names=group.names)
    place = device_of(device)
    choose_precision(settings.precision, device=place, training=False)
    group.to(place)
    if settings.soups and "holdout" not in opened.splits:
        raise DataError("The data have no held-out part", place=data, hint="add --no-soups")
    scorer = _Scorer(
        group=group,
        settings=settings,
        mode=Mode(order=mode),
        test=_batches(opened, "test", settings.batch_size, device=place),
        compiler=compiler_for(settings.compile),
        progress=progress,
    )
    # A base of another shape is refused here, not after hours of scoring.
    for drawn in plans:
        group.merge(drawn[0])
    for index, (donor, name) in enumerate(zip(group.donors, group.names, strict=True)):
        scores = scorer.evaluate(donor, scorer.test, kind=_DONORS, index=index)
        scorer.add(scores, kind="donor", index=index, name=name, donors=str(index))
    for (end, slots), drawn in zip(settings.variants, plans, strict=True):
        fields = {"name": "random slots" if slots == "random" else "", "ends": end}
        main = int((end, slots) == settings.variants[0])
        for index, plan in enumerate(drawn):
            merged = group.merge(plan)
            scores = scorer.evaluate(merged, scorer.test, kind=_MERGES, index=index, draws=1)
            scorer.add(scores, kind="merge", index=index, donors=str(plan), main=main, **fields)
    notes = list(opened.notes)
    if settings.soups:
        scorer.score_soups(_batches(opened, "holdout", settings.batch_size, device=place))
        if any(trained_with(backbone_of(donor)).get("paper_protocol") for donor in group.donors):
            notes.append(
                "greedy soup: the donors held nothing out (paper_protocol), so it is chosen on "
                "images that they have trained on"
            )
    scorer.score_ensembles()
    for sentence in (*notes, *_eager_notes(settings, scorer.compiler)):
        if note is not None:
            note(sentence)
    return scorer.rows


def score_ensemble(
    donors: Sequence[str],
    data: str,
    *,
    settings: EnsembleSettings,
    device: Device = "auto",
    progress: Progress = unheard,
) -> tuple[list[EnsembleScore], tuple[str, ...]]:
    """The scores of one ensemble of the models `donors` (specs), and notes on the data.

    Its members may differ in everything but their classes and image view. `progress` is called with
    the images done. Raises as `score_merging`.
    """
    models = load_donors(donors)
    check_members(models, names=donors)  # before the data are opened
    opened = _open(models, data, settings=settings, holdout=False, names=donors)
    place = device_of(device)
    choose_precision(settings.precision, device=place, training=False)
    batches = _batches(opened, "test", settings.batch_size, device=place)
    variant: Variant = (settings.ensemble_combine, settings.ensemble_orders)
    compiler = compiler_for(settings.compile)
    for model in models:
        prepare(model.to(place), settings.precision, compiler=compiler)
    scores = compiler.run(
        lambda: evaluate_ensembles(
            models, batches, mode=Mode(order=settings.modes), num_orders=settings.num_orders,
            seed=settings.seed, draw=settings.draw, variants=[variant],
            groups=batches.split.groups,
            on_images=lambda done: progress("images", done, batches.split.size),
        )
    )  # fmt: skip
    return scores[variant], (*opened.notes, *_eager_notes(settings, compiler))


@dataclass(kw_only=True)
class _Scorer:
    """Scores one model after the other on the same images and collects the rows."""

    group: MergeGroup
    settings: MergingSettings
    mode: Mode
    test: DeviceBatches
    compiler: BlockCompiler
    progress: Progress
    rows: list[MergingRow] = field(default_factory=list)
    done: int = 0
    """Models scored so far, the ensemble as one."""

    def __post_init__(self) -> None:
        settings, count = self.settings, len(self.group.donors)
        self.draws = self.mode.draws(settings.num_orders, depth=self.group.depth)
        # Of the greedy soup every donor alone, then a soup with each other donor, are held out.
        soups = count + (count - 1) + 2 if settings.soups else 0
        self.total = count + settings.merges * len(settings.variants) + soups + 1
        # A compiled model in the settings' precision that gets the weights of each scored model:
        # so averages are computed in fp32, merges need no memory, and only one model is compiled.
        self.stand_in: nn.Module | None = None
        if settings.precision != "fp32" or self.compiler.on:
            copied = copy.deepcopy(self.group.donors[0])
            self.stand_in = prepare(copied, settings.precision, compiler=self.compiler)

    def score_soups(self, holdout: DeviceBatches) -> None:
        """Score the uniform soup and the greedy one, which is chosen on `holdout`."""
        donors = self.group.donors

        def held_out_top1(model: nn.Module) -> float:
            scores = self.evaluate(model, holdout, kind=_HOLDOUT, index=0)
            return sum(score.top1 for score in scores) / len(scores)

        greedy, chosen = greedy_soup(donors, held_out_top1)
        soups = (("uniform", uniform_soup(donors), range(len(donors))), ("greedy", greedy, chosen))
        for index, (name, soup, members) in enumerate(soups):
            scores = self.evaluate(soup, self.test, kind=_SOUPS, index=index)
            self.add(scores, kind="soup", index=index, name=name, donors=_numbers(members))

    def score_ensembles(self) -> None:
        """Score all variants of the ensemble. Call it last, because it converts the donors."""
        settings, donors = self.settings, self.group.donors
        for donor in donors:
            prepare(donor, settings.precision, compiler=self.compiler)
        drawn = self.mode.is_drawn(self.group.depth)
        # With a single order, "independent" would give the same scores again.
        variants: list[Variant] = list(product(_COMBINE, _ORDERS if drawn else _ORDERS[:1]))
        results = self.compiler.run(
            lambda: evaluate_ensembles(
                donors, self.test, mode=self.mode, num_orders=self.draws,
                seed=orders_seed(settings.seed, _ENSEMBLES, index=0),
                draw="batch" if settings.draw == "batch" else "pass", variants=variants,
                groups=self.test.split.groups, on_images=self.watch(self.test),
            )
        )  # fmt: skip
        self.done += 1
        main = (settings.ensemble_combine, settings.ensemble_orders if drawn else "same")
        for index, (variant, scores) in enumerate(results.items()):
            self.add(
                scores, kind="ensemble", index=index, name="-".join(variant),
                donors=_numbers(range(len(donors))), main=int(variant == main),
            )  # fmt: skip

    def evaluate(
        self,
        model: nn.Module,
        batches: DeviceBatches,
        *,
        kind: int,
        index: int,
        draws: int | None = None,
    ) -> list[Score]:
        """Scores of one model, in the orders of number `index` of its kind."""
        scored = model
        if self.stand_in is not None:
            scored = self.stand_in
            # The copy rounds to the stand-in's dtype; its compiled graphs stay valid.
            scored.load_state_dict(model.state_dict())
        scores = self.compiler.run(
            lambda: evaluate(
                scored, batches, modes=[self.mode], num_orders=draws or self.draws,
                seed=orders_seed(self.settings.seed, kind, index=index),
                draw="batch" if self.settings.draw == "batch" else "pass",
                groups=batches.split.groups, on_images=self.watch(batches),
            )
        )  # fmt: skip
        self.done += 1
        return scores

    def watch(self, batches: DeviceBatches) -> Callable[[int], object]:
        """What hears of images: parts of a model count, because ImageNet takes minutes."""
        return lambda images: self.progress(
            "models", self.done + images / (batches.split.size or images), self.total
        )

    def add(self, scores: Sequence[Score], **fields: Any) -> None:
        """Append a row per score; `fields` are the columns that identify the model."""
        for score in scores:
            order = "" if score.order is None else str(score.order)
            if isinstance(score, EnsembleScore) and score.order is None:
                order = ";".join(map(str, score.member_orders))
            numbers = ("top1", "top5", "cross_entropy", "top1_n", "top5_n")
            measured = {name: getattr(score, name) for name in numbers}
            self.rows.append(
                MergingRow(mode=self.mode.order, order=order, n=score.images, **measured, **fields)
            )


def _numbers(members: Iterable[int]) -> str:
    return ",".join(map(str, members))


def _eager_notes(
    settings: MergingSettings | EnsembleSettings, compiler: BlockCompiler
) -> list[str]:
    if compiler.on or not settings.compile:
        return []
    return [f"The blocks are not compiled and ran in eager mode: {compiler.reason}"]


def load_group(
    donors: Sequence[str],
    *,
    base: str | None,
    needs_base: bool,
    mixed: bool,
    names: Sequence[str] | None = None,
) -> MergeGroup:
    """The group of the models with these specs; `base` defaults to the one in their records.

    Raises `UsageError` for donors that cannot be merged, are named twice, or name no base.
    """
    models = load_donors(donors)
    base = base or shared_record(models)["provenance"].get("base")
    if needs_base and not base:
        raise UsageError(
            "The donors do not name the base checkpoint that they were refined from",
            hint="name it (--base SPEC, base: SPEC in a recipe), or choose other ends",
        )
    loaded = load(base) if needs_base and base else None
    return MergeGroup(models, names=names or donors, base=loaded, mixed=mixed)


def load_donors(specs: Sequence[str]) -> list[nn.Module]:
    """The models with these specs. Raises `UsageError` if one is named twice."""
    # It would count twice in every average, which the rows would not show.
    repeated = [spec for spec in specs if specs.count(spec) > 1]
    if repeated:
        raise UsageError(f"{repeated[0]} is named twice", hint="name each model once")
    return [load(spec) for spec in specs]


def _open(
    models: Sequence[nn.Module],
    data: str,
    *,
    settings: MergingSettings | EnsembleSettings,
    holdout: bool,
    names: Sequence[str],
) -> ImageData:
    first = models[0]
    # The share that was held out in training, so the greedy soup uses no training images.
    trained = trained_with(backbone_of(first))
    options = DataOptions(
        train=holdout,
        holdout=trained.get("holdout", DataOptions.holdout),
        max_test=settings.max_images,
        skip_corrupt=settings.skip_corrupt,
    )
    view = resized_as(image_view(first), settings.resize)
    opened = open_data(data, view, options=options)
    return match_classes(
        opened, class_names_of(first), outputs=num_classes_of(first), place=names[0]
    )


def _batches(data: ImageData, name: str, batch_size: int, *, device: str) -> DeviceBatches:
    """Batches of a split on `device`; kept on the GPU if they fit, else up to 1 GiB in memory."""
    split, view = data.splits[name], data.finish.view
    # Every model is scored on the same images, so these are decoded once if they fit.
    size = math.inf if split.size is None else split.size * view.channels * math.prod(view.size)
    return DeviceBatches(
        split,
        data.finish,
        batch_size=batch_size,
        device=device,
        processes=0 if size <= _SMALL_BYTES else loader_processes(data.spec),
        keep=True,
        host_bytes=_IN_MEMORY_BYTES,
    )
