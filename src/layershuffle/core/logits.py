"""The logits in what a backbone returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layershuffle.errors import UsageError


def logits_of(output: Any) -> Tensor:
    """Logits `[batch, classes]` from the output of a backbone.

    For two heads (timm's distilled models in training) it is their mean, as at evaluation.
    """
    # transformers returns an object with logits, timm and torchvision the tensor.
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and all(isinstance(head, Tensor) for head in logits):
        logits = torch.stack(logits).mean(dim=0)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"The model returned a {type(output).__name__}, which has no logits",
            hint="use a model for image classification",
        )
    return logits
