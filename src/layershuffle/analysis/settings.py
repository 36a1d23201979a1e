"""The settings of all analyses. Plain data, no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from layershuffle.ground.settings import Positive, Seed, Settings


class AnalysisSettings(Settings):
    """The images and orders of an analysis, and the options of single analyses."""

    max_images: Positive = 1000
    """Test images (of a fixed shuffle); the probe is fitted on as many held-out ones."""
    seed: Seed = 0
    """Seed of the drawn orders and of UMAP."""
    num_orders: Positive | None = None
    """Orders that each image runs in. `depth` successive orders have each block at each position
    once. Default: depth; a quarter of it for leave-one-out, half of it for fitting the probe."""
    batch_size: Positive = 20
    """Images per forward. Every batch has its own orders, so smaller ones mean more orders."""
    block: Annotated[int, Field(ge=0)] | None = None
    """umap: the block of the large figure (default: the middle one)."""
    neighbours: Annotated[int, Field(ge=2)] = 15
    """umap: neighbours of a point, for UMAP itself and for the share of neighbours by position."""
    resize: Literal["crop", "squash"] | None = None
    """Scale the shorter side and crop the centre (crop), or scale both sides (squash). Default: as
    the model was trained."""
    skip_corrupt: bool = False
    """Skip unreadable images and report them, instead of stopping at the first one."""
