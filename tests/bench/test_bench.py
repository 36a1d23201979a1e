"""Throughput, phases and FLOPs of `benchmarks/` on a tiny model: counts against known numbers."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from _clocks import PICO, WIDTH_64
from _kinds import BenchConfig, bench
from _machine import PhaseTimer, flops_of
from _workload import make_workload

from layershuffle.core.stack import running, with_hooks

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SMALL = PICO.replace("depth=12", "depth=4")
TINY = BenchConfig(
    model=SMALL, batch_size=4, steps=5, device="cpu", precision="fp32", compile=False,
    orders_per_batch=1, backend="eager",
)  # fmt: skip
PHASES = ["data", "stem", "blocks", "head"]


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("_machine._SIZE", {"cpu": 64})


def test_training_has_its_conditions_and_phases():
    report = bench("train", TINY)
    assert list(report.phases) == [*PHASES, "backward", "optimiser"]
    assert all(milliseconds > 0 for milliseconds in report.phases.values())
    assert report.mfu == pytest.approx(report.rate * report.flops_per_image / report.ceiling)
    assert report.conditions.startswith(f"{SMALL}, batch 4, fp32, on ")
    assert report.blocks["mode"] == "eager"
    assert report.blocks["reason"] == "compile is off"


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_compiled_blocks_have_one_graph_in_every_order(kind):
    report = bench(kind, replace(TINY, compile=True))
    assert report.blocks == {"mode": "compiled", "reason": None, "graphs": 1, "recompiles": 0}


def test_inference_runs_in_its_precision(monkeypatch):
    seen = []
    monkeypatch.setattr(PhaseTimer, "after", lambda self, state, step: seen.append(state.dtype))
    report = bench("eval", replace(TINY, precision="bf16"))
    assert set(seen) == {torch.bfloat16}
    assert report.hardware["precision"] == "bf16"


def test_flops_of_a_vit_in_closed_form():
    """Two per multiplication: patches, then per block qkv, scores, mix, projection, two of MLP."""
    tokens, width, hidden, patches = 16, 64, 128, 15
    block = tokens * width * 3 * width + 2 * tokens * tokens * width
    block += tokens * width * width + 2 * tokens * width * hidden
    whole = 2 * (patches * 16 * width + 12 * block + width * 100)
    forward, training = flops_of(make_workload(WIDTH_64, batch_size=1).model)
    assert forward == whole
    assert training == 3 * whole - 2 * patches * 16 * width  # images need no gradient


def ticking():
    ticks = count()
    return PhaseTimer("cpu", clock=lambda: float(next(ticks)))


def test_phases_are_summed_by_step():
    timer = ticking()
    assert timer.steps() == []
    for phase in ("before", "data", "b", "data", "b", "b", "data"):
        timer.begin(phase)
    assert timer.steps() == [{"data": 1.0, "b": 1.0}, {"data": 1.0, "b": 2.0}]
    for phase in ("data", "b", "data", "b"):  # the second step has begun and not ended
        timer.begin(phase)
    assert timer.steps() == [{"data": 1.0, "b": 1.0}]


def test_blocks_are_a_phase_whatever_the_order():
    workload, timer = make_workload(PICO, batch_size=2), ticking()
    timer.begin("data")
    with torch.no_grad(), running(workload.model, (3, 1)), with_hooks(workload.model, timer):
        workload.model(workload.images)
    timer.begin("data")
    assert timer.steps() == [{"data": 1.0, "blocks": 2.0, "head": 2.0}]
