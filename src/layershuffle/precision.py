"""Which dtype computes faster on this processor: found by a few steps of the very model.

It depends on both: with AMX a ViT-B trains twice as fast in bf16, and a model of width 64 slower;
without bf16 arithmetic all of them are several times slower (docs/log.md). So no table of
processors can say it, and `--precision auto` tries.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from layershuffle.core.losses import logits_of
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import blocks_of
from layershuffle.machine import cpu_has_bf16
from layershuffle.models import image_view

ProbeStep = Callable[[], object]
GAIN = 1.2
"""How many times as fast bf16 has to be: less could be chance, and it rounds every state."""
LEAST_WEIGHTS = 12 * 128**2
"""Of a block, those at width 128; smaller ones are not tried: at width 64 bf16 was slower."""
_PAIRS, _IMAGES = 3, 4
_SLOWER, _FASTER = 0.9, 1.5  # times as fast: one pair of steps is enough to see it
_HOPELESS = 5.0  # times as slow in the first run, which also pays for what is built once


@dataclass(frozen=True, kw_only=True)
class ChosenPrecision:
    """A dtype, and what a probe said of it; "" if there was no need for one."""

    precision: Literal["fp32", "bf16"]
    why: str = ""


def choose_precision(
    model: nn.Module,
    *,
    device: str,
    training: bool,
    images: int,
    has_bf16: Callable[[], bool] = cpu_has_bf16,
    clock: Callable[[], float] = time.process_time,
) -> ChosenPrecision:
    """What `--precision auto` is for `model`, which takes `images` at a time.

    On a GPU bf16 where it has that, for training; scores on a GPU stay in fp32. On a CPU a probe
    decides: steps in turn, of forward and backward under autocast for training, else of forwards
    with weights in bf16, on the clock of this process. There is no probe, and fp32, without bf16
    arithmetic in the processor and for small blocks. The model stays as it is.
    """
    if device != "cpu":
        gpu_has_it = training and torch.cuda.is_bf16_supported()
        return ChosenPrecision(precision="bf16" if gpu_has_it else "fp32")
    weights = sum(parameter.numel() for parameter in blocks_of(model)[0].parameters())
    if weights < LEAST_WEIGHTS or not has_bf16():
        return ChosenPrecision(precision="fp32")
    view = image_view(model)
    pixels = torch.ones(min(images, _IMAGES), view.channels, *view.size)
    # Dropout would draw from the run's own random numbers.
    with in_eval(model):
        make = training_steps if training else scoring_steps
        ratios = ratios_of(*make(model, pixels), clock=clock)
    return judged(ratios)


def judged(ratios: list[float]) -> ChosenPrecision:
    """The choice after steps in bf16 that were so many times as fast as those in fp32."""
    middle = statistics.median(ratios)
    return ChosenPrecision(
        precision="bf16" if middle >= GAIN else "fp32",
        why=f"a step in bf16 is {middle:.2f} times as fast as in fp32 here ({min(ratios):.2f} to "
        f"{max(ratios):.2f}, {len(ratios)} tried); bf16 is taken from {GAIN:g} on",
    )


def ratios_of(fp32: ProbeStep, bf16: ProbeStep, *, clock: Callable[[], float]) -> list[float]:
    """Seconds of `fp32` over seconds of `bf16`, pair by pair; a single one if that one is clear."""

    def seconds(step: ProbeStep) -> float:
        begun = clock()
        step()
        # A coarse clock may not have moved.
        return max(clock() - begun, 1e-9)

    first, other = seconds(fp32), seconds(bf16)
    # Where bf16 is emulated its steps take seconds: one is enough to know.
    if other > _HOPELESS * first:
        return [first / other]
    ratios: list[float] = []
    # A step of a ViT-B takes seconds.
    while len(ratios) < _PAIRS and not (ratios and not _SLOWER < ratios[0] < _FASTER):
        ratios.append(seconds(fp32) / seconds(bf16))
    return ratios


def training_steps(model: nn.Module, images: Tensor) -> tuple[ProbeStep, ProbeStep]:
    """Forward and backward on `images` `[n, *view]`, in fp32 and under bf16 autocast."""

    def step(dtype: AbstractContextManager[object]) -> None:
        with dtype:
            logits = logits_of(model(images))
        logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return (
        lambda: step(nullcontext()),
        lambda: step(torch.autocast("cpu", dtype=torch.bfloat16)),
    )


def scoring_steps(model: nn.Module, images: Tensor) -> tuple[ProbeStep, ProbeStep]:
    """Forwards on `images` `[n, *view]`, in fp32 and with weights and images in bf16."""
    rounded, pixels = copy.deepcopy(model).to(torch.bfloat16), images.bfloat16()

    @torch.inference_mode()
    def forward(scored: nn.Module, batch: Tensor) -> None:
        scored(batch)

    return lambda: forward(model, images), lambda: forward(rounded, pixels)
