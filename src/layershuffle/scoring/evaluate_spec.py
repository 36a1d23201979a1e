"""Score models by their specs: open model and data, evaluate, and make rows of the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.evaluation import Draw, Score, evaluate
from layershuffle.core.orders import ExecutionOrder, check_ends
from layershuffle.core.policies import Mode, parse_modes
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import depth_of, fixed_of
from layershuffle.data import DataOptions, ImageData, Split, match_classes, open_data
from layershuffle.data.class_names import numbered
from layershuffle.data.loading import loader_processes
from layershuffle.data.splits import DeviceBatches
from layershuffle.ground.errors import DataError
from layershuffle.ground.machine import Device, choose_precision, device_of
from layershuffle.ground.rows import ScoreRow
from layershuffle.ground.settings import Precision
from layershuffle.ground.text import Progress, shortened, unheard
from layershuffle.images.view import resized_as
from layershuffle.models import (
    class_names_of,
    image_view,
    load,
    name_classes,
    num_classes_of,
    set_class_names,
)
from layershuffle.models.origin import origin_of
from layershuffle.scoring.settings import EvalSettings, ScoreSettings


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of a model, the data that they were measured on, and how the blocks ran.

    `depth`: the number of blocks. `blocks`: "mode" (compiled or eager), "reason" (of eager mode)
    and "graphs" (their number).
    """

    scores: list[Score]
    data: ImageData
    depth: int
    blocks: dict[str, Any]


def evaluate_spec(
    model_spec: str,
    data_spec: str,
    *,
    settings: EvalSettings,
    order: str | None = None,
    stop: float | None = None,
    device: Device = "auto",
    progress: Progress = unheard,
) -> Evaluation:
    """Score the model on the test split under the modes of `settings`.

    `order` (such as "3,0,2") replaces the modes; `stop` as in `evaluate`. `progress` is called with
    the number of images. Raises `DataError` if the classes of the data do not match the model's,
    `UsageError` for modes or an order that do not fit its depth, and for a device that does not
    exist.
    """
    model = load(model_spec)
    fixed = settings.fixed or fixed_of(model)
    # What does not fit is refused before the data are opened, which may take minutes.
    orders = () if order is None else (ExecutionOrder.parse(order, depth=depth_of(model)),)
    check_ends(orders, fixed)
    modes = _fitting_modes(settings, depth_of(model), fixed=fixed) if order is None else ()
    options = DataOptions(train=False)
    data = open_scored([model], data_spec, settings=settings, options=options, names=[model_spec])
    place = scoring_device(settings, device)
    split = data.splits["test"]
    compiler = block_compiler(settings)
    prepare(model.to(place), settings.precision, compiler=compiler)
    batches = batches_of(data, "test", settings=settings, device=place)

    def score() -> list[Score]:
        return evaluate(
            model,
            batches,
            modes=modes,
            orders=orders,
            num_orders=settings.num_orders,
            seed=settings.seed,
            draw=settings.draw,
            stop=stop,
            fixed=fixed,
            on_images=lambda done: progress("images", done, split.size),
        )

    scores = compiler.run(score)
    report = compiler.report()
    # `recompiles` counts training steps only, so it would always be 0 here.
    blocks = {name: report[name] for name in ("mode", "reason", "graphs")}
    return Evaluation(scores=scores, data=data, depth=depth_of(model), blocks=blocks)


def open_scored(
    models: Sequence[nn.Module],
    spec: str,
    *,
    settings: ScoreSettings,
    options: DataOptions,
    names: Sequence[str],
) -> ImageData:
    """The data `spec` as the first of `models` wants them.

    Models without names of classes get some. `names` are those of the models. Raises `DataError` if
    the classes are not those of a model, `UsageError` for names in `settings` that do not fit.
    """
    options = replace(options, max_test=settings.max_images, skip_corrupt=settings.skip_corrupt)
    for model, name in zip(models, names, strict=True):
        name_classes(model, settings.classes, place=name)
    data = open_data(spec, resized_as(image_view(models[0]), settings.resize), options=options)
    for model, name in zip(models, names, strict=True):
        source = "the data" if model is models[0] else names[0]
        data = matched(model, data, name=name, source=source, some=True)
    return data


def matched(
    model: nn.Module,
    data: ImageData,
    *,
    name: str,
    source: str = "the data",
    some: bool = False,
) -> ImageData:
    """`data` with the classes of `model`, which is called `name`, in the order of its outputs.

    Outputs without names get those of the data, and a note says so; `source`: what named these, the
    data or another model. A model of timm was trained on folders that timm sorts naturally and
    without case (species2 before species10), so its outputs get them in that order. Folders 0, 1,
    ... 10 are the numbers of the outputs. `some`: a part of the model's classes is enough. With
    other classes scores would be meaningless: raises `DataError`.
    """
    if class_names_of(model) is None and num_classes_of(model) == len(data.classes):
        names = data.classes
        order = f"in the order of {source}"
        if sorted(names) == sorted(numbered(len(names))):
            names = numbered(len(names))
            order = "by their numbers"
        elif origin_of(backbone_of(model)).natural_classes:
            from timm.utils import natural_key

            names = tuple(sorted(names, key=natural_key))
            order = "in natural order, as timm sorts"
        set_class_names(model, names)
        note = (
            f"{name} names no classes; its outputs are taken for {shortened(names)}, {order}; "
            "--classes FILE names them"
        )
        data = replace(data, notes=(*data.notes, note))
    return match_classes(
        data, class_names_of(model), outputs=num_classes_of(model), place=name, some=some
    )


def batches_of(
    data: ImageData, split: str, *, settings: ScoreSettings, device: str, keep: bool = False
) -> DeviceBatches:
    """Batches of a split on `device`.

    With `keep` decoded images stay on the GPU, or in memory up to 1 GiB.
    """
    return DeviceBatches(
        data.splits[split],
        data.finish,
        batch_size=settings.batch_size,
        device=device,
        processes=loader_processes(data.spec),
        keep=keep,
    )


def scoring_device(settings: ScoreSettings, device: Device) -> Literal["cpu", "cuda", "mps"]:
    """The device that computes the scores, with a warning where it has no bf16 arithmetic."""
    place = device_of(device)
    choose_precision(settings.precision, device=place, training=False)
    return place


def block_compiler(settings: ScoreSettings) -> BlockCompiler:
    """A compiler for the blocks of scored models, which compiles nothing without `compile`."""
    return BlockCompiler(reason=None if settings.compile else "compile is off")


def prepare(model: nn.Module, precision: Precision, *, compiler: BlockCompiler) -> nn.Module:
    """Cast `model` in place (bf16: all weights and floating buffers) and compile its blocks."""
    if precision == "bf16":
        model.to(torch.bfloat16)
    compiler.add(model)
    return model


def check_modes(
    model: str, settings: EvalSettings, *, kept: int | None, fixed: tuple[int, int]
) -> None:
    """Raises `UsageError` if a mode does not fit a model trained from `model`.

    `kept`: the number of blocks of a truncated model; otherwise `model` is loaded to count them.
    `fixed`: the ends that the training keeps.
    """
    _fitting_modes(settings, kept or depth_of(load(model)), fixed=settings.fixed or fixed)


def _fitting_modes(
    settings: EvalSettings, depth: int, *, fixed: tuple[int, int]
) -> tuple[Mode, ...]:
    modes = parse_modes(settings.modes)
    for mode in modes:
        # Refuses more blocks than `depth`.
        mode.policy(fixed=fixed).draw(depth, seed=settings.seed, step=0)
    return modes


def refuse_not_finite(score: Score, *, subject: str) -> None:
    """Raises `DataError` for a cross-entropy that is not finite; `subject` names the model."""
    if not math.isfinite(score.cross_entropy):
        raise DataError(
            f"The cross-entropy of {subject} is {score.cross_entropy} under the order "
            f"{score.order or 'of a batch'}",
            hint="score it with precision: fp32, or train it again with a lower lr",
        )


def score_rows(
    scores: Sequence[Score], split: Split, *, method: str, seed: int, draw: Draw
) -> list[ScoreRow]:
    """Scores of drawn orders on `split` as rows of results.csv, for a model of a method and seed.

    Raises `DataError` for a cross-entropy that is not finite, which would spoil every mean.
    """
    for score in scores:
        refuse_not_finite(score, subject=f"{method}, seed {seed},")
    counts = split.independent(torch.stack([score.right for score in scores], dim=1))
    rows = []
    for score, count in zip(scores, counts, strict=True):
        assert score.mode is not None  # drawn orders have one
        row = ScoreRow(
            method=method,
            seed=seed,
            mode=score.mode.order,
            kept=score.kept,
            choose="" if score.mode.kept is None else score.mode.choose,
            order_seed=score.index,
            order="" if score.order is None else str(score.order),
            n=score.images,
            top1=score.top1,
            top5=score.top5,
            cross_entropy=score.cross_entropy,
            draw=draw,
            top1_n=None if count == score.images else count,
            parallel=score.mode.parallel,
            passes=score.mode.passes,
        )
        rows.append(row)
    return rows
