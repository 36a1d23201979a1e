"""Score several models alone, merged, as soups and as ensembles, on one set of images.

What the paper's Table 2 and Figure 5 are drawn from. Everything follows from the settings: the same
settings give the same rows on the same machine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import nn

from layershuffle.compiling import BlockCompiler
from layershuffle.data import DataOptions, ImageData, check_class_count, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.loading import loader_processes
from layershuffle.errors import DataError, UsageError
from layershuffle.evaluation import Score, evaluate
from layershuffle.machine import warn_of_slow_bf16
from layershuffle.merging.ensembles import EnsembleScore, Variant, evaluate_ensembles
from layershuffle.merging.family import Family
from layershuffle.merging.fitting import shared_record
from layershuffle.merging.plans import orders_seed, sample_plans
from layershuffle.merging.rows import MergingRow, rows_csv
from layershuffle.merging.settings import Combine, EnsembleOrders, EnsembleSettings, MergingSettings
from layershuffle.merging.soups import greedy_soup, uniform_soup
from layershuffle.models import host_of, image_view, load, num_classes_of
from layershuffle.models.origin import trained_with
from layershuffle.modes import Mode
from layershuffle.policies import OrderMode
from layershuffle.scoring import as_scored, compiler_if, run_blocks

__all__ = ["load_family", "rows_csv", "score_ensemble", "score_merging"]

Progress = Callable[[int, int], None]
"""Called with passes over the images: those done, and all."""
_IN_MEMORY_BYTES = 1 << 30
_SMALL_BYTES = 1 << 24  # not worth loader processes
# Groups of models whose orders are drawn apart (`orders_seed`).
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
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> list[MergingRow]:
    """Score donors, merges, soups and ensembles on the test split of `data`, all in one order mode.

    `donors` and `base` are model specs; `base` is needed for ends from there, by default the one
    that the donors name. `names` stand for the specs in the rows. The greedy soup is put together
    on the held-out split. `note` is called with every sentence that a reader should know. Raises
    `UsageError` for donors that do not fit together or impossible settings, `DataError` if the
    classes of the data are not as many as the models'.
    """
    needs = "base" in settings.ends
    family = load_family(donors, base=base, needs_base=needs, mixed=settings.mixed, names=names)
    ends = {  # first of all, because it refuses impossible counts
        end: sample_plans(
            len(donors), family.depth, count=settings.merges, seed=settings.seed,
            replacement=settings.replacement, end=end,
        )
        for end in settings.ends
    }  # fmt: skip
    opened = _open(family, data, settings=settings, holdout=settings.soups)
    test = _batches(opened, "test", settings.batch_size)
    compiler = compiler_if(settings.compile)
    desk = _Desk(family, settings, mode, test, compiler, progress)
    for plans in ends.values():
        family.merge(plans[0])  # ends that cannot be had are refused before hours of scoring
    desk.score_donors()
    for end, plans in ends.items():
        for index, plan in enumerate(plans):
            row = {"ends": end, "donors": str(plan), "main": int(end == settings.ends[0])}
            desk.score(family.merge(plan), _MERGES, index, row={"kind": "merge", **row})
    notes = opened.notes
    if settings.soups:
        if "holdout" not in opened.splits:
            raise DataError("The data have no held-out part", place=data, hint="add --no-soups")
        desk.score_soups(_batches(opened, "holdout", settings.batch_size))
        notes += _holdout_notes(family)
    desk.score_ensembles()
    if note is not None:
        for sentence in (*notes, *_compiler_notes(compiler)):
            note(sentence)
    return desk.rows


def score_ensemble(
    donors: Sequence[str], data: str, *, settings: EnsembleSettings
) -> tuple[list[EnsembleScore], tuple[str, ...]]:
    """The scores of one ensemble of the models `donors` (specs), and notes on the data.

    Raises as `score_merging`.
    """
    family = load_family(donors, base=None, needs_base=False, mixed=settings.mixed)
    opened = _open(family, data, settings=settings, holdout=False)
    batches = _batches(opened, "test", settings.batch_size)
    variant: Variant = (settings.combine, settings.orders)
    compiler = compiler_if(settings.compile)
    for donor in family.donors:
        as_scored(donor, settings.precision, compiler=compiler)
    scores = run_blocks(
        lambda: evaluate_ensembles(
            family.donors, batches, mode=Mode(order=settings.mode), num_orders=settings.num_orders,
            seed=settings.seed, draw=settings.draw, variants=[variant],
        ),
        compiler=compiler,
    )  # fmt: skip
    return scores[variant], (*opened.notes, *_compiler_notes(compiler))


@dataclass
class _Desk:
    """Scores one model after the other and keeps the rows."""

    family: Family
    settings: MergingSettings
    mode: OrderMode
    test: DeviceBatches
    compiler: BlockCompiler | None
    progress: Progress | None
    rows: list[MergingRow] = field(default_factory=list)
    done: int = 0

    @cached_property
    def stand_in(self) -> nn.Module | None:
        """A model in the settings' precision, compiled, that takes the weights of what is scored.

        So averages stay those of fp32 weights, no merge takes memory of its own, and the blocks of
        one model are compiled. `None` where models are scored as they are.
        """
        if self.settings.precision == "fp32" and self.compiler is None:
            return None
        one = copy.deepcopy(self.family.donors[0])
        return as_scored(one, self.settings.precision, compiler=self.compiler)

    @property
    def draws(self) -> int:
        """Orders per donor, soup and ensemble."""
        return Mode(order=self.mode).draws(self.settings.num_orders)

    @property
    def variants(self) -> list[Variant]:
        """What an ensemble can be; in sequential order there is one order to run in."""
        orders = _ORDERS if Mode(order=self.mode).is_drawn else _ORDERS[:1]
        return list(product(_COMBINE, orders))

    def total(self) -> int:
        """Passes over images, those over held-out ones included."""
        count = len(self.family.donors)
        merges = self.settings.merges * len(self.settings.ends)
        soups = (2 * count - 1 + 2) * self.draws if self.settings.soups else 0
        kinds = len({orders for _, orders in self.variants})
        return count * self.draws + merges + soups + count * self.draws * kinds

    def tick(self, passes: int) -> None:
        """Tell that `passes` more are done."""
        self.done += passes
        if self.progress is not None:
            self.progress(self.done, self.total())

    def score_donors(self) -> None:
        """Every donor alone."""
        for index, (donor, name) in enumerate(
            zip(self.family.donors, self.family.names, strict=True)
        ):
            row = {"kind": "donor", "name": name, "donors": str(index)}
            self.score(donor, _DONORS, index, row=row)

    def score_soups(self, holdout: DeviceBatches) -> None:
        """The uniform soup, and the greedy one, which is made on `holdout`."""
        donors = self.family.donors

        def held_out(model: nn.Module) -> float:
            scores = self._evaluate(model, holdout, (_HOLDOUT, 0), self.draws)
            self.tick(self.draws)
            return sum(score.top1 for score in scores) / len(scores)

        greedy, chosen = greedy_soup(donors, held_out)
        soups = {"uniform": (uniform_soup(donors), tuple(range(len(donors))))}
        soups["greedy"] = (greedy, chosen)
        for index, (name, (soup, parts)) in enumerate(soups.items()):
            row = {"kind": "soup", "name": name, "donors": ",".join(map(str, parts))}
            self.score(soup, _SOUPS, index, row=row)

    def score_ensembles(self) -> None:
        """All variants of the ensemble of all donors."""
        settings, variants = self.settings, self.variants
        for donor in self.family.donors:  # which nothing is made of after this
            as_scored(donor, settings.precision, compiler=self.compiler)
        found = run_blocks(
            lambda: evaluate_ensembles(
                self.family.donors, self.test, mode=Mode(order=self.mode), num_orders=self.draws,
                seed=orders_seed(settings.seed, _ENSEMBLES, index=0),
                draw="batch" if settings.draw == "batch" else "pass", variants=variants,
            ),
            compiler=self.compiler,
        )  # fmt: skip
        orders = settings.ensemble_orders if len(variants) > len(_COMBINE) else "same"
        for index, (variant, scores) in enumerate(found.items()):
            main = int(variant == (settings.ensemble_combine, orders))
            everyone = ",".join(map(str, range(len(self.family.donors))))
            row = {"kind": "ensemble", "name": "-".join(variant), "donors": everyone, "main": main}
            self._keep(scores, index, row)
        kinds = len({orders for _, orders in variants})
        self.tick(len(self.family.donors) * self.draws * kinds)

    def score(self, model: nn.Module, group: int, index: int, *, row: Mapping[str, object]) -> None:
        """Score one model on the test images, a merge in one order and others in several."""
        draws = 1 if group == _MERGES else self.draws
        self._keep(self._evaluate(model, self.test, (group, index), draws), index, row)
        self.tick(draws)

    def _evaluate(
        self, model: nn.Module, batches: DeviceBatches, key: tuple[int, int], draws: int
    ) -> list[Score]:
        group, index = key
        scored = model
        if self.stand_in is not None:
            scored = self.stand_in
            scored.load_state_dict(model.state_dict())
        return run_blocks(
            lambda: evaluate(
                scored, batches, modes=[Mode(order=self.mode)], num_orders=draws,
                seed=orders_seed(self.settings.seed, group, index=index),
                draw="batch" if self.settings.draw == "batch" else "pass",
            ),
            compiler=self.compiler,
        )  # fmt: skip

    def _keep(self, scores: Sequence[Score], index: int, row: Mapping[str, object]) -> None:
        for score in scores:
            fields = {"name": "", "ends": "", "main": 1, **row}
            self.rows.append(
                MergingRow(
                    **fields,  # type: ignore[arg-type]
                    index=index,
                    mode=self.mode,
                    order=_order_text(score),
                    n=score.images,
                    top1=score.top1,
                    top5=score.top5,
                    cross_entropy=score.cross_entropy,
                )
            )


def _compiler_notes(compiler: BlockCompiler | None) -> tuple[str, ...]:
    if compiler is None or compiler.on:
        return ()
    return (f"The blocks are not compiled and ran in eager mode: {compiler.reason}",)


def _order_text(score: Score) -> str:
    if score.order is not None:
        return str(score.order)
    return ";".join(map(str, score.member_orders)) if isinstance(score, EnsembleScore) else ""


def load_family(
    donors: Sequence[str],
    *,
    base: str | None,
    needs_base: bool,
    mixed: bool,
    names: Sequence[str] | None = None,
) -> Family:
    """The family of the models with these specs; `base` is by default the one that they name.

    Raises `UsageError` for donors that do not fit together, are named twice, or name no base.
    """
    twice = [spec for spec in donors if donors.count(spec) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is named twice", hint="name each model once")
    models = [load(spec) for spec in donors]
    if not needs_base:
        return Family(models, names=names or donors, mixed=mixed)
    named = base or shared_record(models)["provenance"].get("base")
    if not named:
        raise UsageError(
            "The donors do not say which base checkpoint they were refined from",
            hint="name it (--base SPEC, base: SPEC in a recipe), or choose other ends",
        )
    return Family(models, names=names or donors, base=load(named), mixed=mixed)


def _open(
    family: Family, data: str, *, settings: MergingSettings | EnsembleSettings, holdout: bool
) -> ImageData:
    first = family.donors[0]
    trained = trained_with(host_of(first))
    options = DataOptions(
        train=holdout,
        holdout=trained.get("holdout", DataOptions.holdout),
        max_test=settings.max_images,
        resize=settings.resize,
        skip_corrupt=settings.skip_corrupt,
    )
    opened = open_data(data, image_view(first), options=options)
    check_class_count(opened, num_classes_of(first), place=family.names[0])
    warn_of_slow_bf16(settings.precision, _device())
    family.to(_device())
    return opened


def _holdout_notes(family: Family) -> tuple[str, ...]:
    if not any(trained_with(host_of(donor)).get("paper_protocol") for donor in family.donors):
        return ()
    return (
        "greedy soup: the donors held nothing out (paper_protocol), so it is chosen on images that "
        "they have trained on",
    )


def _batches(data: ImageData, name: str, batch_size: int) -> DeviceBatches:
    """Batches of a split where the models are; kept on the GPU if they fit, else up to 1 GiB."""
    split, view = data.splits[name], data.finish.view
    size = math.inf if split.size is None else split.size * view.channels * math.prod(view.size)
    return DeviceBatches(
        split,
        data.finish,
        batch_size=batch_size,
        device=_device(),
        processes=0 if size <= _SMALL_BYTES else loader_processes(data.spec),
        keep=True,
        host_bytes=_IN_MEMORY_BYTES,
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
