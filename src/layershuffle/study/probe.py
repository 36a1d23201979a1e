"""How long training and scoring take here, from a short measured probe; for `--dry-run`."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layershuffle.data import DataOptions, open_data
from layershuffle.evaluation import compiler_for, evaluate, prepare
from layershuffle.machine import torch_threads
from layershuffle.merging.settings import MergingSettings
from layershuffle.models import image_view, load, logits_of, num_classes_of
from layershuffle.modes import Mode
from layershuffle.orders import ExecutionOrder
from layershuffle.settings import EvalSettings, FitSettings
from layershuffle.stack import depth_of, running
from layershuffle.study.speed import Speed
from layershuffle.training.weights_cast import weights_cast_to

_WARM_UP, _TIMED = 2, 5


def measure(
    fitted: FitSettings,
    scored: EvalSettings | MergingSettings,
    *,
    threads: int | None,
    step: float | None = None,
) -> Speed:
    """Train and score a few batches of noise as the settings say. Opens the data for their sizes.

    `step`: seconds of a training step, where they are known. The data's own decoding is not timed,
    nor what compiling takes. Raises what loading model and
    data raise.
    """
    model = load(fitted.model, seed=fitted.seed)
    view = image_view(model)
    data = open_data(fitted.data, view, options=DataOptions(resize=fitted.resize))
    if num_classes_of(model) != len(data.classes):
        model = load(fitted.model, num_classes=len(data.classes), seed=fitted.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    images = _noise((fitted.batch_size, view.channels, view.height, view.width), device)
    with torch_threads(threads):
        step = step or _training_step(model, images, fitted)
        forward = _evaluation(copy.deepcopy(model), images[: scored.batch_size], scored)
    depth = depth_of(model)
    return Speed(
        step=step,
        image_block=forward / min(len(images), scored.batch_size) / depth,
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        depth=depth,
        train_images=data.splits["train"].size,
        test_images=min(data.splits["test"].size or 0, scored.max_images or 1 << 62),
    )


def _noise(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def _training_step(model: nn.Module, images: Tensor, fitted: FitSettings) -> float:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    order = ExecutionOrder(tuple(reversed(range(depth_of(model)))), depth_of(model))

    default = "bf16" if images.is_cuda and torch.cuda.is_bf16_supported() else "fp32"
    precision = default if fitted.precision == "auto" else fitted.precision
    pure = precision == "bf16-pure"
    images = images.bfloat16() if pure else images
    compiler = compiler_for(images.is_cuda if fitted.compile is None else fitted.compile)

    def step() -> None:
        with (
            running(model, order),
            torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"),
            weights_cast_to(model, torch.bfloat16) if pure else nullcontext(),
        ):
            loss = F.cross_entropy(logits_of(model(images)).float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()

    prepare(model.train(), "fp32", compiler=compiler)
    return compiler.run(lambda: _timed(step))


def _evaluation(model: nn.Module, images: Tensor, scored: EvalSettings | MergingSettings) -> float:
    compiler = compiler_for(scored.compile)
    prepare(model, scored.precision, compiler=compiler)
    labels = torch.zeros(len(images), dtype=torch.long)
    modes = [Mode(order="sequential")]
    return compiler.run(lambda: _timed(lambda: evaluate(model, [(images, labels)], modes=modes)))


def _timed(work: Callable[[], object]) -> float:
    """Median seconds of one call."""
    seconds = []
    for call in range(_WARM_UP + _TIMED):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if call >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
