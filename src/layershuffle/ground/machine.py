"""This machine: versions and hardware of a result, device and precision, signals and threads."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import counted

Device = str
"""Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1 (this one of several GPUs) or
mps (the GPU of a Mac)."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,4})?")
_log = logging.getLogger("layershuffle")
_PACKAGES = ("layershuffle", "torch", "torchvision", "timm", "transformers", "accelerate", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of this package and of those that its numbers depend on."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's collector of cycles does not run inside: for imports, and while a clock runs.

    While torch and timm are imported it looks through a million objects that all stay. This takes
    a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that what runs can save its state and end.

    Outside the main thread, where Python allows no handlers, signals keep their meaning.
    """
    stop_asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop_asked.set()

    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, ask)
    try:
        yield stop_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cores() -> int:
    """Cores that this process may use; a container often has fewer than its machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows do not tell


def hardware(precision: str, *, device: Device) -> dict[str, Any]:
    """Processor, cores and threads in use, GPU, and the precision of a computation on `device`."""
    import torch

    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device_of(device) == "cuda" else None,
        "precision": precision,
    }


def _cpuinfo() -> str:
    """What Linux says of the processor, "" elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""


def processor() -> str:
    """The name of the processor that the operating system reports."""
    name = re.search(r"^model name\s*:(.+)$", _cpuinfo(), re.MULTILINE)
    if name:
        return name[1].strip()
    return platform.processor() or platform.machine()


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware. False on systems other than Linux."""
    # Flags of x86 processors; the last one is what ARM processors report.
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_cpuinfo().split())


def choose_precision(
    choice: str, *, device: str, training: bool
) -> tuple[Literal["fp32", "bf16"], str]:
    """The dtype of forwards on `device`, and the reason where it was left open.

    `device` is what `device_of` returns, and `choice` is fp32, bf16 or auto. Logs a warning for
    bf16 on a processor without its arithmetic.
    """
    if choice == "bf16" and device == "cpu" and not cpu_has_bf16():
        _log.warning("This processor has no bf16 arithmetic: bf16 will be several times slower")
    if choice == "bf16":
        return "bf16", ""
    if choice == "fp32":
        return "fp32", ""
    if device in ("cpu", "mps"):
        # Some processors train wide models faster in bf16, narrow ones slower (research/log.md).
        return "fp32", f"auto is fp32 on {'a CPU' if device == 'cpu' else 'the GPU of a Mac'}"
    if not training:
        return "fp32", "auto is fp32 for scores, so that they compare between machines"
    import torch

    if not torch.cuda.is_bf16_supported():
        return "fp32", "auto is fp32 on a GPU without bf16"
    return "bf16", "auto is bf16 for training on a GPU that has it"


def check_device(choice: Device) -> None:
    """Raises `UsageError` for a word that names no device."""
    if not _DEVICE.fullmatch(choice):
        raise UsageError(
            f"There is no device {choice!r}", hint="name auto, cpu, cuda, cuda:1 or mps"
        )


def device_of(choice: Device) -> Literal["cpu", "cuda", "mps"]:
    """The device that `choice` denotes here; cuda:1 makes that GPU the one that cuda means.

    Raises `UsageError` for a word that names no device, and if this machine, or torch, has none.
    """
    import torch

    check_device(choice)
    if choice == "mps":
        if not torch.backends.mps.is_available():
            why = "was built without mps" if not torch.backends.mps.is_built() else "finds none"
            raise UsageError(
                f"There is no GPU of a Mac that torch can use here: it {why}",
                hint="leave --device at auto",
            )
        return "mps"
    if choice == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        if choice == "auto":
            return "cpu"
        raise UsageError("There is no GPU that torch can use here", hint="leave --device at auto")
    _, _, number = choice.partition(":")
    if number:
        count = torch.cuda.device_count()
        if int(number) >= count:
            raise UsageError(
                f"There is no {choice} here: torch finds {counted(count, 'GPU')}",
                hint=f"name one from cuda:0 to cuda:{count - 1}",
            )
        torch.cuda.set_device(int(number))
    return "cuda"


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Torch computes with `number` threads inside, and afterwards with as many as before.

    `None` keeps the number and only restores it: numba, for one, resets the thread pool that it
    shares with torch; then sums run in another order and results differ in their last bits.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
