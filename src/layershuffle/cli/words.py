"""What a shell offers at the tab key for a word: models and runs, analyses, methods, recipes.

cyclopts calls these while a command line is typed, so they import nothing slow and look at most
three directories deep.
"""

from __future__ import annotations

from typing import Any

from cyclopts import Parameter

from layershuffle.analysis import ANALYSES
from layershuffle.core.methods import PRESETS
from layershuffle.ground.bundled import asset, recipe_names
from layershuffle.ground.files import user_path

_RECORD = "layershuffle.json"


def _runs(typed: str) -> list[str]:
    """The directories of runs and saved models below the directory that is typed so far."""
    directory, slash, _ = typed.rpartition("/")
    prefix = directory + slash
    place = user_path(prefix or ".")
    found = set()
    for depth in ("*", "*/*", "*/*/*"):
        for record in place.glob(f"{depth}/{_RECORD}"):
            # A run is named by its directory, not by the model in it.
            run = record.parent.parent if record.parent.name == "model" else record.parent
            if run != place:
                found.add(prefix + run.relative_to(place).as_posix())
    return sorted(found)


def _models(context: Any) -> list[str]:
    bundled = [f"bundled:{path.parent.name}" for path in asset().glob(f"*/{_RECORD}")]
    return [*sorted(bundled), *_runs(context.incomplete), "timm:", "hf:"]


def _recipes(context: Any) -> list[str]:
    directory, slash, _ = context.incomplete.rpartition("/")
    prefix = directory + slash
    files = sorted(user_path(prefix or ".").glob("*.yaml"))
    return [*recipe_names(), *(prefix + path.name for path in files)]


def _analyses(_context: Any) -> list[str]:
    return [*ANALYSES, "all"]


def _methods(_context: Any) -> list[str]:
    return [*PRESETS]


MODEL = Parameter(completer=_models)
RECIPE = Parameter(completer=_recipes)
ANALYSIS = Parameter(completer=_analyses)
METHOD = Parameter(completer=_methods)
