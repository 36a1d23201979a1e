"""`fit`: exact resume after kill -9 and SIGTERM, golden losses, errors that keep the last state.

The oracle for the whole trainer is a plain PyTorch loop written out below.
"""

import gc
import itertools
import json
import os
import signal
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MODEL, NO_DROPOUT, assert_same_weights, losses, settings, weights
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.models import VisionTransformer
from torch import nn

import layershuffle as ls
from forked import SERVER
from layershuffle.core.methods import PRESETS
from layershuffle.data.digits import DigitPairs
from layershuffle.ground.errors import Interrupted, TrainingError, UsageError
from layershuffle.ground.extras import missing
from layershuffle.ground.machine import processor
from layershuffle.training import fit
from layershuffle.training.history import COLUMNS, SCORES, add_row, begin_history, read_history
from layershuffle.training.loop import epoch_rows
from layershuffle.training.run import read_result
from refusals import refuses

ARMS = {
    "layershuffle": {"method": "layershuffle"},
    "position": {"method": "layershuffle-position", "encoding": {"dropout": 0.1}},
    "predict": {"method": "layershuffle-predict"},
    "layerdrop": {"method": "layerdrop", "block_drop": 0.5},
    "depth": {"method": "layershuffle", "min_kept": 1},
    "tied": {"method": "layershuffle", "distinct": 2},
    "rounds": {
        "method": "layershuffle",
        "max_parallel": 4,
        "block_drop": 0.2,
        "orders_per_batch": 2,
    },
    "accumulate": {"method": "layershuffle", "accumulate": 2},
    "features": {"method": "anyorder", "keep_features": 3.0},
    "scored often": {"method": "layershuffle", "eval_every": 2},
    # An epoch of two steps, of 16 images and of 4.
    "rest": {"data": "digit-pairs?train=20&validation=32&test=8", "accumulate": 2},
}
LOOP = sys.modules["layershuffle.training.loop"]
GOLDEN = Path(__file__).parent.parent / "golden" / "losses.json"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Uninterrupted runs of every arm: their directory and the losses of every step."""
    runs = {}
    for name, arm in ARMS.items():
        out, events = tmp_path_factory.mktemp(name), []
        fit(settings(**arm), out / "run", on_event=events.append)
        runs[name] = (out / "run", losses(events))
    return runs


def history(out):
    """What the run has left there, to the last digit."""
    return (out / "history.csv").read_text()


def fit_until_killed(arm, out, *, kind, step):
    """A run that kills its own process, as a power cut would, at one of its events."""

    def listen(event):
        if event["kind"] == kind and event.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    gc.freeze()  # see conftest.py
    fit(settings(**arm), out, on_event=listen)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_orders_of_a_forward_are_drawn_once(tmp_path, monkeypatch, accumulate):
    orders, drawn = ls.Method.orders, []

    def drawing(method, depth, **place):
        drawn.append((place["step"], place["micro_batch"]))
        return orders(method, depth, **place)

    monkeypatch.setattr(ls.Method, "orders", drawing)
    fit(settings(method="anyorder", accumulate=accumulate), tmp_path / "run")
    assert drawn == [(step, part) for step in range(8) for part in range(accumulate)]


def test_a_model_without_position_parts_is_trained_as_it_is(tmp_path, monkeypatch):
    trained = []

    def training(state, **how):
        trained.append(type(state.model))
        LOOP.train(state, **how)

    monkeypatch.setattr(sys.modules["layershuffle.training.run"], "train", training)
    fit(settings(), tmp_path / "plain")
    fit(settings(method="layershuffle-position"), tmp_path / "position")
    assert trained == [VisionTransformer, ls.PositionedModel]


@pytest.mark.parametrize(
    ("name", "kind", "step"),
    [
        ("layershuffle", "log", 1),  # before the first checkpoint
        ("layershuffle", "log", 7),  # in the second epoch, between two checkpoints
        ("position", "log", 5),
        ("predict", "checkpoint", 6),  # exactly on the border of two epochs
        ("layerdrop", "best", 4),  # the best model is written, its checkpoint is not
        ("depth", "log", 5),
        ("tied", "log", 5),
        ("rounds", "log", 5),
        ("accumulate", "log", 3),
        ("features", "log", 5),
        ("scored often", "log", 3),  # scored before the checkpoint, and twice more
        ("rest", "log", 3),
        ("rest", "log", 6),
    ],
)
def test_killed_runs_end_at_the_same_weights(undisturbed, tmp_path, name, kind, step):
    out = tmp_path / "run"
    killed = SERVER.Process(
        target=fit_until_killed, args=(ARMS[name], out), kwargs={"kind": kind, "step": step}
    )
    killed.start()
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL
    assert not (out / "result.json").exists()
    fit(settings(**ARMS[name]), out)
    assert_same_weights(weights(out), weights(undisturbed[name][0]))
    assert history(out) == history(undisturbed[name][0])


def test_scoring_leaves_the_training_as_it_is(undisturbed):
    """Dropout, too."""
    assert undisturbed["scored often"][1] == undisturbed["layershuffle"][1]


def test_sigterm_saves_and_the_run_continues(undisturbed, tmp_path):
    """With a row of the history at the checkpoint, whatever else is logged."""
    out, run = tmp_path / "run", settings(log_every=3, checkpoint_every=8)

    def ask_to_stop(event):
        if event["kind"] == "log" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with refuses(Interrupted):
        fit(run, out, on_event=ask_to_stop)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000004"]
    fit(run, out)
    assert_same_weights(weights(out), weights(undisturbed["layershuffle"][0]))
    assert [row["step"] for row in read_history(out / "history.csv")] == [3, 4, 6, 8]


def test_a_finished_run_is_not_repeated(undisturbed):
    out, _ = undisturbed["layershuffle"]
    events = []
    again = fit(settings(), out, on_event=events.append)
    assert events == [{"kind": "complete", "steps": 8}]
    assert again.steps == 8
    assert not (out / "checkpoints").exists()


def test_golden_losses(undisturbed):
    """Per-step losses as they were when the file was written (RENEW_GOLDEN=1 writes it anew).

    Bit for bit on the processor kind and torch they came from, to 1e-4 elsewhere.
    """
    if not begins_with_normal_draws():
        pytest.skip("this torch is older: its trunc_normal_ draws other weights to begin with")
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("RENEW_GOLDEN"):
        golden = {
            "machine": machine(),
            "losses": {n: heard for n, (_, heard) in undisturbed.items()},
        }
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    same_machine = golden["machine"] == machine()
    for name, expected in golden["losses"].items():
        heard = undisturbed[name][1]
        if same_machine:
            assert heard == expected, name
        else:
            assert heard == pytest.approx(expected, rel=1e-4), name


def begins_with_normal_draws():
    """Whether `trunc_normal_` redraws what is out of bounds; torch 2.6 inverts uniform draws."""
    truncated = torch.nn.init.trunc_normal_(
        torch.empty(1000), generator=torch.Generator().manual_seed(0)
    )
    normal = torch.empty(1000).normal_(generator=torch.Generator().manual_seed(0))
    return int((truncated == normal).sum()) > 900


def machine():
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": capability, "processor": processor()}


def test_the_best_state_is_kept(undisturbed):
    for name, (out, _) in undisturbed.items():
        record = json.loads((out / "model" / "layershuffle.json").read_text())
        result = json.loads((out / "result.json").read_text())
        assert record["selected"] == result["selected"], name
        assert result["selected"]["step"] % settings(**ARMS[name]).eval_every == 0
        mode = "sequential" if name == "layerdrop" else "arbitrary"
        assert result["selected"]["metric"] == f"holdout cross-entropy, {mode} order"


def test_weight_decay_shrinks_matrices_alone(tmp_path):
    """By lr times decay in a step; biases, norms and the scales of residuals stay."""
    run = {"model": f"{NO_DROPOUT}&init_values=1", "steps": 1, "warmup": 0, "schedule": "constant"}
    fit(settings(**run), tmp_path / "plain")
    fit(settings(**run, weight_decay=0.5), tmp_path / "decayed")
    plain, begun = weights(tmp_path / "plain"), ls.load(run["model"], seed=5).state_dict()
    expected = {n: w - 1e-3 * 0.5 * begun[n] * (w.dim() > 1) for n, w in plain.items()}
    assert "blocks.0.ls1.gamma" in plain
    assert_same_weights(weights(tmp_path / "decayed"), expected, tolerance=1e-7)


def test_frozen_blocks_are_not_scaled(tmp_path):
    """They could not grow again, and ran at a tenth for ever."""
    run = {"method": "anyorder", "steps": 1, "freeze": ["blocks.1"]}
    fit(settings(**run), tmp_path / "run")
    begun, trained = ls.load(MODEL, seed=5).state_dict(), weights(tmp_path / "run")
    for place, share in ((0, 1.0), (1, 1.0), (2, 0.1), (3, 1.0)):
        name = f"blocks.{place}.mlp.fc2.weight"
        ratio = float(trained[name].abs().sum() / begun[name].abs().sum())
        assert ratio == pytest.approx(share, abs=0.03)
        if place == 1:
            assert torch.equal(trained[name], begun[name])


def test_frozen_blocks_that_are_tied_are_not_scaled(tmp_path):
    """Both drawn blocks have the weights of the first of them."""
    run = {"method": "anyorder", "distinct": 1, "steps": 1, "freeze": ["blocks.1"]}
    fit(settings(**run), tmp_path)
    begun, trained = ls.load(MODEL, seed=5).state_dict(), weights(tmp_path)
    for place in (1, 2):
        name = f"blocks.{place}.mlp.fc2.weight"
        assert torch.equal(trained[name], begun["blocks.1.mlp.fc2.weight"])


def test_a_loss_that_is_not_finite(tmp_path):
    out = tmp_path / "run"
    with refuses(TrainingError):
        fit(settings(lr=1e38, clip=None, warmup=0, steps=200, checkpoint_every=1), out)
    for checkpoint in (out / "checkpoints").glob("step-*"):
        state = load_file(checkpoint / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_a_run_goes_on_with_its_own_settings(undisturbed, tmp_path):
    """Or with the options that its method has anyway, however they are written."""
    with refuses(UsageError):
        fit(settings(lr=2e-3), undisturbed["layershuffle"][0])
    fit(settings(method="anyorder", steps=1), tmp_path)
    fit(settings(method="anyorder", self_distillation=0.3, steps=1), tmp_path)
    with refuses(UsageError):
        fit(settings(method="anyorder", exit_weight=0.4, steps=1), tmp_path)


def test_a_run_does_not_go_on_with_another_default_of_its_method(tmp_path, monkeypatch):
    fit(settings(method="anyorder", steps=1), tmp_path)
    monkeypatch.setitem(PRESETS["anyorder"][1], "exit_weight", 0.4)
    with refuses(UsageError, tmp_path / "settings.yaml"):
        fit(settings(method="anyorder", steps=1), tmp_path)
    fit(settings(method="anyorder", exit_weight=0.3, steps=1), tmp_path)


def test_settings_of_a_run_that_never_began_may_change(tmp_path):
    with refuses(UsageError):
        fit(settings(model="timm:vit_tiny_patch16_22"), tmp_path)
    assert [*tmp_path.iterdir()] == []
    result = fit(settings(steps=1), tmp_path)
    assert result.settings["model"] == MODEL
    (tmp_path / "settings.yaml").write_text("lr: [")
    with refuses(UsageError):
        fit(settings(steps=1), tmp_path)


def test_a_run_that_was_killed_as_it_wrote_its_settings_begins(tmp_path):
    (tmp_path / ".staged-77-settings.yaml").write_text("method: lay")
    assert fit(settings(steps=1), tmp_path).settings["model"] == MODEL
    assert not list(tmp_path.glob(".staged-*"))


def test_the_rows_of_an_epoch_are_a_function_of_seed_and_epoch():
    first = epoch_rows(100, seed=3, epoch=0)
    assert sorted(first) == list(range(100))
    assert first == epoch_rows(100, seed=3, epoch=0)
    assert first not in (epoch_rows(100, seed=3, epoch=4), epoch_rows(100, seed=4, epoch=0))


def test_the_threads_of_a_run_are_its_own(tmp_path):
    before = torch.get_num_threads()
    result = fit(settings(steps=1, threads=before + 1), tmp_path)
    assert (result.hardware["threads"], torch.get_num_threads()) == (before + 1, before)


def test_a_positioned_model_goes_on_with_its_own_method(undisturbed, tmp_path):
    out, _ = undisturbed["position"]
    model = f"dir:{out / 'model'}"
    with refuses(UsageError):
        fit(settings(model=model), tmp_path / "one")
    assert not (tmp_path / "one").exists()
    fit(settings(model=model, method="layershuffle-position", steps=1), tmp_path / "two")
    assert weights(tmp_path / "two").keys() == weights(out).keys()


def test_a_run_records_the_start_that_it_made(undisturbed, tmp_path):
    """A model prepared for drawn orders keeps its weights, and the record says so."""
    out, _ = undisturbed["layershuffle"]
    for model, begins_with in ((MODEL, 0.1), (f"dir:{out / 'model'}", 1.0)):
        run = tmp_path / str(begins_with)
        told: list[dict[str, Any]] = []
        result = fit(
            settings(model=model, method="anyorder", steps=1, lr=1e-12), run, on_event=told.append
        )
        assert "model of 4 blocks (2 of them drawn)" in told[0]["text"]
        record = json.loads((run / "model" / "layershuffle.json").read_text())
        assert record["settings"]["branch_scale"] == begins_with
        notes = [note for note in result.data["notes"] if "--branch-scale" in note]
        assert len(notes) == 1
    assert any("--fixed 0,0 before" in note for note in result.data["notes"])
    # The weights of the run before, which a rate of nearly zero leaves as they are.
    assert_same_weights(weights(run), weights(out), tolerance=1e-9)


def test_a_missing_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(UsageError):
        fit(settings(device="cuda"), tmp_path / "run")


def test_killed_after_the_last_checkpoint_trains_no_further(tmp_path, monkeypatch):
    """In the middle of an epoch, between the last checkpoint and the result."""
    module, run = sys.modules["layershuffle.training.run"], settings(steps=4, schedule="constant")
    finish = module._finish

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(run, tmp_path / "run")
    before = weights(tmp_path / "run")
    monkeypatch.setattr(module, "_finish", finish)
    events = []
    fit(run, tmp_path / "run", on_event=events.append)
    assert [event["kind"] for event in events] == ["data", "start", "end"]
    assert_same_weights(weights(tmp_path / "run"), before)


# --- history --------------------------------------------------------------------------------------


def test_every_fit_leaves_its_history_and_a_page_with_the_curves(tmp_path, monkeypatch):
    monkeypatch.setattr("layershuffle.training.history.missing", missing)  # see conftest.py
    events = []
    fit(settings(log_every=3, checkpoint_every=4), tmp_path, on_event=events.append)
    rows = read_history(tmp_path / "history.csv")
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert [set(COLUMNS) - set(row) for row in rows] == [set(SCORES), set(), set(SCORES), set()]
    told = [event for event in events if event["kind"] in ("log", "scores", "history")]
    for row in rows:
        here = [event for event in told if event["step"] == row["step"]]
        expected = {
            k: v for event in here for k, v in event.items() if k not in ("kind", "waiting")
        }
        assert row == expected, "to the last digit"
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 1
    result = read_result(tmp_path)
    top1 = result.selected["top1"]
    for text in (
        escape(MODEL),
        "96 train, 32 holdout, 32 test images of 100 classes",
        f"{top1['sequential']:.1f} % of 32 images",
        f"{top1['arbitrary']:.1f} %",
        f"{result.selected['value']:.3f}, at step {result.selected['step']} of 8",
        f"layershuffle eval {tmp_path} --data",
    ):
        assert f"{text}" in page, text
    assert "held out, arbitrary order" in page


def test_losses_are_means_over_all_steps_since_the_row_before(tmp_path):
    fit(settings(), tmp_path / "every")
    fit(settings(log_every=3, checkpoint_every=4), tmp_path / "some")
    every = [row["loss"] for row in read_history(tmp_path / "every" / "history.csv")]
    some = read_history(tmp_path / "some" / "history.csv")
    steps = [0, *(int(row["step"]) for row in some)]
    means = [sum(every[a:b]) / (b - a) for a, b in itertools.pairwise(steps)]
    assert [row["loss"] for row in some] == pytest.approx(means, rel=1e-6)


def test_rows_after_the_checkpoint_and_half_a_line_are_written_anew(tmp_path):
    path = tmp_path / "history.csv"
    begin_history(path, step=0)
    for step in (1, 2, 3):
        add_row(path, {"step": step, "loss": step / 7})
    whole = path.read_bytes()
    path.write_bytes(whole + b"4,0.57")
    begin_history(path, step=2)
    add_row(path, {"step": 3, "loss": 3 / 7})
    assert path.read_bytes() == whole


def test_slow_steps_tell_their_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("layershuffle.training.loop._LOSS_SECONDS", 0.0)
    events, logs = [], []
    fit(settings(log_every=8, eval_every=8), tmp_path / "few", on_event=events.append)
    fit(settings(eval_every=8), tmp_path / "all", on_event=logs.append)
    (*told,) = [e["loss"] for e in events if e["kind"] == "step"]
    losses = [e["loss"] for e in logs if e["kind"] == "log"]
    assert told[0] == pytest.approx(losses[0])
    assert len(told) == 4, "a checkpoint every second step logs, too"


def test_trackers_of_accelerate_get_every_row_once_also_after_a_kill(tmp_path):
    def killed(event):
        if event["kind"] == "history" and event["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(settings(log_with="tensorboard"), tmp_path, on_event=killed)
    assert not (tmp_path / "result.json").exists()
    fit(settings(log_with="tensorboard"), tmp_path)
    place = str(tmp_path / "logs" / "layershuffle")
    curves = EventAccumulator(place, purge_orphaned_data=False)
    curves.Reload()
    rows = read_history(tmp_path / "history.csv")
    told = [(event.step, pytest.approx(event.value)) for event in curves.Scalars("loss")]
    assert told == [(row["step"], row["loss"]) for row in rows]
    assert [event.step for event in curves.Scalars(SCORES[0])] == [4, 8]


def test_a_folder_is_no_tracker_and_nothing_stays_of_a_run_that_is_refused(tmp_path, monkeypatch):
    # What wandb leaves in the working directory, which `python -m layershuffle` imports from.
    (tmp_path / "here" / "wandb").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "here")
    empty = tmp_path / "empty"
    empty.mkdir()
    for out in (empty, tmp_path / "new"):
        with refuses(UsageError):
            fit(settings(log_with="wandb"), out)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "empty"}
    assert not list(empty.iterdir())


@pytest.mark.parametrize("reading", [0, 1])
def test_a_run_tells_how_long_it_waited(tmp_path, monkeypatch, reading):
    """Steps of 3 seconds, and as long as a batch takes to be read."""
    now, events = [100.0], []

    def taking(seconds, method):
        def slowly(*args, **kwargs):
            now[0] += seconds
            return method(*args, **kwargs)

        return slowly

    def steps_take_time(phase, step):
        now[0] += 3 if phase == "optimizer" else 0

    items = taking(reading, DigitPairs.__getitems__)
    monkeypatch.setattr(DigitPairs, "__getitems__", items)
    monkeypatch.setattr(LOOP, "evaluate", taking(500, LOOP.evaluate))
    monkeypatch.setattr(LOOP, "_clock", lambda: now[0])
    run = settings(
        data="digit-pairs?train=40&validation=8&test=8", batch_size=4, eval_every=3, log_every=4,
        checkpoint_every=8,
    )  # fmt: skip
    result = fit(run, tmp_path, on_event=events.append, on_phase=steps_take_time)
    waiting = [event["waiting"] for event in events if event["kind"] == "log"]
    assert waiting == pytest.approx([100 * reading / (reading + 3)] * 4)  # at 3, 4, 6 and 8
    # Of the steps alone.
    assert reading or result.images_per_second == round(4 / 3, 1)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def room_for(monkeypatch):
    """A function that makes linear layers run out of memory for more than `images` images."""
    forward = nn.Linear.forward

    def room(images, *, training=True):
        def limited(self, state):
            if len(state) > images and torch.is_grad_enabled() is training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, state)

        monkeypatch.setattr(nn.Linear, "forward", limited)

    return room


@pytest.mark.parametrize("twice", [False, True])
def test_a_batch_that_does_not_fit_says_what_helps(tmp_path, room_for, twice):
    room_for(3)
    run = {"model": NO_DROPOUT, "steps": 1, "batch_size": 18, "activation_checkpointing": twice}
    for accumulate, next_one in ((1, 2), (2, 6)):
        with pytest.raises(TrainingError, match=f"--accumulate {next_one} \\(as many") as caught:
            fit(settings(**run, accumulate=accumulate), tmp_path / str(accumulate))
        said = str(caught.value)
        assert "a smaller --batch-size" in said
        assert ("--activation-checkpointing" in said) is not twice
        # torch 2.6 recomputes for as long as the error of a recomputed block is there.
        del caught
        gc.collect()
    fit(settings(**run, accumulate=6), tmp_path / "fits")


def test_scoring_that_does_not_fit(tmp_path, room_for):
    room_for(20, training=False)
    with refuses(TrainingError):
        fit(settings(model=NO_DROPOUT, steps=3), tmp_path)
