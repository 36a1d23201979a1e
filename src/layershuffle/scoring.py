"""Score a model on a data set by their specs; scores as tidy rows and as a summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from layershuffle.compiling import OFF, BlockCompiler
from layershuffle.data import DataOptions, ImageData, check_class_count, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.loading import loader_processes
from layershuffle.evaluation import Score, evaluate
from layershuffle.machine import warn_of_slow_bf16
from layershuffle.models import image_view, load, num_classes_of
from layershuffle.modes import Mode, parse_modes
from layershuffle.orders import ExecutionOrder
from layershuffle.settings import EvalSettings, FitSettings, Precision
from layershuffle.stack import depth_of

T = TypeVar("T")
COLUMNS = (
    "method",
    "seed",
    "mode",
    "kept",
    "choose",
    "order_seed",
    "order",
    "n",
    "top1",
    "top5",
    "cross_entropy",
    "draw",
)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores with what they were measured on.

    `blocks`: the mode that they ran in (compiled or eager), the reason of eager mode, the graphs.
    """

    scores: list[Score]
    depth: int
    data: ImageData
    blocks: dict[str, Any]

    def kept(self, score: Score) -> int:
        """How many blocks ran."""
        return score.mode.kept or self.depth


def score_model(
    model_spec: str, data_spec: str, *, settings: EvalSettings, order: str | None = None
) -> Scoring:
    """Score the model on the test split, on a GPU if there is one, under the modes of `settings`.

    `order` (as "3,0,2") stands for the modes. Raises `DataError` if the classes of the data are
    not as many as the model's, `UsageError` for modes or an order that do not fit its depth.
    """
    model = load(model_spec)
    modes = parse_modes(settings.modes) if order is None else (_fixed(order, depth_of(model)),)
    options = DataOptions(
        train=False,
        max_test=settings.max_images,
        resize=settings.resize,
        skip_corrupt=settings.skip_corrupt,
        streaming=settings.streaming,
    )
    data = open_data(data_spec, image_view(model), options=options)
    check_class_count(data, num_classes_of(model), place=model_spec)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warn_of_slow_bf16(settings.precision, device)
    compiler = compiler_if(settings.compile)
    as_scored(model.to(device), settings.precision, compiler=compiler)
    batches = DeviceBatches(
        data.splits["test"],
        data.finish,
        batch_size=settings.batch_size,
        device=device,
        processes=loader_processes(data_spec),
    )
    scores = run_blocks(
        lambda: evaluate(
            model,
            batches,
            modes=modes,
            num_orders=settings.num_orders,
            seed=settings.seed,
            draw=settings.draw,
        ),
        compiler=compiler,
    )
    return Scoring(scores=scores, depth=depth_of(model), data=data, blocks=_told(compiler))


def compiler_if(wanted: bool) -> BlockCompiler | None:
    """What compiles the blocks of models that are scored, if that is wanted."""
    return BlockCompiler() if wanted else None


def as_scored(
    model: nn.Module, precision: Precision, *, compiler: BlockCompiler | None
) -> nn.Module:
    """`model` itself: in bf16 with all weights and floating buffers, compiled by `compiler`."""
    if precision == "bf16":
        model.to(torch.bfloat16)
    if compiler is not None:
        compiler.add(model)
    return model


def run_blocks(work: Callable[[], T], *, compiler: BlockCompiler | None) -> T:
    """What `work` gives; again in eager mode, said once, where a block cannot be compiled."""
    if compiler is None:
        return work()
    with compiler.limits():
        found = compiler.or_eager(work)
    if compiler.on and not compiler.graphs:
        compiler.give_up(OFF)
    return found


def _told(compiler: BlockCompiler | None) -> dict[str, Any]:
    if compiler is None:
        return {"mode": "eager", "reason": "compile is off", "graphs": 0}
    report = compiler.report()
    return {name: report[name] for name in ("mode", "reason", "graphs")}


def check_modes(fitted: FitSettings, settings: EvalSettings) -> None:
    """Raises `UsageError` if a mode keeps more blocks than the model to be trained will have."""
    depth = fitted.kept or depth_of(load(fitted.model))
    for mode in parse_modes(settings.modes):
        mode.policy().draw(depth, seed=settings.seed, step=0)


def scores_csv(scoring: Scoring, *, method: str, seed: int, draw: str) -> str:
    """One row per score, under `COLUMNS`; accuracies in percent."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for score in scoring.scores:
        writer.writerow(
            (
                method,
                seed,
                score.mode.order,
                scoring.kept(score),
                "" if score.mode.kept is None else score.mode.choose,
                score.index,
                "" if score.order is None else str(score.order),
                score.images,
                f"{score.top1:.4f}",
                f"{score.top5:.4f}",
                f"{score.cross_entropy:.6f}",
                draw,
            )
        )
    return text.getvalue()


def _fixed(text: str, depth: int) -> Mode:
    order = ExecutionOrder.parse(text, depth=depth)
    ascending = all(first < second for first, second in pairwise(order))
    kept = None if len(order) == depth else len(order)
    return Mode(order="sequential" if ascending else "arbitrary", kept=kept, fixed=order)
