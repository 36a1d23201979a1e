"""The position parts of a saved model, in layershuffle.safetensors beside the backbone's.

Checkpoints of the paper's authors (github.com/matfrei/layershuffle) keep them inside of the encoder
of transformers' ViT or DeiT: one table of positions for all blocks (`encoder.embedding`), a
LayerNorm and a Linear before each block (`encoder.layer.N.projection.net.0` and `.1`), or after it
(`encoder.layer.N.position_mlp.net`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from layershuffle.core.position import PositionedModel, add_position
from layershuffle.core.position_forms import AUTHORS_ENCODING, PredictionForm
from layershuffle.ground.errors import ModelFileError
from layershuffle.models.files import (
    WRAPPERS,
    library_errors,
    read_tensors,
    weight_files,
    write_tensors,
)
from layershuffle.models.metadata import METADATA_FILE, PositionForms

PARTS = "layershuffle.safetensors"
_OTHERS = "the files come from different models: save the model again"
# In its reports of unknown names transformers calls the blocks `layers`.
_TABLE = re.compile(r"(?:\w+\.)?encoder\.embedding\.weight")
_LAYER = re.compile(
    r"(?:\w+\.)?(?:encoder\.layer|layers)\.(\d+)\.(projection|position_mlp)\.net\.([01])\.(\w+)"
)
_OURS = {
    ("projection", "0"): "encoding.norms",
    ("projection", "1"): "encoding.projections",
    ("position_mlp", "0"): "prediction.norms",
    ("position_mlp", "1"): "prediction.classifiers",
}


def with_stored_parts(backbone: nn.Module, forms: PositionForms, *, directory: Path) -> nn.Module:
    """`backbone`, or a `PositionedModel` of it with the parts in `directory`."""
    path = directory / PARTS
    if forms != PositionForms():
        return _with_parts(backbone, forms, tensors=read_tensors(path), place=path)
    # If the file was ignored, the model would be scored without its trained parts.
    if path.exists():
        raise ModelFileError(
            f"{METADATA_FILE} does not mention this file", place=path, hint=_OTHERS
        )
    return backbone


def our_name(name: str) -> str | None:
    """Our name of a tensor of the authors' position parts, `None` for any other tensor."""
    if _TABLE.fullmatch(name):
        return "encoding.table"
    match = _LAYER.fullmatch(name)
    return f"{_OURS[match[2], match[3]]}.{match[1]}.{match[4]}" if match else None


def with_authors_parts(backbone: nn.Module, directory: Path) -> nn.Module:
    """`backbone`, or a `PositionedModel` with the position parts of its checkpoint in `directory`.

    Raises `ModelFileError` if they are incomplete.
    """
    tensors = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                ours = our_name(WRAPPERS.sub("", name))
                if ours is not None:
                    tensors[ours] = file.get_tensor(name)
    if not tensors:
        return backbone
    encoding = prediction = None
    if any(name.startswith("encoding.") for name in tensors):
        table = tensors.get("encoding.table")
        features = AUTHORS_ENCODING.features if table is None else table.shape[-1]
        encoding = replace(AUTHORS_ENCODING, features=features)
    if any(name.startswith("prediction.") for name in tensors):
        prediction = PredictionForm()
    forms = PositionForms(encoding=encoding, prediction=prediction)
    return _with_parts(backbone, forms, tensors=tensors, place=directory)


def _with_parts(
    backbone: nn.Module, forms: PositionForms, *, tensors: Mapping[str, Tensor], place: Path
) -> PositionedModel:
    """`backbone` with position parts of these forms, made of exactly `tensors` by `parts_of` names.

    Raises `ModelFileError` at `place` for other tensors.
    """
    encoding = forms.encoding
    table = tensors.get("encoding.table")
    # Before memory is taken for the part, because a form in a file may name any size.
    if encoding is not None and (table is None or table.shape[-1:] != (encoding.features,)):
        raise ModelFileError(
            f"The file has no table of positions (encoding.table) with {encoding.features} "
            "features",
            place=place,
            hint=_OTHERS,
        )
    with library_errors("torch", place, hint=_OTHERS):
        # The initial values are replaced by the stored tensors.
        model = add_position(backbone, encoding=encoding, prediction=forms.prediction)
        parts_of(model).load_state_dict(tensors, strict=True)
    return model


def parts_of(model: PositionedModel) -> nn.ModuleDict:
    """The position parts of the model, by their names in the file."""
    parts = {"encoding": model.encoding, "prediction": model.prediction}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})


def forms_of(model: nn.Module) -> PositionForms:
    """The forms of the model's position parts."""
    if not isinstance(model, PositionedModel):
        return PositionForms()
    encoding = model.encoding
    prediction = model.prediction
    return PositionForms(
        encoding=encoding.form if encoding else None,
        prediction=prediction.form if prediction else None,
    )


def write_parts(model: nn.Module, directory: Path) -> None:
    """Write the parameters of the model's position parts, if it has any."""
    if isinstance(model, PositionedModel) and parts_of(model):
        write_tensors(parts_of(model).state_dict(), directory / PARTS)
