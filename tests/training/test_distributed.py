"""Two processes train as one does: DDP and FSDP2 on CPUs, over gloo.

One pair of processes runs everything once; the tests check its results.
"""

import functools
import gc
import json
import os
import shutil
import signal
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from runs import NO_DROPOUT, assert_same_weights, settings, weights
from torch.distributed import DistStoreError, TCPStore

import layershuffle as ls
from common import FAMILIES
from forked import SERVER
from layershuffle.core.compiling import BlockCompiler
from layershuffle.data import DataOptions, open_data
from layershuffle.ground.errors import Interrupted, SettingsError, TrainingError, UsageError
from layershuffle.ground.settings import digest
from layershuffle.models import image_view
from layershuffle.training import distributed, fit
from layershuffle.training.distributed import Ranks, is_first_process, joined
from layershuffle.training.loop import epoch_rows
from refusals import refuses

RUN = {"model": NO_DROPOUT, "steps": 9, "eval_every": 9, "checkpoint_every": 9}
# What must not affect the weights.
HIDDEN = ("parallel", "compile", "activation_checkpointing")
GROUPS = {"orders_per_batch": 4, "accumulate": 2, "method": "layershuffle-predict"}
DROP = {"method": "layershuffle-predict", "block_drop": 0.6, "accumulate": 2, "max_parallel": 3}
FAST = {"method": "layershuffle-position", "compile": True, "activation_checkpointing": True}
TIMM = {
    "method": "anyorder",
    "layer_decay": 0.5,
    "freeze": ["patch_embed", "blocks.0"],
    "smoothing": 0.1,
    "keep_features": 2.0,
}
ARMS = {
    "ddp": {},
    "groups": GROUPS,
    "drop": DROP,
    "compiled": FAST,
    "idle": {"method": "layershuffle-predict", "model": "dinov2"},
    "fsdp": {"parallel": "fsdp", **FAST},
    "fsdp groups": {"parallel": "fsdp", **GROUPS},
    "fsdp drop": {"parallel": "fsdp", **DROP},
    "exit": {**GROUPS, "exit_weight": 0.5},
    # Ends of an epoch: 8 images and 4, each shared; one image, which both have.
    "rest": {**FAST, "accumulate": 2, "data": "digit-pairs?train=28&validation=32&test=32"},
    "one left": {"data": "digit-pairs?train=17&validation=32&test=32"},
    "fsdp exit": {"parallel": "fsdp", **DROP, "exit_weight": 0.5},
    # Without position parts, the backbone itself is what is wrapped.
    "anyorder": {"method": "anyorder"},
    "fsdp anyorder": {"parallel": "fsdp", "method": "anyorder"},
    "timm": TIMM,
    "fsdp timm": {"parallel": "fsdp", **TIMM},
}
# FSDP2 of torch 2.6 asks the stream of a CPU for an event, which that stream does not give.
HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
NEEDS_FSDP = pytest.mark.skipif(not HAS_FSDP, reason="FSDP2 of torch 2.6 needs GPUs")
# After which step: in the second epoch, and when some blocks have not run yet.
STOPPED = {"ddp": 7, "fsdp drop": 2}
AGAIN = ("ddp", "fsdp drop")
OWN = {"rank_orders": "own", "steps": 3, "eval_every": 3, "warmup": 0, "schedule": "constant"}


def run(models, **changes):
    """The settings of a run; in `models` lies a host that has a parameter without a use."""
    if changes.get("model") == "dinov2":
        changes["model"] = f"hf:{models / 'dinov2'}"
    return settings(**{**RUN, **changes})


def runs_here(name):
    """Whether the torch of this environment can train the arm on CPUs."""
    return HAS_FSDP or ARMS[name].get("parallel") != "fsdp"


def parameters(names):
    """The arms as parameters of a test; those that cannot run here are skipped, and say why."""
    return [pytest.param(name, marks=() if runs_here(name) else NEEDS_FSDP) for name in names]


class SeenForwards(list):
    """The labels of every forward in a training step of this process, and what wraps the model."""

    def __init__(self):
        super().__init__()
        module = sys.modules["layershuffle.training.loop"]
        module._inputs = self.recorded(module._inputs)

    def recorded(self, inputs):
        # The forwards that compile blocks before the first step have no inputs of a step.
        def record(state, pixels, labels, micro_batch):
            model = state.model if state.ddp is None else state.ddp
            unused = getattr(model, "find_unused_parameters", None)
            kind = [type(model).__name__, unused, type(next(model.parameters())).__name__]
            self.append([kind, sorted(labels.tolist())])
            return inputs(state, pixels, labels, micro_batch)

        return record


def stopping_at(step, process):
    """A listener, heard by the first process alone, that asks another one to stop."""

    def listen(event):
        if event["kind"] == "log" and event["step"] == step:
            os.kill(process, signal.SIGTERM)

    return listen


def work(rank, port, models, out, results):
    """What each of the two processes does."""
    gc.freeze()  # see conftest.py
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # As where matplotlib is missing: a page without its curves, which take 0.3 s to draw.
    sys.modules["layershuffle.training.history"].missing = lambda *names: names
    module = sys.modules["layershuffle.training.job"]
    module.BlockCompiler = functools.partial(BlockCompiler, backend="eager")
    facts, steps = {}, SeenForwards()
    with joined("cpu") as ranks:
        pids = [0, 0]
        torch.distributed.all_gather_object(pids, os.getpid())
        arms = {name: arm for name, arm in ARMS.items() if runs_here(name)}
        for name, arm in {**arms, "own": OWN}.items():
            steps.clear()
            facts[f"compiled {name}"] = fit(run(models, **arm), out / name).compile
            facts[f"labels {name}"] = [labels for _, labels in steps]
            facts[f"kind {name}"] = steps[0][0]
        # Stopped by a signal to the second process, and taken up.
        for name in filter(runs_here, STOPPED):
            step = STOPPED[name]
            stopped, again = out / f"stopped {name}", run(models, **ARMS[name])
            steps.clear()
            try:
                listen = stopping_at(step - 1, pids[1])
                fit(again, stopped, on_event=listen)
            except Interrupted as error:
                facts[f"stopped {name}"] = str(error)
            if ranks.first:
                shutil.copytree(stopped, out / f"for one {name}")
            ranks.wait()
            fit(again, stopped)
            facts[f"labels stopped {name}"] = [labels for _, labels in steps]
        # Different seeds would draw different orders.
        for name in filter(runs_here, ("ddp", "fsdp")):
            try:
                fit(run(models, **ARMS[name], seed=5 + rank), out / "differing")
            except TrainingError as error:
                facts[f"refused {name}"] = str(error)
    for name in filter(runs_here, AGAIN):  # each joins anew
        fit(run(models, **ARMS[name]), out / f"{name} again")
    (results / f"{rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    FAMILIES["hf-dinov2"].plain().save_pretrained(place / "dinov2")
    return place


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """The directory of the runs, and the results of each process."""
    out, results = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("results")
    # As torchrun's, it lives longer than a run.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (store.port, models, out, results)
    both = [SERVER.Process(target=work, args=(rank, *given)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(1500)
    assert [process.exitcode for process in both] == [0, 0]
    return out, [json.loads((results / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Where the same run lies, made by one process that neither compiles nor recomputes."""
    out = tmp_path_factory.mktemp("alone")

    def place(name):
        arm = {key: value for key, value in ARMS[name].items() if key not in HIDDEN}
        changed = run(models, **arm)
        fit(changed, out / digest(changed))  # once: a finished run is not repeated
        return out / digest(changed)

    return place


@pytest.mark.parametrize("name", parameters(ARMS))
def test_two_processes_train_the_weights_of_one(pair, alone, name):
    """Over the border of an epoch (6 steps), to rounding: halves of a batch are averaged."""
    assert_same_weights(weights(pair[0] / name), weights(alone(name)), tolerance=2e-5)
    shared, single = (
        json.loads((d / "result.json").read_text()) for d in (pair[0] / name, alone(name))
    )
    assert (shared["processes"], single["processes"]) == (2, 1)
    assert shared["selected"]["step"] == single["selected"]["step"]
    assert shared["selected"]["value"] == pytest.approx(single["selected"]["value"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # Looking for unused parameters costs time: only where there are some.
        ("ddp", ["DistributedDataParallel", False, "Parameter"]),
        ("groups", ["DistributedDataParallel", False, "Parameter"]),
        ("drop", ["DistributedDataParallel", True, "Parameter"]),
        ("idle", ["DistributedDataParallel", True, "Parameter"]),
        pytest.param("fsdp", ["FSDPPositionedModel", None, "DTensor"], marks=NEEDS_FSDP),
        pytest.param("fsdp anyorder", ["FSDPVisionTransformer", None, "DTensor"], marks=NEEDS_FSDP),
    ],
)
def test_what_wraps_the_model(pair, name, kind):
    for facts in pair[1]:
        assert facts[f"kind {name}"] == kind


def batches(run, ranks=1):
    """Batch after batch of rows, as one process reads them."""
    model = ls.load(run.model, seed=run.seed)
    data = open_data(run.data, image_view(model), options=DataOptions(seed=run.seed))
    train = data.splits["train"].dataset
    rows = epoch_rows(len(train), seed=run.seed, epoch=0)
    size = run.batch_size // ranks
    for start in range(0, len(rows), size):
        items = [train[row] for row in rows[start : start + size]]
        labels = torch.tensor([int(label) for _, label in items])
        yield data.finish(torch.stack([pixels for pixels, _ in items])), labels


@pytest.mark.parametrize("name", parameters(["ddp", "fsdp"]))
def test_each_process_sees_its_half_of_every_batch(pair, models, name):
    whole = [sorted(labels.tolist()) for _, labels in batches(run(models))]
    first, second = (facts[f"labels {name}"] for facts in pair[1])
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)][:6] == whole
    assert first[:6] != second[:6]
    assert all(len(labels) == 8 for labels in first)


def test_own_orders_train_the_mean_of_two_gradients(pair, models):
    """The slow path: one process, both halves one after the other, each in its own order."""
    own = run(models, **OWN)
    model = ls.load(own.model, seed=own.seed).train()
    adam = torch.optim.Adam(model.parameters(), lr=own.lr, eps=1e-6)
    halves = list(batches(own, ranks=2))
    for step in range(3):
        for rank in (0, 1):
            pixels, labels = halves[2 * step + rank]
            order = ls.Shuffled().draw(4, seed=own.seed, step=step, rank=rank)
            with ls.running(model, order):
                (F.cross_entropy(model(pixels), labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    expected = {name: weight.detach() for name, weight in model.state_dict().items()}
    assert_same_weights(weights(pair[0] / "own"), expected, tolerance=2e-6)


@pytest.mark.parametrize("name", parameters(STOPPED))
def test_stopped_in_one_process_and_resumed_in_both(pair, name):
    out, both = pair
    for facts in both:
        assert facts[f"stopped {name}"].startswith(f"Stopped at step {STOPPED[name]} of 9")
        assert facts[f"labels stopped {name}"] == facts[f"labels {name}"]
    assert_same_weights(weights(out / f"stopped {name}"), weights(out / name))


@pytest.mark.parametrize("name", parameters(STOPPED))
def test_stopped_in_two_processes_and_resumed_by_one(pair, models, alone, name):
    out = pair[0] / f"for one {name}"
    fit(run(models, **ARMS[name]), out)
    assert_same_weights(weights(out), weights(alone(name)), tolerance=2e-5)


@pytest.mark.parametrize("name", parameters(AGAIN))
def test_the_same_processes_train_again(pair, name):
    assert_same_weights(weights(pair[0] / f"{name} again"), weights(pair[0] / name))


@pytest.mark.parametrize("name", parameters(["ddp", "fsdp"]))
def test_different_orders_are_refused_at_the_start(pair, name):
    for facts in pair[1]:
        assert "differ between processes" in facts[f"refused {name}"]
    assert not (pair[0] / "differing" / "model").exists()


def test_own_orders_are_refused_under_fsdp(models):
    with refuses(SettingsError):
        run(models, parallel="fsdp", rank_orders="own")


@pytest.mark.parametrize("name", parameters(["compiled", "rest", "fsdp"]))
def test_compiled_without_recompiles(pair, name):
    for facts in pair[1]:
        compiled = facts[f"compiled {name}"]
        assert (compiled["mode"], compiled["recompiles"]) == ("compiled", 0), compiled["reason"]


def test_a_batch_that_the_processes_cannot_share(tmp_path):
    from layershuffle.training.job import prepare

    with refuses(UsageError):
        prepare(settings(**RUN), tmp_path, ranks=Ranks(0, 3))
    shared = settings(**{**RUN, "orders_per_batch": 4, "batch_size": 8})
    with refuses(UsageError):  # three of the four orders would never run
        prepare(shared, tmp_path, ranks=Ranks(0, 4))


def test_a_world_size_that_a_job_left_says_what_is_waited_for(monkeypatch, caplog):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for count in ("2", "two"):
        monkeypatch.setenv("WORLD_SIZE", count)
        with refuses(UsageError) as caught, joined("cpu"):
            pass
        assert "unset WORLD_SIZE" in caught.value.hint

    def never_complete(url):
        # Half an hour of torch's; the warning comes after seconds of it.
        assert said.wait(60)
        yield from ()
        raise DistStoreError("timed out")

    said = threading.Event()
    monkeypatch.setattr(distributed, "rendezvous", never_complete)
    monkeypatch.setattr(distributed, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: (texts.append(record), said.set()))
    texts = []
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refuses(TrainingError, "127.0.0.1:1"), joined("cpu"):
        pass
    assert "127.0.0.1:1 for 2 other processes" in texts[0].getMessage()


def test_a_rank_without_other_processes_is_the_first(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert is_first_process()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not is_first_process()
