"""`bench train`: steps of the trainer that `fit` uses, with all that it does in them."""

from __future__ import annotations

from layershuffle.bench.choices import Chosen, compiler_of, subject_of
from layershuffle.bench.machine import flops_of, matmul_ceiling
from layershuffle.bench.measured import report_of
from layershuffle.bench.report import Report
from layershuffle.bench.training import time_training, timed_trainer
from layershuffle.models import host_of, image_view
from layershuffle.settings import FitSettings


def bench_train(chosen: Chosen) -> Report:
    """Training of `chosen.model` in shuffled orders.

    Raises `TrainingError` that names a batch that fits where this one does not.
    """
    on = subject_of(chosen)
    flops = flops_of(host_of(on.model), image_view(on.model)).training
    ceiling = matmul_ceiling(chosen.device, chosen.precision)
    compiler, settings = compiler_of(chosen), fit_settings(chosen)
    with timed_trainer(settings, on, compiler=compiler, steps=chosen.steps) as trainer:
        measured = time_training(trainer)
    return report_of(
        "train",
        chosen,
        measured=measured,
        flops_per_image=flops,
        ceiling=ceiling,
        facts={"orders": f"{chosen.orders_per_batch} per batch"},
    )


def fit_settings(chosen: Chosen, *, method: str = "layershuffle") -> FitSettings:
    """What `fit` would be told."""
    return FitSettings(
        method=method,
        model=chosen.model,
        data="generated",
        batch_size=chosen.batch,
        orders_per_batch=chosen.orders_per_batch,
        device=chosen.device,
        precision=chosen.precision,
        compile=chosen.compile,
        workers=0,
        log_every=1 << 30,  # logging asks the GPU for the loss
    )
