"""Corruptions, shifts and attacks in docs/open-questions.md agree with the results."""

from __future__ import annotations

import pytest
import robustness
import torch

import layershuffle as ls

ORDERS = robustness.drawn(3)
RADIUS = 8 / 255


def fixed(_: int) -> tuple[ls.ExecutionOrder, ...]:
    return ORDERS


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
    worst = robustness.attacked(model, images, labels, fixed, radius=RADIUS, steps=5)
    assert float((worst - images).abs().max()) <= RADIUS + 1e-6
    assert 0 <= worst.min() <= worst.max() <= 1
    noise = RADIUS * torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).sign()
    clean, noisy, attacked = (
        robustness.attack_gradient(model, pixels, labels, ORDERS)[0].mean()
        for pixels in (images, (images + noise).clamp(0, 1), worst)
    )
    assert attacked > 2 * max(clean, noisy)


def test_an_attacker_never_sees_the_orders_that_answer_nor_an_order_twice() -> None:
    seen = [order.blocks for step in range(21) for order in robustness.many_orders(step)]
    assert len(set(seen)) == len(seen) == 21 * 8
    assert not {order.blocks for order in robustness.drawn(robustness.JUDGED_ORDERS)} & set(seen)


def test_more_restarts_are_never_weaker(model, batch) -> None:
    losses = [
        robustness.attack_gradient(
            model,
            robustness.attacked(model, *batch, fixed, radius=RADIUS, steps=2, restarts=restarts),
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


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_digit_across_the_middle_is_whole_and_where_no_training_image_has_it(sign: int) -> None:
    images, _ = robustness.split_images("validation", 50)
    for image in images:
        moved = robustness._across(image, 2, sign)
        half = image.shape[-1] // 2
        left, right = (image[..., :half], image[..., half:])
        ink = moved.amax(dim=(0, 1)).nonzero().flatten()
        # Whole pixels: every column of ink is one of before, and the two stay apart.
        torch.testing.assert_close(moved.sum(), image.sum())
        reaching, far = (left, right) if sign > 0 else (right, left)
        edge, border = (ink[-1], half + 2) if sign > 0 else (ink[0], half - 2)
        assert edge == (2 * half - 1 if sign > 0 else 0)
        beyond = moved[..., :border] if sign > 0 else moved[..., border:]
        torch.testing.assert_close(beyond.sum(), reaching.sum())
        assert (beyond[..., -2:] if sign > 0 else beyond[..., :2]).sum() > 0
        torch.testing.assert_close(moved.sum() - beyond.sum(), far.sum())


def test_changes_leave_the_generator_as_it_was(batch) -> None:
    before = torch.get_rng_state()
    robustness.changed(batch[0], robustness.CORRUPTIONS["noise"][0], 0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_relative_error_is_the_mean_of_the_ratios_of_each_change() -> None:
    def row(arm: str, change: str, error: int) -> dict[str, str]:
        levels = {f"at{k}": str(100 - error) for k in range(1, 6)}
        return {"arm": arm, "order": "sequential", "seed": "0", "change": change} | levels

    rows = [row("baseline", "blur", 10), row("baseline", "noise", 40)]
    rows += [row("a", "blur", 20), row("a", "noise", 20)]
    # (20 / 10 + 20 / 40) / 2; the ratio of the mean errors would be 0.8.
    assert robustness.relative_error(rows, "a", "sequential", ["blur", "noise"]) == 1.25


def test_the_error_is_the_mean_over_changes_and_strengths() -> None:
    levels = {f"at{k}": str(100 - k) for k in range(1, 6)}
    row = {"arm": "a", "order": "o", "seed": "1", **levels}
    rows = [row | {"change": "blur"}, row | {"change": "noise"} | {"at1": "89"}]
    assert robustness.error_of(rows, "a", "o", ["blur", "noise"]) == {1: 4.0}  # 3 and 5
    assert robustness.error_of(rows, "a", "o", ["blur"]) == {1: 3.0}


def test_errors_are_judged_in_all_and_where_fewer_are_better() -> None:
    usual = {0: 40.0, 1: 41.0, 2: 42.0}
    # The gaps are 3, 4 and 5: t(0.975, 2) = 4.3027 over the root of 3 is 2.484 to either side.
    assert robustness.more_errors({0: 43, 1: 45, 2: 47}, usual) == "+4.0 (+1.5 to +6.5) **worse**"
    assert robustness.more_errors({0: 37, 1: 37, 2: 37}, usual) == "-4.0 (-6.5 to -1.5) **better**"
    assert robustness.more_errors({0: 41, 1: 43, 2: 45}, usual).endswith("**not told apart**")


def test_an_arm_may_err_more_and_add_no_more(monkeypatch) -> None:
    def rows(arm: str, order: str, errors: dict[str, int]) -> list[dict[str, str]]:
        return [
            {"arm": arm, "order": order, "seed": str(seed), "change": change}
            | {f"at{k}": str(100 - error + noise * seed) for k in range(1, 6)}
            for seed in range(3)
            for change, error in errors.items()
            for noise in [0.001 if arm == "layershuffle" and change != "none" else 0]
        ]

    changes = [*robustness.CORRUPTIONS, *robustness.SHIFTS]
    cells = [("baseline", "sequential"), ("layershuffle", "arbitrary")]
    scores = rows(*cells[0], {"none": 4, **dict.fromkeys(changes, 40)})
    scores += rows(*cells[1], {"none": 14, **dict.fromkeys(changes, 50)})
    monkeypatch.setattr(robustness, "CELLS", cells)
    monkeypatch.setattr(robustness, "rows_of", lambda _: scores)
    judged = "| 1.25 | +10.0 (+10.0 to +10.0) **worse** | +0.0 (-0.0 to +0.0) **not told apart** |"
    assert robustness.changed_table().splitlines()[-1] == (
        f"| LayerShuffle | any order | 14.0 | 50.0 {judged} 50.0 {judged}"
    )
