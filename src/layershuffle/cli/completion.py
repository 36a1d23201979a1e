"""`layershuffle completion SHELL`: what a shell needs to complete commands and flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layershuffle.cli import APP
from layershuffle.cli.command import Command


@dataclass(frozen=True)
class CompletionCommand(Command):
    """Print a script by which a shell completes commands and flags at the tab key."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell that reads the script."""

    def run(self) -> int:
        """Print the script."""
        print(APP.generate_completion(shell=self.shell))
        return 0
