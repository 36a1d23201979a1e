"""From settings to what is measured: what "auto" and the defaults come to on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from layershuffle.bench.report import Conditions
from layershuffle.bench.settings import BenchSettings
from layershuffle.bench.subjects import VIT_B, Subject, subject
from layershuffle.compiling import BlockCompiler
from layershuffle.errors import UsageError
from layershuffle.machine import hardware

_DEFAULTS = {"cuda": (VIT_B, 640), "cpu": ("bundled:digits", 64)}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`BenchSettings` with every choice made."""

    model: str
    batch: int
    steps: int
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16", "bf16-pure"]
    compile: bool
    orders_per_batch: int
    workers: int
    backend: str = "inductor"

    def conditions(self, dtype: str | None = None) -> Conditions:
        """What a throughput is told with; `dtype`: of what was handled, if not `precision`."""
        told = dtype or self.precision
        return Conditions(model=self.model, batch=self.batch, dtype=told, hardware=hardware(told))


def choose(settings: BenchSettings) -> Chosen:
    """Raises `UsageError` for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise UsageError("There is no GPU that torch can use here", hint="leave --device at auto")
    device: Literal["cpu", "cuda"] = "cuda" if has_gpu and settings.device != "cpu" else "cpu"
    has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported()
    model, batch = _DEFAULTS[device]
    cores = len(os.sched_getaffinity(0))
    return Chosen(
        model=settings.model or model,
        batch=settings.batch or batch,
        steps=settings.steps,
        device=device,
        precision=settings.precision
        if settings.precision != "auto"
        else ("bf16" if has_bf16 else "fp32"),
        compile=device == "cuda" if settings.compile is None else settings.compile,
        orders_per_batch=settings.orders_per_batch,
        workers=min(16, max(0, cores - 1)) if settings.workers is None else settings.workers,
    )


def compiler_of(chosen: Chosen) -> BlockCompiler:
    """What compiles the blocks, or says why not."""
    return BlockCompiler(
        reason=None if chosen.compile else "compile is off",
        dynamic=chosen.orders_per_batch > 1,
        backend=chosen.backend,
    )


def subject_of(chosen: Chosen) -> Subject:
    """Model and images, where they are measured."""
    return subject(chosen.model, batch=chosen.batch, device=chosen.device)
