"""The image view of a model: plain data.

Every source of this package fits its images to an `ImageView`: the channels, size and normalisation
with which the weights were trained. A mismatch is silent (the accuracy just drops), so the view is
one validated value that is passed from the model to the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from layershuffle.ground.errors import UsageError

INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "hamming", "box")
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
