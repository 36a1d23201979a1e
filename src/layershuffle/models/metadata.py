"""layershuffle.json: metadata of a saved model that the files of its library cannot hold.

{"schema": 1, "library": "timm", "name": "vit_tiny_patch16_224", "num_classes": 100, "depth": 12,
 "blocks": "blocks", "tied": null, "fixed": [0, 0], "shuffled": false,
 "position": {"encoding": null, "prediction": null}, "image_view": {...}, "base_model": null,
 ...the record given to `save`}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import one_line
from layershuffle.images.view import ImageView

METADATA_FILE = "layershuffle.json"
Json = dict[str, JsonValue]
LibraryName = Literal["timm", "transformers"]


# Strict types, because `save` never writes "12" or 12.0 for an integer.
class _MetadataModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class PositionForms(_MetadataModel):
    """Forms of the position parts, `None` for a missing part."""

    encoding: EncodingForm | None = None
    prediction: PredictionForm | None = None


class ModelRecord(_MetadataModel):
    """What `save` takes as the record of a model: how it was trained and scored."""

    method: str | None = None
    policy: Json | None = None
    selected: Json | None = None
    settings: Json | None = None
    scores: JsonValue = None
    provenance: Json | None = None


class ModelMetadata(ModelRecord):
    """The content of layershuffle.json."""

    # pydantic's models have a method `schema`, hence the alias.
    schema_: Literal[1] = Field(alias="schema")
    library: LibraryName
    name: str
    model_args: Json | None = None  # of 0.2.0; config.json has them
    num_classes: Annotated[int, Field(ge=0)]
    depth: Annotated[int, Field(ge=1)]
    blocks: str
    tied: list[int] | None = None
    fixed: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (0, 0)
    shuffled: bool = False
    position: PositionForms
    image_view: ImageView
    base_model: str | None = None


def read_record(directory: str | Path) -> dict[str, Any]:
    """The content of DIRECTORY/layershuffle.json. Raises `ModelFileError` if it is invalid."""
    metadata = read_metadata(user_path(directory))
    return metadata.model_dump(mode="json", by_alias=True, exclude_unset=True)


def read_metadata(directory: Path) -> ModelMetadata:
    """The metadata in `directory`. Raises `ModelFileError` with the first invalid key."""
    path = directory / METADATA_FILE
    try:
        return ModelMetadata.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ModelFileError(
            f"This is no metadata of a model: {_cause(error)}",
            place=path,
            hint="it was changed, damaged, or written by a later version: save the model again",
        ) from error


def checked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as JSON types. Raises `UsageError` for unknown keys and other types."""
    try:
        # As JSON, so tuples become lists now, not only when the model is loaded.
        text = json.dumps(dict(record), allow_nan=False, ensure_ascii=False)
        content = text.encode(errors="replace")  # paths may hold bytes that are no UTF-8
        return ModelRecord.model_validate_json(content).model_dump(exclude_unset=True)
    except (TypeError, ValueError) as error:
        keys = ", ".join(ModelRecord.model_fields)
        raise UsageError(
            f"The record cannot be kept ({_cause(error)})",
            hint=f"its keys are {keys}, with numbers, words, lists and mappings in them; no NaN",
        ) from error


def _cause(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return one_line(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
