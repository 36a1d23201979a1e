"""A fingerprint of a model's weights, by which runs know that they started from one checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(model: nn.Module) -> str:
    """SHA-256, in hexadecimal, over name, type, shape and bytes of every tensor of `model`.

    Equal for equal weights wherever they lie, and however they were stored.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)};".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
