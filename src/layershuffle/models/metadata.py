"""layershuffle.json: metadata of a saved model that the files of its library cannot hold.

{"schema": 1, "library": "timm", "name": "vit_tiny_patch16_224", "model_args": {...},
 "num_classes": 100, "depth": 12, "blocks": "blocks", "tied": null, "position": {"encoding": null,
 "prediction": null}, "image_view": {...}, "base_model": null, ...the record given to `save`}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView
from layershuffle.models.files import check_numbers, read_json
from layershuffle.results import current_method
from layershuffle.text import did_you_mean

METADATA_FILE = "layershuffle.json"
SCHEMA = 1
RECORD_KEYS = ("method", "policy", "selected", "settings", "scores", "provenance")
Json = dict[str, JsonValue]


# Strict types, because `save` never writes "12" or 12.0 for an integer.
class _MetadataModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class PositionForms(_MetadataModel):
    """Forms of the position parts, `None` for a missing part."""

    encoding: EncodingForm | None = None
    prediction: PredictionForm | None = None


class ModelMetadata(_MetadataModel):
    """The content of layershuffle.json."""

    # pydantic's models have a method `schema`, hence the alias.
    schema_: Literal[1] = Field(alias="schema")
    library: Literal["timm", "transformers", "torchvision"]
    name: str
    model_args: Json
    num_classes: Annotated[int, Field(ge=0)]
    depth: Annotated[int, Field(ge=1)]
    blocks: str
    tied: list[int] | None = None
    position: PositionForms
    image_view: ImageView
    base_model: str | None = None
    method: str | None = None
    policy: Json | None = None
    selected: Json | None = None
    settings: Json | None = None
    scores: JsonValue = None
    provenance: Json | None = None


def read_record(directory: str | Path) -> dict[str, Any]:
    """The content of DIRECTORY/layershuffle.json. Raises `ModelFileError` if it is invalid."""
    path = Path(directory) / METADATA_FILE
    data = read_json(path)
    parse_metadata(data, path)
    return data


def parse_metadata(data: Mapping[str, Any], path: Path) -> ModelMetadata:
    """The metadata in `data`. Raises `ModelFileError` with the first invalid key."""
    # Checked before anything is built, because a hostile number would cost memory and time.
    built_from = ("model_args", "position", "num_classes", "depth")
    check_numbers({key: data.get(key) for key in built_from}, path)
    view, settings = data.get("image_view"), data.get("settings")
    # Models of 0.1.0 may have `resize` in the settings of their training alone.
    if isinstance(view, dict) and isinstance(settings, dict) and "resize" not in view:
        squashed = (
            {"resize": "squash", "crop_pct": 1.0} if settings.get("resize") == "squash" else {}
        )
        data = {**data, "image_view": {**view, **squashed}}
    if isinstance(data.get("method"), str):
        # Merges compare the methods of donors, which may be of different versions.
        method, current = current_method(data["method"], settings or {})
        data = {**data, "method": method, "settings": current if settings else settings}
    try:
        # As JSON, in which the strict types of a tuple and of a dataclass are lists and objects.
        return ModelMetadata.model_validate_json(json.dumps(data))
    except (ValidationError, RecursionError) as error:
        raise _invalid(error, path) from error


def _invalid(error: ValidationError | RecursionError, path: Path) -> ModelFileError:
    hint = "the file was changed, damaged, or written by a later version: save the model again"
    if isinstance(error, RecursionError):
        return ModelFileError("The JSON is nested too deeply", place=path, hint=hint)
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = [field.alias or name for name, field in ModelMetadata.model_fields.items()]
        hint = did_you_mean(key, names, otherwise=hint)
    return ModelFileError(f"The key {key!r} is wrong ({first['msg']})", place=path, hint=hint)


def checked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as JSON types. Raises `UsageError` for unknown keys and other types."""
    unknown: Sequence[str] = sorted(record.keys() - set(RECORD_KEYS))
    if unknown:
        keys = f"the keys are {', '.join(RECORD_KEYS)}"
        raise UsageError(
            f"A record has no key {unknown[0]!r}",
            hint=did_you_mean(unknown[0], RECORD_KEYS, otherwise=keys),
        )
    try:
        # A round trip, so tuples become lists now, not only when the model is loaded.
        plain: dict[str, Any] = json.loads(json.dumps(dict(record), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The record cannot be written as JSON ({error})",
            hint="give it numbers, words, lists and mappings; no NaN",
        ) from error
    return plain
