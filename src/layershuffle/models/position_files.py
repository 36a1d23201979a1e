"""The position parts of a saved model: layershuffle.safetensors, beside the stock weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

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
from layershuffle.position import PositionedModel, PositionEncoding, PositionPrediction, width_of
from layershuffle.position_forms import EncodingForm, PredictionForm

PARTS = "layershuffle.safetensors"


def with_stored_parts(host: nn.Module, metadata: ModelMetadata, *, directory: Path) -> nn.Module:
    """`host`, or a `PositionedModel` with the stored parts around it."""
    path = directory / PARTS
    encoding, prediction = metadata.position.encoding, metadata.position.prediction
    if encoding is None and prediction is None:
        # Ignoring the file would score a model without parts that it was trained with.
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
        # Any seed would do: all that is drawn here is replaced by the stored tensors.
        model.encoding = PositionEncoding(metadata.depth, width_of(host), form=form, seed=0)
    if prediction is not None:
        guess = cast(PredictionForm, form_of(PredictionForm, prediction, path=place))
        model.prediction = PositionPrediction(metadata.depth, width_of(host), form=guess, seed=0)
    parts = parts_of(model)
    tensors = read_tensors(path, shapes_of(parts.state_dict()))
    # assign keeps the type in which the tensors were saved, such as half precision.
    parts.load_state_dict(tensors, strict=True, assign=True)
    return model


def _check_part_depth(shapes: Mapping[str, Shape], depth: int, *, path: Path) -> None:
    # A table is [depth, features] or [depth, depth, features]; a bias has a number per position.
    for name, axis in (("encoding.table", -2), ("prediction.classifiers.0.bias", -1)):
        if len(shapes.get(name, ())) >= -axis:
            check_depth(shapes[name][axis], depth, place=path)


def _check_features(shapes: Mapping[str, Shape], form: EncodingForm, *, path: Path) -> None:
    # Before the part is built: a form may ask for any size.
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
    """The position parts that the model has, under the names they have in the file."""
    parts = {"encoding": model.encoding, "prediction": model.prediction}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})


def position_to_json(model: nn.Module) -> dict[str, Any]:
    """The forms of the model's position parts as layershuffle.json has them."""
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
