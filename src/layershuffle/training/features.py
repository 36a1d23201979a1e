"""A loss that keeps the features: what the classifier reads stays near what it read before.

Fine-tuning for one task costs what the features told of others. The untouched model runs in order
beside the one that is trained, and the features along the drawn orders, and at the exit, are drawn
towards its features by their cosine. docs/own-loop.md has the same for other loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layershuffle.core.losses import Criterion, Divergence, softmax_divergence
from layershuffle.core.position import backbone_of
from layershuffle.core.tensors import logits_of
from layershuffle.ground.errors import UsageError
from layershuffle.models import blank_images, num_classes_of

Criteria = tuple[Criterion, Divergence]
"""What `Method.loss` takes as `criterion`."""


class KeptFeatures:
    """The features that a model has before its training, and the loss that keeps them.

    `untouched` is that model, which this object freezes, and `model` the one that is trained, with
    a classifier of `classes` outputs at the same place. Raises `UsageError` for a model without a
    single linear layer that gives its logits.
    """

    def __init__(self, untouched: nn.Module, *, model: nn.Module, weight: float) -> None:
        self._untouched = untouched.eval().requires_grad_(False)
        backbone = backbone_of(untouched)
        path = classifier_path(backbone)
        self._read = backbone.get_submodule(path)
        self._classifier = backbone_of(model).get_submodule(path)
        self._weight = weight
        self.classes = num_classes_of(untouched)

    @contextmanager
    def asked_for(self, images: Tensor) -> Iterator[Criteria]:
        """Within, the model returns its features behind its logits, `[n, classes + width]`.

        Yields the criteria of `Method.loss` for such answers to these images.
        """
        seen: list[Tensor] = []

        def note(_: nn.Module, inputs: tuple[Tensor]) -> None:
            seen.append(inputs[0].float())

        with self._read.register_forward_pre_hook(note), torch.no_grad():
            self._untouched(images)
        criterion = partial(
            _right_and_near, features=seen[0], classes=self.classes, weight=self._weight
        )
        with self._classifier.register_forward_hook(_with_features):
            yield criterion, partial(_divergence, classes=self.classes)


def classifier_path(model: nn.Module) -> str:
    """The path of the linear layer that gives the logits of a model.

    Raises `UsageError` if no single one does, as in distilled models with two heads.
    """
    outputs: dict[str, Tensor] = {}

    def note(_: nn.Module, __: Any, output: Tensor, *, path: str) -> None:
        outputs[path] = output

    with ExitStack() as hooks, torch.no_grad():
        for path, part in model.named_modules():
            if isinstance(part, nn.Linear):
                hooks.enter_context(part.register_forward_hook(partial(note, path=path)))
        images = blank_images(model, 1).to(next(model.parameters()).device)
        logits = logits_of(model(images), model)
    for path, output in outputs.items():
        if output is logits:
            return path
    raise UsageError(
        f"{type(model).__name__} has no single linear layer that gives its logits, so what its "
        "classifier reads is not known",
        place="--keep-features",
        hint="leave it out, or write the loop of docs/own-loop.md",
    )


def _with_features(_: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
    return torch.cat([logits, inputs[0]], dim=-1)


def _right_and_near(
    answers: Tensor, labels: Tensor, *, features: Tensor, classes: int, weight: float
) -> Tensor:
    """The cross-entropy, and how far the features are from `features`, `[n, width]`."""
    nearness = F.cosine_similarity(answers[:, classes:], features, dim=-1).mean()
    return F.cross_entropy(answers[:, :classes], labels) + weight * (1 - nearness)


def _divergence(early: Tensor, final: Tensor, *, classes: int) -> Tensor:
    return softmax_divergence(early[:, :classes], final[:, :classes])
