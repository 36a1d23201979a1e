"""Views and the pure helpers that fit image tensors to them."""

from __future__ import annotations

import pytest
import torch

from layershuffle.data import ImageView
from layershuffle.data.transforms import fit_images, match_channels, normalise
from layershuffle.errors import UsageError
from refusals import refuses

GREY = {"channels": 1, "height": 4, "width": 6, "mean": (0.25,), "std": (0.5,)}


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 3},
        {"std": (0.5, 0.5)},
        {"std": (0.0,)},
        {"height": 0},
        {"interpolation": "lanczos3"},
        {"crop_pct": 0.0},
        {"crop_pct": 1.5},
        {"resize": "stretch"},
    ],
)
def test_a_view_that_does_not_fit_together_is_refused(change: dict) -> None:
    with refuses(UsageError):
        ImageView(**{**GREY, **change})


def test_normalise_is_per_channel_and_leaves_its_input_alone() -> None:
    view = ImageView(channels=3, height=1, width=2, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25))
    images = torch.full((2, 3, 1, 2), 0.5)
    out = normalise(images, view)
    assert out[0, :, 0, 0].tolist() == [0.5, 0.0, -2.0]
    assert images.unique().tolist() == [0.5]


def test_channels_grey_is_repeated_and_rgb_becomes_luma() -> None:
    grey = torch.rand(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(match_channels(grey, 3), torch.cat([grey] * 3, dim=1))
    rgb = torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1)
    assert match_channels(rgb, 1).item() == pytest.approx(0.299 + 0.5 * 0.114, abs=1e-7)


def test_fit_images_gives_the_view_its_shape_and_numbers() -> None:
    view = ImageView(channels=3, height=8, width=12, mean=(0.5,) * 3, std=(0.25,) * 3)
    out = fit_images(torch.ones(5, 1, 4, 6, dtype=torch.uint8), view)
    assert out.shape == (5, 3, 8, 12)
    assert out.dtype == torch.float32
    assert (out - 2.0).abs().max() < 1e-5
