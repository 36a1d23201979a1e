"""What a probe of this machine saw. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What the probe saw. Seconds; `image_block`: one block on one image in evaluation, its share
    of stem and head included. `parameter_bytes`: of the saved model. `train_images` (`None` for a
    stream), `test_images`: of the data.
    """

    step: float
    image_block: float
    parameter_bytes: int
    depth: int
    train_images: int | None
    test_images: int
