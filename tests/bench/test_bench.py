"""`layershuffle bench` on a tiny model: its counts against known numbers."""

import json
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count, islice

import pytest
import torch

from layershuffle.bench.kinds import BENCHES, EndlessBatches, bench_input, bench_orders, steady
from layershuffle.bench.machine import Syncs, factors, flops_of
from layershuffle.bench.report import Conditions, report_text, throughput
from layershuffle.bench.settings import KINDS, WARM_UP, BenchConfig, BenchSettings, resolve
from layershuffle.bench.timing import SMOKE, PhaseTimer, median_phases
from layershuffle.bench.workloads import (
    PICO,
    WIDTH_64,
    make_workload,
    memory_of_merges,
    merge_group,
    random_spec,
)
from layershuffle.cli import main
from layershuffle.core import losses
from layershuffle.core.methods import Method
from layershuffle.core.stack import running, with_hooks
from layershuffle.errors import TrainingError, UsageError
from layershuffle.models import image_view
from refusals import refuses

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SMALL = PICO.replace("depth=12", "depth=4")
TINY = BenchConfig(
    model=SMALL, batch=4, steps=5, device="cpu", precision="fp32", compile=False,
    orders_per_batch=1, workers=0, backend="eager",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("layershuffle.bench.machine._SIZE", {"cpu": 64})


def bench(kind, **changes):
    return BENCHES[kind](replace(TINY, **changes))


def test_training_has_its_conditions_and_phases():
    report = bench("train")
    assert list(report.phases) == ["data", "stem", "blocks", "head", "backward", "optimiser"]
    assert all(milliseconds > 0 for milliseconds in report.phases.values())
    assert report.rate.steps == 5
    assert report.mfu == pytest.approx(report.rate.median * report.flops_per_image / report.ceiling)
    assert report.syncs is None  # no GPU
    text = report_text(report)
    assert text.startswith(f"train: {SMALL}, batch 4, fp32, on ")
    assert "blocks    eager (compile is off)" in text
    assert report.conditions.hardware["processor"] in text
    json.dumps(asdict(report))


def test_compiled_training_has_one_graph_in_every_order():
    report = bench("train", compile=True)
    assert (report.mode.name, report.mode.graphs, report.mode.recompiles) == ("compiled", 1, 0)
    assert "compiled, 1 graphs, 0 recompiles after warm-up" in report_text(report)


def test_a_backend_that_fails_is_reported_as_eager(caplog):
    report = bench("train", compile=True, backend="no-such-backend")
    assert report.mode.name == "eager"
    assert "no-such-backend" in report.mode.reason
    assert f"eager ({report.mode.reason})" in report_text(report)
    assert "NOT compiled" in caplog.text


def test_a_batch_that_is_too_large_names_one_that_fits(monkeypatch):
    whole = losses.loss_along

    def small_memory(model, images, **way):
        if len(images) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return whole(model, images, **way)

    monkeypatch.setattr(losses, "loss_along", small_memory)
    monkeypatch.setattr("layershuffle.training.warmup.loss_along", small_memory)
    with refuses(TrainingError):
        bench("train", batch=8)


@pytest.mark.parametrize(("steps_before", "copies"), [(0, 2), (1, 0)])
def test_the_batch_that_fits_leaves_room_for_the_moments_of_adam(steps_before, copies, monkeypatch):
    """Both moments are missing until the first step is done."""
    reserved, trials = [], []
    whole, empty_like = Method.loss_and_logits, torch.empty_like

    def loss_and_logits(self, model, images, labels, **place):
        if len(labels) == 8 and place["step"] == steps_before:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, model, images, labels, **place)

    def noted(tensor, **kwargs):
        copy = empty_like(tensor, **kwargs)
        if isinstance(tensor, torch.nn.Parameter) and not kwargs:
            reserved.append(weakref.ref(copy))
        return copy

    def trial(state, size):
        parameters = len(list(state.model.parameters()))
        trials.append((size, sum(copy() is not None for copy in reserved) / parameters))
        if size > 2:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Method, "loss_and_logits", loss_and_logits)
    monkeypatch.setattr("layershuffle.training.warmup.try_forward", trial)
    monkeypatch.setattr(torch, "empty_like", noted)
    with refuses(TrainingError):
        bench("train", batch=8)
    assert trials == [(4, copies), (2, copies)]
    assert not any(copy() is not None for copy in reserved)


def test_counting_of_syncs_ends_with_the_step_that_fails(monkeypatch):
    ended = []
    whole = Method.loss_and_logits

    @contextmanager
    def counted(self, device):
        try:
            yield
        finally:
            ended.append(device)

    def fails(self, *args, **named):
        if named["step"] == WARM_UP + 1:
            raise FloatingPointError("no number")
        return whole(self, *args, **named)

    monkeypatch.setattr(Syncs, "counted", counted)
    monkeypatch.setattr(Method, "loss_and_logits", fails)
    with pytest.raises(FloatingPointError):
        bench("train")
    assert ended == ["cpu"]


def test_only_torchs_sync_warnings_are_counted(monkeypatch):
    """The warning that the debug mode is a prototype also mentions syncs, and is not counted."""
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    syncs = Syncs()
    with syncs.counted("cuda"):
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all "
            "synchronizing operations (Triggered internally at Module.cpp)",
            stacklevel=1,
        )
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered ...)", stacklevel=1)
    assert syncs.count == 2
    assert modes == ["warn", "default"]


def test_inference():
    report = bench("eval", compile=True)
    assert list(report.phases) == ["data", "stem", "blocks", "head"]
    assert (report.mode.name, report.mode.graphs, report.mode.recompiles) == ("compiled", 1, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_orders(precision):
    report = bench_orders(replace(TINY, batch=2, precision=precision), effort=SMOKE)
    facts = report.facts
    assert "4 block runs for 10" in facts["all truncations"]
    assert "10 block runs for 16" in facts["leave-one-out and base"]
    assert "9 block runs for 12" in facts["leave-two-out"]
    assert (report.conditions.dtype, report.rate.unit) == (precision, "scores")


def test_merges():
    report = bench("merge", precision="bf16")
    assert (report.rate.unit, report.rate.steps) == ("merges", 5)
    weights = 2 * sum(p.numel() for p in make_workload(SMALL, batch=1).model.parameters())
    assert f"to the {12 * weights / 2**20:,.0f} MiB of 12 models" in report.facts["memory"]


def test_input_reads_what_was_generated():
    """The batch has the requested size, although it is larger than the number of files."""
    report = bench_input(replace(TINY, batch=20, precision="bf16"), files=16)
    assert report.rate.steps == 5
    assert "12 JPEG files of 500 x 375" in report.facts["files"]
    assert (report.conditions.batch, report.conditions.dtype) == (20, "uint8")
    assert report.conditions.hardware["precision"] == "uint8"
    assert [*islice(EndlessBatches(3, batch=4), 2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]


@pytest.mark.parametrize(("workers", "steps"), [(0, 5), (3, 1), (16, 5)])
def test_reading_is_timed_when_every_process_is_busy(workers, steps):
    """Two batches per process are not timed, then four or more are, in steps of one each."""
    each, taken = max(1, workers), []
    batches = (taken.append(number) for number in count())
    seconds = steady(batches, workers=workers, steps=steps, clock=lambda: float(len(taken)))
    assert seconds == [each] * max(4, steps)
    assert len(taken) == each * (2 + max(4, steps))


def test_processes_read_from_one_iterator_to_the_end():
    report = bench_input(replace(TINY, batch=2, workers=2), files=8)
    assert report.facts["processes"] == 2
    assert report.rate.median > 0


def test_flops_of_a_vit_in_closed_form():
    """Two per multiplication: patches, then per block qkv, scores, mix, projection, two of MLP."""
    tokens, width, hidden, patches = 16, 64, 128, 15
    block = tokens * width * 3 * width + 2 * tokens * tokens * width
    block += tokens * width * width + 2 * tokens * width * hidden
    whole = 2 * (patches * 16 * width + 12 * block + width * 100)
    model = make_workload(WIDTH_64, batch=1).model
    flops = flops_of(model, image_view(model))
    assert flops.forward == whole
    assert flops.training == 3 * whole - 2 * patches * 16 * width  # images need no gradient


def test_the_ceiling_multiplies_numbers_that_differ():
    matrices, again = factors("cpu", "bf16"), factors("cpu", "bf16")
    assert all(map(torch.equal, matrices, again))
    assert not torch.equal(*matrices)
    for matrix in matrices:
        assert matrix.dtype == torch.bfloat16
        assert abs(matrix.float().std() - 1) < 0.1


def ticking(device="cpu"):
    ticks = count()
    return PhaseTimer(device, clock=lambda: float(next(ticks)))


def test_phases_are_summed_by_step():
    timer = ticking()
    assert timer.steps("a") == []
    for phase in ("before", "a", "b", "a", "b", "b", "a"):
        timer.begin(phase)
    assert timer.steps("a") == [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    assert median_phases(timer.steps("a")) == {"a": 1.0, "b": 1.5}
    timer.begin("b")  # the third step has begun and not ended
    assert len(timer.steps("a")) == 2


def test_blocks_are_a_phase_whatever_the_order():
    workload, timer = make_workload(PICO, batch=2), ticking()
    timer.begin("step")
    with torch.no_grad(), running(workload.model, (3, 1)), with_hooks(workload.model, timer):
        workload.model(workload.images)
    timer.begin("step")
    assert timer.steps("step") == [{"step": 1.0, "blocks": 2.0, "head": 2.0}]


def test_a_throughput_names_its_conditions():
    hardware = {"processor": "a processor", "gpu": None, "threads": 1}
    conditions = Conditions(model="m", batch=1, dtype="fp32", hardware=hardware)
    assert str(conditions) == "m, batch 1, fp32, on a processor, 1 thread"
    rate = throughput([0.5, 1.0, 2.0], 10)
    assert (rate.median, rate.low, rate.high) == (10.0, 5.0, 20.0)


def test_weights_are_random_and_nothing_is_downloaded():
    assert random_spec("timm:vit_tiny_patch16_224") == (
        "timm:vit_tiny_patch16_224?pretrained=false"
    )
    assert random_spec("torchvision:vit_b_16?image_size=32") == (
        "torchvision:vit_b_16?image_size=32&weights=none"
    )
    assert random_spec(PICO) == PICO
    assert random_spec("bundled:digits") == "bundled:digits"
    with refuses(UsageError):
        random_spec("timm:vit_tiny_patch16_224?pretrained=true")


def test_memory_of_merges_is_that_of_the_average_ends():
    """Tensors: one set of stem and head for any number of merges."""
    model = make_workload(SMALL, batch=1).model
    added = memory_of_merges(merge_group(model, 4), merges=5)
    ends = [t for name, t in model.state_dict().items() if not name.startswith("blocks.")]
    total = sum(t.nbytes for t in model.state_dict().values())
    assert added.donors == 4 * total
    assert added.tensors == sum(t.nbytes for t in ends)
    assert 0 < added.objects < 5 * 50_000


def test_settings_are_resolved_for_this_machine():
    config = resolve(BenchSettings(device="cpu", batch=3))
    assert (config.model, config.batch, config.compile) == ("bundled:digits", 3, False)
    assert (config.precision, config.device) == ("fp32", "cpu")


def test_the_command(capsys):
    words = ["bench", "merge", "--model", PICO, "--batch", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["conditions"]["batch"] == 1
    assert report["conditions"]["hardware"]["processor"]
    assert main(["bench", "trian"]) == 2
    error = capsys.readouterr().err
    assert "KIND must be one of train, eval" in error
    assert "did you mean 'train'?" in error
    assert set(BENCHES) == set(KINDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_syncs_are_counted():
    syncs, numbers = Syncs(), torch.ones(3, device="cuda")
    with syncs.counted("cuda"):
        assert float(numbers.sum()) == 3.0
        numbers.add_(1)
    assert syncs.count == 1
