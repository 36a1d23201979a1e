"""Settings as people write them: a YAML recipe, `LAYERSHUFFLE_*` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from layershuffle.errors import UsageError
from layershuffle.settings import EvalSettings, FitSettings, Settings

_ENVIRONMENT_PREFIX = "LAYERSHUFFLE_"
_MAX_RECIPE_BYTES = 1 << 20
_SET_BY_ENVIRONMENT = {*FitSettings.model_fields, *EvalSettings.model_fields}


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UsageError` for anything else, or an absurd size."""
    try:
        if path.stat().st_size > _MAX_RECIPE_BYTES:
            raise UsageError("A recipe is a small YAML file, this one is not", place=path)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"The recipe cannot be read ({' '.join(str(error).split())})",
            place=path,
            hint="see recipes/ for examples",
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError("A recipe is a YAML mapping of settings", place=path)
    return content


def from_environment(
    kind: type[Settings], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings of `kind` found as LAYERSHUFFLE_NAME variables, read as YAML scalars."""
    source = os.environ if environment is None else environment
    _refuse_unknown_variables(source)
    names = {name: f"{_ENVIRONMENT_PREFIX}{name.upper()}" for name in kind.model_fields}
    return {
        name: _scalar(source[variable], variable)
        for name, variable in names.items()
        if variable in source
    }


def _refuse_unknown_variables(source: Mapping[str, str]) -> None:
    known = {f"{_ENVIRONMENT_PREFIX}{n.upper()}" for n in _SET_BY_ENVIRONMENT}
    for variable in sorted(name for name in source if name.startswith(_ENVIRONMENT_PREFIX)):
        if variable not in known:
            near = get_close_matches(variable, known, n=1)
            raise UsageError(
                f"The environment variable {variable} names no setting",
                hint=f"did you mean {near[0]}?" if near else "unset it",
            )


def _scalar(text: str, variable: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"{text!r} is not a value", place=variable, hint="write it as in a YAML recipe"
        ) from error
