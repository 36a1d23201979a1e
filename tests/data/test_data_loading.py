"""Specs, options and the pieces that all sources share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layershuffle.data import SOURCES, DataOptions, open_data
from layershuffle.data.contract import derived_seed, stratified_holdout
from layershuffle.data.digits import DIGIT_VIEW
from layershuffle.data.loading import parse_spec
from layershuffle.errors import UsageError
from refusals import refuses


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


def test_the_form_of_a_source_begins_with_its_name() -> None:
    assert all(source.form.startswith(name) for name, source in SOURCES.items())


@pytest.mark.parametrize(
    "spec",
    [
        "digit-pair",
        "flder:/data",
        "/data/imagenet",
        "",
        "hf:x?lable=y",
        "folder:",
        "torchvision",
    ],
)
def test_bad_specs_name_the_nearest_good_one(spec: str) -> None:
    with refuses(UsageError):
        open_data(spec, DIGIT_VIEW)


def test_a_folder_without_its_scheme_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    with refuses(UsageError):
        open_data("shapes", DIGIT_VIEW)


@pytest.mark.parametrize(
    "change",
    [{"holdout": 0.0}, {"holdout": 1.0},
     {"max_test": 0}],
)  # fmt: skip
def test_options_out_of_range(change: dict) -> None:
    with refuses(UsageError):
        DataOptions(**change)


def test_a_seed_is_the_written_down_hash() -> None:
    # First 8 bytes of SHA-256 of "augment/7/3", by another tool, without the lowest bit.
    assert derived_seed("augment", 7, 3) == 6618477723628042639
    assert derived_seed("a", 1) != derived_seed("a", 11) != derived_seed("a1", 1)


def test_holdout_is_disjoint_stratified_and_seeded() -> None:
    labels = [0] * 100 + [1] * 10 + [2] * 2 + [3]
    training, held_out = stratified_holdout(labels, 0.2, seed=1)
    assert sorted(training + held_out) == list(range(113))
    counts = torch.bincount(torch.tensor(labels)[held_out], minlength=4).tolist()
    assert counts == [20, 2, 1, 0]
    assert stratified_holdout(torch.tensor(labels), 0.2, seed=1) == (training, held_out)
    assert stratified_holdout(labels, 0.2, seed=2)[1] != held_out


def test_holdout_never_takes_the_last_image_of_a_class() -> None:
    training, held_out = stratified_holdout([0, 0, 1, 1, 1], 0.99, seed=0)
    assert (len(training), len(held_out)) == (2, 3)
    assert {(0, 0, 1, 1, 1)[row] for row in training} == {0, 1}
