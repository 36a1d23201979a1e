"""How hidden states travel: float32 as they are, float16, or int8 with a scale per token.

A ViT-B/16 state of one image (197 x 768) takes 591 KiB as float32, 296 as float16, 148 as int8.
Plain numpy: hosts and gateway need nothing else to talk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layershuffle.errors import UsageError

Wire = Literal["fp32", "fp16", "int8"]
_LEVELS = 127


@dataclass(frozen=True, slots=True)
class Packet:
    """A state `[images, tokens, width]`: `values` in the wire's type, `scales` for int8 only."""

    wire: Wire
    values: NDArray[Any]
    scales: NDArray[np.float32] | None = None

    @property
    def images(self) -> int:
        """Number of images in the state."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the envelope."""
        return int(self.values.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))


def pack(state: NDArray[np.float32], wire: Wire) -> Packet:
    """`state` float32 `[images, tokens, width]` for the wire. Raises `UsageError` for other types.

    fp32 is exact; fp16 rounds to 11 bits; int8 rounds each token to 1/127 of its largest value.
    """
    if state.dtype != np.float32:
        raise UsageError(f"A state travels from float32, not {state.dtype}")
    if wire == "fp32":
        return Packet(wire, np.ascontiguousarray(state))
    if wire == "fp16":
        limits = np.finfo(np.float16)
        small = np.clip(state, limits.min, limits.max)
        # What is not finite stays so: the router is to see it.
        return Packet(wire, np.where(np.isfinite(state), small, state).astype(np.float16))
    largest = np.abs(state).max(axis=-1, keepdims=True)
    scales = np.where(largest == 0, 1, largest / _LEVELS).astype(np.float32)
    broken = ~np.isfinite(scales)
    scales[broken] = np.nan  # so that its whole token comes out as not finite
    levels = state / scales
    np.rint(levels, out=levels)
    if broken.any():
        np.nan_to_num(levels, copy=False)
    return Packet(wire, levels.astype(np.int8), scales)


def unpack(packet: Packet) -> NDArray[np.float32]:
    """The state of a packet, float32 `[images, tokens, width]`."""
    if packet.scales is None:
        return packet.values.astype(np.float32, copy=False)
    return packet.values.astype(np.float32) * packet.scales
