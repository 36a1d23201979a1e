"""States on the wire: exact as float32, within half a step as float16 and int8."""

import numpy as np
import pytest

from layershuffle.errors import UsageError
from layershuffle.swarm.messages import pack, pack_answer, unpack, unpack_answer

STATE = np.random.default_rng(0).normal(size=(2, 197, 768)).astype(np.float32)


def test_sizes_of_a_vit_b_state_on_the_wire():
    kib = {wire: pack(STATE[:1], wire).nbytes / 1024 for wire in ("fp32", "fp16", "int8")}
    assert kib["fp32"] == 591.0
    assert kib["fp16"] == 295.5
    assert kib["int8"] == pytest.approx(147.75 + 197 * 4 / 1024)


def test_float32_is_exact():
    assert np.array_equal(unpack(pack(STATE, "fp32")), STATE)


def test_float16_rounds_to_eleven_bits():
    error = np.abs(unpack(pack(STATE, "fp16")) - STATE)
    assert (error <= np.abs(STATE) * 2.0**-11 + 2.0**-25).all(), error.max()


def test_int8_is_within_half_a_step_of_each_token():
    error = np.abs(unpack(pack(STATE, "int8")) - STATE)
    step = np.abs(STATE).max(axis=-1, keepdims=True) / 127
    assert (error <= 0.5 * step * (1 + 1e-5)).all(), (error / step).max()
    assert (error > 0.1 * step).any()


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_large_and_zero_values_survive(wire):
    state = np.zeros((1, 2, 4), np.float32)
    state[0, 1] = [1e5, -1e5, 5e4, 0]
    back = unpack(pack(state, wire))
    assert np.isfinite(back).all()
    assert not back[0, 0].any()
    assert back[0, 1, 2] == pytest.approx(5e4, rel=0.01)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_visible(wire, value):
    state = np.ones((1, 2, 4), np.float32)
    state[0, 1, 2] = value
    back = unpack(pack(state, wire))
    assert not np.isfinite(back[0, 1]).all()
    assert np.isfinite(back[0, 0]).all()


@pytest.mark.parametrize(("wire", "less"), [("fp16", 3), ("int8", 2)])
def test_small_changes_survive_narrow_wires(wire, less):
    """Twelve hops of small changes: their rounding errors do not accumulate in the state."""
    steps = np.random.default_rng(1).normal(0, 0.2, (12, *STATE.shape)).astype(np.float32)
    exact, states, added = STATE, STATE, STATE
    for step in steps:
        exact = exact + step
        states = unpack(pack(unpack(pack(states, wire)) + step, wire))
        asked = pack(added, wire)
        added = unpack_answer(pack_answer(unpack(asked) + step, asked), before=added)
    assert less * np.abs(added - exact).max() < np.abs(states - exact).max()


def test_an_answer_on_the_exact_wire_is_the_state():
    asked = pack(STATE, "fp32")
    after = STATE * np.float32(1.1)
    assert (unpack_answer(pack_answer(after, asked), before=STATE) == after).all()
    with pytest.raises(ValueError, match="it has the shape"):
        unpack_answer(pack(STATE[:, :1], "int8"), before=STATE)


def test_other_types_are_refused():
    with pytest.raises(UsageError, match="float32, not float64"):
        pack(STATE.astype(np.float64), "fp32")
