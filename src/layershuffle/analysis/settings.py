"""The settings of all analyses. Plain data, no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from layershuffle.settings import Positive, Seed, Settings


class AnalysisSettings(Settings):
    """How many images and orders an analysis looks at, and which block it shows large."""

    images: Positive = 1000
    """Test images (of a fixed shuffle); the probe is fitted on as many held-out ones."""
    seed: Seed = 0
    """Seed of the drawn orders and of UMAP."""
    orders: Positive | None = None
    """Orders that each image runs in. Every depth orders in a row hold each block at each position
    once. Default: depth; a quarter of it for leave-one-out, half of it for fitting the probe."""
    batch_size: Positive = 20
    """Images per forward. Every batch has orders of its own: smaller ones mean more orders."""
    block: Annotated[int, Field(ge=0)] | None = None
    """umap: the block shown large (default: the middle one)."""
    neighbours: Annotated[int, Field(ge=2)] = 15
    """umap: neighbours of a point, for UMAP itself and for the share of neighbours by position."""
    resize: Literal["crop", "squash"] | None = None
    """Scale the shorter side and crop the centre (crop), or scale both sides (squash). Default: as
    the model was trained."""
    skip_corrupt: bool = False
    """Leave unreadable images out, counted and named, instead of stopping."""
    streaming: bool = False
    """Read hf: data as a stream."""
