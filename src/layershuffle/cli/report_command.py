"""`layershuffle report DIR`: the report of a study again, from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.reproduce_command import show_report


@dataclass
class _Options:
    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of a study, finished or not."""


def run(argv: Sequence[str]) -> int:
    """Write the report; what is missing is said in it."""
    about = "Write the report of a study from its results, finished or not; nothing is trained."
    show_report(parse(_Options, argv, command="report", about=about).directory)
    return 0
