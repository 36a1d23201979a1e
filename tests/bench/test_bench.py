"""`layershuffle bench` on a model that costs nothing: what it counts is what happened."""

import json
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count, islice

import pytest
import torch

from layershuffle.bench.choices import Chosen, choose
from layershuffle.bench.kinds import BENCHES
from layershuffle.bench.machine import Syncs, factors, flops_of, matmul_ceiling
from layershuffle.bench.marks import BlockMarks, Marks, median_phases
from layershuffle.bench.measured import WARM_UP
from layershuffle.bench.merge import Added, family_of, memory_of_merges
from layershuffle.bench.pairs import SMOKE
from layershuffle.bench.reading import Again, bench_input, steady
from layershuffle.bench.report import Conditions, report_text, throughput
from layershuffle.bench.settings import KINDS, BenchSettings
from layershuffle.bench.subjects import PICO, WIDTH_64, random_spec, subject
from layershuffle.cli import main
from layershuffle.errors import TrainingError, UsageError
from layershuffle.models import image_view
from layershuffle.stack import running, with_hooks
from layershuffle.training.state import TrainState

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SMALL = PICO.replace("depth=12", "depth=4")
TINY = Chosen(
    model=SMALL, batch=4, steps=5, device="cpu", precision="fp32", compile=False,
    orders_per_batch=1, workers=0, backend="eager",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("layershuffle.bench.machine._SIZE", {"cpu": 64})


def bench(kind, **changes):
    return BENCHES[kind](replace(TINY, **changes))


def test_training_is_told_with_its_conditions_and_phases():
    report = bench("train")
    assert list(report.phases) == ["data", "stem", "blocks", "head", "backward", "optimiser"]
    assert all(milliseconds > 0 for milliseconds in report.phases.values())
    assert report.rate.low <= report.rate.median <= report.rate.high
    assert report.rate.steps == 5
    assert report.mfu == pytest.approx(report.rate.median * report.flops_per_image / report.ceiling)
    assert report.syncs is None  # no GPU
    text = report_text(report)
    assert text.startswith(f"train: {SMALL}, batch 4, fp32, on ")
    assert "blocks     eager (compile is off)" in text
    assert report.conditions.hardware["processor"] in text
    json.dumps(asdict(report))


def test_compiled_training_has_one_graph_in_every_order():
    report = bench("train", compile=True)
    assert (report.mode.name, report.mode.graphs, report.mode.recompiles) == ("compiled", 1, 0)
    assert "compiled, 1 graphs, 0 recompiles after warm-up" in report_text(report)


def test_what_fell_back_is_marked_eager(caplog):
    report = bench("train", compile=True, backend="no-such-backend")
    assert report.mode.name == "eager"
    assert "no-such-backend" in report.mode.reason
    assert f"eager ({report.mode.reason})" in report_text(report)
    assert "NOT compiled" in caplog.text


def test_a_batch_that_does_not_fit_names_one_that_does(monkeypatch):
    whole = TrainState.loss_and_logits

    def small_memory(self, model, *, images, labels):
        if len(labels) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, model, images=images, labels=labels)

    monkeypatch.setattr(TrainState, "loss_and_logits", small_memory)
    with pytest.raises(TrainingError, match=r"A step of 8 images .* is 2\. Next: --batch 2"):
        bench("train", batch=8)


@pytest.mark.parametrize(("steps_before", "copies"), [(0, 2), (1, 0)])
def test_what_fits_leaves_room_for_the_moments_of_adam(steps_before, copies, monkeypatch):
    """Both of them are missing until the first step is done."""
    reserved, held = [], []
    whole, empty_like = TrainState.loss_and_logits, torch.empty_like

    def loss_and_logits(self, *args, **kwargs):
        if self.step == steps_before:
            # Only now: before the first step the run tries a forward of its own batch.
            monkeypatch.setattr("layershuffle.training.warmup.try_forward", try_forward)
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, *args, **kwargs)

    def noted(tensor, **kwargs):
        made = empty_like(tensor, **kwargs)
        if isinstance(tensor, torch.nn.Parameter) and not kwargs:
            reserved.append(weakref.ref(made))
        return made

    def try_forward(state, size):
        parameters = len(list(state.model.parameters()))
        held.append((size, sum(one() is not None for one in reserved) / parameters))
        if size > 2:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(TrainState, "loss_and_logits", loss_and_logits)
    monkeypatch.setattr(torch, "empty_like", noted)
    with pytest.raises(TrainingError, match=r"is 2\. Next: --batch 2"):
        bench("train", batch=8)
    assert held == [(4, copies), (2, copies)]
    assert not any(one() is not None for one in reserved)


def test_counting_of_syncs_ends_with_the_step_that_fails(monkeypatch):
    ended = []

    @contextmanager
    def counted(self, device):
        try:
            yield
        finally:
            ended.append(device)

    def fails(self, *args, **kwargs):
        if self.step == WARM_UP + 1:
            raise FloatingPointError("no number")
        return whole(self, *args, **kwargs)

    whole = TrainState.loss_and_logits
    monkeypatch.setattr(Syncs, "counted", counted)
    monkeypatch.setattr(TrainState, "loss_and_logits", fails)
    with pytest.raises(FloatingPointError):
        bench("train")
    assert ended == ["cpu"]


def test_syncs_are_what_torch_calls_so(monkeypatch):
    """Its notice that the debug mode is a prototype, which speaks of them too, is none."""
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
def test_orders(precision, monkeypatch):
    monkeypatch.setattr("layershuffle.bench.orders._QUICK", SMOKE)
    report = bench("orders", batch=2, precision=precision)
    facts = report.facts
    assert "4 block runs for 10" in facts["all truncations"]
    assert "10 block runs for 16" in facts["leave-one-out and base"]
    assert "9 block runs for 12" in facts["leave-two-out"]
    assert report.conditions.dtype == precision


def test_merges():
    report = bench("merge")
    assert report.rate.unit == "merges"
    assert "100 merges add" in report.facts["memory"]


def test_merges_are_of_the_dtype_that_is_told(monkeypatch):
    families = []
    monkeypatch.setattr(
        "layershuffle.bench.merge.memory_of_merges",
        lambda family, merges: families.append(family) or Added(donors=1, tensors=0, objects=0),
    )
    assert bench("merge", precision="bf16").conditions.dtype == "bf16"
    weights = [weight for donor in families[0].donors for weight in donor.parameters()]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_input_reads_what_was_generated():
    """The batch is the one asked for, though it is larger than all files together."""
    report = bench_input(replace(TINY, batch=20, precision="bf16"), files=16)
    assert report.rate.steps == 5
    assert "12 JPEG files of 500 x 375" in report.facts["files"]
    assert (report.conditions.batch, report.conditions.dtype) == (20, "uint8")
    assert report.conditions.hardware["precision"] == "uint8"
    assert [*islice(Again(3, batch=4), 2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]


@pytest.mark.parametrize(("workers", "steps"), [(0, 5), (3, 1), (16, 5)])
def test_reading_is_timed_when_every_process_is_busy(workers, steps):
    """Two batches each are left out; then four each or more are timed, in steps of one each."""
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
    model = subject(WIDTH_64, batch=1).model
    flops = flops_of(model, image_view(model))
    assert flops.forward == whole
    assert flops.training == 3 * whole - 2 * patches * 16 * width  # images need no gradient


def test_a_ceiling_is_above_what_models_reach():
    assert matmul_ceiling("cpu", "fp32") > 1e7


def test_the_ceiling_multiplies_numbers_that_differ():
    one, other = factors("cpu", "bf16"), factors("cpu", "bf16")
    assert all(map(torch.equal, one, other))
    assert not torch.equal(*one)
    for matrix in one:
        assert matrix.dtype == torch.bfloat16
        assert abs(matrix.float().std() - 1) < 0.1


def test_marks_are_read_by_step_and_phase():
    ticks = count()
    marks = Marks("cpu", clock=lambda: float(next(ticks)))
    for phase in ("before", "a", "b", "a", "b", "b", "a"):
        marks.mark(phase)
    assert marks.steps("a") == [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    assert median_phases(marks.steps("a")) == {"a": 1.0, "b": 1.5}
    marks.mark("b")  # the third step has begun and not ended
    assert len(marks.steps("a")) == 2
    assert Marks("cpu").steps("a") == []


def test_blocks_are_marked_whatever_the_order():
    ticks = count()
    on, marks = subject(PICO, batch=2), Marks("cpu", clock=lambda: float(next(ticks)))
    with torch.no_grad(), running(on.model, (3, 1)), with_hooks(on.model, BlockMarks(marks)):
        on.model(on.images)
    assert [phase for phase, _ in marks.spans()] == ["blocks", "head", "blocks"]


def test_no_throughput_without_its_conditions():
    hardware = {"processor": "a processor", "gpu": None, "threads": 1}
    said = Conditions(model="m", batch=1, dtype="fp32", hardware=hardware)
    assert str(said) == "m, batch 1, fp32, on a processor, 1 thread(s)"
    for unsaid in ("model", "dtype"):
        with pytest.raises(UsageError, match=f"without its {unsaid}"):
            replace(said, **{unsaid: ""})
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
    with pytest.raises(UsageError, match="trained weights"):
        random_spec("timm:vit_tiny_patch16_224?pretrained=true")


def test_memory_of_merges_is_that_of_the_average_ends():
    """Tensors: one set of stem and head, whatever the number of merges."""
    model = subject(SMALL, batch=1).model
    added = memory_of_merges(family_of(model, 4), merges=5)
    ends = [t for name, t in model.state_dict().items() if not name.startswith("blocks.")]
    total = sum(t.nbytes for t in model.state_dict().values())
    assert added.donors == 4 * total
    assert added.tensors == sum(t.nbytes for t in ends)
    assert 0 < added.objects < 5 * 50_000


def test_choices():
    chosen = choose(BenchSettings(device="cpu", batch=3))
    assert (chosen.model, chosen.batch, chosen.compile) == ("bundled:digits", 3, False)
    assert (chosen.precision, chosen.device) == ("fp32", "cpu")


def test_the_command(capsys):
    words = ["bench", "merge", "--model", PICO, "--batch", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["conditions"]["batch"] == 1
    assert report["conditions"]["hardware"]["processor"]
    assert main(["bench", "trian"]) == 2
    error = capsys.readouterr().err
    assert "bench measures train, eval" in error
    assert "did you mean 'train'?" in error
    assert set(BENCHES) == set(KINDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_syncs_are_counted():
    syncs, numbers = Syncs(), torch.ones(3, device="cuda")
    with syncs.counted("cuda"):
        assert float(numbers.sum()) == 3.0
        numbers.add_(1)
    assert syncs.count == 1
