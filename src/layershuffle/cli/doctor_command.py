"""`layershuffle doctor`: what this machine has, and what to type next."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layershuffle.cli.parsing import parse


@dataclass
class _Options:
    pass


def run(argv: Sequence[str]) -> int:
    """Print the findings; exit code 1 if something needed is missing."""
    about = "Say what this machine has: versions, GPU, bf16, caches, writable places, what to do."
    parse(_Options, argv, command="doctor", about=about)
    findings = list(_findings())
    width = max(len(name) for name, _, _ in findings)
    for name, good, text in findings:
        print(f"{'ok ' if good else 'NO '} {name:<{width}}  {text}")
    print("\nNext: layershuffle reproduce recipes/digits-quick.yaml   (digits, no download)")
    print(
        "      layershuffle fit --method layershuffle --model timm:NAME --data folder:DIR --out DIR"
    )
    return 0 if all(good for _, good, _ in findings) else 1


def _findings() -> Iterator[tuple[str, bool, str]]:
    from layershuffle.machine import processor, versions

    yield "python", sys.version_info >= (3, 11), sys.version.split()[0]
    for package, found in versions().items():
        if package != "python":
            yield package, found != "not installed", found
    yield "processor", True, f"{processor()}, {len(os.sched_getaffinity(0))} cores"
    yield "memory", True, f"{_memory_gib():.1f} GiB"
    yield from _accelerator()
    yield from _caches()
    yield from _places()
    yield "bundled:digits", *_bundled()


def _accelerator() -> Iterator[tuple[str, bool, str]]:
    import torch

    from layershuffle.machine import cpu_has_bf16

    if torch.cuda.is_available():
        name, bf16 = torch.cuda.get_device_name(), torch.cuda.is_bf16_supported()
        free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
        yield "gpu", True, f"{name}, {free:.0f} of {total:.0f} GiB free"
        yield "bf16", True, "yes, used by default" if bf16 else "no: fp32 is used"
        return
    yield "gpu", True, "none: the digits recipes need none"
    has = "the processor has it" if cpu_has_bf16() else "the processor lacks it, and would be slow"
    yield "bf16", True, f"{has}; fp32 is used on CPUs"


def _caches() -> Iterator[tuple[str, bool, str]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = sorted(f"{r.repo_type}:{r.repo_id}" for r in scan_cache_dir().repos)
    except CacheNotFound:
        cached = []
    text = ", ".join(cached[:8]) + (f" and {len(cached) - 8} more" if len(cached) > 8 else "")
    offline = " (HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
    yield "hub cache", True, f"{HF_HUB_CACHE}: {text or 'no weights or data yet'}{offline}"


def _places() -> Iterator[tuple[str, bool, str]]:
    for name, path in (("working directory", Path.cwd()), ("home", Path.home())):
        free = shutil.disk_usage(path).free / 2**30
        writable = os.access(path, os.W_OK)
        yield name, writable, f"{path}, {'' if writable else 'NOT '}writable, {free:.0f} GiB free"


def _bundled() -> tuple[bool, str]:
    from layershuffle.errors import ModelFileError
    from layershuffle.models import load
    from layershuffle.stack import depth_of

    try:
        model = load("bundled:digits")
    except ModelFileError as error:
        return False, str(error)
    parameters = sum(p.numel() for p in model.parameters())
    return True, f"{depth_of(model)} blocks, {parameters:,} parameters"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
