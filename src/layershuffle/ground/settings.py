"""What settings of every command share: one base class, their types, and how a recipe is read.

Settings come from a YAML recipe and from flags, which have precedence. The docstring of a setting
is its text in `--help`. Unknown keys are refused, and the error names the nearest valid one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from cyclopts import Parameter
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.text import nearest, one_line

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_HINT = "name a YAML file with a line per setting, as in `steps: 500`"


def _pair_of_flag(value: Any) -> Any:
    """The two numbers that a flag such as `--fixed 1,1` names; anything else as it is."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    text = ",".join(words)
    if not re.fullmatch(r"[0-9]{1,4},[0-9]{1,4}", text):
        raise ValueError(f"{text!r} is not two numbers of blocks, such as 1,1")
    return tuple(map(int, text.split(",")))


Positive = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0)]
NotBelow = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
BlockId = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Below 2 ** 32, the limit of numpy's generator, which augmentation uses."""
Precision = Literal["fp32", "bf16"]
"""The dtype of forwards whose results are scores."""
Ends = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]],
    BeforeValidator(_pair_of_flag),
    Parameter(n_tokens=1, metavar="FIRST,LAST"),
]
"""Numbers of first and last blocks that keep their place: [1, 1] in a recipe, 1,1 as a flag."""
Name = Annotated[str, Field(pattern=r"^[^/.][^/]*$")]
"""A name that becomes part of a path, so it has no slash and does not begin with a dot."""


AnySettings = TypeVar("AnySettings", bound="Settings")


class Settings(BaseModel):
    """Base class of settings: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **fields: Any) -> None:
        """Raises `SettingsError` with the key, the problem, and the nearest valid key."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems = _causes([dict(details) for details in error.errors()])
            # A misspelt key is often the cause of another that is missing.
            unknown = [problem for problem in problems if problem["type"] in _UNKNOWN]
            texts = [_problem(type(self), problem) for problem in unknown or problems]
            raise SettingsError("; ".join(texts)) from error

    @model_validator(mode="before")
    @classmethod
    def _none(cls, fields: Any) -> Any:
        # The word of a flag, as in `--clip None`. What is no mapping is for pydantic to refuse.
        if not isinstance(fields, dict):
            return fields
        return {name: None if value == "None" else value for name, value in fields.items()}


class _EveryKeyOnce(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for place, _ in node.value:
            # `<<` brings keys that the others may replace.
            merges = place.tag == "tag:yaml.org,2002:merge"
            key = place.value if merges else self.construct_object(place, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key!r} is there twice", problem_mark=place.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises `UsageError` if the file cannot be read, names a key twice, or holds something other
    than a mapping with text keys.
    """
    try:
        # A byte order mark is what some editors of Windows begin a file with.
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_EveryKeyOnce)
    except FileNotFoundError as error:
        # Plans and lists of hosts are read here, too: they have no steps.
        raise UsageError(
            "There is no such file", place=path, hint="name a YAML file that exists"
        ) from error
    # A few hundred nested brackets are enough for yaml's parser to end in a RecursionError.
    # YAML makes a date of 2024-13-45, which is a ValueError, as are bytes that are no UTF-8.
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"The recipe cannot be read ({one_line(error)})",
            place=path,
            hint=_HINT,
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError("A recipe must be a YAML mapping of settings", place=path, hint=_HINT)
    return content


@dataclass(frozen=True)
class KeysOf:
    """Marks a setting that is a mapping whose keys are `settings`, built from it later."""

    settings: type[Settings]


def digest(settings: Settings) -> str:
    """The SHA-256 of the settings, independent of the version of Python."""
    # Sorted, so fields may be reordered within their class.
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _causes(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The problems without those of a list whose items have problems: pydantic left these out, and
    then found it too short."""
    parents = set()
    for problem in problems:
        if len(problem["loc"]) > 1:
            parents.add(problem["loc"][:-1])
    return [problem for problem in problems if problem["loc"] not in parents]


def _problem(kind: type[Settings], error: dict[str, Any]) -> str:
    """An error of pydantic as a sentence."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] in _UNKNOWN:
        return _unknown(kind, name)
    # An error of this package within a validator has its own cause and hint.
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, UsageError):
        message = raised.cause if raised.hint is None else f"{raised.cause}: {raised.hint}"
    else:
        message = str(error["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
        message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
        if error["type"] == "literal_error":
            message = f"{error['input']!r} is not {error['ctx']['expected']}"
        message = message.replace("Tuple should", "The list should").replace(
            " after validation", ""
        )
    return f"{name}: {message}" if name else message


def _unknown(kind: type[Settings], name: str) -> str:
    group, _, word = name.rpartition(".")
    # Keys of other groups come last, because `modle` is as near to `modes` as to `model`.
    match = nearest(word, _known_keys(kind, group))
    # Groups with this key come before groups with similar keys.
    groups = sorted(kind.model_fields, key=lambda other: word not in _known_keys(kind, other))
    for other in () if match else groups:
        # With its group, because the key may be valid there but not here.
        if elsewhere := nearest(word, _known_keys(kind, other)):
            match = f"{other}.{elsewhere}"
            break
    return f"{name!r} is not a setting" + (f", did you mean {match!r}?" if match else "")


def _known_keys(kind: type[Settings], group: str) -> list[str]:
    """The keys of a group of settings, or of `kind` itself if `group` is empty."""
    field = kind.model_fields.get(group)
    nested = kind if field is None else field.annotation
    for mark in () if field is None else field.metadata:
        nested = mark.settings if isinstance(mark, KeysOf) else nested
    if is_dataclass(nested):
        return [part.name for part in fields(nested)]
    if isinstance(nested, type) and issubclass(nested, Settings):
        return list(nested.model_fields)
    return []
