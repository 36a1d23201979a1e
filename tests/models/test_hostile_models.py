"""Hostile and damaged model directories: one `ModelFileError` each, and nothing is ever run."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_models import (
    CONFIG,
    FACTS,
    LIBRARIES,
    PARTS,
    WEIGHTS,
    Change,
    Sentinel,
    cut,
    edit,
    extra,
    put,
    refused,
    rename,
    retensor,
    wider,
    without_the_last_block,
)

import layershuffle as ls
from common import FAMILIES
from layershuffle.models import (
    num_classes_of,
)
from layershuffle.models.files import (
    MAX_JSON_BYTES,
)

pytestmark = pytest.mark.usefixtures("bounded")


def header(entries: dict[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN_WEIGHTS = {
    "empty": put(WEIGHTS, b""),
    "three bytes": put(WEIGHTS, b"abc"),
    "garbage": put(WEIGHTS, bytes(range(256)) * 64),
    "header longer than the file": put(WEIGHTS, header({}, length=1 << 20)),
    "header of exabytes": put(WEIGHTS, header({}, length=(1 << 63) - 1)),
    "header that is no JSON": put(WEIGHTS, struct.pack("<Q", 8) + b"{{{{{{{{"),
    "header that is a list": put(WEIGHTS, struct.pack("<Q", 2) + b"[]"),
    "deeply nested header": put(WEIGHTS, struct.pack("<Q", 200_000) + b"[" * 200_000),
    "offsets beyond the file": put(
        WEIGHTS, header({"x": {**ENTRY, "data_offsets": [0, 1 << 40]}}, b"\0" * 8)
    ),
    "offsets that do not fit the shape": put(
        WEIGHTS, header({"x": {**ENTRY, "shape": [1 << 40]}}, b"\0" * 8)
    ),
    "negative shape": put(WEIGHTS, header({"x": {**ENTRY, "shape": [-2]}}, b"\0" * 8)),
    "shape that overflows": put(
        WEIGHTS, header({"x": {**ENTRY, "shape": [1 << 32, 1 << 32, 1 << 32]}}, b"\0" * 8)
    ),
    "unknown type": put(WEIGHTS, header({"x": {**ENTRY, "dtype": "PICKLE"}}, b"\0" * 8)),
    "overlapping tensors": put(WEIGHTS, header({"x": ENTRY, "y": ENTRY}, b"\0" * 8)),
    "cut in the header": cut(WEIGHTS, keep=0.01),
    "cut in the data": cut(WEIGHTS, keep=0.9),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("what", BROKEN_WEIGHTS)
def test_broken_safetensors(what: str, name: str, good: Callable[[str], Path]) -> None:
    place = good(name)
    BROKEN_WEIGHTS[what](place)
    text = refused(place)
    assert "not a whole safetensors file" in text
    assert str(place / WEIGHTS) in text


OTHER_TENSORS = {
    "renamed": (retensor(WEIGHTS, rename), "strange"),
    "extra": (retensor(WEIGHTS, extra), "unexpected backdoor"),
    "one block fewer": (
        retensor(WEIGHTS, without_the_last_block),
        "holds 3 blocks, 4 are expected",
    ),
    "another shape": (retensor(WEIGHTS, wider), "shape"),
    "none": (retensor(WEIGHTS, lambda _: {}), "holds 0 blocks, 4 are expected"),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("what", OTHER_TENSORS)
def test_tensors_of_another_model(what: str, name: str, good: Callable[[str], Path]) -> None:
    place, (change, expected) = good(name), OTHER_TENSORS[what]
    change(place)
    assert expected in refused(place)


BROKEN_JSON = {
    "empty": b"",
    "not JSON": b"{nope",
    "a list": b"[1, 2]",
    "text that is no UTF-8": b'{"a": "\xff\xfe"}',
    "deeply nested": b'{"a":' * 100_000,
    "nested, and closed": b'{"a":' * 200 + b"1" + b"}" * 200,
    "huge": b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}',
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("file", [FACTS, CONFIG])
@pytest.mark.parametrize("what", BROKEN_JSON)
def test_broken_json(what: str, file: str, good: Callable[[str], Path]) -> None:
    for name in LIBRARIES:
        place = good(name)
        (place / file).write_bytes(BROKEN_JSON[what])
        assert str(place / file) in refused(place)


@pytest.mark.parametrize("file", [FACTS, CONFIG, WEIGHTS, PARTS])
def test_missing_files(file: str, good: Callable[[str], Path]) -> None:
    for name in LIBRARIES:
        place = good(name)
        (place / file).unlink()
        assert str(place) in refused(place)


WRONG_FACTS: dict[str, tuple[Change, str]] = {
    "schema of the future": (edit(FACTS, "schema", value=2), "schema 2, this version reads 1"),
    "no schema": (edit(FACTS, "schema", value=...), "schema None"),
    "unknown key": (edit(FACTS, "polciy", value={}), "did you mean 'policy'?"),
    "unknown library": (edit(FACTS, "library", value="pickle"), "'library' is wrong"),
    "another library": (edit(FACTS, "library", value="torchvision"), "torchvision's configuration"),
    "name of another type": (edit(FACTS, "name", value=3), "'name' is wrong"),
    "another name": (edit(FACTS, "name", value="vit_huge"), "says 'vit_huge'"),
    "another depth": (edit(FACTS, "depth", value=12), "holds 4 blocks, 12 are expected"),
    "depth as text": (edit(FACTS, "depth", value="4"), "'depth' is wrong"),
    "depth as truth": (edit(FACTS, "depth", value=True), "'depth' is wrong"),
    "absurd depth": (edit(FACTS, "depth", value=10**12), "beyond any vision transformer"),
    "other classes": (edit(FACTS, "num_classes", value=1000), "says 1000"),
    "other blocks": (edit(FACTS, "blocks", value="head"), "not a Sequential"),
    "no such blocks": (edit(FACTS, "blocks", value="a.b"), "no module 'a.b'"),
    "policy that is none": (edit(FACTS, "policy", value={"policy": "evil"}), "not an order policy"),
    "policy with a list for a name": (
        edit(FACTS, "policy", value={"policy": ["layerdrop"]}), "order policy is invalid",
    ),
    "policy of other types": (
        edit(FACTS, "policy", value={"policy": "layerdrop", "p": "x"}), "drop probability",
    ),
    "view without numbers": (edit(FACTS, "image_view", "mean", value="abc"), "image_view"),
    "view with zero std": (edit(FACTS, "image_view", "std", value=[0, 0, 0]), "image_view"),
    "view with more keys": (edit(FACTS, "image_view", "evil", value=1), "image_view"),
    "view with text": (edit(FACTS, "image_view", "height", value="32"), "image_view"),
    "position that is none": (edit(FACTS, "position", value=[1]), "'position' is wrong"),
    "unknown part": (edit(FACTS, "position", "evil", value={}), "unknown"),
    "encoding without a form": (edit(FACTS, "position", "encoding", value=None), "unexpected"),
    "no parts at all": (
        edit(FACTS, "position", value={"encoding": None, "prediction": None}), "does not mention",
    ),
    "encoding of other features": (
        edit(FACTS, "position", "encoding", "features", value=5), "shape",
    ),
    "absurd features": (
        edit(FACTS, "position", "encoding", "features", value=10**9), "beyond any",
    ),
    "large features": (
        edit(FACTS, "position", "encoding", "features", value=10**7), "shape",
    ),
    "features as text": (
        edit(FACTS, "position", "encoding", "features", value="many"), "EncodingForm",
    ),
    "negative features": (
        edit(FACTS, "position", "encoding", "features", value=-4), "features=-4",
    ),
    "unknown table": (edit(FACTS, "position", "encoding", "table", value="x"), "EncodingForm"),
    "unknown field": (edit(FACTS, "position", "prediction", "x", value=1), "PredictionForm"),
    "dropout as text": (edit(FACTS, "position", "encoding", "dropout", value="x"), "EncodingForm"),
    "dropout beyond one": (edit(FACTS, "position", "encoding", "dropout", value=7), "EncodingForm"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FACTS)
def test_wrong_metadata_is_refused(what: str, good: Callable[[str], Path]) -> None:
    place, (change, expected) = good("timm-vit"), WRONG_FACTS[what]
    change(place)
    text = refused(place)
    assert expected in text
    assert str(place) in text


WRONG_CONFIG: dict[str, tuple[str, Change, str]] = {
    "timm: unknown architecture": (
        "timm-vit", edit(CONFIG, "architecture", value="evil_net"), "no timm model 'evil_net'",
    ),
    "timm: architecture elsewhere": (
        "timm-vit", edit(CONFIG, "architecture", value="hf-hub:evil/net"), "no timm model",
    ),
    "timm: architecture of another type": (
        "timm-vit", edit(CONFIG, "architecture", value=["vit"]), "needs architecture",
    ),
    "timm: a checkpoint elsewhere": (
        "timm-vit", edit(CONFIG, "model_args", "checkpoint_path", value="evil.pth"),
        "'checkpoint_path' is not an argument",
    ),
    "timm: unknown argument": (
        "timm-vit", edit(CONFIG, "model_args", "evil", value=1), "unexpected keyword",
    ),
    "timm: another depth": (
        "timm-vit", edit(CONFIG, "model_args", "depth", value=6), "holds 4 blocks, 6 are expected",
    ),
    "timm: depth of millions": (
        "timm-vit", edit(CONFIG, "model_args", "depth", value=10**7), "beyond any",
    ),
    "timm: huge width": (
        "timm-vit", edit(CONFIG, "model_args", "embed_dim", value=1 << 22), "shape",
    ),
    "timm: width as text": (
        "timm-vit", edit(CONFIG, "model_args", "embed_dim", value="wide"), "cannot build",
    ),
    "timm: another activation that is none": (
        "timm-vit", edit(CONFIG, "model_args", "act_layer", value="os.system"), "cannot build",
    ),
    "transformers: unknown model": (
        "hf-vit", edit(CONFIG, "model_type", value="evil"), "cannot build",
    ),
    "transformers: another model": (
        "hf-vit", edit(CONFIG, "model_type", value="beit"), "no model of transformers",
    ),
    "transformers: no classifier": (
        "hf-vit", edit(CONFIG, "model_type", value="bert"), "no model of transformers",
    ),
    "transformers: another depth": (
        "hf-vit", edit(CONFIG, "num_hidden_layers", value=6), "holds 4 blocks, 6 are expected",
    ),
    "transformers: depth of millions": (
        "hf-vit", edit(CONFIG, "num_hidden_layers", value=10**7), "beyond any",
    ),
    "transformers: huge width": (
        "hf-vit", edit(CONFIG, "hidden_size", value=1 << 22), "other shapes",
    ),
    "transformers: width as text": (
        "hf-vit", edit(CONFIG, "hidden_size", value="wide"), "cannot build",
    ),
    "transformers: billions of labels": (
        "hf-vit", edit(CONFIG, "num_labels", value=10**10), "beyond any",
    ),
    "transformers: fewer labels": (
        "hf-vit", edit(CONFIG, "id2label", value={"0": "a"}), "other shapes",
    ),
    "transformers: unknown activation": (
        "hf-vit", edit(CONFIG, "hidden_act", value="os.system"), "cannot build",
    ),
    "transformers: attention from a repository": (
        "hf-vit", edit(CONFIG, "attn_implementation", value="evil/kernels"), "code from elsewhere",
    ),
    "transformers: hidden attention": (
        "hf-vit", edit(CONFIG, "_attn_implementation", value="evil/kernels"), "code from elsewhere",
    ),
    "transformers: attention of another type": (
        "hf-vit", edit(CONFIG, "attn_implementation", value={"": "evil/x"}), "code from elsewhere",
    ),
    "transformers: quantised": (
        "hf-vit", edit(CONFIG, "quantization_config", value={"quant_method": "x"}), "quantization",
    ),
    "transformers: an adapter": (
        "hf-vit", put("adapter_config.json", b"{}"), "an adapter",
    ),
    "torchvision: another class": (
        "torchvision-vit", edit(CONFIG, "name", value="Sequential"), '"name": "VisionTransformer"',
    ),
    "torchvision: no arguments": (
        "torchvision-vit", edit(CONFIG, "kwargs", value=[]), 'an object "kwargs"',
    ),
    "torchvision: unknown argument": (
        "torchvision-vit", edit(CONFIG, "kwargs", "evil", value=1), "cannot build",
    ),
    "torchvision: another depth": (
        "torchvision-vit", edit(CONFIG, "kwargs", "num_layers", value=6),
        "holds 4 blocks, 6 are expected",
    ),
    "torchvision: depth of millions": (
        "torchvision-vit", edit(CONFIG, "kwargs", "num_layers", value=10**7), "beyond any",
    ),
    "torchvision: huge width": (
        "torchvision-vit", edit(CONFIG, "kwargs", "hidden_dim", value=1 << 22), "shape",
    ),
    "torchvision: no heads": (
        "torchvision-vit", edit(CONFIG, "kwargs", "num_heads", value=0), "cannot build",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_CONFIG)
def test_wrong_configurations_are_refused(what: str, good: Callable[[str], Path]) -> None:
    name, change, expected = WRONG_CONFIG[what]
    place = good(name)
    change(place)
    assert expected in refused(place)


WRONG_PARTS = {
    "empty": (put(PARTS, b""), "not a whole safetensors file"),
    "cut": (cut(PARTS, keep=0.5), "not a whole safetensors file"),
    "extra": (retensor(PARTS, extra), "unexpected backdoor"),
    "renamed": (retensor(PARTS, rename), "strange"),
    "another shape": (retensor(PARTS, wider), "shape"),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_wrong_position_parts_are_refused(what: str, good: Callable[[str], Path]) -> None:
    place, (change, expected) = good("timm-vit"), WRONG_PARTS[what]
    change(place)
    text = refused(place)
    assert expected in text
    assert PARTS in text


@pytest.mark.parametrize("part", ["encoding", "prediction"])
def test_position_parts_of_another_depth(
    part: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    place = good("timm-vit")
    deeper = ls.load(
        "timm:vit_tiny_patch16_224?pretrained=false&img_size=32&patch_size=8&depth=6&embed_dim=32"
        "&num_heads=2&num_classes=5"
    )
    forms: dict[str, Any] = {part: ls.EncodingForm() if part == "encoding" else ls.PredictionForm()}
    ls.save(ls.add_position(deeper, **forms), tmp_path / "deep")
    shutil.copy(tmp_path / "deep" / PARTS, place / PARTS)
    assert "holds 6 blocks, 4 are expected" in refused(place)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "model.pth", "weights.pt", "last.ckpt", "Model.BIN"]
)
@pytest.mark.parametrize("scheme", ["dir:", "hf:", ""])
def test_a_pickle_alone_is_refused_and_never_read(
    scheme: str, file: str, name: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    place = good(name)
    (place / WEIGHTS).unlink()
    (place / file).write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    text = refused(f"{scheme}{place}")
    assert f"{file}, a pickle" in text
    assert "weights_only=True" in text
    assert not (tmp_path / "ran").exists()


def test_a_pickle_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    assert "a pickle" in refused(tmp_path / "model.pt")
    assert "a pickle" in refused(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_pickle_beside_safetensors_is_left_alone(
    name: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    place = good(name)
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    assert num_classes_of(ls.load(str(place))) == 5
    assert not (tmp_path / "ran").exists()


def test_code_in_a_repository_is_never_run(good: Callable[[str], Path], tmp_path: Path) -> None:
    place = good("hf-vit")
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(CONFIG, "auto_map", value={
        "AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Model",
    })(place)  # fmt: skip
    (place / "preprocessor_config.json").write_text(
        json.dumps({"auto_map": {"AutoImageProcessor": "evil.Processor"}})
    )
    assert num_classes_of(ls.load(f"hf:{place}")) == 5  # a class of transformers itself is used
    edit(CONFIG, "model_type", value="evil")(place)
    refused(f"hf:{place}")
    assert not (tmp_path / "ran").exists()


def test_timm_inside_transformers_reads_no_other_files(
    good: Callable[[str], Path], tmp_path: Path
) -> None:
    FAMILIES["hf-timm-wrapper"].plain().save_pretrained(tmp_path / "wrapper")
    (tmp_path / "x.pth").write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    edit(CONFIG, "model_args", "checkpoint_path", value=str(tmp_path / "x.pth"))(
        tmp_path / "wrapper"
    )
    assert "other files" in refused(f"hf:{tmp_path / 'wrapper'}")
    assert not (tmp_path / "ran").exists()
