"""Blocks of other models: whether they fit, and how to read one without the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from layershuffle.core.position import backbone_of
from layershuffle.core.stack import blocks_of, stack_of
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView
from layershuffle.models.files import (
    Shape,
    read_json,
    shapes_of,
    tensor_headers,
    weight_files,
    weights_digest,
)
from layershuffle.models.metadata import (
    METADATA_FILE,
    ModelMetadata,
    parse_metadata,
)
from layershuffle.models.origin import origin_of, seeded
from layershuffle.models.store import image_view
from layershuffle.swarm.program import pack_tensors


@dataclass(frozen=True)
class Lineage:
    """The properties that decide whether a block of one model may replace a block of another.

    `base`: fingerprint of the pretrained blocks that the model was refined from, and which of them
    it kept; `None` if its files do not record it. `shapes`: shapes of the tensors of a block, by
    name. `view`: how images are prepared for the model.
    """

    base: str | None
    depth: int
    shapes: Mapping[str, Shape]
    view: ImageView


def lineage_of(model: nn.Module) -> Lineage:
    """The lineage of a loaded model. A model whose record names no base is its own base."""
    host = backbone_of(model)
    blocks = blocks_of(host)
    return Lineage(
        base=_base(origin_of(host).record.get("provenance")) or weights_digest(stack_of(host)),
        depth=len(blocks),
        shapes=shapes_of(blocks[0].state_dict()),
        view=image_view(host),
    )


def read_lineage(directory: str | Path) -> Lineage:
    """The lineage of a saved model, from its JSON and the headers of its weights.

    Raises `ModelFileError` if it is not a saved model, `UsageError` if it has position encoding.
    """
    place, facts = _metadata_at(directory)
    if facts.position.encoding is not None:
        raise UsageError(
            "The blocks of this model need a position encoding, which hosts do not have",
            place=place,
            hint="serve a model of another method, such as layershuffle",
        )
    shapes = {n: shape for n, (_, shape) in tensor_headers(*weight_files(place)).items()}
    return Lineage(
        base=_base(facts.provenance),
        depth=facts.depth,
        shapes={ours: shapes[name] for name, ours in _names(place, facts, block=0).items()},
        view=facts.image_view,
    )


def read_block(directory: str | Path, block: int) -> bytes:
    """The safetensors of one block of a saved model, as in `Bundle.tensors`.

    No other weights are read. Raises `ModelFileError` if it is no saved model or damaged,
    `UsageError` for a block that it lacks.
    """
    place, facts = _metadata_at(directory)
    check_blocks([block], depth=facts.depth, place=place)
    names, tensors = _names(place, facts, block=block), {}
    # A large model has several files; those without the block are read no further than the header.
    for path in weight_files(place):
        try:
            with safe_open(path, framework="pt") as file:
                for name in names.keys() & set(file.keys()):
                    tensors[names[name]] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"The weights cannot be read ({error})",
                place=path,
                hint="save or copy the model again",
            ) from error
    return pack_tensors(tensors)


def check_blocks(blocks: Iterable[int], *, depth: int, place: str | Path) -> None:
    """Raises `UsageError` for a block that the model at `place` lacks."""
    for block in blocks:
        if not 0 <= block < depth:
            raise UsageError(
                f"The model has no block {block} (0 to {depth - 1} exist)",
                place=place,
                hint="name another block",
            )


def _metadata_at(directory: str | Path) -> tuple[Path, ModelMetadata]:
    """The directory of the model (of a run, its subdirectory "model"), and its metadata."""
    place = Path(directory)
    if not place.exists():
        raise ModelFileError("There is no such directory", place=place, hint="check the path")
    if not (place / METADATA_FILE).is_file() and (place / "model" / METADATA_FILE).is_file():
        place = place / "model"
    return place, parse_metadata(read_json(place / METADATA_FILE), place / METADATA_FILE)


def _base(provenance: object) -> str | None:
    record: Mapping[str, Any] = provenance if isinstance(provenance, Mapping) else {}
    if record.get("base_sha256") is None:
        return None
    # If a model kept only some blocks of its base, siblings must have kept the same ones.
    blocks = record.get("blocks_of_base")
    return f"{record['base_sha256']}, blocks {blocks}" if blocks else str(record["base_sha256"])


def _names(place: Path, facts: ModelMetadata, *, block: int) -> dict[str, str]:
    """The names of the block's tensors: name in the file to name in the block."""
    stored = set(tensor_headers(*weight_files(place)))
    # timm and torchvision save tensors under the names of the modules, transformers renames some.
    if facts.library == "transformers":
        names = _transformers_names(place, f"{facts.blocks}.{block}.")
    else:
        # torchvision names its blocks encoder_layer_0, encoder_layer_1 ...
        own = re.compile(rf"{re.escape(facts.blocks)}\.(?:encoder_layer_)?{block}\.(.+)")
        names = {name: match[1] for name in stored if (match := own.fullmatch(name))}
    if not names or not names.keys() <= stored:
        raise ModelFileError(
            f"The weights of block {block} are not where {METADATA_FILE} says ({facts.blocks})",
            place=place,
            hint="the files come from different models: save the model again",
        )
    return names


def _transformers_names(place: Path, prefix: str) -> dict[str, str]:
    """The names that transformers gives to the tensors below `prefix` when it saves a model.

    It renames some of them. So a model on the meta device is saved with a number in place of each
    tensor: the name under which a number is saved is the new name of that tensor.
    """
    from transformers import AutoModelForImageClassification

    from layershuffle.models import hf_models

    # Weights without data are enough, because only names are needed.
    config = hf_models.checked_config(place)
    with seeded(0), torch.device("meta"):
        sketch = AutoModelForImageClassification.from_config(config)
    own = [name for name in sketch.state_dict() if name.startswith(prefix)]
    numbers = {name: torch.tensor([number]) for number, name in enumerate(own)}
    with TemporaryDirectory() as saved, hf_models.quiet():
        sketch.save_pretrained(saved, state_dict=numbers)
        (path,) = weight_files(Path(saved))
        with safe_open(path, framework="pt") as file:
            places = {name: int(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 -- not a mapping
    return {name: own[number].removeprefix(prefix) for name, number in places.items()}
