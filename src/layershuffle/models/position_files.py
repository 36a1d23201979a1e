"""The position parts of a saved model, in layershuffle.safetensors beside the backbone's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from layershuffle.core.position import PositionedModel, add_position
from layershuffle.errors import ModelFileError
from layershuffle.models.files import read_tensors, refused_by, write_tensors
from layershuffle.models.metadata import METADATA_FILE, PositionForms

PARTS = "layershuffle.safetensors"
_OTHERS = "the files come from different models: save the model again"


def with_stored_parts(backbone: nn.Module, forms: PositionForms, *, directory: Path) -> nn.Module:
    """`backbone`, or a `PositionedModel` of it with the parts in `directory`."""
    path = directory / PARTS
    if forms != PositionForms():
        return with_parts(backbone, forms, tensors=read_tensors(path), place=path)
    # If the file was ignored, the model would be scored without its trained parts.
    if path.exists():
        raise ModelFileError(
            f"{METADATA_FILE} does not mention this file", place=path, hint=_OTHERS
        )
    return backbone


def with_parts(
    backbone: nn.Module, forms: PositionForms, *, tensors: Mapping[str, Tensor], place: Path
) -> PositionedModel:
    """`backbone` with position parts of these forms, made of exactly `tensors` by `parts_of` names.

    Raises `ModelFileError` at `place` for other tensors.
    """
    encoding, table = forms.encoding, tensors.get("encoding.table")
    # Before memory is taken for the part, because a form in a file may name any size.
    if encoding is not None and (table is None or table.shape[-1:] != (encoding.features,)):
        raise ModelFileError(
            f"The file has no table of positions (encoding.table) with {encoding.features} "
            "features",
            place=place,
            hint=_OTHERS,
        )
    with refused_by("torch", place, hint=_OTHERS):
        # The initial values are replaced by the stored tensors.
        model = add_position(backbone, encoding=encoding, prediction=forms.prediction)
        parts_of(model).load_state_dict(tensors, strict=True)
    return model


def parts_of(model: PositionedModel) -> nn.ModuleDict:
    """The position parts of the model, by their names in the file."""
    parts = {"encoding": model.encoding, "prediction": model.prediction}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})


def position_to_json(model: nn.Module) -> dict[str, Any]:
    """The forms of the model's position parts, as in layershuffle.json."""
    if not isinstance(model, PositionedModel):
        return {"encoding": None, "prediction": None}
    return {
        "encoding": asdict(model.encoding.form) if model.encoding else None,
        "prediction": asdict(model.prediction.form) if model.prediction else None,
    }


def write_parts(model: nn.Module, directory: Path) -> None:
    """Write the parameters of the model's position parts, if it has any."""
    if isinstance(model, PositionedModel) and parts_of(model):
        write_tensors(parts_of(model).state_dict(), directory / PARTS)
