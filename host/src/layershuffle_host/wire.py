"""The wire between a gateway and its hosts: messages, frames, dtypes and limits.

Both ends use this module; docs/host-protocol.md specifies it for hosts in other languages. Text
frames are JSON messages, binary frames are visits, answers and refusals. Whatever is malformed
raises `WireError`, and nothing is believed before it is checked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PROTOCOL = "1.0"
"""MAJOR.MINOR. Ends of one major version work if their minor versions differ by one at most."""
HOST_PATH = "/v1/host"
FILE_PATH = "/v1/files/"
MAX_FRAME_BYTES = 64 << 20
MAX_TEXT_BYTES = 1 << 20
MAX_IMAGES = 256
MAX_BLOCKS = 1024
MAX_FILE_BYTES = 4 << 30
MAX_TEXT = 400
MAX_HELD = 4096
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,39}"
PING_SECONDS = 2.0
PONG_SECONDS = 4.0

HEADER = struct.Struct("<BBHIHHII")
_WIDTHS = {1: "<f4", 2: "<f2", 3: "i1"}
State = NDArray[np.float32]


class WireError(ValueError):
    """A message or a frame that breaks the protocol."""


Kind = IntEnum("Kind", "VISIT ANSWER REFUSAL")
"""The kind of a binary frame."""
Dtype = IntEnum("Dtype", "FLOAT32 FLOAT16 INT8")
"""How the numbers of a state travel. In other dtypes than FLOAT32 an answer is the difference that
the block made to the state."""
Why = IntEnum("Why", "UNKNOWN_BLOCK FULL LATE FAILED DRAINING")
"""Why a visit is refused."""
Close = IntEnum(
    "Close",
    {"BROKEN": 4400, "BAD_TOKEN": 4401, "NO_HELLO": 4408, "NAME_IN_USE": 4409, "VERSION": 4426},
)
"""Codes with which a gateway closes the connection of a host."""


class Header(NamedTuple):
    """The first 20 bytes of a binary frame.

    `time` has the microseconds that are left for a visit, or those that an answer was computed in.
    `note` has the number of images that were computed together with an answer, or the reason of a
    refusal (`Why`). `waited` has the microseconds that a visit waited before its computation.
    """

    kind: int
    dtype: int
    slot: int
    visit: int
    images: int
    note: int = 0
    time: int = 0
    waited: int = 0


def frame(header: Header, state: State | None = None) -> bytes:
    """The bytes of a frame.

    `state` is float32 `[images, tokens, width]` and is narrowed to the dtype of the header.
    """
    head = HEADER.pack(*header)
    if state is None:
        return head
    if header.dtype == Dtype.INT8:
        # A scale per token, so that one with large numbers does not coarsen the others.
        whole = np.abs(state)  # used again below: a new array takes longer than the arithmetic
        scales = whole.max(axis=2, keepdims=True) / 127
        scales[scales == 0] = 1
        head += scales.astype("<f4").tobytes()
        state = np.rint(np.divide(state, scales, out=whole), out=whole)
    if header.dtype == Dtype.FLOAT16:
        state = np.clip(state, -65504, 65504)
    return b"".join((head, np.ascontiguousarray(state, _WIDTHS[header.dtype]).data))


def header_of(content: bytes) -> Header:
    """The header of a binary frame. Raises `WireError` for bytes that cannot be a frame."""
    if not HEADER.size <= len(content) <= MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(content)} bytes")
    header = Header(*HEADER.unpack_from(content))
    if header.kind not in (1, 2, 3) or header.dtype not in _WIDTHS:
        raise WireError(f"a frame of kind {header.kind} and dtype {header.dtype}")
    if not 1 <= header.images <= MAX_IMAGES:
        raise WireError(f"a frame of {header.images} images")
    return header


def state_in(content: bytes, header: Header, *, shape: tuple[int, int]) -> State:
    """The state of a visit or an answer, float32 `[images, tokens, width]`.

    Raises `WireError` unless the frame has exactly the bytes of such a state, all numbers finite.
    """
    dtype = np.dtype(_WIDTHS[header.dtype])
    sizes = (header.images, *shape)
    scales = header.images * shape[0] if header.dtype == Dtype.INT8 else 0
    if len(content) != HEADER.size + 4 * scales + dtype.itemsize * math.prod(sizes):
        raise WireError(f"{len(content)} bytes are no state {sizes} in dtype {header.dtype}")
    state = np.frombuffer(content, dtype, offset=HEADER.size + 4 * scales).reshape(sizes)
    if scales:
        factors = np.frombuffer(content, "<f4", count=scales, offset=HEADER.size)
        state = state * factors.reshape(*sizes[:2], 1)
    state = state.astype(np.float32, copy=False)
    if not is_finite(state):
        raise WireError("a state with numbers that are not finite")
    return state


def is_finite(state: State) -> bool:
    """Whether every number of the state is finite."""
    # One that is not finite makes the squared length so, in a third of the time of the sum.
    # In float64 the sum of finite numbers cannot overflow.
    return math.isfinite(np.vdot(state, state)) or math.isfinite(state.sum(dtype=np.float64))


# --- messages -------------------------------------------------------------------------------------

Check = Callable[[Any], bool]


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value))


def _number(most: float, *, least: float = 0, kinds: tuple[type, ...] = (int, float)) -> Check:
    return lambda value: type(value) in kinds and least <= value <= most


def _list(each: Check, most: int, *, least: int = 0) -> Check:
    return lambda value: (
        isinstance(value, list) and least <= len(value) <= most and all(map(each, value))
    )


def _fields(**checks: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in checks.items())
    )


# Half a surrogate pair, which JSON may hold, is no text: no log and no frame can show it.
_text = _matches(rf"[^\ud800-\udfff]{{0,{MAX_TEXT}}}")
_digest = _matches("[0-9a-f]{64}")
_slot = _number(0xFFFF, kinds=(int,))
_file = _fields(sha256=_digest, bytes=_number(MAX_FILE_BYTES, kinds=(int,)))
_shape = _list(_number(1 << 20, least=1, kinds=(int,)), 2, least=2)
_block = _fields(slot=_slot, graph=_file, weights=_file, shape=_shape)
# docs/host-protocol.md says who sends which, and what the fields mean.
_MESSAGES: dict[str, Check] = {
    "hello": _fields(
        protocol=_text, token=_text, name=_matches(NAME), instance=_text, version=_text,
        runtime=_text, memory=_number(1 << 50, kinds=(int,)), speed=_number(1e9),
        held=_list(_digest, MAX_HELD),
    ),
    "assign": _fields(blocks=_list(_block, MAX_BLOCKS)),
    "ready": _fields(slot=_slot, seconds=_number(1e6)),
    "failed": _fields(slot=_slot, why=_text),
    "drain": _fields(),
}  # fmt: skip


def text_of(kind: str, **fields: Any) -> str:
    """A message as JSON. Raises `WireError` for one that the other end would refuse."""
    text = json.dumps({"type": kind} | fields, ensure_ascii=False).encode(errors="replace").decode()
    message_in(text)
    return text


def message_in(text: str) -> dict[str, Any]:
    """The message in a text frame, with every field of its type checked; others are ignored."""
    try:
        message: Any = json.loads(text) if len(text) <= MAX_TEXT_BYTES else None
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON ({error})") from error
    kind = message.get("type") if isinstance(message, dict) else None
    check = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if check is None or not check(message):
        raise WireError(f"no message of this protocol (type {ascii(kind)[:20]})")
    return dict(message)


def version_refused(theirs: str) -> str | None:
    """Why an end that speaks `theirs` is refused, `None` if it is not."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", theirs)
    major, minor = map(int, PROTOCOL.split("."))
    if match and int(match[1]) == major and abs(int(match[2]) - minor) <= 1:
        return None
    return f"protocol {theirs[:20]} does not work with {PROTOCOL}: upgrade the older end"
