"""About this machine: `layershuffle doctor` looks at it, and `completion` prints what its shell
needs to complete commands and flags."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layershuffle.cli.command import Command
from layershuffle.ground.extras import EXTRAS, install_line, missing
from layershuffle.ground.text import listing, shortened


@dataclass(frozen=True)
class CompletionCommand(Command):
    """Print a script by which a shell completes commands and flags at the tab key."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell that reads the script."""

    def run(self) -> int:
        """Print the script."""
        # Not above: it imports this module where this command is chosen.
        from layershuffle.cli import APP

        print(APP.generate_completion(shell=self.shell))
        return 0


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Show what this machine has: versions, extras, GPU, bf16, writable places; and what to type
    next."""

    def run(self) -> int:
        """Print the findings; exit code 1 if something needed is missing."""
        findings = list(_findings())
        rows: list[tuple[str, str]] = []
        code = 0
        for name, good, text in findings:
            rows.append((f"{'ok ' if good else 'NO '} {name}", text))
            if not good:
                code = 1
        rows += map(_extra, EXTRAS)
        install = f"{install_line('study')} && " if missing("study") else ""
        print(
            f"{listing(rows)}\n\n"
            "Next: layershuffle predict bundled:digits-swarm bundled:digit-pair.png   (seconds, no "
            "download)\n"
            f"      {install}layershuffle reproduce digits-quick   (7 to 11 minutes on two "
            "cores, no download)\n"
            "      layershuffle fit timm:NAME --data folder:DIR "
            "--out DIR"
        )
        return code


def _extra(name: str) -> tuple[str, str]:
    """A row about an extra. One that is missing is no fault: not everybody needs it."""
    extra = EXTRAS[name]
    lacking = missing(name)
    if not lacking:
        return f"ok  extra {name}", extra.brings
    partly = len(lacking) < len(extra.modules)
    state = f"without {shortened(lacking)}" if partly else "not installed"
    return f"-   extra {name}", f"{state}; {install_line(name)} for {extra.brings}"


def _findings() -> Iterator[tuple[str, bool, str]]:
    """The findings: the name of what was checked, whether it is good enough, and what is there."""
    from layershuffle.ground.machine import cores, processor, versions

    yield "python", sys.version_info >= (3, 11), sys.version.split()[0]
    for package, version in versions().items():
        # python has a line of its own above, with the oldest version that will do.
        if package != "python":
            yield package, version != "not installed", version
    # What this process may use: a container has fewer cores than the machine.
    yield "processor", True, f"{processor()}, {cores()} cores"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield "memory", True, f"{memory:.1f} GiB"
    yield from _accelerator()
    # Runs go below the working directory, caches and the swarm's token below the home, Ray's files
    # and sockets into the temporary directory.
    places = {
        "working directory": Path.cwd(),
        "home": Path(os.path.expanduser("~")),
        "temporary space": Path(tempfile.gettempdir()),
    }
    for name, path in places.items():
        if not path.is_dir():
            yield (
                name,
                False,
                "unknown: set HOME" if str(path) == "~" else f"{path} is no directory",
            )
            continue
        free = shutil.disk_usage(path).free / 2**30
        writable = os.access(path, os.W_OK)
        yield name, writable, f"{path}, {'' if writable else 'NOT '}writable, {free:.0f} GiB free"
    yield "bundled:digits", *_bundled()


def _accelerator() -> Iterator[tuple[str, bool, str]]:
    import torch

    from layershuffle.ground.machine import cpu_has_bf16

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        bf16 = torch.cuda.is_bf16_supported()
        free, total = torch.cuda.mem_get_info()
        yield "gpu", True, f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield "bf16", True, "yes, used by default" if bf16 else "no: fp32 is used"
        return
    if torch.backends.mps.is_available():
        yield "gpu", True, "that of a Mac, with --device mps (auto is the CPU)"
        yield "bf16", True, "fp32 is used by default"
        return
    # Good enough without one, so that the exit code stays 0 on machines that have what they need.
    built = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "knows CPUs only"
    yield "gpu", True, f"none that torch can use (it {built}); the digits recipes need none"
    has = "the processor has it" if cpu_has_bf16() else "the processor lacks it, and would be slow"
    yield "bf16", True, f"{has}; fp32 is used by default"


def _bundled() -> tuple[bool, str]:
    from layershuffle.core.stack import depth_of
    from layershuffle.ground.errors import ModelFileError
    from layershuffle.models import load

    try:
        # Loaded, so that damaged files are found as well as missing ones.
        model = load("bundled:digits")
    except ModelFileError as error:
        return False, str(error)
    parameters = sum(p.numel() for p in model.parameters())
    return True, f"{depth_of(model)} blocks, {parameters:,} parameters"
