"""The image view of a model: plain data.

Every source of this package fits its images to an `ImageView`: the channels, size and normalisation
with which the weights were trained. A mismatch is silent (the accuracy just drops), so the view is
one validated value that is passed from the model to the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from layershuffle.ground.errors import DataError, UsageError

INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "hamming", "box")
MAX_PIXELS = 89_478_485  # Pillow's own default threshold: 268 MB as RGB
Resize = Literal["crop", "squash"]
RESIZES = get_args(Resize)


@dataclass(frozen=True, kw_only=True)
class ImageView:
    """The input that a model expects.

    `mean` and `std` have one number per channel and apply to images in [0, 1]. `resize` is "crop"
    (the shorter side is resized to its target, the aspect ratio is kept) or "squash" (both sides
    are); `crop_pct` is the share of the resized sides that the central crop keeps at evaluation.
    Raises UsageError if the numbers do not fit together.
    """

    # pydantic reads this when it checks a file; otherwise it ignores unknown fields.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    resize: Resize = "crop"

    def __post_init__(self) -> None:
        sizes = f"{self.channels} channels of {self.height} x {self.width} pixels"
        cause = ""
        if min(self.channels, self.height, self.width) < 1:
            cause = f"There is no image of {sizes}"
        elif {len(self.mean), len(self.std)} != {self.channels}:
            cause = f"mean and std need a number for each of {sizes}"
        elif not min(self.std) > 0:
            cause = f"std must be above 0, got {self.std}"
        elif not 0 < self.crop_pct <= 1:
            cause = f"crop_pct must be in (0, 1], got {self.crop_pct}"
        elif self.interpolation not in INTERPOLATIONS:
            names = ", ".join(INTERPOLATIONS)
            cause = f"interpolation is one of {names}, not {self.interpolation!r}"
        elif self.resize not in RESIZES:
            cause = f"resize is crop or squash, not {self.resize!r}"
        if cause:
            raise UsageError(cause, place="ImageView")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.height, self.width


def resized_as(view: ImageView, resize: Resize | None) -> ImageView:
    """`view` with another `resize`; `None` leaves it unchanged."""
    if resize is None or resize == view.resize:
        return view
    if resize == "squash":
        # It keeps the whole image, so crop_pct is ignored.
        return replace(view, resize=resize, crop_pct=1.0)
    return replace(view, resize=resize)


def view_of_files(view: ImageView, data: str) -> ImageView:
    """The view for image files, of a model that was trained on `data` ("" if nobody knows).

    Models trained on generated images squash them, as in training.
    """
    generated = data.startswith("digit-pairs")
    return resized_as(view, "squash") if generated else view


def uncropped_size(view: ImageView) -> tuple[int, int]:
    """(width, height) of which the crop keeps the share `crop_pct`."""
    # 43 / (43 / 50) is slightly less than 50, but must not become 49.
    across = math.floor(view.width / view.crop_pct + 1e-9)
    down = math.floor(view.height / view.crop_pct + 1e-9)
    return across, down


def resized_size(size: tuple[int, int], view: ImageView) -> tuple[int, int]:
    """(width, height) of an image of `size` before the crop, rounded as in timm.

    "squash": the uncropped size; "crop": the smallest size that covers it. Raises DataError for a
    long thin image, which the enlargement of its short side would make too large.
    """
    width, height = size
    goal_width, goal_height = uncropped_size(view)
    if view.resize == "squash":
        return goal_width, goal_height
    # For squares timm uses torchvision's Resize, which rounds the longer side down.
    whole = int if goal_width == goal_height else round
    if goal_width * height >= goal_height * width:  # the width is the tight side
        across = goal_width
        down = max(goal_height, whole(goal_width * height / width))
    else:
        across = max(goal_width, whole(goal_height * width / height))
        down = goal_height
    if across * down > MAX_PIXELS:
        raise DataError(
            f"The image has {width} x {height} pixels; with its short side at the model's size "
            f"{across} x {down}, at most {MAX_PIXELS}",
            hint="crop it",
        )
    return across, down
