"""`layershuffle bench` on a tiny model: its counts against known numbers."""

import json
from dataclasses import replace
from itertools import count

import pytest
import torch
from _clocks import PICO, WIDTH_64

from layershuffle.bench.kinds import bench
from layershuffle.bench.machine import PhaseTimer, flops_of
from layershuffle.bench.report import report_text
from layershuffle.bench.settings import BenchConfig, BenchSettings, resolve
from layershuffle.bench.workload import make_workload, random_spec
from layershuffle.cli import main
from layershuffle.core import losses
from layershuffle.core.stack import running, with_hooks
from layershuffle.errors import TrainingError, UsageError
from refusals import refuses

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
    monkeypatch.setattr("layershuffle.bench.machine._SIZE", {"cpu": 64})


def test_training_has_its_conditions_and_phases():
    report = bench("train", TINY)
    assert list(report.phases) == [*PHASES, "backward", "optimiser"]
    assert all(milliseconds > 0 for milliseconds in report.phases.values())
    assert report.mfu == pytest.approx(report.rate * report.flops_per_image / report.ceiling)
    text = report_text(report)
    assert text.startswith(f"train: {SMALL}, batch 4, fp32, on {report.hardware['processor']}")
    assert "blocks    eager (compile is off)" in text


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_compiled_blocks_have_one_graph_in_every_order(kind):
    report = bench(kind, replace(TINY, compile=True))
    assert report.blocks == {"mode": "compiled", "reason": None, "graphs": 1, "recompiles": 0}
    assert "compiled, 1 graph, 0 recompiles after warm-up" in report_text(report)


def test_inference_runs_in_its_precision(monkeypatch):
    seen = []
    monkeypatch.setattr(PhaseTimer, "after", lambda self, state, step: seen.append(state.dtype))
    report = bench("eval", replace(TINY, precision="bf16"))
    assert set(seen) == {torch.bfloat16}
    assert report.hardware["precision"] == "bf16"


def test_a_batch_that_is_too_large_is_refused(monkeypatch):
    def no_memory(*args, **way):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(losses, "loss_along", no_memory)
    with refuses(TrainingError):
        bench("train", TINY)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eval", replace(TINY, orders_per_batch=4)),
        ("train", replace(TINY, model=SMALL.replace("num_classes=10", "num_classes=0"))),
    ],
)
def test_what_cannot_be_measured_is_refused(kind, config):
    with refuses(UsageError):
        bench(kind, config)


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


def test_weights_are_random_and_nothing_is_downloaded():
    assert random_spec("timm:vit_tiny") == "timm:vit_tiny?pretrained=false"
    assert random_spec("hf:google/vit?a=1") == "hf:google/vit?a=1&pretrained=false"
    for spec in (PICO, "torchvision:vit_b_16?weights=none", "bundled:digits"):
        assert random_spec(spec) == spec


def test_the_command(capsys):
    config = resolve(BenchSettings(device="cpu", batch_size=3))
    assert (config.model, config.batch_size, config.compile) == ("bundled:digits", 3, False)
    words = ["bench", "eval", "--model", PICO, "--batch-size", "1", "--device", "cpu", "--json"]
    assert main([*words, "--steps", "5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch_size"], len(report["rates"])) == (1, 5)
