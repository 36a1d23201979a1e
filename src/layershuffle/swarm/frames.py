"""Visits and their answers as bytes: one format for the data channel and for calls over Ray.

A frame is a head of fixed length, little-endian, and a tail whose length the head says:

    mark        2 bytes, the same in every frame
    kind, code  1 byte each; the code is the wire of a state, or the kind of a failure
    count       of blocks
    length      of the tail in bytes
    shape       of the state: images, tokens, width
    id          of the visit, the same in its answer
    numbers     a visit's budget, or an answer's compute and queue times (ms) and its batch
    tail        blocks, scales (only int8), values; the text of a failure; a proof

Arrays are read in place, without a copy, and nothing is unpickled: any bytes become numbers or
raise `BrokenFrame`. `FrameStream` splits the bytes of a connection into frames.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostUnavailable,
    Packet,
    VisitError,
    Wire,
    WorkExpired,
)
from layershuffle.text import one_line

FRAME_BYTES = 64 << 20
"""Longest tail: 108 states of a ViT-B/16 in float32."""
_HEAD = struct.Struct("<HBBIIIIIQ3d")
HEAD_BYTES = _HEAD.size
_MARK = 0x534C
_WIRES: tuple[Wire, ...] = ("fp32", "fp16", "int8")
_TYPES: dict[Wire, np.dtype[Any]] = {
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "int8": np.dtype("i1"),
}
_SCALE, _BLOCK = np.dtype("<f4"), np.dtype("<u4")
# The failures that a host may report. Its death is not one of them.
_FAILURES: tuple[type[VisitError], ...] = (HostFailed, HostUnavailable, WorkExpired)
_CAUSE = 2000  # characters of a failure's text
Bytes = bytes | bytearray | memoryview

_STAGE = 1 << 14  # bytes; frames up to this size are short
_PROOFS = 64  # longest tail before the peer has proved itself
# A cut cable is silent. After these probes the kernel ends the connection, as soon as Ray would
# declare the member dead (`ray_config.SYSTEM_CONFIG`).
_SILENCE_S, _SILENT_PROBES = 1, 3


class FrameKind(IntEnum):
    """The kind of a frame. The last three are the handshake (`channel`)."""

    VISIT = 1
    ANSWER = 2
    FAILURE = 3
    CANCEL = 4
    CHALLENGE = 5
    PROOF = 6
    WELCOME = 7


class BrokenFrame(LayerShuffleError):
    """Bytes that are no frame, or a frame in the wrong place."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a frame (see the module's docstring); `images` to `width` are the shape."""

    kind: FrameKind
    code: int
    count: int
    length: int
    images: int
    tokens: int
    width: int
    id: int
    numbers: tuple[float, float, float]


def visit_frame(
    number: int, blocks: Sequence[int], *, packet: Packet, budget_ms: float
) -> list[Bytes]:
    """The parts of the frame of a visit with this id, to be sent one after the other."""
    numbers = (budget_ms, 0.0, 0.0)
    return _state_frame(FrameKind.VISIT, number, packet=packet, numbers=numbers, blocks=blocks)


def answer_frame(number: int, answer: Answer) -> list[Bytes]:
    """The parts of the frame that answers the visit with this id."""
    numbers = (answer.compute_ms, answer.queue_ms, answer.batch)
    return _state_frame(FrameKind.ANSWER, number, packet=answer.packet, numbers=numbers)


def failure_frame(number: int, error: VisitError) -> list[Bytes]:
    """The parts of the frame with the reason why the visit with this id has no answer."""
    code = next((i for i, kind in enumerate(_FAILURES) if isinstance(error, kind)), 0)
    words = error.cause[:_CAUSE].encode("utf-8", "replace")
    return word_frame(FrameKind.FAILURE, number=number, code=code, words=words)


def word_frame(
    kind: FrameKind, *, number: int = 0, code: int = 0, words: bytes = b""
) -> list[Bytes]:
    """The parts of a frame without a state."""
    return [_HEAD.pack(_MARK, kind, code, 0, len(words), 0, 0, 0, number, 0.0, 0.0, 0.0), words]


def _state_frame(
    kind: FrameKind,
    number: int,
    *,
    packet: Packet,
    numbers: tuple[float, float, float],
    blocks: Sequence[int] = (),
) -> list[Bytes]:
    wire, values = packet.wire, packet.values
    if values.ndim != 3 or values.dtype != _TYPES[wire]:
        raise UsageError(
            f"A state travels as [images, tokens, width] in {wire}, not as {values.dtype} of shape "
            f"{values.shape}"
        )
    tail: list[Bytes] = [np.asarray(blocks, _BLOCK).tobytes()] if blocks else []
    # Before the values, so scales stay aligned.
    if packet.scales is not None:
        tail.append(_bytes_of(packet.scales))
    tail.append(_bytes_of(values))
    length = sum(map(len, tail))
    if length > FRAME_BYTES:
        raise UsageError(
            f"A visit of {length >> 20} MiB is too large; at most {FRAME_BYTES >> 20} MiB travel",
            hint="send fewer images at a time",
        )
    code = _WIRES.index(wire)
    head = _HEAD.pack(
        _MARK, kind, code, len(blocks), length, *values.shape, number, *numbers
    )  # fmt: skip
    return [head, *tail]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    # A view, because a state is large and must not be copied on its way to the socket.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_head(raw: Bytes, *, most: int = FRAME_BYTES) -> Head:
    """The head in these `HEAD_BYTES` bytes. Raises `BrokenFrame`, also for a tail over `most`."""
    if len(raw) != HEAD_BYTES:
        raise BrokenFrame(f"a head of {len(raw)} bytes")
    mark, kind, code, count, length, images, tokens, width, number, *numbers = _HEAD.unpack(raw)
    if mark != _MARK or kind not in _KINDS:
        raise BrokenFrame("bytes that are no frame")
    if length > most:
        raise BrokenFrame(f"a frame of {length} bytes, of {most} at most")
    return Head(
        _KINDS[kind], code, count, length, images, tokens, width, number, tuple(numbers)
    )  # fmt: skip


# A look-up, because `FrameKind(number)` takes a microsecond.
_KINDS = {int(kind): kind for kind in FrameKind}


def read_visit(head: Head, tail: bytearray) -> tuple[tuple[int, ...], Packet, float]:
    """Blocks, state and budget (ms) of a visit. Raises `BrokenFrame`."""
    if head.kind is not FrameKind.VISIT:
        raise BrokenFrame(f"a frame of kind {head.kind.name} in the place of a visit")
    packet = _packet_in(head, tail)
    blocks = np.frombuffer(tail, _BLOCK, head.count)
    budget_ms = head.numbers[0]
    if not math.isfinite(budget_ms):
        raise BrokenFrame("a visit whose budget is no number")
    return tuple(blocks.tolist()), packet, budget_ms


def read_answer(head: Head, tail: bytearray) -> Answer:
    """The answer to a visit. Raises the `VisitError` in the frame, or `BrokenFrame`."""
    if head.kind is FrameKind.FAILURE:
        if head.code >= len(_FAILURES):
            raise BrokenFrame(f"an unknown failure {head.code}")
        raise _FAILURES[head.code](tail.decode("utf-8", "replace")[:_CAUSE])
    if head.kind is not FrameKind.ANSWER or head.count:
        raise BrokenFrame(f"a frame of kind {head.kind.name} in the place of an answer")
    compute_ms, queue_ms, batch = head.numbers
    return Answer(_packet_in(head, tail), compute_ms=compute_ms, queue_ms=queue_ms, batch=batch)


def _packet_in(head: Head, tail: bytearray) -> Packet:
    """The state in the tail, as arrays over its memory."""
    if head.code >= len(_WIRES):
        raise BrokenFrame(f"an unknown wire {head.code}")
    wire, shape = _WIRES[head.code], (head.images, head.tokens, head.width)
    scaled = (head.images, head.tokens, 1) if wire == "int8" else None
    scale_at = head.count * _BLOCK.itemsize
    values_at = scale_at + (0 if scaled is None else math.prod(scaled) * _SCALE.itemsize)
    # Python's integers do not overflow, so a false shape cannot have the right number of bytes.
    if values_at + math.prod(shape) * _TYPES[wire].itemsize != len(tail):
        raise BrokenFrame(f"{len(tail)} bytes for {head.count} blocks and a state {shape} ({wire})")
    values = np.frombuffer(tail, _TYPES[wire], offset=values_at).reshape(shape)
    scales = None
    if scaled is not None:
        scales = np.frombuffer(tail, _SCALE, math.prod(scaled), scale_at).reshape(scaled)
    return Packet(wire, values, scales)


def split(whole: Any) -> tuple[Head, bytearray]:
    """Head and tail of a complete frame. Raises `BrokenFrame`."""
    if not isinstance(whole, bytes):
        raise BrokenFrame(f"a {type(whole).__name__} in the place of a frame")
    head = read_head(whole[:HEAD_BYTES])
    tail = bytearray(memoryview(whole)[HEAD_BYTES:])  # a copy, which callers may change
    if len(tail) != head.length:
        raise BrokenFrame(f"{len(tail)} bytes of {head.length}")
    return head, tail


# --- over a connection ----------------------------------------------------------------------------


class FrameStream(asyncio.BufferedProtocol):
    """Splits the bytes of a connection into frames, and passes them to `receive`.

    Memory for a tail is allocated only after its head was checked, and a long tail is read directly
    into it. Until `trusted` is set, tails are at most as long as a proof. `made` is called when the
    connection begins, `lost` once with the reason when it has ended.
    """

    def __init__(
        self,
        receive: Callable[[Head, bytearray], None],
        *,
        made: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._receive, self._made, self._lost = receive, made, lost
        self._transport: asyncio.Transport | None = None
        # Short frames are read at once: two reads, and two turns of the loop, cost more.
        self._stage, self._staged = memoryview(bytearray(_STAGE)), 0
        self._head: Head | None = None
        self._tail = bytearray()
        self._unread = memoryview(b"")  # part of the tail, if it is read directly into its memory
        self._why = ""
        self.trusted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls it once."""
        self._transport = cast("asyncio.Transport", transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            _end_when_silent(connection)
        self._made()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory for the next bytes."""
        del sizehint
        return self._unread if self._unread else self._stage[self._staged :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes have arrived in the buffer."""
        try:
            if not self._unread:
                self._staged += nbytes
                self._cut()
                return
            self._unread = self._unread[nbytes:]
            if not self._unread and self._head is not None:
                self._hand_over(self._head, self._tail)
        except BrokenFrame as error:
            self.abort(f"it sent {error.cause}")

    def _cut(self) -> None:
        """Pass on the complete frames on the stage. The remainder of a tail is read next, directly
        into its memory; the beginning of a head stays on the stage."""
        begin, end = 0, self._staged
        while end - begin >= HEAD_BYTES:
            most = FRAME_BYTES if self.trusted else _PROOFS
            head = read_head(self._stage[begin : begin + HEAD_BYTES], most=most)
            begin += HEAD_BYTES
            staged = min(head.length, end - begin)
            tail = bytearray(head.length)
            tail[:staged] = self._stage[begin : begin + staged]
            begin += staged
            if staged < head.length:
                self._head, self._tail, self._unread = head, tail, memoryview(tail)[staged:]
                break
            self._hand_over(head, tail)
        self._stage[: end - begin] = self._stage[begin:end]
        self._staged = end - begin

    def _hand_over(self, head: Head, tail: bytearray) -> None:
        self._head, self._tail = None, bytearray()
        self._receive(head, tail)

    def eof_received(self) -> None:
        """The peer has closed its side; asyncio then closes ours."""
        # An incomplete frame is dropped; its visit learns that the connection ended.
        self._why = self._why or "it closed the connection"

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio calls it once."""
        self._transport = None
        self._lost(self._why or (one_line(error) if error else "the connection ended"))

    @property
    def open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, parts: Iterable[Bytes]) -> None:
        """Send the parts of a frame. A peer that leaves too much unread is disconnected."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # `lost` has reported it, or will
        if transport.get_write_buffer_size() > FRAME_BYTES:
            self.abort("it does not read what it is sent")
            return
        parts = list(parts)
        # Short frames are copied, because another system call would cost more.
        if sum(map(len, parts)) <= _STAGE:
            parts = [b"".join(parts)]
        for part in parts:
            transport.write(part)

    def abort(self, why: str) -> None:
        """End the connection at once, with this reason."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()


def _end_when_silent(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _SILENCE_S,
        "TCP_KEEPINTVL": _SILENCE_S,
        "TCP_KEEPCNT": _SILENT_PROBES,
        "TCP_USER_TIMEOUT": _SILENT_PROBES * _SILENCE_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them, other systems some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
