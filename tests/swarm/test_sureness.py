"""How sure answers are: against closed forms, slow counts, and models run block by block."""

import math

import numpy as np
import pytest
import torch
from gateway_site import VIT, made_up, picture, run
from test_calibration import digits_model
from test_server_app import logits, tensors

from common import DEPTH, logits_of
from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import running
from layershuffle.data import DataOptions, open_data
from layershuffle.data.contract import limited_test
from layershuffle.models import file_view
from layershuffle.swarm.measuring import calibrate
from layershuffle.swarm.sureness import (
    Sureness,
    calibration_error,
    default_confidence,
    ending_at,
    probabilities,
    temperature_of,
)
from pictures import file_of


def test_probabilities_are_those_of_torch_in_float64():
    values = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32) * 40
    wanted = (torch.from_numpy(values).double() / 1.7).softmax(dim=-1).numpy()
    assert probabilities(values, 1.7) == pytest.approx(wanted, rel=1e-12)
    assert probabilities(np.float32([3e38, -3e38])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("right", "margin"), [(80, 4.0), (60, 0.1), (99, 2.0)])
def test_the_temperature_makes_the_chance_the_share_of_right_answers(right, margin):
    """With one margin for all answers the best T is margin / ln(share / (1 - share))."""
    values = np.tile(np.float32([margin, 0.0]), (100, 1))
    labels = np.array([0] * right + [1] * (100 - right))
    found = temperature_of(values, labels)
    assert found == pytest.approx(margin / math.log(right / (100 - right)), rel=1e-3)
    assert probabilities(values[0], found)[0] == pytest.approx(right / 100, abs=1e-4)


def test_the_calibration_error_is_the_mean_distance_of_chance_and_share():
    chances = np.array([0.9] * 10 + [0.5] * 30 + [1.0] * 10)
    right = np.array([True] * 7 + [False] * 3 + [True] * 18 + [False] * 12 + [True] * 10)
    assert calibration_error(chances, right) == pytest.approx(100 * (10 * 0.2 + 30 * 0.1) / 50)


def test_what_ending_early_costs_is_counted_answer_by_answer():
    generator = np.random.default_rng(3)
    chances, right = generator.random((4, 5, 50)), generator.random((4, 5, 50)) < 0.7
    for confidence in (0.01, 0.6, 0.9, 1.0):
        blocks, hits = [], []
        for order in range(4):
            for image in range(50):
                reached = [n for n in range(5) if chances[order, n, image] >= confidence]
                last = reached[0] if reached else 4
                blocks.append(last + 1)
                hits.append(right[order, last, image])
        assert ending_at(confidence, chances, right=right) == pytest.approx(
            (np.mean(blocks), 100 * np.mean(hits))
        )


def test_the_default_is_the_least_confidence_that_loses_at_most_a_third_of_a_point():
    """1,000 images, all right at the end; after one block 4 are wrong, with a chance of 0.7."""
    chances, right = np.full((1, 2, 1000), 0.999), np.ones((1, 2, 1000), dtype=bool)
    chances[0, 0, :4], right[0, 0, :4] = 0.7, False
    assert default_confidence(chances, right) == 0.701
    right[0, 0, 0] = True
    assert default_confidence(chances, right) == 0.5, "3 of 1,000 may be lost"
    chances[0, 0] = 1.0
    right[0, 0, :9] = False
    assert default_confidence(chances, right) is None


def test_a_calibration_measures_every_beginning_of_its_orders():
    """Against each beginning of each order run alone; fitted on held-out, scored on test images."""
    model = digits_model()
    spec = "digit-pairs?test=40"
    sureness = calibrate(model, spec, orders=7, images=30, seed=5, batch_size=16).sureness
    assert sureness is not None
    assert (sureness.split, sureness.orders, sureness.images) == ("holdout", 6, 30)
    data = open_data(spec, file_view(model), options=DataOptions(max_test=30))
    orders = [Shuffled().draw(3, seed=5, step=k) for k in range(6)]

    def answers(split):
        part = data.splits[split]
        part = limited_test(part.dataset, limit=30)
        items = [part.dataset[index] for index in range(30)]
        pixels = data.finish(torch.stack([image for image, _ in items]))
        out = np.empty((6, 3, 30, 100), np.float32)
        for k, order in enumerate(orders):
            for count in range(3):
                with torch.no_grad(), running(model, order.blocks[: count + 1]):
                    out[k, count] = logits_of(model(pixels)).numpy()
        return out, np.array([label for _, label in items])

    outputs, labels = answers("holdout")
    for count, temperature in enumerate(sureness.temperatures):
        alone = outputs[:, count].reshape(-1, 100)
        assert temperature == pytest.approx(temperature_of(alone, np.tile(labels, 6)), rel=1e-3)
    outputs, labels = answers("test")
    right = outputs.argmax(axis=-1) == labels
    for count, temperature in enumerate(sureness.temperatures):
        for errors, used in ((sureness.raw_error, 1.0), (sureness.error, temperature)):
            chances = probabilities(outputs[:, count], used).max(axis=-1)
            wanted = calibration_error(chances.ravel(), right[:, count].ravel())
            assert errors[count] == pytest.approx(wanted, abs=0.05)


# --- at the gateway -------------------------------------------------------------------------------

TEMPERATURES = (1.5, 0.9, 2.0, 0.7)


def sure_at(confidence):
    """A calibration of the pico model that ends requests at `confidence`."""
    sureness = Sureness(
        split="holdout", orders=6, images=9, temperatures=TEMPERATURES, raw_error=(1.0,) * DEPTH,
        error=(0.5,) * DEPTH, stops=(), confidence=confidence,
    )  # fmt: skip
    return made_up().model_copy(update={"sureness": sureness})


def answer_of(calibration, *, seed=0, **options):
    async def go(place):
        if calibration is not None:
            place.remote_model.temperatures = calibration.temperatures
        heads = place.remote_model.model.head
        runs = []
        place.remote_model.model.head = lambda state: runs.append(1) or heads(state)
        response = await place.classify(file_of(picture(seed)), **options)
        return response.json() | {"status": response.status_code, "heads": len(runs)}

    return run(go, calibration=calibration)


@pytest.mark.parametrize("confidence", [0.3, 0.4, 0.5])
def test_a_request_ends_where_its_chance_first_reaches_the_confidence(confidence):
    """Against the model in one process, block by block of the order that the swarm took."""
    whole = answer_of(sure_at(0.9), confidence="off")
    assert (whole["ending"], len(whole["blocks"]), whole["heads"]) == ("complete", DEPTH, 1)
    chances = []
    for count, temperature in enumerate(TEMPERATURES, start=1):
        alone = logits(VIT.wrapped(), tensors(picture()), whole["blocks"][:count])[0]
        chances.append(float((alone.double() / temperature).softmax(-1).max()))
    assert whole["chance"] == whole["top"][0]["probability"] == pytest.approx(chances[-1])
    reached = [count for count, chance in enumerate(chances, start=1) if chance >= confidence]
    wanted = min([*reached, DEPTH])
    asked = answer_of(sure_at(0.9), confidence=confidence, min_blocks=1)
    assert (asked["blocks"], asked["heads"]) == (whole["blocks"][:wanted], wanted)
    assert asked["chance"] == pytest.approx(chances[wanted - 1])
    assert (asked["ending"] == "sure", asked["degraded"]) == (wanted < DEPTH, False)
    assert len(asked["skipped"]) == DEPTH - wanted
    assert answer_of(sure_at(confidence), min_blocks=1)["top"] == asked["top"], "the default"


def test_fewest_blocks_hold_also_for_sure_answers():
    asked = answer_of(sure_at(0.9), confidence=0.01, min_blocks=3)
    assert (asked["ending"], len(asked["blocks"])) == ("sure", 3)
    assert len(answer_of(sure_at(0.9), confidence=0.01)["blocks"]) == 2, "half of the accuracy"


def test_without_temperatures_no_answer_has_a_chance():
    plain = answer_of(None)
    assert (plain["chance"], plain["ending"], len(plain["blocks"])) == (None, "complete", DEPTH)
    refused = answer_of(None, confidence=0.9)
    assert (refused["status"], refused["heads"]) == (422, 0)
    assert "never measured" in refused["error"]["cause"]
