"""What docs/open-questions.md says of corruptions, shifts and attacks is what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import layershuffle as ls

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import robustness  # noqa: E402

ORDERS = robustness.drawn(3)
RADIUS = 8 / 255


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ls.load("bundled:digits-swarm").eval()


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return robustness.split_images("validation", 16)


def test_tables_are_made_of_the_results() -> None:
    page = robustness.PAGE.read_text(encoding="utf-8")
    assert page == robustness.with_tables(page), "run scripts/robustness.py"


def test_the_gradient_is_the_mean_over_orders(model, batch) -> None:
    losses, gradient = robustness.attack_gradient(model, *batch, ORDERS)
    single = [robustness.attack_gradient(model, *batch, [order]) for order in ORDERS]
    torch.testing.assert_close(losses, sum(loss for loss, _ in single) / 3)
    torch.testing.assert_close(gradient, sum(part for _, part in single) / 3)


def test_an_attack_stays_near_and_does_more_than_noise(model, batch) -> None:
    images, labels = batch
    worst = robustness.attacked(model, images, labels, ORDERS, radius=RADIUS, steps=5)
    assert float((worst - images).abs().max()) <= RADIUS + 1e-6
    assert 0 <= worst.min() <= worst.max() <= 1
    noise = RADIUS * torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).sign()
    clean, noisy, attacked = (
        robustness.attack_gradient(model, pixels, labels, ORDERS)[0].mean()
        for pixels in (images, (images + noise).clamp(0, 1), worst)
    )
    assert attacked > 2 * max(clean, noisy)


def test_more_restarts_are_never_weaker(model, batch) -> None:
    losses = [
        robustness.attack_gradient(
            model,
            robustness.attacked(model, *batch, ORDERS, radius=RADIUS, steps=2, restarts=restarts),
            batch[1],
            ORDERS,
        )[0]
        for restarts in (1, 3)
    ]
    assert (losses[1] >= losses[0] - 1e-5).all()


@pytest.mark.parametrize("name", [*robustness.CORRUPTIONS, *robustness.SHIFTS])
def test_a_change_is_the_same_in_every_call_and_grows(name: str, batch) -> None:
    change, strengths = (robustness.CORRUPTIONS | robustness.SHIFTS)[name]
    images = batch[0]
    first, again = (robustness.changed(images, change, strengths[0]) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == images.shape
    weak, strong = (
        float((robustness.changed(images, change, strength) - images).abs().mean())
        for strength in (strengths[0], strengths[-1])
    )
    assert 0 < weak < strong


def test_the_error_is_the_mean_over_changes_and_strengths() -> None:
    levels = {f"at{k}": str(100 - k) for k in range(1, 6)}
    row = {"arm": "a", "order": "o", "seed": "1", **levels}
    rows = [row | {"change": "blur"}, row | {"change": "noise"} | {"at1": "89"}]
    assert robustness.error_of(rows, "a", "o", ["blur", "noise"]) == {1: 4.0}  # 3 and 5
    assert robustness.error_of(rows, "a", "o", ["blur"]) == {1: 3.0}
