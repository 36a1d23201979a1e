"""Soups against means by hand, ensembles against a sample-by-sample slow path."""

import math

import pytest
import torch

import layershuffle as ls
from common import DEPTH, FAMILIES, images, logits_of, redraw
from layershuffle.core.stack import running
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.images.view import resized_as
from layershuffle.merging.ensembles import evaluate_ensemble
from layershuffle.merging.soups import greedy_soup, uniform_soup
from layershuffle.models import (
    image_view,
    replace_head,
    set_class_names,
    set_image_view,
    truncate,
)
from layershuffle.models.files import weights_digest
from refusals import refuses

BATCHES = [(images(3, seed=s), torch.tensor([0, 1, 2]) + s % 3) for s in range(2)]


def donors_of(name, count=3):
    return [redraw(FAMILIES[name].wrapped(), seed=20 + s).eval() for s in range(count)]


@pytest.mark.parametrize("name", ["timm-vit", "timm-xcit", "hf-beit", "torchvision-vit"])
def test_uniform_soup_is_the_mean(name):
    donors = donors_of(name)
    before = [weights_digest(donor) for donor in donors]
    soup = uniform_soup(donors)
    states = [donor.state_dict() for donor in donors]
    for key, tensor in soup.state_dict().items():
        if tensor.is_floating_point():
            wanted = torch.stack([s[key].double() for s in states]).mean(0)
            assert torch.equal(tensor, wanted.to(tensor.dtype)), key
    assert [weights_digest(donor) for donor in donors] == before
    assert soup.state_dict().keys() == states[0].keys()


def test_greedy_soup_adds_while_the_score_does_not_fall():
    donors = donors_of("timm-vit", count=4)
    weights = [float(donor.head.bias[0].detach()) for donor in donors]

    def score(model):  # a bias nearer to the target scores better
        return -abs(float(model.head.bias[0].detach()) - wish)

    for wish in (weights[1], sum(weights) / 4, weights[0] + 5):
        soup, chosen = greedy_soup(donors, score)
        ranked = sorted(range(4), key=lambda i: -score(donors[i]))
        expected, best = [ranked[0]], score(donors[ranked[0]])
        for i in ranked[1:]:
            mean = sum(weights[j] for j in (*expected, i)) / (len(expected) + 1)
            if -abs(mean - wish) >= best:
                expected, best = [*expected, i], -abs(mean - wish)
        assert chosen == tuple(expected)
        assert score(soup) == pytest.approx(best, abs=1e-6)


def test_equal_scores_take_everyone_in_the_order_given():
    donors = donors_of("timm-vit")
    soup, chosen = greedy_soup(donors, lambda _: 1.0)
    assert chosen == (0, 1, 2)
    assert weights_digest(soup) == weights_digest(uniform_soup(donors))


def slow(donors, orders_at, combine):
    """(top-1, cross-entropy), one sample at a time."""
    right, loss, n = 0, 0.0, 0
    for number, (batch, labels) in enumerate(BATCHES):
        for image, label in zip(batch, labels.tolist(), strict=True):
            rows = []
            for donor, order in zip(donors, orders_at(number), strict=True):
                with torch.inference_mode(), running(donor, order):
                    rows.append(logits_of(donor(image[None]))[0].double())
            if combine == "logits":
                p = torch.stack(rows).mean(0).softmax(0)
            else:
                p = torch.stack([row.softmax(0) for row in rows]).mean(0)
            right += int(p.argmax()) == label
            loss -= math.log(p[label])
            n += 1
    return 100 * right / n, loss / n


@pytest.mark.parametrize("combine", ["logits", "probabilities"])
@pytest.mark.parametrize("orders", ["same", "independent"])
@pytest.mark.parametrize("draw", ["pass", "batch"])
def test_ensembles_equal_the_slow_path(combine, orders, draw):
    donors = donors_of("timm-vit")
    scores = evaluate_ensemble(
        donors, BATCHES, num_orders=2, seed=3, orders=orders, combine=combine, draw=draw
    )
    assert [score.index for score in scores] == [0, 1]
    for score in scores:

        def orders_at(batch, index=score.index):
            place = {"step": batch, "micro_batch": index} if draw == "batch" else {"step": index}
            ranks = range(3) if orders == "independent" else (0, 0, 0)
            return [ls.Shuffled().draw(DEPTH, seed=3, rank=rank, **place) for rank in ranks]

        top1, loss = slow(donors, orders_at, combine)
        assert (score.images, score.top1, score.kept) == (6, top1, DEPTH)
        assert score.cross_entropy == pytest.approx(loss, rel=1e-5)
        assert score.member_orders == (tuple(orders_at(0)) if draw == "pass" else ())
        assert (score.order is None) == (orders == "independent" or draw == "batch")


def test_one_sequential_order_and_the_members_stay_as_they_were():
    donors = donors_of("hf-vit", count=2)
    donors[1].train()
    (score,) = evaluate_ensemble(donors, BATCHES, mode="sequential", num_orders=7)
    assert str(score.order) == "0,1,2,3"
    assert [donor.training for donor in donors] == [False, True]
    alone = evaluate_ensemble(donors[:1], BATCHES, mode="sequential", combine="probabilities")[0]
    (wanted,) = ls.evaluate(donors[0], BATCHES, modes="sequential")
    assert (alone.top1, alone.top5) == (wanted.top1, wanted.top5)
    assert alone.cross_entropy == pytest.approx(wanted.cross_entropy, rel=1e-5)


def test_members_of_other_depths_have_no_order_in_common():
    donors = donors_of("timm-vit", count=2)
    shorter = truncate(donors_of("timm-vit", count=1)[0], "0,1,2")
    with refuses(UsageError):
        evaluate_ensemble([donors[0], shorter], BATCHES, orders="same")
    (score,) = evaluate_ensemble([donors[0], shorter], BATCHES, num_orders=1, orders="independent")
    assert [len(order) for order in score.member_orders] == [DEPTH, 3]


def test_nothing_to_score():
    features = [donor for donor in donors_of("timm-vit", count=2) if not donor.reset_classifier(0)]
    with refuses(UsageError):
        evaluate_ensemble(features, BATCHES)
    donors = donors_of("timm-vit", count=2)
    for draw in ("pass", "batch"):
        with refuses(DataError):
            evaluate_ensemble(donors, [], draw=draw)
    with refuses(UsageError):
        evaluate_ensemble(donors, BATCHES, mode="sequential,arbitrary")


def test_names_of_classes_are_compared_although_the_first_model_has_none():
    unnamed, first, second = donors_of("hf-vit", count=3)
    names = ("ant", "bee", "cat", "dog", "elk")
    set_class_names(first, names)
    set_class_names(second, names)
    assert len(evaluate_ensemble([unnamed, first, second], BATCHES, num_orders=1)) == 1
    set_class_names(second, names[::-1])
    with refuses(UsageError):
        evaluate_ensemble([unnamed, first, second], BATCHES)


def test_members_whose_classes_stand_in_another_order_are_refused():
    """The mean of their logits would be of different classes."""
    first, second = donors_of("hf-vit", count=2)
    names = ("ant", "bee", "cat", "dog", "elk")
    set_class_names(first, names)
    set_class_names(second, names[::-1])
    with refuses(UsageError):
        evaluate_ensemble([first, second], BATCHES)
    set_class_names(second, names)
    assert len(evaluate_ensemble([first, second], BATCHES, num_orders=1)) == 1
    set_image_view(second, resized_as(image_view(second), "crop"))
    with refuses(UsageError):
        evaluate_ensemble([first, second], BATCHES)
    replace_head(second, 7, seed=0)
    with refuses(UsageError):
        evaluate_ensemble([first, second], BATCHES)
