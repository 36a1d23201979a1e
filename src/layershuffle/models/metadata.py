"""layershuffle.json: the facts beside the weights that no host library has a place for.

{"schema": 1, "library": "timm", "name": "vit_tiny_patch16_224", "model_args": {...},
 "num_classes": 100, "depth": 12, "blocks": "blocks", "position": {"encoding": null,
 "prediction": null}, "image_view": {...}, "base_model": null, ...the record given to `save`}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.models.files import check_numbers, read_json
from layershuffle.policies import policy_from_json
from layershuffle.position_forms import EncodingForm, PredictionForm, form_from_json

FACTS = "layershuffle.json"
SCHEMA = 1
RECORD_KEYS = ("method", "policy", "selected", "settings", "scores", "provenance")
Json = dict[str, JsonValue]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class PositionFacts(_Strict):
    """Forms of the position parts, `None` for a part that is not there."""

    encoding: Json | None = None
    prediction: Json | None = None


class Facts(_Strict):
    """The content of layershuffle.json."""

    schema_: Literal[1] = Field(alias="schema")
    library: Literal["timm", "transformers", "torchvision"]
    name: str
    model_args: Json
    num_classes: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=2)]
    blocks: str
    position: PositionFacts
    image_view: Json
    base_model: str | None = None
    method: str | None = None
    policy: Json | None = None
    selected: Json | None = None
    settings: Json | None = None
    scores: JsonValue = None
    provenance: Json | None = None


def read_record(directory: str | Path) -> dict[str, Any]:
    """The mapping in DIRECTORY/layershuffle.json, checked; `ModelFileError` if it is wrong."""
    path = Path(directory) / FACTS
    data = read_json(path)
    read_facts(data, path)
    return data


def read_facts(data: Mapping[str, Any], path: Path) -> Facts:
    """The facts in `data`; raises `ModelFileError` naming the first key that is wrong."""
    if data.get("schema") != SCHEMA:
        raise ModelFileError(
            f"The file has schema {str(data.get('schema'))[:20]}, this version reads {SCHEMA}",
            place=path,
            hint="install the version of layershuffle that saved it, or save the model again",
        )
    try:
        facts = Facts.model_validate(data)
    except ValidationError as error:
        raise _invalid(error, path) from error
    for part in (facts.model_args, facts.position.model_dump(), {"classes": facts.num_classes}):
        check_numbers(part, path)
    check_numbers({"depth": facts.depth}, path)
    _check_policy(facts, path)
    return facts


def form_of(
    kind: type[EncodingForm] | type[PredictionForm], data: Mapping[str, Any], *, path: Path
) -> EncodingForm | PredictionForm:
    """The form of a position part; raises `ModelFileError` for other fields, types or values."""
    try:
        form = form_from_json(kind, data)
        TypeAdapter(kind).validate_python(dict(data))
        if isinstance(form, EncodingForm) and not 0 <= form.dropout <= 1:
            raise UsageError(f"dropout lies in [0, 1], {form.dropout} does not")
    except (UsageError, ValidationError, TypeError) as error:
        raise ModelFileError(
            f"The position part is not a {kind.__name__} ({' '.join(str(error).split())[:300]})",
            place=path,
            hint="save the model again",
        ) from error
    return form


def checked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as JSON types; raises `UsageError` for unknown keys and what JSON cannot hold."""
    unknown = sorted(record.keys() - set(RECORD_KEYS))
    if unknown:
        raise UsageError(
            f"A record has no key {unknown[0]!r}", hint=_nearest(unknown[0], RECORD_KEYS)
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(record), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The record cannot be written as JSON ({error})",
            hint="give it numbers, words, lists and mappings; no NaN",
        ) from error
    return plain


def _check_policy(facts: Facts, path: Path) -> None:
    if facts.policy is None:
        return
    try:
        policy_from_json(facts.policy)
    except (UsageError, TypeError) as error:
        raise ModelFileError(
            f"The order policy is not one ({error})", place=path, hint="save the model again"
        ) from error


def _invalid(error: ValidationError, path: Path) -> ModelFileError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in Facts.model_fields.items()]
        return ModelFileError(f"The key {key!r} is unknown", place=path, hint=_nearest(key, known))
    return ModelFileError(
        f"The key {key!r} is wrong ({first['msg']})",
        place=path,
        hint="the file was changed or damaged: save the model again",
    )


def _nearest(key: str, known: tuple[str, ...] | list[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
