"""Files and graphs that come to a host: resumed, checked, bounded, refused."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from gateway_end import SHAPE, Gateway, HostEnd, hosting, states, talk
from onnx import TensorProto, helper
from safetensors.numpy import load, save

from layershuffle_host.blocks import Block
from layershuffle_host.graph import RefusedGraph, external_tensors
from layershuffle_host.host import Host

# --- files ----------------------------------------------------------------------------------------


def test_a_cut_transfer_is_taken_up_where_it_ended(gateway: Gateway, tmp_path: Path) -> None:
    block = gateway.blocks[4]
    graph, weights = block["graph"]["sha256"], block["weights"]["sha256"]
    gateway.cut = [2000, 10**9, 60_000, 60_000]

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(block)
        for _ in range(3):
            assert "ended after" in (await end.hear("failed"))["why"]
        await end.hear("ready")
        assert gateway.fetched == [
            (graph, 0, 200), (graph, 2000, 206),
            (weights, 0, 200), (weights, 60_000, 206), (weights, 120_000, 206),
        ]  # fmt: skip
        assert {path.name for path in tmp_path.iterdir()} == {graph, weights}
        assert (tmp_path / weights).read_bytes() == gateway.files[weights]

    talk(gateway, tmp_path, say)


def test_a_server_without_ranges_sends_all_again(gateway: Gateway, tmp_path: Path) -> None:
    gateway.cut, gateway.knows_ranges = [2000], False

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(gateway.blocks[0])
        await end.hear("failed")
        await end.hear("ready")
        assert [start for _, start, _ in gateway.fetched] == [0, 0, 0]

    talk(gateway, tmp_path, say)


def test_a_file_with_another_digest_never_reaches_a_reader(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[bytes]()
    monkeypatch.setattr(
        "layershuffle_host.host.Block",
        lambda graph, weights, **how: read.append(weights) or Block(graph, weights, **how),
    )
    digest = gateway.blocks[0]["weights"]["sha256"]
    right = gateway.files[digest]
    gateway.files[digest] = right[:-1] + bytes([right[-1] ^ 1])

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(gateway.blocks[0])
        assert "other SHA-256" in (await end.hear("failed"))["why"]
        assert read == []
        gateway.files[digest] = right + b"longer"
        while "longer" not in (await end.hear("failed"))["why"]:
            pass
        gateway.files[digest] = right
        while (message := await asyncio.wait_for(end.messages.get(), 20))["type"] == "failed":
            pass
        assert message["type"] == "ready"
        assert read == [right]

    talk(gateway, tmp_path, say)


def test_files_stay_on_disk_and_damaged_ones_come_again(gateway: Gateway, tmp_path: Path) -> None:
    first, second = gateway.blocks[:2]
    weights = tmp_path / second["weights"]["sha256"]

    async def fetch(host: Host, end: HostEnd) -> None:
        await end.load(first, second)

    talk(gateway, tmp_path, fetch)
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    gateway.fetched.clear()

    async def again(host: Host, end: HostEnd) -> None:
        held = {block[part]["sha256"] for block in (first, second) for part in ("graph", "weights")}
        assert set(end.hello["held"]) == held
        await end.load(first, second)
        assert gateway.fetched == [(weights.name, 0, 200)]

    talk(gateway, tmp_path, again)


def test_two_hosts_share_a_cache(gateway: Gateway, tmp_path: Path) -> None:
    """Each file is fetched once, by whoever comes first."""

    async def main() -> None:
        async with (
            gateway.listening(),
            hosting(gateway, cache=tmp_path),
            hosting(gateway, cache=tmp_path, name="pi-2"),
        ):
            ends = [await asyncio.wait_for(gateway.hosts.get(), 20) for _ in range(2)]
            await asyncio.gather(*(end.load(*gateway.blocks[:4]) for end in ends))
            digests = [digest for digest, _, _ in gateway.fetched]
            assert sorted(digests) == sorted(set(digests))
            assert len(digests) == 5

    asyncio.run(main())


def test_the_disk_is_bounded(gateway: Gateway, tmp_path: Path) -> None:
    size = gateway.blocks[0]["weights"]["bytes"]

    async def say(host: Host, end: HostEnd) -> None:
        for block in gateway.blocks:
            await end.load(block)
        assert len(host.blocks) == 1
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * host.memory
        assert (tmp_path / gateway.blocks[11]["weights"]["sha256"]).exists()

    talk(gateway, tmp_path, say, memory=size + 1000)


def test_memory_is_bounded(gateway: Gateway, tmp_path: Path) -> None:
    size = gateway.blocks[0]["weights"]["bytes"]

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(*gateway.blocks[:3])
        assert [(await end.hear("ready"))["slot"] for _ in range(2)] == [0, 1]
        message = await end.hear("failed")
        assert (message["slot"], message["why"][:11]) == (2, "MemoryError")
        # It makes room as soon as one is not wanted any more.
        await end.load(*gateway.blocks[1:3])

    talk(gateway, tmp_path, say, memory=2 * size)


# --- hostile graphs -------------------------------------------------------------------------------


def graph_with(*nodes: Any, **model: Any) -> bytes:
    """An ONNX model with these nodes between `state` and `out`."""
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", *SHAPE]) for n in ("state", "out")
    ]
    graph = helper.make_graph([*nodes], "g", ends[:1], ends[1:])
    return helper.make_model(graph, **model).SerializeToString()


IDENTITY = helper.make_node("Identity", ["state"], ["out"])


def stored_in(location: str) -> bytes:
    model = onnx.load_from_string(graph_with(helper.make_node("Add", ["state", "w"], ["out"])))
    tensor = model.graph.initializer.add(
        name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value=location)
    return model.SerializeToString()


def branching() -> bytes:
    inner = helper.make_graph([helper.make_node("Identity", ["state"], ["x"])], "b", [], [])
    return graph_with(helper.make_node("If", ["c"], ["out"], then_branch=inner, else_branch=inner))


def with_function() -> bytes:
    model = onnx.load_from_string(graph_with(IDENTITY))
    model.functions.add(name="f", domain="ours")
    return model.SerializeToString()


def constant_in_a_file() -> bytes:
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights")
    return graph_with(helper.make_node("Constant", [], ["c"], value=tensor), IDENTITY)


HOSTILE = {
    "path": stored_in("/etc/passwd"),
    "above": stored_in("../weights"),
    "domain": graph_with(helper.make_node("Evil", ["state"], ["out"], domain="com.evil")),
    "opset": graph_with(IDENTITY, opset_imports=[helper.make_opsetid("com.evil", 1)]),
    "control flow": branching(),
    "function": with_function(),
    "constant": constant_in_a_file(),
    "other weights": graph_with(IDENTITY),
    "no graph": b"",
    "text": b"<html>",
    "cut": stored_in("weights")[:-3],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_are_refused(
    gateway: Gateway, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the gateway listed them, and before ONNX Runtime sees them."""
    seen = list[object]()
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *a, **k: seen.append(a) or real(*a, **k)
    )
    weights = gateway.files[gateway.blocks[0]["weights"]["sha256"]]
    with pytest.raises(RefusedGraph):
        Block(HOSTILE[name], weights, shape=SHAPE, threads=1)
    assert seen == []


def test_a_hostile_block_does_not_stop_the_others(gateway: Gateway, tmp_path: Path) -> None:
    bad = {**gateway.blocks[0], "graph": gateway.offer(HOSTILE["control flow"])}

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(bad, gateway.blocks[1])
        assert "control flow" in (await end.hear("failed"))["why"]
        assert (await end.hear("ready"))["slot"] == 1
        assert (await end.visit(1, states(1))).shape == (1, *SHAPE)

    talk(gateway, tmp_path, say)


def test_weights_of_another_shape_are_refused(gateway: Gateway) -> None:
    graph, weights = (
        gateway.files[gateway.blocks[0][part]["sha256"]] for part in ("graph", "weights")
    )
    tensors = load(weights)
    name = next(name for name, tensor in tensors.items() if tensor.shape == (64, 192))
    with pytest.raises(Exception, match=r"(?i)shape|mismatch|dimension"):
        Block(graph, save({**tensors, name: tensors[name][:1]}), shape=SHAPE, threads=1)


def test_random_bytes_are_no_graph() -> None:
    draw, whole = random.Random(0), stored_in("weights")
    assert external_tensors(whole) == {"w"}
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        with suppress(RefusedGraph):
            external_tensors(bytes(content))
