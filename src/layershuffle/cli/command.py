"""What every command of the command line is: a frozen dataclass of its arguments, with `run`.

cyclopts makes the flags and the help text of the fields and their docstrings. Arguments before
`KW_ONLY` need no flag, and have one all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from layershuffle.cli.words import MODEL
from layershuffle.ground.machine import Device, torch_threads
from layershuffle.ground.text import Progress

AnySettings = TypeVar("AnySettings")
Inline = Annotated[AnySettings, Parameter(name="*")]
"""Settings whose fields are flags without a prefix: `--seed`, not `--settings.seed`."""
MACHINE = Parameter(group="Machine")
"""Flags that come last in `--help`."""
AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]
Models = Annotated[tuple[str, ...], Parameter(name="--model"), MODEL]
"""One model or several."""
ImageFiles = Annotated[tuple[Path, ...], Parameter(name="--image")]
"""One image file or several."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command; its docstring is the description in `--help`."""

    def run(self) -> int:
        """Run the command and print the outcome; returns the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Reporting(Command):
    """A command whose outcome is for people or for programs."""

    json: Annotated[bool, Parameter(group="Output")] = False
    """Print JSON, with every number."""

    def show(self, report: Any, text: str) -> None:
        """Print one of them."""
        print(json.dumps(report, indent=2) if self.json else text)


@dataclass(frozen=True, kw_only=True)
class ComputingCommand(Command):
    """A command that runs a model in this process; `fit` has the flags as settings."""

    device: Annotated[Device, MACHINE] = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1 (this one of several) or
    mps (the GPU of a Mac)."""
    threads: Annotated[AtLeastOne | None, MACHINE] = None
    """CPU threads of torch (default: torch's own choice)."""

    @contextmanager
    def computing(self, title: str) -> Iterator[Progress]:
        """Compute with the requested number of threads, and show the progress under `title`."""
        from layershuffle.cli.progress import shown_progress

        with torch_threads(self.threads), shown_progress(title) as progress:
            yield progress
