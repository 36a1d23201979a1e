"""`bf16-pure`: forwards in bf16 whose weights are kept, trained and saved in fp32.

Autocast computes only products in bf16, and casts what goes into each. Here a whole forward is
bf16, from weights that are rounded anew for every forward; the optimiser moves the fp32 ones, so
that steps too small for bf16 are not lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_Tensors = dict[str, Any]  # torch's own type allows only `Parameter` where a cast weight will stand
# By module: its buffers, their versions when they were cast, and the casts. Some classes cast on
# the host (timm's rotary tables), for which the host would wait for the GPU in every forward. The
# buffers are in it so that no new tensor gets the id of one that was freed.
_BUFFER_CASTS: WeakKeyDictionary[nn.Module, tuple[_Tensors, list[Any], _Tensors]] = (
    WeakKeyDictionary()
)


@contextmanager
def weights_cast_to(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, `model` computes with its weights and floating-point buffers cast to `dtype`.

    Its input has to be of `dtype` too. Gradients reach the original weights in their own dtype.
    `backward` has to be inside if activations are recomputed. Norms with running statistics stay as
    they are: they change in place. What a forward writes into another floating buffer is lost.
    """
    casts: dict[int, Any] = {}  # by id of the weight, so that modules that share one share its cast
    originals: list[tuple[_Tensors, _Tensors]] = []
    try:
        for module in model.modules():
            if isinstance(module, _NormBase):
                continue
            weights = _floating(module._parameters)
            for weight in weights.values():
                casts.setdefault(id(weight), weight.to(dtype))
            originals += [
                (module._parameters, weights),
                (module._buffers, _floating(module._buffers)),
            ]
            buffer_casts = _cast_buffers(module, dtype)
            module._parameters.update({name: casts[id(w)] for name, w in weights.items()})
            module._buffers.update(buffer_casts)
        yield
    finally:
        for place, tensors in originals:
            place.update(tensors)


def _floating(place: _Tensors) -> _Tensors:
    return {
        n: tensor
        for n, tensor in place.items()
        if tensor is not None and tensor.is_floating_point()
    }


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> _Tensors:
    """As `module.to(dtype)` makes them: some classes keep theirs exact."""
    buffers = _floating(module._buffers)
    versions = [(id(buffer), buffer._version) for buffer in buffers.values()]
    _, cast_versions, casts = _BUFFER_CASTS.get(module, ({}, [], {}))
    if versions != cast_versions:
        twin = copy.copy(module)
        twin._parameters, twin._modules, twin._buffers = {}, {}, dict(module._buffers)
        twin.to(dtype)
        casts = {name: twin._buffers[name] for name in buffers}
        _BUFFER_CASTS[module] = buffers, versions, casts
    return casts
