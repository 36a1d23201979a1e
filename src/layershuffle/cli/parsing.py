"""From words to settings: recipe, then environment, then flags; the later one wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from pydantic_core import PydanticUndefined

from layershuffle.errors import SettingsError, UsageError
from layershuffle.recipes import from_environment, read_recipe
from layershuffle.settings import Settings, check_known, field_value

AnySettings = TypeVar("AnySettings", bound=Settings)
Parsed = TypeVar("Parsed")


def parse(kind: type[Parsed], argv: Sequence[str], *, command: str, about: str) -> Parsed:
    """`kind` (a dataclass) filled from flags. tyro itself reports wrong flags and exits with 2."""
    return tyro.cli(
        kind,
        args=list(argv),
        prog=f"layershuffle {command}",
        description=about,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def settings_from(
    kind: type[AnySettings], argv: Sequence[str], *, recipe: Path | None, command: str, about: str
) -> AnySettings:
    """The settings of a command, every layer checked. Raises `UsageError` in one paragraph."""
    fields = {**(read_recipe(recipe) if recipe else {}), **from_environment(kind)}
    try:
        check_known(kind, fields)  # before tyro, which would ask for what was misspelt
        return tyro.cli(
            kind,
            args=list(argv),
            prog=f"layershuffle {command}",
            description=about,
            default=_defaults(kind, fields),
        )
    except SettingsError as error:
        raise SettingsError(
            error.cause, place=recipe, hint=f"layershuffle {command} --help"
        ) from None


def _defaults(kind: type[AnySettings], fields: dict[str, Any]) -> AnySettings:
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        missing = tyro.MISSING if default is PydanticUndefined else default
        values[name] = field_value(kind, name, value=fields[name]) if name in fields else missing
    return kind.model_construct(None, **values)


def take_option(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `--flag VALUE` or `--flag=VALUE`, and the words without it."""
    words = list(argv)
    for index, word in enumerate(words):
        if word == flag:
            if index + 1 == len(words):
                raise UsageError(f"{flag} needs a value")
            return words[index + 1], words[:index] + words[index + 2 :]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], words[:index] + words[index + 1 :]
    return None, words
