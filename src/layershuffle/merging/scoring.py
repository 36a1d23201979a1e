"""Score several models alone, merged, as soups and as ensembles, on the same images.

These are the scores of the paper's Table 2 and Figure 5. The same settings give the same rows on
the same machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.evaluation import Draw, Score, evaluate
from layershuffle.core.policies import Mode, OrderMode
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import stack_of
from layershuffle.data import DataOptions, ImageData
from layershuffle.data.splits import DeviceBatches
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.machine import Device
from layershuffle.ground.rows import MergingRow
from layershuffle.ground.text import Progress, unheard
from layershuffle.merging.compatibility import check_members, shared_record
from layershuffle.merging.ensembles import EnsembleScore, Variant, evaluate_ensembles
from layershuffle.merging.group import MergeGroup
from layershuffle.merging.plans import MergePlan, orders_seed, sample_plans
from layershuffle.merging.settings import (
    Combine,
    EnsembleOrders,
    EnsembleSettings,
    MergingSettings,
)
from layershuffle.merging.soups import greedy_soup, uniform_soup
from layershuffle.models import load
from layershuffle.models.files import weights_digest
from layershuffle.models.origin import training_settings
from layershuffle.models.spec import own_directory
from layershuffle.scoring.evaluate_spec import (
    batches_of,
    block_compiler,
    open_scored,
    prepare,
    refuse_not_finite,
    scoring_device,
)

# Kinds of models with orders of their own: merge 3 runs in other orders than donor 3.
_KINDS = ("donor", "merge", "soup", "holdout", "ensemble")


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
) -> tuple[list[MergingRow], list[str]]:
    """Scores of donors, merges, soups and ensembles on the test split of `data`, and notes on them.

    `donors` and `base` are model specs, `base` is for "base" ends (default: the base that the
    donors name). `names` replace the specs in the rows. The greedy soup is chosen on the held-out
    split. `progress` is called with the models scored. Raises `UsageError` for donors that do not
    fit together or impossible settings, `DataError` if the data have other classes than the models.
    """
    needs_base = "base" in settings.ends
    group = load_group(donors, base=base, needs_base=needs_base, names=names)
    # Before the data are opened, because impossible counts and bases are refused here.
    plans: list[list[MergePlan]] = []
    for end, slots in settings.variants:
        drawn = sample_plans(
            len(donors),
            group.depth,
            count=settings.merges,
            seed=settings.seed,
            replacement=settings.replacement,
            end=end,
            slots=slots,
            fixed=group.fixed,
        )
        plans.append(drawn)
    place = scoring_device(settings, device)
    group.to(place)
    for drawn in plans:
        group.merge(drawn[0])  # refuses a base that is not there or of another shape
    shares: list[float] = []
    nothing_held_out = False
    for donor in group.donors:
        run = training_settings(backbone_of(donor))
        shares.append(run.get("holdout", DataOptions.holdout))
        nothing_held_out = nothing_held_out or bool(run.get("paper_protocol"))
    # What all donors held out in training, so the greedy soup uses no training images: held-out
    # parts of the same data contain each other.
    options = DataOptions(train=settings.soups, holdout=min(shares))
    opened = open_scored(group.donors, data, settings=settings, options=options, names=group.names)
    # Again, because donors without names have some now.
    check_members(group.donors, names=group.names)
    if settings.soups and "holdout" not in opened.splits:
        raise DataError("The data have no held-out part", place=data, hint="add --no-soups")
    scorer = _Scorer(
        group=group,
        settings=settings,
        mode=Mode(order=mode),
        test=batches_of(opened, "test", settings=settings, device=place, keep=True),
        compiler=block_compiler(settings),
        progress=progress,
    )
    for index, (donor, name) in enumerate(zip(group.donors, group.names, strict=True)):
        scorer.score(donor, kind="donor", index=index, name=name, donors=[index])
    for (end, slots), drawn in zip(settings.variants, plans, strict=True):
        fields = {"name": "random slots" if slots == "random" else "", "ends": end}
        main = int((end, slots) == settings.variants[0])
        for index, plan in enumerate(drawn):
            scorer.score(
                group.merge(plan),
                kind="merge",
                index=index,
                draws=1,
                donors=str(plan),
                main=main,
                **fields,
            )
    if settings.soups:
        held = batches_of(opened, "holdout", settings=settings, device=place, keep=True)
        scorer.score_soups(held)
    scorer.score_ensembles()
    notes = list(opened.notes)
    if settings.soups and nothing_held_out:
        notes.append(
            "greedy soup: the donors held nothing out (paper_protocol), so it is chosen on images "
            "that they have trained on"
        )
    return scorer.rows, notes


def score_ensemble(
    donors: Sequence[str],
    data: str,
    *,
    settings: EnsembleSettings,
    device: Device = "auto",
    progress: Progress = unheard,
) -> tuple[list[EnsembleScore], ImageData]:
    """The scores of one ensemble of the models `donors` (specs), and the data.

    Its members may differ in everything but their classes and image view. `progress` is called with
    the images done. Raises as `score_merging`.
    """
    models = load_donors(donors)
    check_members(models, names=donors)  # before the data are opened
    options = DataOptions(train=False)
    opened = open_scored(models, data, settings=settings, options=options, names=donors)
    check_members(models, names=donors)  # again, because those without names have some now
    place = scoring_device(settings, device)
    compiler = block_compiler(settings)
    batches = batches_of(opened, "test", settings=settings, device=place, keep=True)
    for model in models:
        prepare(model.to(place), settings.precision, compiler=compiler)
    variant: Variant = (settings.ensemble_combine, settings.ensemble_orders)
    scores = compiler.run(
        lambda: evaluate_ensembles(
            models,
            batches,
            mode=Mode(order=settings.modes),
            num_orders=settings.num_orders,
            seed=settings.seed,
            draw=settings.draw,
            variants=[variant],
            on_images=lambda done: progress("images", done, batches.split.size),
        )
    )
    return scores[variant], opened


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
        settings = self.settings
        count = len(self.group.donors)
        self.draw: Draw = "batch" if settings.draw == "batch" else "pass"
        depth = self.group.depth
        fixed = self.group.fixed
        self.draws = self.mode.draws(settings.num_orders, depth=depth, fixed=fixed)
        # The greedy soup scores every donor alone, then a soup with each other donor, both on
        # held-out images.
        soups = count + (count - 1) + 2 if settings.soups else 0
        self.total = count + settings.merges * len(settings.variants) + soups + 1
        # It gets the weights of each scored model: so averages are computed in fp32, merges need no
        # memory, and only one model is compiled.
        self.substitute: nn.Module | None = None
        if settings.precision != "fp32" or self.compiler.on:
            copied = copy.deepcopy(self.group.donors[0])
            self.substitute = prepare(copied, settings.precision, compiler=self.compiler)

    def score_soups(self, holdout: DeviceBatches) -> None:
        """Score the uniform soup and the greedy one, which is chosen on `holdout`."""
        donors = self.group.donors

        def held_out_top1(model: nn.Module) -> float:
            scores = self.evaluate(model, holdout, kind="holdout", index=0)
            return sum(score.top1 for score in scores) / len(scores)

        greedy, chosen = greedy_soup(donors, held_out_top1)
        soups = (("uniform", uniform_soup(donors), range(len(donors))), ("greedy", greedy, chosen))
        for index, (name, soup, members) in enumerate(soups):
            self.score(soup, kind="soup", index=index, name=name, donors=members)

    def score_ensembles(self) -> None:
        """Score all variants of the ensemble. Call it last, because it converts the donors."""
        settings = self.settings
        donors = self.group.donors
        for donor in donors:
            prepare(donor, settings.precision, compiler=self.compiler)
        drawn = self.mode.is_drawn(self.group.depth, fixed=self.group.fixed)
        # With a single order, "independent" would give the same scores again.
        kinds = get_args(EnsembleOrders) if drawn else ("same",)
        variants: list[Variant] = list(product(get_args(Combine), kinds))
        results = self.compiler.run(
            lambda: evaluate_ensembles(
                donors,
                self.test,
                mode=self.mode,
                num_orders=self.draws,
                seed=orders_seed(settings.seed, _KINDS.index("ensemble"), index=0),
                draw=self.draw,
                variants=variants,
                on_images=self.watch(self.test),
            )
        )
        main = (settings.ensemble_combine, settings.ensemble_orders if drawn else "same")
        for index, (variant, scores) in enumerate(results.items()):
            self.add(
                scores,
                kind="ensemble",
                index=index,
                name="-".join(variant),
                donors=range(len(donors)),
                main=int(variant == main),
            )

    def score(
        self, model: nn.Module, *, kind: str, index: int, draws: int | None = None, **fields: Any
    ) -> None:
        """Append the rows of one model on the test images."""
        scores = self.evaluate(model, self.test, kind=kind, index=index, draws=draws)
        self.add(scores, kind=kind, index=index, **fields)

    def evaluate(
        self,
        model: nn.Module,
        batches: DeviceBatches,
        *,
        kind: str,
        index: int,
        draws: int | None = None,
    ) -> list[Score]:
        """Scores of one model, in the orders of number `index` of its kind."""
        scored = model
        if self.substitute is not None:
            scored = self.substitute
            # The copy rounds to the dtype of the substitute, whose compiled graphs stay valid.
            scored.load_state_dict(model.state_dict())
        scores = self.compiler.run(
            lambda: evaluate(
                scored,
                batches,
                modes=[self.mode],
                num_orders=draws or self.draws,
                seed=orders_seed(self.settings.seed, _KINDS.index(kind), index=index),
                draw=self.draw,
                on_images=self.watch(batches),
            )
        )
        self.done += 1
        return scores

    def watch(self, batches: DeviceBatches) -> Callable[[int], object]:
        """A function that reports the progress of a model from the number of its images done.

        Parts of a model count, because ImageNet takes minutes.
        """
        return lambda images: self.progress(
            "models", self.done + images / batches.split.size, self.total
        )

    def add(self, scores: Sequence[Score], *, donors: Iterable[int] | str, **fields: Any) -> None:
        """Append a row per score; `fields` are the columns that identify the model."""
        members = donors if isinstance(donors, str) else ",".join(map(str, donors))
        counts = self.test.split.independent(torch.stack([score.right for score in scores], dim=1))
        for score, count in zip(scores, counts, strict=True):
            refuse_not_finite(score, subject=f"the {fields['kind']} {fields['index']}")
            order = "" if score.order is None else str(score.order)
            if isinstance(score, EnsembleScore) and score.order is None:
                order = ";".join(map(str, score.member_orders))
            row = MergingRow(
                donors=members,
                mode=self.mode.order,
                order=order,
                n=score.images,
                top1=score.top1,
                top5=score.top5,
                cross_entropy=score.cross_entropy,
                top1_n=None if count == score.images else count,
                **fields,
            )
            self.rows.append(row)


def load_group(
    donors: Sequence[str],
    *,
    base: str | None,
    needs_base: bool,
    names: Sequence[str] | None = None,
) -> MergeGroup:
    """The group of the models with these specs; `base` defaults to the one in their records.

    Raises `UsageError` for donors that cannot be merged or are named twice, and for a base from
    which they were not refined.
    """
    models = load_donors(donors)
    provenance = shared_record(models)["provenance"]
    base = base or provenance.get("base")
    loaded = load(base) if needs_base and base else None
    known = provenance.get("base_sha256")
    if loaded is not None and known is not None and weights_digest(stack_of(loaded)) != known:
        raise UsageError(
            "This is not the base from which the models were refined: its blocks have other "
            "weights",
            place=base,
            hint="name that base, or choose other ends; with ?pretrained=false every --seed makes "
            "another base",
        )
    return MergeGroup(models, names=names or donors, base=loaded)


def load_donors(specs: Sequence[str]) -> list[nn.Module]:
    """The models with these specs. Raises `UsageError` if one is named twice."""
    # It would count twice in every average, which the rows would not show.
    named: dict[str | Path, str] = {}
    for spec in specs:
        directory = own_directory(spec)
        model = spec if directory is None else directory.resolve()
        if model in named:
            cause = f"{named[model]} and {spec} are one model, which would count twice"
            raise UsageError(cause, hint="name each model once")
        named[model] = spec
    return list(map(load, specs))
