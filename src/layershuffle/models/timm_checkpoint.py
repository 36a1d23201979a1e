"""Read the weights in a checkpoint of timm's training script (.pth.tar)."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import timm
import torch

from layershuffle.errors import ModelFileError
from layershuffle.models.files import check_tensors, shapes_of
from layershuffle.models.origin import HostModel, match_dtype
from layershuffle.text import one_line

# Errors of torch for damaged checkpoints, and of timm (RuntimeError) for refused ones.
_UNREADABLE = (
    OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError,
    UnpicklingError,
)  # fmt: skip


def load_checkpoint(host: HostModel, path: Path) -> None:
    """Load the weights of a checkpoint of timm's training script into `host`, in their dtype.

    If the run has an average of the weights, it is used, as in timm. torch's restricted unpickler
    reads the file, which creates tensors and refuses code. Raises `ModelFileError`.
    """
    hint = "name a .pth.tar file of timm's train.py, or a .safetensors file"
    if not path.is_file():
        raise ModelFileError("There is no such file", place=path, hint=hint)
    try:
        tensors = timm.models.load_state_dict(str(path), use_ema=True, weights_only=True)
    except _UNREADABLE as error:
        raise ModelFileError(
            # Only the first sentence, because torch then advises to unpickle it nevertheless.
            f"The checkpoint cannot be read ({one_line(error).partition('. ')[0]})",
            place=path,
            hint=hint,
        ) from error
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ModelFileError("The checkpoint holds no weights", place=path, hint=hint)
    try:
        check_tensors(shapes_of(tensors), shapes_of(host.state_dict()), place=path)
    except ModelFileError as error:
        hint = "say what the model was trained with, as in ?checkpoint=FILE&num_classes=10"
        raise ModelFileError(error.cause, place=path, hint=hint) from error
    match_dtype(host, tensors)
    host.load_state_dict(tensors, strict=True)
