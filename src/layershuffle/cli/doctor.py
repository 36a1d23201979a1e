"""`layershuffle doctor`: what this machine has, and what to type next."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from layershuffle.cli.command import Command
from layershuffle.extras import EXTRAS, missing
from layershuffle.text import listing, shortened

# Default ports, and what listens there.
_PORTS = {8000: "swarm up and deploy", 6400: "swarm head"}
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Show what this machine has: versions, extras, GPU, bf16, caches, writable places, ports; and
    what to type next."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print the findings; exit code 1 if something needed is missing."""
        findings = list(_findings())
        code = 0 if all(good for _, good, _ in findings) else 1
        if self.json:
            print(json.dumps(_as_json(findings), indent=2))
            return code
        rows = [(f"{'ok ' if good else 'NO '} {name}", text) for name, good, text in findings]
        rows += [_extra(name) for name in EXTRAS]
        install = "pip install 'layershuffle[study]' && " if missing("study") else ""
        print(
            f"{listing(rows)}\n\n"
            "Next: layershuffle predict bundled:digits-swarm bundled:digit-pair.png   (seconds, no "
            "download)\n"
            f"      {install}layershuffle reproduce digits-quick   (7 to 11 minutes on two "
            "cores, no download)\n"
            "      layershuffle fit --method layershuffle --model timm:NAME --data folder:DIR "
            "--out DIR"
        )
        return code


def _as_json(findings: list[tuple[str, bool, str]]) -> dict[str, object]:
    return {
        "findings": [{"name": name, "ok": good, "text": text} for name, good, text in findings],
        "extras": [
            {"name": name, "missing": list(missing(name)), "brings": extra.brings}
            for name, extra in EXTRAS.items()
        ],
    }


def _extra(name: str) -> tuple[str, str]:
    """A row about an extra. One that is missing is no fault: not everybody needs it."""
    extra, lacking = EXTRAS[name], missing(name)
    if not lacking:
        return f"ok  extra {name}", extra.brings
    partly = len(lacking) < len(extra.modules)
    state = f"without {shortened(lacking)}" if partly else "not installed"
    return f"-   extra {name}", f"{state}; pip install 'layershuffle[{name}]' for {extra.brings}"


def _findings() -> Iterator[tuple[str, bool, str]]:
    """What was looked at: its name, whether it is good enough, and what is there."""
    from layershuffle.machine import processor, versions

    yield "python", sys.version_info >= (3, 11), sys.version.split()[0]
    for package, version in versions().items():
        # python has a line of its own above, with the oldest version that will do.
        if package != "python":
            yield package, version != "not installed", version
    # What this process may use: a container has fewer cores than the machine.
    yield "processor", True, f"{processor()}, {len(os.sched_getaffinity(0))} cores"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield "memory", True, f"{memory:.1f} GiB"
    yield from _accelerator()
    yield "hub cache", find_spec("huggingface_hub") is not None, _hub_cache()
    # Runs go below the working directory, caches and the swarm's token below the home, Ray's files
    # and sockets into the temporary directory.
    places = {
        "working directory": Path.cwd(),
        "home": Path.home(),
        "temporary space": Path(tempfile.gettempdir()),
    }
    for name, path in places.items():
        free = shutil.disk_usage(path).free / 2**30
        writable = os.access(path, os.W_OK)
        yield name, writable, f"{path}, {'' if writable else 'NOT '}writable, {free:.0f} GiB free"
    for port, user in _PORTS.items():
        # In use is no fault: what uses it may be a swarm of ours.
        yield f"port {port}", True, f"{'free' if is_free(port) else 'IN USE'} ({user})"
    yield "bundled:digits", *_bundled()


def is_free(port: int) -> bool:
    """Whether a server could listen at this port of the loopback network."""
    with socket.socket() as probe:
        # As servers do: a port that was in use a moment ago can be taken again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _accelerator() -> Iterator[tuple[str, bool, str]]:
    driver = _NVIDIA.read_text(encoding="utf-8").splitlines()[0] if _NVIDIA.is_file() else ""
    yield "gpu driver", True, " ".join(driver.split()) or "none of NVIDIA"
    if find_spec("torch") is None:
        yield "gpu", False, "not known without torch"
        return

    import torch

    from layershuffle.machine import cpu_has_bf16

    if torch.cuda.is_available():
        name, bf16 = torch.cuda.get_device_name(), torch.cuda.is_bf16_supported()
        free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
        yield "gpu", True, f"{name}, {free:.0f} of {total:.0f} GiB free"
        yield "bf16", True, "yes, used by default" if bf16 else "no: fp32 is used"
        return
    # Good enough without one, so that the exit code stays 0 on machines that have what they need.
    built = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "knows CPUs only"
    unused = f"none that torch can use, though there is a driver; this torch {built}"
    yield "gpu", True, unused if driver else "none: the digits recipes need none"
    has = "the processor has it" if cpu_has_bf16() else "the processor lacks it, and would be slow"
    yield "bf16", True, f"{has}; fp32 is used by default"


def _hub_cache() -> str:
    if find_spec("huggingface_hub") is None:
        return "not known without huggingface_hub"

    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = sorted(f"{r.repo_type}:{r.repo_id}" for r in scan_cache_dir().repos)
    # This is no fault: nothing was ever downloaded here.
    except CacheNotFound:
        cached = []
    offline = " (HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
    return f"{HF_HUB_CACHE}: {shortened(cached, limit=8) or 'no weights or data yet'}{offline}"


def _bundled() -> tuple[bool, str]:
    lacking = [name for name in ("torch", "timm", "safetensors") if find_spec(name) is None]
    if lacking:
        return False, f"cannot be loaded without {', '.join(lacking)}"

    from layershuffle.core.stack import depth_of
    from layershuffle.errors import ModelFileError
    from layershuffle.models import load

    try:
        # Loaded, not looked for, so that damaged files are found as well.
        model = load("bundled:digits")
    except ModelFileError as error:
        return False, str(error)
    parameters = sum(p.numel() for p in model.parameters())
    return True, f"{depth_of(model)} blocks, {parameters:,} parameters"
