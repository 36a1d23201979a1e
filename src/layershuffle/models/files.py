"""Read and write the files of a saved model: JSON and safetensors, here or on the hub.

A model directory may come from anyone. So nothing is ever unpickled, and the names and shapes in
the header of a safetensors file are compared with the model before memory is taken for it. Every
fault becomes one `ModelFileError`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import snapshot_download

# HTTPError is that of the client which this version has: of httpx or of httpx2.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HFValidationError,
    HTTPError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layershuffle.ground.errors import ModelFileError, StackError, UsageError, of_the_machine
from layershuffle.ground.text import one_line

LOG = logging.getLogger("layershuffle")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
# Newer releases of transformers write the second for models of images and text.
PROCESSORS = (PROCESSOR, "processor_config.json")
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".tar", ".ckpt", ".pkl", ".pickle"})
# What DataParallel and torch.compile put before the names of the model, or of a block, inside of
# them.
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
_FLOATS = {"f64", "f32", "f16", "bf16", "float64", "float32", "float16", "bfloat16"}

_AGAIN = "take the model from its source again"
# What libraries raise for files and arguments that they cannot use.
REFUSALS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError,
    ArithmeticError, AssertionError, EOFError, UnpicklingError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip


@contextmanager
def library_errors(
    library: str,
    place: str | Path | None = None,
    *,
    hint: str,
    kind: type[ModelFileError] | type[UsageError] = ModelFileError,
) -> Iterator[None]:
    """Turn what `library` raises within into one `kind`, with its own words, `place` and `hint`.

    A `StackError` stays: the model is whole, and its blocks cannot run in any order.
    """
    try:
        yield
    except StackError:
        raise
    except UsageError as error:  # one of ours about an argument that a file may hold
        raise (
            error if kind is UsageError else kind(error.cause, place=place, hint=error.hint)
        ) from error
    except FileNotFoundError as error:  # timm raises it without a word
        hint = "name one that exists, or download or save the model again"
        raise kind("There is no such file", place=place, hint=hint) from error
    except REFUSALS as error:
        if isinstance(error, OSError) and (reason := of_the_machine(error)) is not None:
            raise reason from error
        # torch advises to run what is inside such a file, which nobody should.
        words = one_line(error).replace("weights_only=False", "...")
        raise kind(
            f"{library} refuses this ({type(error).__name__}: {words})",
            place=place,
            hint=hint,
        ) from error


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn what the hub, its cache or the network refuses within into one `ModelFileError`."""
    try:
        yield
    # Offline, no connection, no such name, no token: the library says which.
    except (HTTPError, HFValidationError, OSError) as error:
        raise ModelFileError(
            f"{name} is not in the cache of this machine, and the hub does not give or take it "
            f"({type(error).__name__}: {one_line(error)})",
            place=f"huggingface.co/{name}",
            hint=f"write hf:DIR for a directory, or type hf download {name} (on another machine: "
            "then copy the cache here), after hf auth login for your own and private models; "
            "?pretrained=false takes random weights",
        ) from error


def fetched(name: str, files: Sequence[str], *, revision: str | None = None) -> Path:
    """The directory in the cache with those of `files` (names or patterns) that `name` has.

    Raises `ModelFileError` for a name that the hub does not have, and without cache and network.
    """
    with hub_errors(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelFileError` for other content."""
    with library_errors("json", path, hint=_AGAIN):
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("the file is no JSON object")
    return data


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the library in a model directory: one, or several shards.

    Raises `ModelFileError` if there are none.
    """
    files = sorted(directory.glob("model*.safetensors"))
    pickles = [path for path in directory.glob("*") if path.suffix.lower() in PICKLE_SUFFIXES]
    if not files and pickles:
        raise refused_pickle(pickles[0])
    if not files:
        raise ModelFileError(
            f"There is no {WEIGHTS} here",
            place=directory,
            hint="name the directory that layershuffle.save, timm or transformers wrote",
        )
    return files


def refused_pickle(path: Path) -> ModelFileError:
    """The error for weights in a pickle."""
    return ModelFileError(
        f"{path.name} is a pickle, and reading a pickle can run any program inside it",
        place=path,
        hint="timm:ARCHITECTURE?checkpoint=FILE reads those of timm's train.py without running "
        "anything; convert others once, where you trust them: python -c "
        '"import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{path.name}', weights_only=True), '{WEIGHTS}')\"",
    )


def tensor_headers(*paths: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype (F32, BF16) and shape by tensor name, from the headers of safetensors files."""
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in paths:
        with _whole(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                tensor = file.get_slice(name)
                plain = WRAPPERS.sub("", name)
                if plain in headers:
                    raise ValueError(f"it has two tensors {plain}")
                headers[plain] = (tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


def has_wrapper_names(path: Path) -> bool:
    """Whether a name of a tensor in this file has a part that a wrapper around a model added."""
    with _whole(path), safe_open(path, framework="pt") as file:
        return any(WRAPPERS.search(name) for name in file.keys())  # noqa: SIM118 -- not a mapping


def read_tensors(*paths: Path) -> dict[str, Tensor]:
    """The tensors of all `paths`, by their names without those of wrappers around the model.

    On Linux they are mapped, not read: memory is taken when they are used.
    """
    tensor_headers(*paths)  # refuses what is not whole
    tensors = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            tensors[WRAPPERS.sub("", name)] = tensor
    return tensors


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    check_download(path)
    hint = "it is cut off, damaged, or has bytes after its end: download or save it again"
    with library_errors("safetensors", path, hint=hint):
        yield


def check_download(path: Path) -> None:
    """Raises `ModelFileError` for what a download that went wrong leaves in place of a file.

    Libraries say of it "weights_only", "Errno 22" or "header too large".
    """
    with path.open("rb") if path.is_file() else nullcontext() as file:
        head = file.read(64).lstrip().lower() if file else b""
    cause = ""
    hint = "download the file again"
    if head.startswith((b"<!doctype", b"<html")):
        cause = "This is an HTML page"
    elif head.startswith(b"version https://git-lfs"):
        cause = "Git LFS has left its pointer here, not the file"
        hint = "run git lfs pull there"
    elif head.startswith(b"pk\x03\x04") and not is_zipfile(path):
        cause = "This is a checkpoint that was cut off"
    if cause:
        raise ModelFileError(cause, place=path, hint=hint)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `tensors` as safetensors, bit for bit, from any device and memory layout."""
    # Copies, because the format refuses tensors that share memory and strided ones.
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})


def say_dtype(kinds: Mapping[str, object], place: str | Path) -> None:
    """Warn that weights stored in another floating dtype than float32 are computed in it.

    `kinds` are the dtypes by the names of tensors. Raises `ModelFileError` for quantised weights.
    """
    plain = {name: str(kind).removeprefix("torch.").lower() for name, kind in kinds.items()}
    for name, kind in plain.items():
        # Integers elsewhere are numbers of positions.
        if name.endswith("weight") and kind not in _FLOATS:
            raise ModelFileError(
                f"The weights {name} are stored as {kind}: they are quantised, and mean nothing "
                "without their scales",
                place=place,
                hint="take the model from before it was quantised",
            )
    others = sorted((set(plain.values()) & _FLOATS) - {"f32", "float32"})
    if others:
        LOG.warning(
            "%s: weights stored as %s are loaded as float32, and trained, scored and merged so.",
            place,
            ", ".join(others),
        )


def check_finite(model: nn.Module, place: str | Path | None = None) -> None:
    """Raises `ModelFileError` for a weight that is NaN or infinite, and for a buffer with a NaN.

    One pass over the weights without a copy: 0.05 s for the 86 million of a ViT-B.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # The extremes of a tensor with a NaN are NaN.
        extremes = torch.stack(torch.aminmax(tensor.detach()))
        # Masks in buffers hold infinities on purpose.
        bad = ~extremes.isfinite() if id(tensor) in parameters else extremes.isnan()
        if bad.any():
            raise ModelFileError(
                f"The weights {name} hold {extremes[bad][0].item()}, so no answer of this model "
                "means anything",
                place=place,
                hint="take the model from its source again, or train it with a lower learning rate",
            )


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
