"""`fit`: exact resume after kill -9 and SIGTERM, golden losses, errors that keep the last state.

The oracle for the whole trainer is a plain PyTorch loop written out below.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from runs import MODEL, assert_same_weights, losses, settings, weights
from safetensors.torch import load_file

from forked import SERVER
from layershuffle.errors import Interrupted, TrainingError, UsageError
from layershuffle.machine import processor
from layershuffle.training import fit
from layershuffle.training.loop import EpochSampler
from refusals import refuses

ARMS = {
    "layershuffle": {"method": "layershuffle"},
    "position": {"method": "layershuffle-position", "encoding": {"dropout": 0.1}},
    "predict": {"method": "layershuffle-predict"},
    "layerdrop": {"method": "layerdrop", "drop": 0.5},
    "depth-ema": {"method": "layershuffle", "ema": 0.9, "min_kept": 1},
    "tied": {"method": "layershuffle", "distinct": 2},
    "rounds": {"method": "layershuffle", "max_parallel": 4, "drop": 0.2, "orders_per_batch": 2},
    "accumulate": {"method": "layershuffle", "accumulate": 2},
}
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
    torch.set_num_threads(1)
    fit(settings(**arm), out, on_event=listen)


@pytest.mark.parametrize(
    ("name", "kind", "step"),
    [
        ("layershuffle", "log", 1),  # before the first checkpoint
        ("layershuffle", "log", 7),  # in the second epoch, between two checkpoints
        ("position", "log", 5),
        ("predict", "checkpoint", 6),  # exactly on the border of two epochs
        ("layerdrop", "best", 4),  # the best model is written, its checkpoint is not
        ("depth-ema", "log", 5),
        ("tied", "log", 5),
        ("rounds", "log", 5),
        ("accumulate", "log", 3),
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


def test_sigterm_saves_and_the_run_continues(undisturbed, tmp_path):
    out = tmp_path / "run"

    def ask_to_stop(event):
        if event["kind"] == "log" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with refuses(Interrupted):
        fit(settings(), out, on_event=ask_to_stop)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000004"]
    fit(settings(), out)
    assert_same_weights(weights(out), weights(undisturbed["layershuffle"][0]))
    assert history(out) == history(undisturbed["layershuffle"][0])


def test_a_finished_run_is_not_repeated(undisturbed):
    out, _ = undisturbed["layershuffle"]
    events = []
    again = fit(settings(), out, on_event=events.append)
    assert events == [{"kind": "complete", "steps": 8}]
    assert again.steps == 8
    assert not (out / "checkpoints").exists()


def test_golden_losses(undisturbed):
    """Per-step losses as they were when the file was written (python tests/golden/write.py).

    Bit for bit on the processor kind and torch they came from, to 1e-4 elsewhere.
    """
    golden = json.loads(GOLDEN.read_text())
    same_machine = golden["machine"] == machine()
    for name, (_, heard) in undisturbed.items():
        expected = golden["losses"][name]
        if same_machine:
            assert heard == expected, name
        else:
            assert heard == pytest.approx(expected, rel=1e-4), name


def machine():
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": capability, "processor": processor()}


def test_the_best_state_is_kept(undisturbed):
    for name, (out, _) in undisturbed.items():
        record = json.loads((out / "model" / "layershuffle.json").read_text())
        result = json.loads((out / "result.json").read_text())
        assert record["selected"] == result["selected"], name
        assert result["selected"]["step"] in (4, 8)
        mode = "sequential" if name == "layerdrop" else "arbitrary"
        assert result["selected"]["metric"] == f"holdout cross-entropy, {mode} order"


def test_a_loss_that_is_not_finite(tmp_path):
    out = tmp_path / "run"
    with refuses(TrainingError):
        fit(settings(lr=1e38, clip=None, warmup=0, steps=200, checkpoint_every=1), out)
    for checkpoint in (out / "checkpoints").glob("step-*"):
        state = load_file(checkpoint / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_other_settings_in_one_directory(undisturbed):
    out, _ = undisturbed["layershuffle"]
    with refuses(UsageError):
        fit(settings(lr=2e-3), out)


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


def test_sampler_is_a_function_of_seed_and_epoch():
    sampler, again = EpochSampler(range(100), 3), EpochSampler(range(100), 3)
    first = list(sampler)
    assert sorted(first) == list(range(100))
    sampler.set_epoch(4)
    again.set_epoch(4)
    assert list(sampler) == list(again) != first
    assert list(EpochSampler(range(100), 4)) != first


def test_a_positioned_model_goes_on_with_its_own_method(undisturbed, tmp_path):
    out, _ = undisturbed["position"]
    model = f"dir:{out / 'model'}"
    with refuses(UsageError):
        fit(settings(model=model), tmp_path / "one")
    assert not (tmp_path / "one").exists()
    fit(settings(model=model, method="layershuffle-position", steps=1), tmp_path / "two")
    assert weights(tmp_path / "two").keys() == weights(out).keys()


def test_a_missing_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(UsageError):
        fit(settings(device="cuda"), tmp_path / "run")


def test_killed_after_the_last_checkpoint_trains_no_further(tmp_path, monkeypatch):
    """In the middle of an epoch, between the last checkpoint and the result."""
    module, run = sys.modules["layershuffle.training.fit"], settings(steps=4, schedule="constant")
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
