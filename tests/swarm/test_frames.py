"""Visits, answers and failures as bytes, and invalid bytes."""

import struct

import numpy as np
import pytest

from layershuffle.errors import UsageError
from layershuffle.swarm.frames import (
    FRAME_BYTES,
    HEAD_BYTES,
    BrokenFrame,
    FrameKind,
    answer_frame,
    failure_frame,
    read_answer,
    read_head,
    read_visit,
    split,
    visit_frame,
    word_frame,
)
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostUnavailable,
    Packet,
    WorkExpired,
    pack,
)

STATE = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
WIRES = ("fp32", "fp16", "int8")


@pytest.mark.parametrize("wire", WIRES)
def test_a_visit_and_its_answer_come_out_as_they_went_in(wire):
    packet = pack(STATE, wire)
    whole = b"".join(visit_frame(7, (3, 0, 2), packet=packet, budget_ms=12.5))
    head, tail = split(whole)
    assert (head.kind, head.id, len(whole)) == (FrameKind.VISIT, 7, HEAD_BYTES + 12 + packet.nbytes)
    blocks, again, budget_ms = read_visit(head, tail)
    assert (blocks, budget_ms) == ((3, 0, 2), 12.5)
    sealed = b"".join(answer_frame(7, Answer(packet, 1.5, 0.25, 3.0)))
    answer = read_answer(*split(sealed))
    assert (answer.compute_ms, answer.queue_ms, answer.batch) == (1.5, 0.25, 3.0)
    for got in (again, answer.packet):
        assert got.wire == wire
        for mine, theirs in ((packet.values, got.values), (packet.scales, got.scales)):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert mine.dtype == theirs.dtype
                assert np.array_equal(mine, theirs)
                assert theirs.flags.writeable
                assert theirs.flags.aligned


@pytest.mark.parametrize("kind", [HostFailed, HostUnavailable, WorkExpired])
def test_a_failure_comes_out_as_it_went_in(kind):
    with pytest.raises(kind, match="no time for Zoë") as caught:
        read_answer(*split(b"".join(failure_frame(1, kind("no time for Zoë")))))
    assert type(caught.value) is kind


@pytest.mark.parametrize("blocks", [(), (1, 2)])
@pytest.mark.parametrize("wire", WIRES)
def test_a_visit_that_is_cut_or_longer_than_it_says_is_broken(wire, blocks):
    whole = b"".join(visit_frame(1, blocks, packet=pack(STATE, wire), budget_ms=1.0))
    for length in (*range(len(whole)), len(whole) + 1):
        part = (whole + b"x")[:length]
        with pytest.raises(BrokenFrame):
            read_visit(*split(part))


def test_invalid_frames_are_refused():
    whole = b"".join(visit_frame(1, (1,), packet=pack(STATE, "fp32"), budget_ms=1.0))
    for place, value in (
        (0, b"\x00\x00"),  # the mark
        (2, b"\x63"),  # the kind
        (3, b"\x09"),  # the wire
        (4, struct.pack("<I", 2)),  # blocks
        (12, struct.pack("<I", 2**32 - 1)),  # images: their bytes are no 32 bits
        (32, struct.pack("<d", float("nan"))),  # the budget
    ):
        with pytest.raises(BrokenFrame):
            read_visit(*split(whole[:place] + value + whole[place + len(value) :]))
    long = bytearray(whole[:HEAD_BYTES])
    long[8:12] = struct.pack("<I", FRAME_BYTES + 1)
    with pytest.raises(BrokenFrame, match=f"of {FRAME_BYTES} at most"):
        read_head(bytes(long))
    with pytest.raises(BrokenFrame, match="unknown failure 9"):
        read_answer(*split(b"".join(word_frame(FrameKind.FAILURE, code=9))))
    with pytest.raises(BrokenFrame, match="kind VISIT"):
        read_answer(*split(whole))
    for other in (None, "text", 5):
        with pytest.raises(BrokenFrame, match="in the place of a frame"):
            split(other)


def test_a_state_that_cannot_travel_is_refused():
    with pytest.raises(UsageError, match="float64"):
        visit_frame(1, (0,), packet=Packet("fp32", STATE.astype(np.float64)), budget_ms=1.0)
    large = np.broadcast_to(np.float32(0), (2, FRAME_BYTES // 4, 1))
    with pytest.raises(UsageError, match="too large"):
        visit_frame(1, (0,), packet=Packet("fp32", large), budget_ms=1.0)
