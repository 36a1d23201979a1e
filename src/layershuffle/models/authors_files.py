"""Checkpoints of the paper's authors (github.com/matfrei/layershuffle): their position parts.

Their models keep the parts inside of the encoder of transformers' ViT or DeiT: one table of
positions for all blocks (`encoder.embedding`), a LayerNorm and a Linear before each block
(`encoder.layer.N.projection.net.0` and `.1`), or after it (`encoder.layer.N.position_mlp.net`).
Here they become position parts beside the backbone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import nn

from layershuffle.core.position_forms import AUTHORS_ENCODING, AUTHORS_PREDICTION
from layershuffle.models.files import WRAPPERS, weight_files
from layershuffle.models.metadata import PositionForms
from layershuffle.models.position_files import with_parts

_TABLE = re.compile(r"(?:\w+\.)?encoder\.embedding\.weight")
# In its reports of unknown names transformers calls the blocks `layers`.
_LAYER = re.compile(
    r"(?:\w+\.)?(?:encoder\.layer|layers)\.(\d+)\.(projection|position_mlp)\.net\.([01])\.(\w+)"
)
_OURS = {
    ("projection", "0"): "encoding.norms",
    ("projection", "1"): "encoding.projections",
    ("position_mlp", "0"): "prediction.norms",
    ("position_mlp", "1"): "prediction.classifiers",
}


def our_name(name: str) -> str | None:
    """Our name of a tensor of a position part, `None` for any other tensor."""
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
        prediction = AUTHORS_PREDICTION
    forms = PositionForms(encoding=encoding, prediction=prediction)
    return with_parts(backbone, forms, tensors=tensors, place=directory)
