"""Settings as people write them in a YAML recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from layershuffle.bundled import asset, recipe_names
from layershuffle.errors import UsageError
from layershuffle.text import one_line

_MAX_RECIPE_BYTES = 1 << 20
_HINT = "name a YAML file with a line per setting, as in `steps: 500`"


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises `UsageError` if the file cannot be read, is larger than 1 MiB, or holds something other
    than a mapping with text keys.
    """
    try:
        if path.stat().st_size > _MAX_RECIPE_BYTES:
            raise UsageError("A recipe must be a small YAML file, but this file is not", place=path)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        # Plans and lists of hosts are read here, too: they have no steps.
        raise UsageError(
            "There is no such file", place=path, hint="name a YAML file that exists"
        ) from error
    # A few hundred nested brackets are enough for yaml's parser to end in a RecursionError.
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"The recipe cannot be read ({one_line(error)})",
            place=path,
            hint=_HINT,
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError("A recipe must be a YAML mapping of settings", place=path, hint=_HINT)
    return content


def recipe_of_model(place: Path) -> dict[str, Any] | None:
    """The packaged recipe that trains a model into a directory of this name, `None` without one.

    Some recipes refine what another one trains: `runs/NAME`, made by `layershuffle pretrain NAME`.
    """
    if place.name not in recipe_names():
        return None
    recipe = read_recipe(asset("recipes", f"{place.name}.yaml"))
    return None if "arms" in recipe else recipe  # a study fills its directory with other things
