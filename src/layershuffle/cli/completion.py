"""`layershuffle completion SHELL`: what a shell needs to complete commands and flags."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union

import tyro

from layershuffle.cli import ROOT, CommandGroup
from layershuffle.cli.command import Command

_SPEC = re.compile(r"^COMPLETION_SPEC = .*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CompletionCommand(Command):
    """Print a script by which a shell completes commands and flags at the tab key."""

    shell: Annotated[
        Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")
    ]
    """bash, zsh or fish."""

    def run(self) -> int:
        """Print the script."""
        print(completion_script(self.shell))
        return 0


def completion_script(shell: str) -> str:
    """The script for `shell`, of all commands as they are now."""
    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        tyro.cli(
            _tree(ROOT),
            args=["--tyro-print-completion", shell],
            prog="layershuffle",
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
    # tyro writes the descriptions with their line breaks, and the script takes lines for answers.
    return _SPEC.sub(lambda line: line[0].replace("\\n", " "), output.getvalue())


def _tree(group: CommandGroup) -> Any:
    """The commands of a group as the union of types that tyro makes subcommands of."""
    kinds: list[Any] = []
    for name, (summary, target) in group.commands.items():
        if isinstance(target, CommandGroup):
            kind: Any = make_dataclass(name.title(), [("command", _tree(target))])
        else:
            module, _, word = target.partition(":")
            kind = getattr(import_module(f"layershuffle.cli.{module}"), word)
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, description=summary)])
    return Union[tuple(kinds)]  # noqa: UP007 -- made of a tuple, which `|` cannot be
