"""No step makes the host wait for the device, tested on a CPU (see test_gpu_training.py)."""

import sys
from contextlib import ExitStack

import pytest
import torch
from runs import settings
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from layershuffle.training import fit

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
         aten.equal.default}  # fmt: skip
READS = {torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.numpy, torch.Tensor.tolist}


class Dispatched(TorchDispatchMode):
    """Counts operations that wait for values: .item(), float(), int(), bool(), masks."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Syncs.found += func in WAITS
        return func(*args, **(kwargs or {}))


class Syncs(TorchFunctionMode):
    """Those, and blocking copies between host and device, told by the call: here both are one.

    Copies count only where this package makes them: torch, accelerate and transformers call the
    same functions for tensors that are where they should be.
    """

    found = 0

    def __enter__(self):
        self.dispatched = Dispatched()
        self.dispatched.__enter__()
        return super().__enter__()

    def __exit__(self, *reason):
        super().__exit__(*reason)
        self.dispatched.__exit__(*reason)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals["__name__"].startswith("layershuffle"):
            made_there = func in (torch.tensor, torch.as_tensor) and "device" in kwargs
            named = any(map(is_device, (*args[1:2], kwargs.get("device"))))
            sent = func is torch.Tensor.to and named and not kwargs.get("non_blocking")
            Syncs.found += bool(made_there or sent or func in READS)
        return func(*args, **kwargs)


def is_device(value):
    return isinstance(value, torch.device | str)


@pytest.mark.parametrize(
    "wait",
    [
        float,
        lambda ones: ones[ones > 0],
        lambda ones: torch.tensor([1], device=ones.device),
        lambda ones: ones.to("cpu"),
        lambda ones: ones.to(device=torch.device("cpu")),
        lambda ones: ones.tolist(),
    ],
)
def test_waiting_calls_are_counted(monkeypatch, wait):
    monkeypatch.setitem(globals(), "__name__", "layershuffle.pretended")
    monkeypatch.setattr(Syncs, "found", 0)
    with Syncs():
        wait(torch.ones(()))
    assert Syncs.found >= 1


def counting():
    """A listener to phases that counts from the arrival of a batch on, after the first step."""
    counted = ExitStack()

    def count(phase, step):
        # The first forward of a model runs a trial of its loop.
        if phase == "forward" and step > 0:
            counted.close()
            counted.enter_context(Syncs())
        elif phase == "report":
            counted.close()

    return count


def test_no_step_waits_for_the_device(tmp_path, monkeypatch):
    """From the arrival of a batch to the end of the step; logging is at the last step."""
    fit(settings(steps=1), tmp_path / "zero")  # constants are sent once
    # On a CPU `to_device` leaves tensors where they are; on GPUs it is told not to wait.
    for user in ("entries", "losses", "position"):
        monkeypatch.setattr(f"layershuffle.core.{user}.to_device", lambda tensor, device: tensor)
    monkeypatch.setattr(Syncs, "found", 0)
    run = {"method": "layershuffle", "min_kept": 3, "ema": 0.9, "orders_per_batch": 3, "steps": 3}
    fit(settings(log_every=10, **run), tmp_path / "one", on_phase=counting())
    predict = {"method": "layershuffle-predict", "prediction": {"loss": "mean"}, "drop": None}
    run |= {**predict, "ema": None}
    fit(settings(log_every=10, **run), tmp_path / "two", on_phase=counting())
    assert Syncs.found == 0
