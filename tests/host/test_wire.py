"""The wire and graphs: what one end writes the other reads, and what is malformed is refused;
the command, and what it is shipped in."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gateway_end import TOKEN, Gateway, HostEnd, states, talk
from onnx import TensorProto, helper
from packaging.requirements import Requirement

from layershuffle_host import wire
from layershuffle_host.__main__ import main as command
from layershuffle_host.blocks import Block
from layershuffle_host.graph import RefusedGraph, external_tensors
from layershuffle_host.host import Host
from layershuffle_host.wire import (
    HEADER,
    PROTOCOL,
    Dtype,
    Header,
    Kind,
    WireError,
    frame,
    header_of,
    message_in,
    state_in,
    text_of,
    version_refused,
)
from once import build

SHAPE, DIGITS = (3, 4), (16, 64)
DIGEST = "ab" * 32
FILE = {"sha256": DIGEST, "bytes": 7}
HELLO: dict[str, Any] = {
    "protocol": PROTOCOL, "token": "t", "name": "pi-4", "instance": "i", "version": "0.1.0",
    "runtime": "r", "memory": 10**8, "speed": 3.5, "held": [DIGEST],
}  # fmt: skip
BLOCK = {"slot": 3, "graph": FILE, "weights": FILE, "shape": [16, 64]}


def head(**changes: int) -> Header:
    return Header(Kind.VISIT, Dtype.FLOAT32, 3, 9, 2, 0, 10**6)._replace(**changes)


@pytest.mark.parametrize(
    ("dtype", "size", "most"),
    [(Dtype.FLOAT32, 96, 0.0), (Dtype.FLOAT16, 48, 1e-3), (Dtype.INT8, 24 + 24, 1.0 / 254)],
)
def test_a_state_comes_back(dtype: Dtype, size: int, most: float) -> None:
    state = np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32)
    state[0, 1] = 0  # a token without a scale
    content = frame(head(dtype=dtype), state)
    assert len(content) == 20 + size
    header = header_of(content)
    assert header == head(dtype=dtype)
    got = state_in(content, header, shape=SHAPE)
    assert got.dtype == np.float32
    error = np.abs(got - state).max(axis=2) / np.abs(state).max(axis=2).clip(1e-9)
    assert error.max() <= most * 1.001


def test_the_header_is_the_one_of_the_page(repository: Path) -> None:
    assert HEADER.pack(1, 2, 3, 4, 5, 6, 7, 8) == bytes(
        [1, 2, 3, 0, 4, 0, 0, 0, 5, 0, 6, 0, 7, 0, 0, 0, 8, 0, 0, 0]
    )
    page = (repository / "docs" / "host-protocol.md").read_text()
    for kind in (*Kind, *wire.Dtype):
        assert f"{kind.value} {kind.name.lower()}" in page
    for why in wire.Why:
        assert f"{why.value} {why.name.lower().replace('_', ' ')}" in page
    for code in wire.Close:
        assert str(int(code)) in page
    assert f'"{PROTOCOL}"' in page
    assert f"`/v1/{wire.HOST_PATH[4:]}`".strip("`") in page
    assert wire.FILE_PATH in page


def test_large_numbers_fit_into_float16() -> None:
    content = frame(head(dtype=Dtype.FLOAT16), np.full((2, *SHAPE), 1e6, np.float32))
    assert state_in(content, header_of(content), shape=SHAPE).max() == 65504


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"\0", lambda c: c[:16]])
def test_another_length_is_refused(dtype: Dtype, change: Any) -> None:
    content = change(frame(head(dtype=dtype), np.ones((2, *SHAPE), np.float32)))
    with pytest.raises(WireError):
        state_in(content, header_of(content), shape=SHAPE)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    state = np.ones((2, *SHAPE), np.float32)
    state[1, 2, 3] = bad
    content = frame(head(), state)
    with pytest.raises(WireError):
        state_in(content, header_of(content), shape=SHAPE)


def test_the_largest_finite_numbers_are_taken() -> None:
    state = np.full((2, *SHAPE), np.finfo(np.float32).max)
    assert np.array_equal(state_in(frame(head(), state), head(), shape=SHAPE), state)


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 15, frame(head(kind=0)), frame(head(kind=4)), frame(head(dtype=0)),
     frame(head(dtype=4)), frame(head(images=0)), frame(head(images=257))],
)  # fmt: skip
def test_headers_that_are_none(content: bytes) -> None:
    with pytest.raises(WireError):
        header_of(content)


def test_messages_come_back_and_unknown_fields_are_ignored() -> None:
    for kind, fields in (
        ("hello", HELLO),
        ("assign", {"blocks": [BLOCK]}),
        ("assign", {"blocks": []}),
        ("ready", {"slot": 0, "seconds": 0.25}),
        ("failed", {"slot": 0, "why": "no memory"}),
        ("drain", {}),
    ):
        assert message_in(text_of(kind, **fields, new=1)) == {"type": kind, **fields, "new": 1}


BAD_HELLO = {
    "name": ["", "-x", "a b", "a\n", "x" * 41, "\u00e9", 3],
    "token": [None, 3, "x" * 401],
    "memory": [-1, 1.5, True, "1", 2**51],
    "speed": [-1, "1", True, None, 1e10, float("nan")],
    "held": [None, ["x"], [DIGEST.upper()], [DIGEST] * 4097],
}
BAD_BLOCK = {
    "slot": [-1, 65536, 1.0, True],
    "graph": [None, {}, {"sha256": DIGEST}, {"sha256": "x", "bytes": 1}, {**FILE, "bytes": -1}],
    "shape": [[], [1], [1, 2, 3], [0, 1], ["1", 2], [1, 2**21]],
}
BAD: list[dict[str, Any]] = [
    *({"type": "hello", **HELLO, name: bad} for name in BAD_HELLO for bad in BAD_HELLO[name]),
    *({"type": "hello", **{k: v for k, v in HELLO.items() if k != name}} for name in HELLO),
    *(
        {"type": "assign", "blocks": [{**BLOCK, name: bad}]}
        for name in BAD_BLOCK
        for bad in BAD_BLOCK[name]
    ),
    {"type": "assign", "blocks": [BLOCK] * 1025},
    {"type": "assign", "blocks": {"0": BLOCK}},
    {"type": "ready", "slot": 1},
    {"type": "other"},
    {"type": ["hello"]},
    {},
]


@pytest.mark.parametrize("message", BAD, ids=lambda message: repr(message)[-40:])
def test_malformed_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        message_in(json.dumps(message))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "[" * 100_000, '"x"', " " * (wire.MAX_TEXT_BYTES + 1)]
)
def test_text_that_is_no_message(text: str) -> None:
    with pytest.raises(WireError):
        message_in(text)


def test_no_end_sends_what_the_other_refuses() -> None:
    with pytest.raises(WireError):
        text_of("failed", slot=1, why="x" * 401)
    # Of a path that is no UTF-8.
    assert message_in(text_of("failed", slot=1, why="caf\udce9"))["why"] == "caf?"


@pytest.mark.parametrize(
    ("theirs", "works"),
    [("1.0", True), ("1.1", True), ("1.2", False), ("2.0", False), ("0.9", False),
     ("1", False), ("1.0.0", False), ("", False), ("x" * 300, False)],
)  # fmt: skip
def test_versions_one_step_apart_work(theirs: str, works: bool) -> None:
    assert (version_refused(theirs) is None) == works


# --- hostile graphs -------------------------------------------------------------------------------


def graph_with(*nodes: Any, **model: Any) -> bytes:
    """An ONNX model with these nodes between `state` and `out`."""
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", *DIGITS])
        for n in ("state", "out")
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
        Block(HOSTILE[name], weights, shape=DIGITS, threads=1)
    assert seen == []


def test_a_hostile_block_does_not_stop_the_others(gateway: Gateway, tmp_path: Path) -> None:
    bad = {**gateway.blocks[0], "graph": gateway.offer(HOSTILE["control flow"])}

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(bad, gateway.blocks[1])
        assert "control flow" in (await end.hear("failed"))["why"]
        assert (await end.hear("ready"))["slot"] == 1
        assert (await end.visit(1, states(1))).shape == (1, *DIGITS)

    talk(gateway, tmp_path, say)


def test_random_bytes_are_no_graph() -> None:
    draw, whole = random.Random(0), stored_in("weights")
    assert external_tensors(whole) == {"w"}
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        with suppress(RefusedGraph):
            external_tensors(bytes(content))


# --- the command and its distribution -------------------------------------------------------------


def test_the_command_serves_without_torch_and_ends_by_sigterm(
    gateway: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8-sig")  # as some editors do
    words = ["--token-file", tmp_path / "token", "--name", "pi", "--memory", "50MB"]
    words += ["--cache", tmp_path / "cache", "--threads", "1"]

    async def main() -> None:
        async with gateway.listening():
            host = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "layershuffle_host", gateway.url, *map(str, words),
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            end = await asyncio.wait_for(gateway.hosts.get(), 60)
            assert (end.hello["name"], end.hello["memory"]) == ("pi", 50_000_000)
            await end.load(*gateway.blocks[:4])
            assert (await end.visit(3, states(1))).shape == (1, *DIGITS)
            status = Path(f"/proc/{host.pid}/status").read_text()
            (resident,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
            assert int(resident.split()[1]) < 90_000, resident
            assert "libtorch" not in Path(f"/proc/{host.pid}/maps").read_text()
            os.kill(host.pid, signal.SIGTERM)
            await end.hear("drain")
            _, log = await asyncio.wait_for(host.communicate(), 20)
            assert host.returncode == 0, log
            assert b"assigns 4 blocks" in log

    asyncio.run(main())


@pytest.mark.parametrize("package", ["layershuffle", "layershuffle_host"])
def test_the_maker_of_the_runtime_is_told_nothing(package: str, tmp_path: Path) -> None:
    """ONNX Runtime keeps in the user's cache what it sends, and a number of the machine."""
    path = tmp_path / "model.onnx"
    path.write_bytes(graph_with(IDENTITY))
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    environment.pop("XDG_CACHE_HOME", None)
    code = f"import {package}, onnxruntime; onnxruntime.InferenceSession({str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list(tmp_path.rglob("*")) == [path]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    assert command(["ws://127.0.0.1:1", "--token-file", str(token)]) == 2
    token.write_text("x")
    assert f"No such file or directory: '{token}'. Next: " in capsys.readouterr().err
    for content, cause in ((None, "ca.pem"), ("x", "no certificate"), ("", "no certificate")):
        if content is not None:
            (tmp_path / "ca.pem").write_text(content)
        words = ["--token-file", str(token), "--ca", str(tmp_path / "ca.pem")]
        assert command(["wss://127.0.0.1:1", "--cache", str(tmp_path / "c"), *words]) == 2
        assert cause in capsys.readouterr().err
    for url in ("ftp://x", "gateway:80", "ws://"):
        assert command([url, "--token-file", str(token), "--cache", str(tmp_path / "c")]) == 2
        assert "no address of a gateway" in capsys.readouterr().err
    for wrong in (["--memory", "much"], ["--threads", "0"], ["--name", "a\nb"]):
        with pytest.raises(SystemExit) as exit_:
            command(["ws://127.0.0.1:1", "--token-file", str(token), *wrong])
        assert exit_.value.code == 2


def test_the_distribution_is_small_and_stands_alone(repository: Path) -> None:
    source = repository / "host" / "src" / "layershuffle_host"
    lines = {path.name: len(path.read_text().splitlines()) for path in source.glob("*.py")}
    assert sum(lines.values()) <= 1200, lines
    assert lines["wire.py"] <= 220
    text = "\n".join(path.read_text() for path in source.glob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    others = imported - set(sys.stdlib_module_names) - {"layershuffle_host"}
    assert others == {"onnxruntime", "numpy", "websockets", "safetensors"}
    project = tomllib.loads((repository / "host" / "pyproject.toml").read_text())["project"]
    assert {re.split("[<>=]", line)[0] for line in project["dependencies"]} == others


def test_a_host_is_small_and_runs_with_its_dependencies_alone(
    repository: Path, tmp_path: Path
) -> None:
    """In a clean environment, of the wheel and what pip would install beside it, linked to here."""
    place, files = tmp_path / "environment", dict[Path, Path]()
    build(repository / "host", tmp_path, "--target", "wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python, (packages,) = place / "bin" / "python", place.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *tmp_path.glob("*.whl")], check=True, capture_output=True)
    names = ["onnxruntime", "numpy", "websockets", "safetensors"]
    for name in names:  # it grows
        for line in requires(name) or ():
            wanted = Requirement(line)
            if wanted.name not in names and (not wanted.marker or wanted.marker.evaluate()):
                names.append(wanted.name)
        for file in distribution(name).files or ():
            if file.suffix != ".pyc" and ".." not in file.parts:
                files[packages / file] = Path(file.locate())
    for link, file in files.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    assert sum(file.stat().st_size for file in files.values()) < 145e6
    code = "import importlib.util as u, layershuffle_host.host; print(u.find_spec('torch'))"
    done = subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "None\n"
    subprocess.run([python.with_name("layershuffle-host"), "--help"], env={}, check=True)
