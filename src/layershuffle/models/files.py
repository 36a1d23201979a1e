"""Read, check and write the files of a saved model: JSON and safetensors.

A model directory may come from anyone. So nothing is ever unpickled, JSON is limited in size and
checked before it is used, and the names and shapes in a safetensors header are compared with the
model that is built before any tensor is read. Every fault becomes one `ModelFileError`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layershuffle.errors import ModelFileError
from layershuffle.text import shortened

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
# Newer releases of transformers write the second for models of images and text.
PROCESSORS = (PROCESSOR, "processor_config.json")
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".tar", ".ckpt", ".pkl", ".pickle"})

MAX_JSON_BYTES = 1 << 20
_MAX_NESTING = 64
MAX_INDEX_BYTES = 1 << 24  # a shard index lists every tensor of a model
# Larger than any vision transformer. A model is built from its configuration before its weights are
# compared, and these three kinds of numbers decide how much time and memory that takes.
_MAX_NUMBER = 1 << 24
_MAX_BLOCKS = 1024
_MAX_CLASSES = 1 << 20

Shape = tuple[int, ...]


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelFileError` for other content, or beyond `limit`."""
    try:
        with path.open("rb") as file:
            # One more byte than allowed shows that the file is too large.
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(
            f"The file cannot be read ({error.strerror or error})",
            place=path,
            hint="check the path; a saved model is a directory with this file in it",
        ) from error
    if len(raw) > limit:
        raise ModelFileError(
            f"The file is larger than {limit // 1024} KiB, more than such a file ever needs",
            place=path,
            hint="take the model from its source again",
        )
    try:
        data = json.loads(raw.decode("utf-8"))
    # Deep nesting raises RecursionError; undecodable text and bad JSON raise ValueError.
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"This is not JSON ({type(error).__name__})",
            place=path,
            hint="the file is damaged: take the model from its source again",
        ) from error
    if not isinstance(data, dict):
        raise ModelFileError(
            f"A JSON object is expected here, not a {type(data).__name__}",
            place=path,
            hint="take the model from its source again",
        )
    _check_nesting(data, path)
    return data


def _check_nesting(data: object, path: Path) -> None:
    # Later functions on the data are recursive.
    level: list[Any] = [data]
    for _ in range(_MAX_NESTING):
        inside = [node.values() if isinstance(node, dict) else node for node in level]
        level = [x for values in inside for x in values if isinstance(x, dict | list)]
        if not level:
            return
    raise ModelFileError(
        f"The JSON is nested deeper than {_MAX_NESTING} levels",
        place=path,
        hint="take the model from its source again",
    )


def check_numbers(data: object, place: Path, *, key: str = "") -> None:
    """Raises `ModelFileError` for numbers so large that a model would fill the memory."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            check_numbers(value, place, key=str(name))
    elif isinstance(data, list | tuple):
        for value in data:
            check_numbers(value, place, key=key)
    elif isinstance(data, int | float) and abs(data) > _limit_of(key):
        raise ModelFileError(
            f"{key} = {str(data)[:20]} is beyond any vision transformer (at most {_limit_of(key)})",
            place=place,
            hint="take the model from its source again",
        )


def _limit_of(key: str) -> int:
    if re.search(r"depth|layers|blocks", key):
        return _MAX_BLOCKS
    return _MAX_CLASSES if re.search(r"labels|classes", key) else _MAX_NUMBER


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory: one, or the shards that an index names.

    Raises `ModelFileError` if there are none, with another message for pickles.
    """
    index = directory / WEIGHTS_INDEX
    if (directory / WEIGHTS).is_file():
        return (directory / WEIGHTS,)
    if index.is_file():
        return _shards(directory, index)
    refuse_pickle(directory)
    raise ModelFileError(
        f"There is no {WEIGHTS} here",
        place=directory,
        hint="name the directory that layershuffle.save, or transformers' save_pretrained, wrote",
    )


def refuse_pickle(path: Path) -> None:
    """Raises `ModelFileError` if `path` is a pickle, or a directory with one."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pickles = [file for file in files if file.suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        name = pickles[0].name
        raise ModelFileError(
            f"The weights are in {name}, a pickle, and reading a pickle can run any program inside "
            "it, so it is refused",
            place=pickles[0],
            hint="timm:ARCHITECTURE?checkpoint=FILE reads those of timm's train.py without running "
            'anything; convert others once, where you trust it: python -c "import torch; '
            "from safetensors.torch import save_file; "
            f"save_file(torch.load('{name}', weights_only=True), '{WEIGHTS}')\"",
        )


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """Shapes by tensor name, from the file's header. Raises `ModelFileError` if it is damaged."""
    # A directory or an unreadable file raises OSError, a bad header SafetensorError.
    try:
        with safe_open(path, framework="pt") as file:
            # A slice gets its shape from the header, so no tensor is read.
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def read_tensors(path: Path, expected: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors of `path`, after `check_tensors` has compared its header with `expected`."""
    check_tensors(tensor_shapes(path), expected, place=path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `tensors` as safetensors, bit for bit, from any device and memory layout."""
    # Copies, because the format refuses tensors that share memory and strided ones.
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})


def weights_digest(model: nn.Module) -> str:
    """SHA-256, in hexadecimal, over name, type, shape and bytes of every tensor of `model`.

    It is equal for equal weights, independent of device, memory layout and file.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)};".encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Shapes by tensor name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def difference(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """A text that lists missing and unexpected tensors of a file."""
    lists = (shortened(sorted(names)) or "none" for names in (missing, unexpected))
    return "missing {}; unexpected {}".format(*lists)


def check_tensors(
    stored: Mapping[str, Shape], expected: Mapping[str, Shape], *, place: Path
) -> None:
    """Raises `ModelFileError` unless names and shapes agree; another depth is reported first."""
    missing, unexpected = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if missing or unexpected:
        check_depth(stack_depth(stored), stack_depth(expected), place=place)
        raise ModelFileError(
            "The tensors in the file are not those of the model: "
            + difference(missing, unexpected),
            place=place,
            hint="weights and configuration come from different models: save the model again",
        )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ModelFileError(
                f"The tensor {name} has shape {stored[name]}, the model needs {shape}",
                place=place,
                hint="weights and configuration come from different models: save the model again",
            )


def check_depth(stored: int, expected: int, *, place: Path) -> None:
    """Raises `ModelFileError` with both numbers of blocks if they differ."""
    if stored != expected:
        raise ModelFileError(
            f"This is a checkpoint of another depth: it holds {stored} blocks, {expected} are "
            "expected",
            place=place,
            hint="weights and configuration come from different models: save the model again",
        )


def stack_depth(names: Iterable[str]) -> int:
    """Number of blocks in tensor names such as `blocks.0.`, `layer.0.`, `encoder_layer_0.`."""
    stacks: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for match in re.finditer(r"(?:(?<=[._])|^)(\d+)(?=\.)", name):
            stacks[name[: match.start()]].add(match[1])
    # Names also number other modules (two heads, the layers of an MLP), but fewer than blocks.
    return max((len(numbers) for numbers in stacks.values()), default=0)


def _shards(directory: Path, index: Path) -> tuple[Path, ...]:
    again = "take the model from its source again"
    weight_map = read_json(index, limit=MAX_INDEX_BYTES).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for name in names:
        # A name with a path could refer to a file outside of the directory.
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or Path(name).suffix != ".safetensors"
        ):
            raise ModelFileError(
                f"The shard {name!r} is not a safetensors file here", place=index, hint=again
            )
        if not (directory / name).is_file():
            raise ModelFileError(f"The shard {name} is missing", place=directory, hint=again)
    if not names:
        raise ModelFileError("The index names no shard", place=index, hint=again)
    return tuple(directory / name for name in sorted(set(names)))


def _damaged(path: Path, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"This is not a whole safetensors file ({error})",
        place=path,
        hint="it is truncated or damaged: copy or save the model again",
    )
