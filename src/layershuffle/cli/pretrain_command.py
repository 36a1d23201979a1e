"""`layershuffle pretrain RECIPE`: train a base model, as the shipped digits checkpoint was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layershuffle.cli.fit_command import fit_from
from layershuffle.errors import UsageError

_ABOUT = (
    "Train a base model from a recipe (a file for the method `baseline` whose model starts from "
    "random weights), e.g. layershuffle pretrain recipes/digits-base.yaml --out DIR. Flags change "
    "single settings."
)


def run(argv: Sequence[str]) -> int:
    """Pretrain; returns the exit code."""
    if argv and argv[0] in ("-h", "--help"):
        return fit_from(argv, recipe=None, command="pretrain RECIPE", about=_ABOUT)
    if not argv or argv[0].startswith("-"):
        raise UsageError(
            "No recipe was given", hint="layershuffle pretrain recipes/digits-base.yaml --out DIR"
        )
    return fit_from(argv[1:], recipe=Path(argv[0]), command="pretrain RECIPE", about=_ABOUT)
