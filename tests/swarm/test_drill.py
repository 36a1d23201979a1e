"""Drills: when faults happen, and their figures against hand-made replies."""

import asyncio
import json
import math
import threading
from statistics import NormalDist
from types import SimpleNamespace

import pytest
from PIL import Image

from clock import loop_time, run_virtual
from common import FAMILIES
from layershuffle.cli.swarm.demo import _cells as cells_of
from layershuffle.cli.swarm.drill import DrillCommand
from layershuffle.errors import DataError, LayerShuffleError, UsageError
from layershuffle.models import load
from layershuffle.swarm.calibration import Calibration, CellAccuracy
from layershuffle.swarm.chaos import Fault, one_of_each_fault
from layershuffle.swarm.client import SwarmError
from layershuffle.swarm.drill import (
    Drill,
    Reply,
    calibrated_data,
    drill_json,
    drill_report,
    judged,
    run_drill,
    why_not_judged,
)
from layershuffle.swarm.load_client import Labelled, labelled_images, load_client
from layershuffle.swarm.plan import DEFAULT_MODEL
from waiting import HANGS, until


class Noting:
    def __init__(self):
        self.happened = []

    async def inject(self, fault):
        self.happened.append((fault, len(asked)))


asked: list[int] = []


def test_faults_happen_just_before_their_request():
    asked.clear()
    engine = Noting()

    async def ask(number):
        asked.append(number)
        await asyncio.sleep(0)
        return Reply("answered", True, 12, 1.0)

    faults = [Fault(0, "a", "slow"), Fault(7, "b", "crash"), Fault(7, "c", "crash")]
    drill = asyncio.run(run_drill(ask, 20, faults=faults, engine=engine, concurrency=1))
    assert engine.happened == [(faults[0], 0), (faults[1], 7), (faults[2], 7)]
    assert [fault for fault, _ in drill.fired] == faults
    assert sorted(drill.replies) == list(range(20))


def test_no_more_requests_at_a_time_than_asked_for():
    now, most = 0, 0

    async def ask(_):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return Reply("answered", True, 12, 1.0)

    asyncio.run(run_drill(ask, 30, concurrency=5))
    assert most == 5


def test_shares_and_quantiles():
    ended = ["answered"] * 6 + ["degraded"] * 2 + ["late", "failed"]
    drill = Drill({i: Reply(e, True, 1, float(i + 1)) for i, e in enumerate(ended)})
    assert drill.share("degraded") == 20.0
    assert drill.share("answered", "degraded") == 80.0
    assert drill.quantile(0.5) == 5.0
    assert drill.quantile(0.99) == 10.0


def calibration(*tops):
    """Top-1 by number of blocks, from 1 on, each known to within 2 points."""
    rows = [
        {
            "kept": kept,
            "top1": top,
            "low": top - 2,
            "high": top + 2,
            "sd_orders": 1.0,
            "orders_low": top - 8,
            "orders_high": top + 8,
        }
        for kept, top in enumerate(tops, start=1)
    ]
    return Calibration(
        schema=3, weights="0", data="d", split="test", seed=0, orders=2, images=100,
        classes=("a", "b"), rows=tuple(CellAccuracy(**row) for row in rows),
    )  # fmt: skip


def test_the_interval_is_that_of_a_binomial_and_of_the_calibration():
    replies = [Reply("answered", i < 80, 1, 1.0) for i in range(100)]
    got = judged(replies, calibration(75.0))
    half = math.hypot(2, 100 * NormalDist().inv_cdf(0.975) * math.sqrt(0.75 * 0.25 / 100))
    assert (got.top1, got.expected, got.answers) == (80.0, 75.0, 100)
    assert got.low == pytest.approx(75 - half, abs=1e-2)
    assert got.high == pytest.approx(75 + half, abs=1e-2)
    assert got.inside


def test_each_answer_counts_with_its_own_number_of_blocks():
    replies = [Reply("answered", True, 2, 1.0)] * 10 + [Reply("degraded", False, 1, 1.0)] * 30
    failed = [Reply("failed", False, 0, 1.0)] * 5
    got = judged([*replies, *failed], calibration(50.0, 90.0))
    assert got.expected == pytest.approx(60.0)
    assert (got.answers, got.top1, got.inside) == (40, 25.0, False)
    assert math.isnan(judged(failed, calibration(50.0)).top1)


def test_the_report_says_how_requests_ended():
    replies = [Reply("answered", True, 2, 5.0)] * 3 + [Reply("degraded", True, 1, 9.0)]
    drill = Drill(dict(enumerate(replies)))
    judgement = judged(replies, calibration(50.0, 90.0))
    text = drill_report(drill, judgement=judgement, routing="order-free")
    words = " ".join(text.split())
    assert "answered in full 75.0 %" in words
    assert "degraded 25.0 %" in words
    assert "half within 5, 99 % within 9" in text
    assert "100.0 %, inside what the calibration lets expect: 80.0 %" in text
    unjudged = drill_report(drill, judgement="never calibrated", routing="order-free")
    assert "accuracy not judged: never calibrated" in unjudged


def test_the_report_as_json_holds_the_same_figures_and_no_nan():
    replies = [Reply("answered", True, 2, 5.0)] * 3 + [Reply("degraded", True, 1, 9.0)]
    drill = Drill(dict(enumerate(replies)), [(Fault(2, "a", "crash"), 0.5)])
    judgement = judged(replies, calibration(50.0, 90.0))
    report = drill_json(drill, judgement=judgement, routing="order-free")
    assert report["requests"] == 4
    assert report["percent"] == {"answered": 75.0, "degraded": 25.0, "failed": 0.0, "late": 0.0}
    assert report["ms"] == {"median": 5.0, "p99": 9.0}
    assert report["faults"] == [{"at": 2, "host": "a", "kind": "crash", "seconds": 0.5}]
    accuracy = report["accuracy"]
    assert (accuracy["answers"], accuracy["top1"], accuracy["expected"]) == (4, 100.0, 80.0)
    assert accuracy["inside"]

    # Nobody answered: no accuracy, and no time.
    empty = drill_json(Drill(), judgement=judged([], calibration(50.0)), routing="sequential")
    assert empty["accuracy"] is empty["ms"]["median"] is None
    json.dumps([report, empty], allow_nan=False)


def test_images_are_those_of_the_calibration_and_of_others_nothing_is_judged():
    stored = calibration(50.0, 60.0, 70.0)
    assert calibrated_data(stored, model="dir:m") == "d"
    with pytest.raises(UsageError, match=r"never calibrated.* swarm calibrate dir:m --data SPEC"):
        calibrated_data(None, model="dir:m")
    assert why_not_judged(stored, data="d") == ""
    assert why_not_judged(None, data="d") == "the model was never calibrated"
    assert "on d, and these images are e" in why_not_judged(stored, data="e")


@pytest.mark.parametrize(
    ("patient", "asked", "seconds"), [(False, 7.0, 0), (True, 7.0, 3 * 7), (True, None, 3 * 1)]
)
def test_a_patient_client_waits_as_long_as_the_gateway_asks(patient, asked, seconds):
    class Client:
        async def classify(self, image, **options):
            raise SwarmError("no host is up", place="here", retry_after=asked)

    async def drilled():
        ask = load_client(Client(), [Labelled(b"", 0)], deadline_ms=1e9, patient=patient)
        drill = await run_drill(ask, 3, concurrency=1)
        return drill.share("failed"), round(loop_time(), 3)

    assert run_virtual(drilled()) == (100, seconds)


def test_the_demo_marks_an_accuracy_outside_its_interval():
    def cells(right, **facts):
        replies = [Reply("answered", number < right, 1, 1.0, **facts) for number in range(100)]
        return cells_of(Drill(dict(enumerate(replies))), calibration(90.0))[-2:]

    verdict = judged([Reply("answered", True, 1, 1.0)] * 100, calibration(90.0))
    interval = f"90.0 ({verdict.low:.1f}-{verdict.high:.1f})"
    assert cells(90) == ("90.0 %", interval)
    assert cells(70) == ("70.0 %", f"{interval}, outside")
    assert cells(90, unjudged="blocks of another model took part") == ("", "")


def test_images_of_other_classes_are_refused_and_few_are_enough(tmp_path):
    for name in ("cat", "dog"):
        folder = tmp_path / "test" / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("L", (20, 12), number).save(folder / f"{number}.png")
    model = load(DEFAULT_MODEL)
    with pytest.raises(DataError, match="the model has 100 outputs, the data has 2 classes"):
        labelled_images(model, f"folder:{tmp_path}", count=4)
    assert len(labelled_images(model, "digit-pairs?test=3&train=5", count=10)) == 3
    with pytest.raises(UsageError, match="At least one request is needed, got 0"):
        labelled_images(model, "digit-pairs", count=0)


def test_a_fault_that_cannot_happen_ends_the_drill():
    class Refusing:
        async def inject(self, fault):
            raise UsageError("no such switch")

    async def ask(_):
        await asyncio.sleep(0)
        return Reply("answered", True, 12, 1.0)

    with pytest.raises(UsageError, match="no such switch"):
        asyncio.run(run_drill(ask, 9, faults=[Fault(3, "a", "slow")], engine=Refusing()))


# --- the command ----------------------------------------------------------------------------------


class FakeOperator:
    """Notes what it is told, and how the hosts are then. `refuses`: what fails."""

    def __init__(self, *refuses):
        self.told, self.refuses = [], refuses
        self.conditions = dict.fromkeys("abc", "healthy")
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def command(self, name, *, routing="", host="", kind=""):
        if name == "routing":
            self.told.append((name, routing))
            return {"before": "sequential"}
        self.asked.set()
        assert kind == "rejoin" or self.goes_on.wait(HANGS)
        self.told.append((kind, host))
        if (kind, host) in self.refuses:
            raise LayerShuffleError(f"{host} cannot {kind}")
        self.conditions[host] = "healthy" if kind == "rejoin" else "gone"
        return {}


def drilled(monkeypatch, operator, ask, routing="order-free", **options):
    """A drill whose requests are `ask`; of no data and no calibration."""
    hosts = [SimpleNamespace(name=name) for name in operator.conditions]

    class Client:
        def __init__(self, *_, **__):
            pass

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        async def swarm(self):
            for host in hosts:
                host.condition = operator.conditions[host.name]
            return SimpleNamespace(hosts=hosts)

    monkeypatch.setattr("layershuffle.models.load", lambda spec: FAMILIES["timm-vit"].wrapped())
    monkeypatch.setattr("layershuffle.swarm.load_client.labelled_images", lambda *_, **__: ())
    monkeypatch.setattr("layershuffle.swarm.load_client.load_client", lambda *_, **__: ask)
    monkeypatch.setattr("layershuffle.swarm.client.AsyncSwarmClient", Client)
    for name in ("served.served_directory", "served.ServedModel", "calibration.calibration_of"):
        monkeypatch.setattr(f"layershuffle.swarm.{name}", lambda _: None)
    facts = {"hosts": ["a", "b", "c"], "model": "mine", "routing": routing}
    return DrillCommand(kinds=("crash", "freeze"), data="some", **options).drill(facts, operator)


def test_with_json_the_output_is_json_and_what_happens_goes_to_standard_error(monkeypatch, capsys):
    operator = FakeOperator()
    options = {"requests": 40, "routings": ("order-free", "sequential"), "json": True}
    assert asyncio.run(drilled(monkeypatch, operator, answered, **options)) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["hosts"] == 3
    assert [routing["routing"] for routing in report["routings"]] == ["order-free", "sequential"]
    for routing in report["routings"]:
        assert routing["percent"]["answered"] == 100.0
        assert routing["accuracy_why"] == "the model was never calibrated"
        assert [fault["kind"] for fault in routing["faults"]] == ["crash", "freeze"]
    assert "before request" in output.err


async def answered(number):
    await asyncio.sleep(0)
    return Reply("answered", True, 3, 1.0)


def test_a_drill_of_a_model_that_was_never_calibrated(monkeypatch, capsys):
    operator = FakeOperator()
    assert asyncio.run(drilled(monkeypatch, operator, answered, requests=40)) == 0
    assert "accuracy not judged: the model was never calibrated" in capsys.readouterr().out
    assert set(operator.conditions.values()) == {"healthy"}
    assert operator.told[-1] == ("routing", "sequential")


@pytest.mark.parametrize("routing", ["order-free", "sequential"])
def test_a_drill_uses_the_routing_of_the_swarm(monkeypatch, capsys, routing):
    operator = FakeOperator()
    assert asyncio.run(drilled(monkeypatch, operator, answered, routing, requests=40)) == 0
    assert operator.told[0] == ("routing", routing)
    assert f"{routing}, 40 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("routings", "code"),
    [
        (("order-free",), 1),
        (("order-free", "sequential"), 1),
        (("sequential", "order-free"), 0),
    ],
)
def test_a_request_lost_in_free_order_is_a_failure(monkeypatch, routings, code):
    failures = iter([True])  # the first request of the first routing

    async def ask(number):
        return Reply("failed", False, 0, 1.0) if next(failures, False) else await answered(number)

    drill = drilled(monkeypatch, FakeOperator(), ask, requests=40, routings=routings)
    assert asyncio.run(drill) == code


def test_a_drill_that_breaks_mends_what_it_broke(monkeypatch):
    async def ask(number):
        if number == 15:  # one host crashed
            raise RuntimeError("no gateway")
        return await answered(number)

    operator = FakeOperator()
    with pytest.raises(RuntimeError, match="no gateway"):
        asyncio.run(drilled(monkeypatch, operator, ask, requests=40, concurrency=1))
    ((crash, host),) = [order for order in operator.told if order[0] in ("crash", "freeze")]
    assert crash == "crash"
    assert [order for order in operator.told if order[0] == "rejoin"] == [("rejoin", host)]
    assert operator.told[-1] == ("routing", "sequential")


def test_ctrl_c_mends_too_and_after_the_fault_under_way(monkeypatch):
    """The order for the fault runs in a thread, which nothing stops."""
    operator = FakeOperator()
    operator.goes_on.clear()

    async def go():
        task = asyncio.create_task(drilled(monkeypatch, operator, answered, requests=40))
        await until(operator.asked.is_set)
        assert not operator.told[2:], "still under way"
        task.cancel()
        for _ in range(100):  # in which a drill that did not wait would mend
            await asyncio.sleep(0)
        operator.goes_on.set()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    faults = [order for order in operator.told if order[0] != "routing"]
    assert faults == [("crash", faults[0][1]), ("rejoin", faults[0][1])]
    assert set(operator.conditions.values()) == {"healthy"}


def test_a_host_that_cannot_be_mended_keeps_no_other_from_it(monkeypatch):
    faults = one_of_each_fault(["a", "b", "c"], requests=40, seed=1, kinds=("crash", "freeze"))
    first, second = (fault.host for fault in faults)
    assert first != second
    operator = FakeOperator(("rejoin", min(first, second)))
    with pytest.raises(LayerShuffleError, match="cannot rejoin"):
        asyncio.run(drilled(monkeypatch, operator, answered, requests=40, seed=1))
    assert operator.conditions[max(first, second)] == "healthy"
    assert operator.told[-1] == ("routing", "sequential")
