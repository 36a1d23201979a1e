"""Pure bf16 with fp32 weights behind it: forwards in a lower precision than weights are kept in.

Under autocast only products are computed in bf16; the state between blocks, norms and sums stay
fp32, and every product casts what it gets. Here all of a forward is bf16, from weights rounded anew
for every forward, and the optimiser goes on from the fp32 ones: steps smaller than bf16 can tell
are not lost. Nothing else changes: the model's parameters are its fp32 weights as before, for
optimiser, checkpoints, moving average and data parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, `model` computes with its weights and floating buffers rounded to `dtype`.

    Its input has to be of that dtype too. Gradients reach the true weights in their own dtype. Keep
    `backward` inside where activations are recomputed. Batch norms, whose statistics change in
    place and which take any input, stay as they are.
    """
    made: dict[int, Tensor] = {}
    modules = [module for module in model.modules() if not isinstance(module, _BatchNorm)]
    # Any: nn.Module's own types allow a Parameter there and nothing else, which a copy is not.
    places: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        places += [
            (module._parameters, _rounded_weights(module, dtype, made)),
            (module._buffers, _rounded_buffers(module, dtype)),
        ]
    before = [dict(place) for place, _ in places]
    try:
        for place, new in places:
            place.update(new)
        yield
    finally:
        for (place, _), old in zip(places, before, strict=True):
            place.update(old)


def _rounded_weights(
    module: nn.Module, dtype: torch.dtype, made: dict[int, Tensor]
) -> dict[str, Tensor]:
    """What is shared stays shared: `made` holds the copies by the weights they are of."""
    held = {n: w for n, w in module._parameters.items() if w is not None and w.is_floating_point()}
    for weight in held.values():
        if id(weight) not in made:
            made[id(weight)] = weight.to(dtype)
    return {name: made[id(weight)] for name, weight in held.items()}


def _rounded_buffers(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """As `.to(dtype)` makes them: some classes keep theirs exact, such as timm's rotary periods."""
    if not any(b is not None and b.is_floating_point() for b in module._buffers.values()):
        return {}
    twin = copy.copy(module)
    twin._parameters, twin._modules, twin._buffers = {}, {}, dict(module._buffers)
    return twin.to(dtype)._buffers
