"""What ships in this package beside code: recipes, models, and a picture to classify.

A recipe goes by its name (`digits-quick`), other files as `bundled:NAME`, as the models do.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import did_you_mean

_SCHEME = "bundled:"


def asset(*names: str) -> Path:
    """A file or directory of this package, which need not exist."""
    return Path(str(resources.files("layershuffle").joinpath("assets", *names)))


def recipe_names() -> list[str]:
    """The recipes of this package, by name."""
    return sorted(path.stem for path in asset("recipes").glob("*.yaml"))


def recipe_file(path: Path) -> Path:
    """The file of a recipe: `path` itself, or the packaged recipe of that name ("digits-quick").

    Raises `UsageError` if there is neither.
    """
    # A directory of that name may be here as well: the results of an earlier run.
    if str(path) in recipe_names() and not path.is_file():
        return asset("recipes", f"{path}.yaml")
    if path.exists():
        return path
    listed = f"the recipes of this package are {', '.join(recipe_names())}"
    raise UsageError(
        "There is no recipe of this name",
        place=path,
        hint=did_you_mean(path.stem, recipe_names(), otherwise=listed),
    )


def packaged_file(path: Path) -> Path:
    """What is at `path`, which may be "bundled:NAME": a packaged picture, or a packaged model.

    Raises `UsageError` if the package has nothing of that name.
    """
    scheme, _, name = str(path).partition(_SCHEME)
    if scheme or not name:
        return path
    if not asset(name).exists():
        names = sorted(place.name for place in asset().iterdir())
        raise UsageError(
            f"This package has no {name!r}",
            place=path,
            hint=did_you_mean(name, names, otherwise="bundled:digit-pair.png is a picture"),
        )
    return asset(name)


def recipe_of_model(place: Path) -> dict[str, Any] | None:
    """The packaged recipe that trains a model into a directory of this name, `None` without one.

    Some recipes refine what another one trains: `runs/NAME`, of `layershuffle fit --recipe NAME`.
    """
    if place.name not in recipe_names():
        return None
    text = asset("recipes", f"{place.name}.yaml").read_text(encoding="utf-8")
    recipe: dict[str, Any] = yaml.safe_load(text)
    if "arms" in recipe:
        return None  # a study fills its directory with other things
    return recipe
