"""Specs, views, seeds and the holdout: what all sources share."""

from __future__ import annotations

import pytest
import torch

from layershuffle.data import ImageView
from layershuffle.data.contract import derived_seed, stratified_holdout
from layershuffle.data.loading import parse_spec
from layershuffle.data.transforms import fit_images, match_channels
from layershuffle.errors import UsageError
from refusals import refuses

GREY = {"channels": 1, "height": 4, "width": 6, "mean": (0.25,), "std": (0.5,)}


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("digit-pairs", ("digit-pairs", "", {})),
        ("digit-pairs?train=5&test=6", ("digit-pairs", "", {"train": "5", "test": "6"})),
        ("folder:/data/a b?c", ("folder", "/data/a b?c", {})),
        ("hf:org/set:conf?label=fine", ("hf", "org/set:conf", {"label": "fine"})),
    ],
)
def test_specs(spec: str, parts: tuple[str, str, dict[str, str]]) -> None:
    assert parse_spec(spec) == parts


def test_a_seed_is_the_written_down_hash() -> None:
    # First 8 bytes of SHA-256 of "augment/7/3", by another tool, without the lowest bit.
    assert derived_seed("augment", 7, 3) == 6618477723628042639
    assert derived_seed("a", 1) != derived_seed("a", 11) != derived_seed("a1", 1)


def test_holdout_is_disjoint_and_stratified() -> None:
    labels = [0] * 100 + [1] * 10 + [2] * 2 + [3]
    training, held_out = stratified_holdout(labels, 0.2)
    assert sorted(training + held_out) == list(range(113))
    counts = torch.bincount(torch.tensor(labels)[held_out], minlength=4).tolist()
    assert counts == [20, 2, 1, 0]
    # Each class has draws of its own, so what other classes have moves none of its images.
    assert stratified_holdout(labels[:110], 0.2)[1] == held_out[:22]


def test_holdout_never_takes_the_last_image_of_a_class() -> None:
    training, held_out = stratified_holdout([0, 0, 1, 1, 1], 0.99)
    assert (len(training), len(held_out)) == (2, 3)
    assert {(0, 0, 1, 1, 1)[row] for row in training} == {0, 1}


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
