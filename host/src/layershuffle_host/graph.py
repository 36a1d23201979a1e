"""What an ONNX graph may hold before ONNX Runtime sees it.

A graph comes from the gateway, by a digest that it listed; what could do more than compute is
refused all the same. The bytes are walked as protobuf writes them, with the numbers of onnx.proto,
because a host needs four facts of a graph and no package for them.
"""

from __future__ import annotations

from collections.abc import Iterator

LOCATION = b"weights"
"""The one file that a graph may refer to: its content is given, and nothing is opened."""
MAX_GRAPH_BYTES = 8 << 20
# The kinds of messages inside a kind of message, by field.
_INSIDE = {
    "model": {7: "graph", 8: "opset"},
    "graph": {1: "node", 5: "initializer"},
    "node": {5: "attribute"},
    "attribute": {5: "constant", 10: "constant"},
    "initializer": {13: "location"},
    "constant": {13: "location"},
}
_REFUSED = {
    ("model", 20): "training",
    ("model", 25): "functions of its own",
    ("graph", 15): "sparse tensors",
    ("attribute", 6): "control flow",
    ("attribute", 11): "control flow",
    ("attribute", 22): "sparse tensors",
    ("attribute", 23): "sparse tensors",
    ("constant", 13): "constants in files",
    ("constant", 14): "constants in files",
}


class RefusedGraph(ValueError):
    """A graph that this host does not load."""


def external_tensors(content: bytes) -> set[str]:
    """The names of the tensors that the weights of a block have to bring.

    Raises `RefusedGraph` for bytes that are no ONNX graph, and for one with functions, operators of
    other domains than ONNX's own, control flow, sparse tensors, or tensors in other files.
    """
    if len(content) > MAX_GRAPH_BYTES:
        raise RefusedGraph(f"the graph has {len(content)} bytes")
    names = set[str]()
    is_graph = False
    for kind, message in _messages("model", content):
        fields = list(_fields(message))
        for number, value in fields:
            if (kind, number) in _REFUSED:
                raise RefusedGraph(f"the graph has {_REFUSED[kind, number]}")
            names_domain = (kind, number) in (("opset", 1), ("node", 7))
            if names_domain and value not in (b"", b"ai.onnx"):
                raise RefusedGraph("the graph has operators of another domain than ONNX's own")
        is_graph |= kind == "graph"
        # Of a field that is there twice, protobuf takes the last.
        if kind == "location" and (1, b"location") in fields and dict(fields).get(2) != LOCATION:
            raise RefusedGraph("the graph refers to another file than its weights")
        # Numbers elsewhere: the place of a tensor (field 14) is 1, or field 13 says where.
        if kind == "initializer" and ((14, 1) in fields or 13 in dict(fields)):
            name = b""
            for number, value in fields:
                if number == 8 and isinstance(value, bytes):
                    name += value
            names.add(name.decode(errors="replace"))
    if not is_graph:
        raise RefusedGraph("the file is no ONNX graph")
    return names


def _messages(kind: str, message: bytes) -> Iterator[tuple[str, bytes]]:
    """A message and all messages in it that matter here, with their kinds."""
    yield kind, message
    for number, value in _fields(message):
        if inner := _INSIDE.get(kind, {}).get(number):
            if isinstance(value, int):
                raise RefusedGraph("the file is no ONNX graph")
            yield from _messages(inner, value)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: a number, or bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        if key & 7 == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 == 2:
            length, place = _varint(message, place)
        if key & 7 not in (1, 2, 5) or place + length > len(message):
            raise RefusedGraph("the graph is cut off, or none")
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift, byte in zip(range(0, 70, 7), message[place : place + 10], strict=False):
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise RefusedGraph("the graph is cut off, or none")
