"""What every command of the command line is: a frozen dataclass of its arguments, with `run`.

tyro makes the flags and the help text of the fields and their docstrings, so that `--help` shows
every argument with its type, its default and a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self, TypeVar

import tyro

from layershuffle.errors import SettingsError

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
