"""Requests with labelled images, how they end, and what the calibration lets expect of them."""

import asyncio
import math
from statistics import NormalDist
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from PIL import Image

from clock import loop_time, run_virtual
from layershuffle.gateway.calibration.calibration import Expected
from layershuffle.gateway.client.client import SwarmError
from layershuffle.gateway.client.judging import (
    ENDED,
    Labelled,
    Reply,
    asking,
    cells,
    ends_and_times,
    judged,
    sent,
)
from layershuffle.gateway.client.labelled import labelled_images
from layershuffle.ground.errors import DataError
from layershuffle.models import load
from refusals import refuses


def expecting(top1):
    """What an answer says to expect, known to within 2 points."""
    return Expected(
        kept=1, top1=top1, low=top1 - 2, high=top1 + 2, sd_orders=1.0, orders_low=top1 - 8,
        orders_high=top1 + 8, data="d", split="test", orders=2, images=100,
    )  # fmt: skip


# --- requests -------------------------------------------------------------------------------------


def test_what_happens_before_a_request_happens_once_and_no_more_are_under_way_than_asked_for():
    now, most, happened = 0, 0, []

    async def ask(number):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return Reply("answered", True, float(number))

    async def note():
        happened.append(loop_time())

    replies = run_virtual(sent(ask, 30, events={12: note}, concurrency=5))
    assert sorted(reply.ms for reply in replies) == list(range(30))
    assert most == 5
    assert happened == [pytest.approx(0.002)], "ten were answered"


@pytest.mark.parametrize(
    ("patient", "asked", "seconds"), [(False, 7.0, 0), (True, 7.0, 3 * 7), (True, None, 3 * 1)]
)
def test_a_patient_client_waits_as_long_as_the_gateway_asks(patient, asked, seconds):
    class Client:
        async def classify(self, image, **options):
            raise SwarmError("no host is up", place="here", retry_after=asked)

    async def tried():
        ask = asking(Client(), [Labelled(b"", 0)], deadline_ms=1e9, patient=patient)
        replies = await sent(ask, 3, concurrency=1)
        ends = [(reply.ended, reply.ms) for reply in replies]
        return ends_and_times(ends)["failed"], round(loop_time(), 3)

    assert run_virtual(tried()) == (100, seconds)


def test_what_the_gateway_does_not_take_ends_it():
    for status in (401, 422):
        error = SwarmError("deadline_ms is 1", place="here", status=status)
        client = SimpleNamespace(classify=AsyncMock(side_effect=error))
        ask = asking(client, [Labelled(b"", 0)], deadline_ms=1, patient=True)
        with refuses(SwarmError, "here"):
            run_virtual(sent(ask, 3))


def test_images_of_other_classes_are_refused_and_few_are_enough(tmp_path):
    for name in ("cat", "dog"):
        folder = tmp_path / "test" / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("L", (20, 12), number).save(folder / f"{number}.png")
    model = load("bundled:digits-onnx")
    with refuses(DataError):
        labelled_images(model, f"folder:{tmp_path}", count=4)
    assert len(labelled_images(model, "digit-pairs?test=3&train=5", count=10)) == 3


# --- results --------------------------------------------------------------------------------------


def test_the_interval_is_that_of_a_binomial_and_of_the_calibration():
    got = judged([Reply("answered", i < 80, 1.0, expecting(75.0)) for i in range(100)])
    half = math.hypot(2, 100 * NormalDist().inv_cdf(0.975) * math.sqrt(0.75 * 0.25 / 100))
    assert (got.top1, got.expected, got.answers) == (80.0, 75.0, 100)
    assert (got.low, got.high) == pytest.approx((75 - half, 75 + half), abs=1e-2)
    assert got.text == f"75.0 ({got.low:.1f} to {got.high:.1f})"


def test_each_answer_counts_with_what_it_said_itself():
    replies = [Reply("answered", True, 1.0, expecting(90.0))] * 10
    replies += [Reply("degraded", False, 1.0, expecting(50.0))] * 30
    unknown = [Reply("failed", False, 1.0)] * 5 + [Reply("answered", True, 1.0)]
    got = judged([*replies, *unknown])
    assert (got.answers, got.top1, got.expected) == (40, 25.0, pytest.approx(60.0))
    assert got.text.endswith(", outside")
    assert judged(unknown) is None


def test_the_cells_of_a_table():
    replies = [Reply("answered", True, float(ms), expecting(90.0)) for ms in range(1, 18)]
    replies += [Reply("degraded", False, 50.0, expecting(40.0))]
    replies += [Reply("late", False, 50.0, expecting(90.0))]
    replies.append(Reply("failed", False, 99.0))
    verdict = judged(replies)
    assert verdict is not None
    assert verdict.answers == 19
    assert cells(replies, verdict) == ("5.0", "5.0", "5.0", "10", "99", "89.5", verdict.text)
    assert cells(replies, None)[5:] == ("-", "-")
    figures = ends_and_times([(reply.ended, reply.ms) for reply in replies])
    assert [figures[end] for end in ENDED] == [85, 5, 5, 5]
