"""The position parts of a saved model, in layershuffle.safetensors beside the host's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from layershuffle.core.position import (
    PositionedModel,
    PositionEncoding,
    PositionPrediction,
    width_of,
)
from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.errors import ModelFileError
from layershuffle.models.files import (
    Shape,
    check_depth,
    check_tensors,
    read_tensors,
    shapes_of,
    tensor_shapes,
    write_tensors,
)
from layershuffle.models.metadata import METADATA_FILE, ModelMetadata, form_of

PARTS = "layershuffle.safetensors"


def with_stored_parts(host: nn.Module, metadata: ModelMetadata, *, directory: Path) -> nn.Module:
    """`host`, or a `PositionedModel` of it with the stored parts."""
    path = directory / PARTS
    encoding, prediction = metadata.position.encoding, metadata.position.prediction
    if encoding is None and prediction is None:
        # If the file was ignored, the model would be scored without its trained parts.
        if path.exists():
            raise ModelFileError(
                f"{METADATA_FILE} does not mention this file",
                place=path,
                hint="save the model again",
            )
        return host
    place = directory / METADATA_FILE
    shapes = tensor_shapes(path)
    _check_part_depth(shapes, metadata.depth, path=path)
    model = PositionedModel(host)
    if encoding is not None:
        form = cast(EncodingForm, form_of(EncodingForm, encoding, path=place))
        _check_features(shapes, form, path=path)
        # The seed does not matter, because the stored tensors replace the initial values.
        model.encoding = PositionEncoding(metadata.depth, width_of(host), form=form, seed=0)
    if prediction is not None:
        guess = cast(PredictionForm, form_of(PredictionForm, prediction, path=place))
        model.prediction = PositionPrediction(metadata.depth, width_of(host), form=guess, seed=0)
    parts = parts_of(model)
    tensors = read_tensors(path, shapes_of(parts.state_dict()))
    # assign keeps the dtype of the stored tensors, such as half precision.
    parts.load_state_dict(tensors, strict=True, assign=True)
    return model


def _check_part_depth(shapes: Mapping[str, Shape], depth: int, *, path: Path) -> None:
    # A table is [depth, features] or [depth, depth, features]; a bias is [depth].
    for name, axis in (("encoding.table", -2), ("prediction.classifiers.0.bias", -1)):
        if len(shapes.get(name, ())) >= -axis:
            check_depth(shapes[name][axis], depth, place=path)


def _check_features(shapes: Mapping[str, Shape], form: EncodingForm, *, path: Path) -> None:
    # Checked before the part is built, because a form may contain any size.
    stored = shapes.get("encoding.table", ())[-1:]
    if stored and stored != (form.features,):
        raise ModelFileError(
            f"The tensor encoding.table has shape {shapes['encoding.table']}, {METADATA_FILE} says "
            f"features = {form.features}",
            place=path,
            hint="the files come from different models: save the model again",
        )
    if not stored:
        check_tensors(shapes, {"encoding.table": ()}, place=path)


def parts_of(model: PositionedModel) -> nn.ModuleDict:
    """The position parts of the model, by their names in the file."""
    parts = {"encoding": model.encoding, "prediction": model.prediction}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})


def position_to_json(model: nn.Module) -> dict[str, Any]:
    """The forms of the model's position parts, as in layershuffle.json."""
    if not isinstance(model, PositionedModel):
        return {"encoding": None, "prediction": None}
    return {
        "encoding": vars(model.encoding.form).copy() if model.encoding else None,
        "prediction": vars(model.prediction.form).copy() if model.prediction else None,
    }


def write_parts(model: nn.Module, directory: Path) -> None:
    """Write the parameters of the model's position parts, if it has any."""
    if isinstance(model, PositionedModel) and parts_of(model):
        write_tensors(parts_of(model).state_dict(), directory / PARTS)
