"""The settings of `layershuffle bench`. Plain data, no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from layershuffle.settings import Positive, Settings

KINDS = {
    "train": "training steps as fit takes them: images per second, and where the time goes",
    "eval": "forwards, each batch in an order of its own",
    "orders": "many orders over one batch: one by one, and with shared beginnings run once",
    "input": "reading JPEG files as training does",
    "merge": "making merges of twelve models: time and memory",
}


class BenchSettings(Settings):
    """What is measured, and on what."""

    model: str | None = None
    """Model spec, built with random weights (default: ViT-B/16 on a GPU, the digits model on a
    CPU)."""
    batch: Positive | None = None
    """Images per step (default: 640 on a GPU, 64 on a CPU)."""
    steps: Annotated[int, Field(ge=5)] = 20
    """Steps or merges that are timed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16", "bf16-pure"] = "auto"
    """auto: bf16 on GPUs that have it, fp32 elsewhere. train: as fit has it; others have weights
    and states in bf16 either way."""
    threads: Positive | None = None
    """CPU threads of torch (default: torch's own choice)."""
    compile: bool | None = None
    """Compile the blocks (default: on a GPU yes, on a CPU no)."""
    orders_per_batch: Positive = 1
    """train: groups of the images of a forward, each with an order of its own."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """input: loader processes (default: the cores but one, at most 16)."""
