"""What a result was measured on: versions and hardware."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger("layershuffle")
_PACKAGES = ("layershuffle", "torch", "torchvision", "timm", "transformers", "accelerate", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of this package and of those that its numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware(precision: str) -> dict[str, Any]:
    """Processor, cores and threads in use, GPU, and the precision of the computation."""
    import torch

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "precision": precision,
    }


def processor() -> str:
    """The processor's name, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_has_bf16() -> bool:
    """The processor multiplies bf16 in hardware (AVX512-BF16 or AMX); Linux only, else False."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    words = set(cpuinfo.read_text(encoding="utf-8").split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def warn_of_slow_bf16(precision: str, device: str) -> None:
    """Says that bf16 will be slow, where it is meant for a processor that cannot multiply it."""
    if precision.startswith("bf16") and device == "cpu" and not cpu_has_bf16():
        _log.warning("this processor has no bf16 arithmetic: bf16 will be several times slower")


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` from the host on `device`, without making the host wait for what runs there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Inside, torch computes with `number` threads (None: as before); after, as before.

    With None it is a guard: numba, for one, resets the thread pool that it shares with torch, and
    then sums come out in another order and results differ in their last bits.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
