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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_Tensors = dict[str, Any]  # nn.Module's own types allow a Parameter, which a copy is not
# By module: its exact buffers with their versions, and the rounded ones. Some classes compute
# theirs on the host, which in every forward would make the host wait for the GPU.
_BUFFERS: WeakKeyDictionary[nn.Module, tuple[list[tuple[Tensor, int]], _Tensors]] = (
    WeakKeyDictionary()
)


@contextmanager
def weights_cast_to(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, `model` computes with its weights and floating buffers rounded to `dtype`.

    Its input has to be of that dtype too. Gradients reach the true weights in their own dtype. Keep
    `backward` inside where activations are recomputed. Norms with running statistics, which change
    in place and take any input, stay as they are; what a forward writes into another floating
    buffer is lost.
    """
    made: dict[int, Tensor] = {}
    places: list[tuple[_Tensors, _Tensors]] = []
    for module in model.modules():
        if not isinstance(module, _NormBase):
            places += [
                (module._parameters, _rounded_weights(module, dtype, made)),
                (module._buffers, _rounded_buffers(module, dtype)),
            ]
    before = [{name: place[name] for name in new} for place, new in places]
    try:
        for place, new in places:
            place.update(new)
        yield
    finally:
        for (place, _), old in zip(places, before, strict=True):
            place.update(old)


def _rounded_weights(module: nn.Module, dtype: torch.dtype, made: dict[int, Tensor]) -> _Tensors:
    """What is shared stays shared: `made` holds the copies by the weights they are of."""
    held = {n: w for n, w in module._parameters.items() if w is not None and w.is_floating_point()}
    for weight in held.values():
        if id(weight) not in made:
            made[id(weight)] = weight.to(dtype)
    return {name: made[id(weight)] for name, weight in held.items()}


def _rounded_buffers(module: nn.Module, dtype: torch.dtype) -> _Tensors:
    """As `.to(dtype)` makes them: some classes keep theirs exact, such as timm's rotary periods."""
    held = {n: b for n, b in module._buffers.items() if b is not None and b.is_floating_point()}
    if not held:
        return {}
    exact, made = _BUFFERS.get(module, ([], {}))
    as_before = len(exact) == len(held) and all(
        one is other and version == other._version
        for (one, version), other in zip(exact, held.values(), strict=True)
    )
    if as_before:
        return made
    twin = copy.copy(module)
    twin._parameters, twin._modules, twin._buffers = {}, {}, dict(module._buffers)
    twin.to(dtype)
    made = {name: twin._buffers[name] for name in held}
    _BUFFERS[module] = [(buffer, buffer._version) for buffer in held.values()], made
    return made
