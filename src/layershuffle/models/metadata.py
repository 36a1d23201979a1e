"""layershuffle.json: metadata of a saved model that the host libraries' files cannot hold.

{"schema": 1, "library": "timm", "name": "vit_tiny_patch16_224", "model_args": {...},
 "num_classes": 100, "depth": 12, "blocks": "blocks", "tied": null, "position": {"encoding": null,
 "prediction": null}, "image_view": {...}, "base_model": null, ...the record given to `save`}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from layershuffle.core.policies import policy_from_json
from layershuffle.core.position_forms import EncodingForm, PredictionForm, form_from_json
from layershuffle.data.view import ImageView, resized_as
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.models.files import check_numbers, read_json
from layershuffle.models.origin import view_from_json
from layershuffle.results import current_method
from layershuffle.text import did_you_mean, one_line

METADATA_FILE = "layershuffle.json"
SCHEMA = 1
RECORD_KEYS = ("method", "policy", "selected", "settings", "scores", "provenance")
Json = dict[str, JsonValue]


# Strict types, because `save` never writes "12" or 12.0 for an integer.
class _MetadataModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class PositionForms(_MetadataModel):
    """Forms of the position parts, `None` for a missing part."""

    encoding: Json | None = None
    prediction: Json | None = None


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
    image_view: Json
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
    # Checked before the keys, because a newer file has other keys.
    if data.get("schema") != SCHEMA:
        raise ModelFileError(
            f"The file has schema {str(data.get('schema'))[:20]}, this version reads {SCHEMA}",
            place=path,
            hint="install the version of layershuffle that saved it, or save the model again",
        )
    try:
        metadata = ModelMetadata.model_validate(data)
    except ValidationError as error:
        raise _invalid(error, path) from error
    # Checked before anything is built, because a hostile number would cost memory and time.
    sizes = {"classes": metadata.num_classes, "depth": metadata.depth}
    for part in (metadata.model_args, metadata.position.model_dump(), sizes):
        check_numbers(part, path)
    _check_policy(metadata, path)
    if metadata.method is None:
        return metadata
    # Merges compare the methods of donors, which may be of different versions.
    method, settings = current_method(metadata.method, metadata.settings or {})
    return metadata.model_copy(
        update={"method": method, "settings": settings if metadata.settings else None}
    )


def view_of_record(metadata: ModelMetadata, path: Path) -> ImageView:
    """The image view of the saved model. Raises `ModelFileError` if it is inconsistent.

    Older files have `resize` only in the settings of the training.
    """
    view = view_from_json({"resize": "crop", **metadata.image_view}, path)
    if "resize" in metadata.image_view or not metadata.settings:
        return view
    resize = metadata.settings.get("resize")
    return resized_as(view, "squash") if resize == "squash" else view


def form_of(
    kind: type[EncodingForm] | type[PredictionForm], data: Mapping[str, Any], *, path: Path
) -> EncodingForm | PredictionForm:
    """The form of a position part. Raises `ModelFileError` for invalid fields, types or values."""
    try:
        form = form_from_json(kind, data)
        # A dataclass accepts values of any type, so pydantic checks them.
        TypeAdapter(kind).validate_python(dict(data))
        if isinstance(form, EncodingForm) and not 0 <= form.dropout <= 1:
            raise UsageError(f"dropout must be in [0, 1], got {form.dropout}")
    except (UsageError, ValidationError, TypeError) as error:
        raise ModelFileError(
            f"The position part is not a {kind.__name__} ({one_line(error)})",
            place=path,
            hint="save the model again",
        ) from error
    return form


def checked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as JSON types. Raises `UsageError` for unknown keys and other types."""
    unknown = sorted(record.keys() - set(RECORD_KEYS))
    if unknown:
        raise UsageError(
            f"A record has no key {unknown[0]!r}", hint=_nearest(unknown[0], RECORD_KEYS)
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


def _check_policy(metadata: ModelMetadata, path: Path) -> None:
    if metadata.policy is None:
        return
    try:
        policy_from_json(metadata.policy)
    except (UsageError, TypeError) as error:
        raise ModelFileError(
            f"The order policy is invalid ({error})", place=path, hint="save the model again"
        ) from error


def _invalid(error: ValidationError, path: Path) -> ModelFileError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = [field.alias or name for name, field in ModelMetadata.model_fields.items()]
        return ModelFileError(f"The key {key!r} is unknown", place=path, hint=_nearest(key, names))
    return ModelFileError(
        f"The key {key!r} is wrong ({first['msg']})",
        place=path,
        hint="the file was changed or damaged: save the model again",
    )


def _nearest(key: str, names: Sequence[str]) -> str:
    return did_you_mean(key, names, otherwise=f"the keys are {', '.join(names)}")
