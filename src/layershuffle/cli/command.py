"""What every command of the command line is: a frozen dataclass of its arguments, with `run`.

tyro makes the flags and the help text of the fields and their docstrings, so that `--help` shows
every argument with its type, its default and a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Self, TypeVar

import tyro

from layershuffle.errors import SettingsError, UsageError
from layershuffle.machine import Device, torch_threads
from layershuffle.progress import Progress

AnySettings = TypeVar("AnySettings")
Inline = Annotated[AnySettings, tyro.conf.arg(name="")]
"""Settings whose fields are flags without a prefix: `--seed`, not `--settings.seed`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command; its docstring is the description in `--help`."""

    # `main` acts on --debug before anything is parsed, because parsing may fail as well. The field
    # is here for the help text.
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the whole Python traceback of a failure."""

    def run(self) -> int:
        """Do what the command is for, print the outcome; returns the exit code."""
        raise NotImplementedError

    @classmethod
    def parse(cls, words: Sequence[str], *, prog: str) -> Self:
        """The command with its arguments from `words`.

        Raises `SettingsError` for a value that a setting cannot have. tyro itself reports unknown
        and missing arguments, and exits with 2.
        """
        try:
            return tyro.cli(cls, args=list(words), prog=prog)
        except SettingsError as error:
            # Not chained: the first error says the same without the next command to type.
            raise SettingsError(error.cause, hint=f"{prog} --help") from None


@dataclass(frozen=True, kw_only=True)
class ComputingCommand(Command):
    """A command that runs a model in this process; `fit` and `bench` have the flags as settings."""

    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads of torch (default: torch's own choice)."""

    @contextmanager
    def computing(self, title: str) -> Iterator[Progress]:
        """With as many threads as asked for; the progress is shown under `title`."""
        from layershuffle.cli.progress import shown_progress

        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is 1 or more, not {self.threads}")
        with threads_of(self.threads), shown_progress(title) as progress:
            yield progress


def threads_of(number: int | None) -> AbstractContextManager[None]:
    """Torch computes with `number` threads inside; `None` leaves it its own choice."""
    # Not even set to what it is: torch's choice depends on the machine and may change.
    return torch_threads(number) if number else nullcontext()
