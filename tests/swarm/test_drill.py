"""Drills: what each scenario breaks and mends, the figures, and the wrapper that breaks hosts."""

import asyncio
import json
import math
import threading
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from PIL import Image

from clock import loop_time, run_virtual
from common import FAMILIES
from layershuffle.cli.drill import DrillCommand
from layershuffle.errors import DataError, LayerShuffleError, UsageError
from layershuffle.models import load
from layershuffle.swarm.calibration import Calibration, CellAccuracy
from layershuffle.swarm.chaos import ChaosTransport
from layershuffle.swarm.client import SwarmError
from layershuffle.swarm.drill import (
    Labelled,
    Played,
    Reply,
    asking,
    ends_and_times,
    judged,
    labelled_images,
    report,
    sent,
)
from layershuffle.swarm.faults import SCENARIOS
from layershuffle.swarm.messages import Answer, Visit
from layershuffle.swarm.rounds import Cell
from refusals import refuses
from waiting import HANGS, until

ONE, TWO = Cell(1), Cell(2)


def calibration(*tops):
    """Top-1 by number of blocks, from 1 on, each known to within 2 points."""
    rows = [
        CellAccuracy(
            kept=kept, top1=top, low=top - 2, high=top + 2, sd_orders=1.0, orders_low=top - 8,
            orders_high=top + 8,
        )
        for kept, top in enumerate(tops, start=1)
    ]  # fmt: skip
    return Calibration(
        schema=3, weights="0", data="d", split="test", seed=0, orders=2, images=100,
        classes=("a", "b"), rows=tuple(rows),
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

    replies = run_virtual(sent(ask, 30, before={12: note}, concurrency=5))
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

    async def drilled():
        ask = asking(Client(), [Labelled(b"", 0)], deadline_ms=1e9, patient=patient)
        replies = await sent(ask, 3, concurrency=1)
        ends = [(reply.ended, reply.ms) for reply in replies]
        return ends_and_times(ends)["failed"], round(loop_time(), 3)

    assert run_virtual(drilled()) == (100, seconds)


def test_what_the_gateway_does_not_take_ends_the_drill():
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
    got = judged([Reply("answered", i < 80, 1.0, ONE) for i in range(100)], calibration(75.0))
    half = math.hypot(2, 100 * NormalDist().inv_cdf(0.975) * math.sqrt(0.75 * 0.25 / 100))
    assert (got.top1, got.expected, got.answers) == (80.0, 75.0, 100)
    assert (got.low, got.high) == pytest.approx((75 - half, 75 + half), abs=1e-2)
    assert got.text == f"75.0 ({got.low:.1f} to {got.high:.1f})"


def test_each_answer_counts_with_its_own_number_of_blocks():
    replies = [Reply("answered", True, 1.0, TWO)] * 10 + [Reply("degraded", False, 1.0, ONE)] * 30
    unknown = [Reply("failed", False, 1.0)] * 5 + [Reply("answered", True, 1.0, Cell(2, 1, 9))]
    got = judged([*replies, *unknown], calibration(50.0, 90.0))
    assert (got.answers, got.top1, got.expected) == (40, 25.0, pytest.approx(60.0))
    assert got.text.endswith(", outside")
    assert judged(unknown, calibration(50.0, 90.0)) is judged(replies, None) is None


@pytest.mark.parametrize("confidence", [None, 0.9])
def test_requests_that_end_when_sure_are_judged_by_their_own_chance(confidence):
    class Client:
        async def classify(self, image, **options):
            assert options["confidence"] == (confidence or "off")
            top = [SimpleNamespace(index=0)]
            return SimpleNamespace(degraded=False, chance=0.95, cell=ONE, top=top)

    ask = asking(Client(), [Labelled(b"", 0)], deadline_ms=1e9, patient=True, confidence=confidence)
    replies = run_virtual(sent(ask, 10))
    got = judged(replies, calibration(70.0))
    wanted = 95.0 if confidence else 70.0
    assert (got.top1, got.expected) == (100.0, pytest.approx(wanted))
    plain = judged([replace(reply, chance=None) for reply in replies], calibration(70.0))
    assert got.expected - got.low == pytest.approx(plain.expected - plain.low)
    assert got.high == pytest.approx(min(100.0, plain.high + wanted - 70.0))
    assert Played("slow", replies, 1.0, got).as_json()["mean_blocks"] == 1


def test_the_table():
    replies = [Reply("answered", True, float(ms), TWO) for ms in range(1, 18)]
    replies += [Reply(e, False, 50.0, cell) for e, cell in (("degraded", ONE), ("late", TWO))]
    replies.append(Reply("failed", False, 99.0))
    verdict = judged(replies, calibration(40.0, 90.0))
    rows = [Played("slow", replies, 59.94, verdict), Played("all", replies, None, None)]
    heading, *_, first, second = report(rows).splitlines()
    assert heading == "20 requests or more in each scenario; shares in percent"
    assert first.split()[:7] == ["slow", "5.0", "5.0", "5.0", "10", "99", "89.5"]
    assert verdict.text in first
    assert first.endswith("59.9 s"), "in one line"
    assert second.split() == ["all", "5.0", "5.0", "5.0", "10", "99", "-", "-", "not", "seen"]
    figures = rows[0].as_json()
    ends = ("answered", "degraded", "failed", "late", "ms_median", "ms_p99")
    assert [figures[name] for name in ends] == [85, 5, 5, 5, 10, 99]
    assert figures["accuracy"]["answers"] == 19
    json.dumps([row.as_json() for row in rows], allow_nan=False)
    # Without any host nothing can be answered for a while, but the hosts have to come back.
    assert [Played(n, replies, 1.0, None).passed for n in ("all", "slow")] == [True, False]
    assert not rows[1].passed


# --- the command ----------------------------------------------------------------------------------


class FakeSwarm:
    """A swarm of the hosts a, b, c, and its operator, who notes what it is told.

    `refuses`: what fails. Killed hosts come back after three looks, if `recovers`; liars stay out.
    """

    hosts = ("a", "b", "c")

    def __init__(self, *refuses, recovers=True):
        self.told, self.refuses, self.recovers = [], refuses, recovers
        self.conditions = dict.fromkeys("abc", "healthy")
        self.looks = 0
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def command(self, name, *, host, kind):
        self.asked.set()
        assert kind == "rejoin" or self.goes_on.wait(HANGS)
        self.told.append((kind, host))
        if (kind, host) in self.refuses:
            raise LayerShuffleError(f"{host} cannot {kind}")
        self.conditions[host] = "healthy" if kind == "rejoin" else kind
        return {}

    async def swarm(self):
        self.looks += 1
        for host, condition in self.conditions.items():
            if condition == "kill" and self.recovers and self.looks > 3:
                self.conditions[host] = "healthy"
        hosts = [SimpleNamespace(name=n, condition=c) for n, c in self.conditions.items()]
        return SimpleNamespace(hosts=hosts, model="mine")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


SURE = calibration(50.0, 60.0, 90.0)


async def replied(number):
    await asyncio.sleep(0.01 * (number >= 40))
    return Reply("answered", True, 1.0, Cell(3))


def drilled(monkeypatch, fake, *scenarios, ask=replied, stored=SURE, **options):
    """The drill of a fake swarm whose requests are `ask`; `stored`: the calibration of its model,
    which is the one that is served now."""
    monkeypatch.setattr("layershuffle.models.load", lambda spec: FAMILIES["timm-vit"].wrapped())
    monkeypatch.setattr("layershuffle.swarm.drill.labelled_images", lambda *_, **__: ())
    monkeypatch.setattr("layershuffle.swarm.drill.asking", lambda *_, **__: ask)
    monkeypatch.setattr("layershuffle.swarm.client.AsyncSwarmClient", lambda *_, **__: fake)
    for name in ("served_directory", "ServedModel"):
        monkeypatch.setattr(f"layershuffle.swarm.served.{name}", lambda of: of)
    calibrations = {"mine": stored}
    monkeypatch.setattr("layershuffle.swarm.calibration.calibration_of", calibrations.__getitem__)
    command = DrillCommand(scenarios=scenarios, **{"requests": 40, **options})
    return command.drill(fake)


BROKEN = {
    "third": [("crash", "c")],
    "all-but-one": [("kill", "b"), ("kill", "c")],
    "all": [("kill", "a"), ("kill", "b"), ("kill", "c")],
    "frozen": [("freeze", "c")],
    "slow": [("slow", "c")],
    "cut": [("cut", "c")],
    "lossy": [("lossy", "c")],
    "restless": [("restless", "c")],
    "leaving": [("leave", "c")],
    "liar": [("wrong", "c")],
    "rare-liar": [("wrong-rarely", "c")],
    "canary-liar": [("wrong-but-canaries", "c")],
}


@pytest.mark.parametrize("scenario", BROKEN)
def test_each_scenario_breaks_what_it_names_and_mends_it(monkeypatch, capsys, scenario):
    fake, asked = FakeSwarm(), []

    async def ask(number):
        asked.append((number, fake.told.copy()))
        return await replied(number)

    options = {"ask": ask, "concurrency": 1, "json": True}
    assert asyncio.run(drilled(monkeypatch, fake, scenario, **options)) == 0
    told = dict(asked)
    assert (told[9], sorted(told[10])) == ([], BROKEN[scenario])
    mends = sorted(("rejoin", host) for _, host in BROKEN[scenario])
    # What lasts is mended after half of the requests, and everything in the end.
    assert sorted(fake.told[len(mends) :]) == sorted(mends * (1 + SCENARIOS[scenario].lasts))
    assert set(fake.conditions.values()) == {"healthy"}
    (row,) = json.loads(capsys.readouterr().out)["scenarios"]
    assert (row["scenario"], row["passed"], row["requests"]) == (scenario, True, len(asked))
    assert (row["accuracy"]["top1"], row["accuracy"]["expected"]) == (100.0, 90.0)
    assert 0 <= row["whole_s"] < 5


def test_what_never_recovers_or_loses_a_request_is_not_passed(monkeypatch, capsys):
    monkeypatch.setattr("layershuffle.swarm.drill._RECOVERY", 0.2)
    assert asyncio.run(drilled(monkeypatch, FakeSwarm(recovers=False), "all")) == 1
    assert "not seen" in capsys.readouterr().out

    async def ask(number):
        return Reply("failed", False, 1.0) if number == 3 else await replied(number)

    assert asyncio.run(drilled(monkeypatch, FakeSwarm(), "slow", ask=ask)) == 1


def test_a_model_without_a_calibration_is_refused(monkeypatch):
    with refuses(UsageError):
        asyncio.run(drilled(monkeypatch, FakeSwarm(), "slow", stored=None))


def test_a_drill_that_breaks_mends_what_it_broke(monkeypatch):
    async def ask(number):
        if number == 15:
            raise RuntimeError("no gateway")
        return await replied(number)

    fake = FakeSwarm()
    with pytest.raises(RuntimeError, match="no gateway"):
        asyncio.run(drilled(monkeypatch, fake, "third", "slow", ask=ask))
    assert fake.told == [("crash", "c"), ("rejoin", "c")]


def test_ctrl_c_mends_too_and_after_the_fault_under_way(monkeypatch):
    """The order for the fault runs in a thread, which nothing stops."""
    fake = FakeSwarm()
    fake.goes_on.clear()

    async def go():
        task = asyncio.create_task(drilled(monkeypatch, fake, "third"))
        await until(fake.asked.is_set)
        assert not fake.told, "still under way"
        task.cancel()
        for _ in range(100):  # in which a drill that did not wait would mend
            await asyncio.sleep(0)
        fake.goes_on.set()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    assert fake.told == [("crash", "c"), ("rejoin", "c")]


def test_a_host_that_cannot_be_broken_or_mended_keeps_no_other_from_it(monkeypatch):
    fake = FakeSwarm(("kill", "b"), ("rejoin", "b"), recovers=False)
    with pytest.raises(LayerShuffleError, match="b cannot rejoin"):
        asyncio.run(drilled(monkeypatch, fake, "all"))
    assert fake.conditions == dict.fromkeys("abc", "healthy")


# --- the wrapper that breaks hosts ---------------------------------------------------------------

STATE = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)


class Doubling:
    """A transport whose hosts take 20 ms to double a state."""

    async def visit(self, visit, state, *, form="fp32"):
        await asyncio.sleep(0.02)
        return Answer(2 * state, 20.0, 3.0)


def visit_through(transport):
    return transport.visit(Visit("a", 0, 5.0), STATE)


def test_a_slow_host_computes_ten_times_as_long_and_one_visit_at_a_time():
    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "slow")
        answers = await asyncio.gather(*(visit_through(transport) for _ in range(3)))
        assert loop_time() == pytest.approx(3 * 0.2)
        assert [answer.compute_ms for answer in answers] == [200.0] * 3
        assert [answer.queue_ms for answer in answers] == pytest.approx([3.0, 203.0, 403.0])
        transport.heal("a")
        assert (await visit_through(transport)).compute_ms == 20.0

    run_virtual(go())


def test_wrong_answers_are_finite_false_and_the_same_for_equal_states():
    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "wrong")
        first, second = [(await visit_through(transport)).state for _ in range(2)]
        assert np.isfinite(first).all()
        assert (first == second).all()
        assert np.abs(first - 2 * STATE).mean() > 2 * STATE.std()
        transport.heal("a")
        assert ((await visit_through(transport)).state == 2 * STATE).all()

    run_virtual(go())


def test_a_cut_host_computes_and_nobody_hears_of_it():
    async def go():
        transport = ChaosTransport(Doubling())
        before = asyncio.create_task(visit_through(transport))
        await asyncio.sleep(0.01)
        transport.break_host("a", "cut")
        after = asyncio.create_task(visit_through(transport))
        await asyncio.sleep(10)
        assert not before.done()
        assert not after.done()
        transport.heal("a")
        healed = loop_time()
        await before
        assert loop_time() == healed, "it was computed meanwhile"
        await after
        assert loop_time() - healed == pytest.approx(0.02)

    run_virtual(go())


def test_a_bad_link_delays_each_way_and_sends_again_what_it_lost():
    """Of n messages 0.8 n arrive at once; one that is lost k times is 2 k delays later."""

    async def go():
        transport = ChaosTransport(Doubling())
        transport.break_host("a", "lossy")
        times = []
        for _ in range(2000):
            begun = loop_time()
            await visit_through(transport)
            times.append(loop_time() - begun)
        extra = (np.array(times) - 0.42) / 0.4  # messages lost, on both ways
        assert np.abs(extra - extra.round()).max() < 1e-6
        assert extra.min() == pytest.approx(0, abs=1e-6)
        # Two geometric draws: 2 x 0.2 / 0.8 losses in the mean, with a variance of 0.625.
        assert abs(extra.mean() - 0.5) < 4 * np.sqrt(0.625 / 2000)
        transport.heal("a")
        begun = loop_time()
        await visit_through(transport)
        assert loop_time() - begun == pytest.approx(0.02)

    run_virtual(go())


@pytest.mark.parametrize(
    ("kind", "request_lies", "canary_lies"),
    [("wrong", 400, 400), ("wrong-but-canaries", 400, 0), ("wrong-rarely", 4, 0)],
)
def test_three_kinds_of_liars(kind, request_lies, canary_lies):
    async def honest(visit, state, *, form="fp32"):
        return Answer(state, 1.0, 0.0)

    async def lies(budget):
        transport = ChaosTransport(SimpleNamespace(visit=honest))
        transport.break_host("a", kind)
        visit = Visit("a", 0, 1.0, budget=budget)
        answers = [await transport.visit(visit, STATE) for _ in range(400)]
        return sum(bool((answer.state != STATE).any()) for answer in answers)

    # 4 of 400 in the mean; 1 of 1,000 draws lies beyond 12.
    assert abs(asyncio.run(lies(2.0)) - request_lies) <= (8 if request_lies == 4 else 0)
    assert asyncio.run(lies(None)) == canary_lies
