"""The settings of scores. Plain data; torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from layershuffle.core.policies import parse_modes
from layershuffle.ground.settings import Positive, Precision, Seed, Settings


class ScoreSettings(Settings):
    """How scores are computed: images, seed and precision."""

    seed: Seed = 0
    """Seed of the drawn orders, and of drawn merges."""
    precision: Precision = "fp32"
    """Dtype of forwards; bf16 is faster on GPUs and keeps 8 bits of weights and states. Weights and
    outputs of several models are averaged in fp32 in any case."""
    compile: bool = False
    """Compile the blocks; on a CPU it takes minutes and gains little."""
    batch_size: Positive = 250
    """Images per forward."""
    max_images: Positive | None = None
    """Score only the first images of a fixed shuffle (default: all images)."""
    resize: Literal["crop", "squash"] | None = None
    """Scale the shorter side and crop the centre (crop), or scale both sides (squash). Default: as
    the model was trained."""
    skip_corrupt: bool = False
    """Skip unreadable images and report them, instead of stopping at the first one."""
    classes: Path | None = None
    """File that names the outputs of models without names of classes, one per line in their order
    (default: the order of the data; for checkpoints of timm, natural order)."""


class EvalSettings(ScoreSettings):
    """The modes of scores, and how they are computed."""

    modes: str = "sequential,arbitrary"
    """Comma-separated order modes: sequential, arbitrary, kept:9 (the number of blocks that run),
    kept:9:arbitrary, kept:9:sequential:spaced (or random, first, last); behind any of them
    :parallel=3 (blocks side by side), behind kept also :passes=2 (they run again)."""
    num_orders: Positive = 20
    """Number of orders drawn per mode."""
    draw: Literal["pass", "batch"] = "pass"
    """Draw an order for each pass over the data, or, as the paper did, for every batch."""

    @model_validator(mode="after")
    def _check(self) -> EvalSettings:
        # Parsed to refuse misspelt modes before a model is loaded.
        parse_modes(self.modes)
        return self
