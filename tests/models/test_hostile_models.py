"""Hostile and damaged model directories: one `ModelFileError` each, and nothing is ever run."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
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
    not_finite,
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
    "garbage": put(WEIGHTS, bytes(range(256)) * 64),
    "header longer than the file": put(WEIGHTS, header({}, length=1 << 20)),
    "deeply nested header": put(WEIGHTS, struct.pack("<Q", 200_000) + b"[" * 200_000),
    "offsets beyond the file": put(
        WEIGHTS, header({"x": {**ENTRY, "data_offsets": [0, 1 << 40]}}, b"\0" * 8)
    ),
    "shape that overflows": put(
        WEIGHTS, header({"x": {**ENTRY, "shape": [1 << 32, 1 << 32, 1 << 32]}}, b"\0" * 8)
    ),
    "cut in the header": cut(WEIGHTS, keep=0.01),
    "cut in the data": cut(WEIGHTS, keep=0.9),
    "bytes after the end": lambda place: put(WEIGHTS, (place / WEIGHTS).read_bytes() + b"x")(place),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("what", BROKEN_WEIGHTS)
def test_broken_safetensors(what: str, name: str, good: Callable[[str], Path]) -> None:
    place = good(name)
    BROKEN_WEIGHTS[what](place)
    error = refused(place)
    assert error.place == place / WEIGHTS
    assert isinstance(error.__cause__, SafetensorError | OSError)


# What is wrong, and a name that every message has.
OTHER_TENSORS = {
    "renamed": (retensor(WEIGHTS, rename), ""),
    "extra": (retensor(WEIGHTS, extra), "backdoor"),
    "one block fewer": (retensor(WEIGHTS, without_the_last_block), "3."),
    "another shape": (retensor(WEIGHTS, wider), "shape"),
    "none": (retensor(WEIGHTS, lambda _: {}), ""),
    "a number that is none": (retensor(WEIGHTS, not_finite), "nan"),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("what", OTHER_TENSORS)
def test_tensors_of_another_model(what: str, name: str, good: Callable[[str], Path]) -> None:
    place, (change, named) = good(name), OTHER_TENSORS[what]
    change(place)
    error = refused(place)
    assert Path(error.place) == place
    assert named in error.cause


BROKEN_JSON = {
    "empty": b"",
    "not JSON": b"{nope",
    "a list": b"[1, 2]",
    "deeply nested": b'{"a":' * 100_000,
    "huge": b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}',
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("file", [FACTS, CONFIG])
@pytest.mark.parametrize("what", BROKEN_JSON)
def test_broken_json(what: str, file: str, good: Callable[[str], Path]) -> None:
    for name in LIBRARIES:
        place = good(name)
        (place / file).write_bytes(BROKEN_JSON[what])
        assert refused(place).place in (place, place / file)


@pytest.mark.parametrize("file", [FACTS, CONFIG, WEIGHTS, PARTS])
def test_missing_files(file: str, good: Callable[[str], Path]) -> None:
    for name in LIBRARIES:
        place = good(name)
        (place / file).unlink()
        assert refused(place).place in (place, place / file)


# Of layershuffle.json: the file that the error names.
WRONG_FACTS: dict[str, tuple[Change, str]] = {
    "schema of the future": (edit(FACTS, "schema", value=2), FACTS),
    "unknown key": (edit(FACTS, "polciy", value={}), FACTS),
    "another library": (edit(FACTS, "library", value="torchvision"), CONFIG),
    "another name": (edit(FACTS, "name", value="vit_huge"), FACTS),
    "another depth": (edit(FACTS, "depth", value=12), FACTS),
    "absurd depth": (edit(FACTS, "depth", value=10**12), FACTS),
    "other classes": (edit(FACTS, "num_classes", value=1000), FACTS),
    "other blocks": (edit(FACTS, "blocks", value="head"), FACTS),
    "view without numbers": (edit(FACTS, "image_view", "mean", value="abc"), FACTS),
    "view with zero std": (edit(FACTS, "image_view", "std", value=[0, 0, 0]), FACTS),
    "encoding without a form": (edit(FACTS, "position", "encoding", value=None), PARTS),
    "no parts at all": (
        edit(FACTS, "position", value={"encoding": None, "prediction": None}), PARTS,
    ),
    "encoding of other features": (
        edit(FACTS, "position", "encoding", "features", value=5), PARTS,
    ),
    "absurd features": (edit(FACTS, "position", "encoding", "features", value=10**9), FACTS),
    "large features": (edit(FACTS, "position", "encoding", "features", value=10**7), PARTS),
    "dropout beyond one": (edit(FACTS, "position", "encoding", "dropout", value=7), FACTS),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FACTS)
def test_wrong_metadata_is_refused(what: str, good: Callable[[str], Path]) -> None:
    place, (change, file) = good("timm-vit"), WRONG_FACTS[what]
    change(place)
    assert refused(place).place == place / file


# Of config.json, by library. Its own words come with the directory, ours with the file.
WRONG_CONFIG: dict[str, dict[str, Change]] = {
    "timm-vit": {
        "unknown architecture": edit(CONFIG, "architecture", value="evil_net"),
        "architecture elsewhere": edit(CONFIG, "architecture", value="hf-hub:evil/net"),
        "a checkpoint elsewhere": edit(CONFIG, "model_args", "checkpoint_path", value="evil.pth"),
        "unknown argument": edit(CONFIG, "model_args", "evil", value=1),
        "another depth": edit(CONFIG, "model_args", "depth", value=6),
        "depth of millions": edit(CONFIG, "model_args", "depth", value=10**7),
        "huge width": edit(CONFIG, "model_args", "embed_dim", value=1 << 22),
        "an activation that is none": edit(CONFIG, "model_args", "act_layer", value="os.system"),
    },
    "hf-vit": {
        "unknown model": edit(CONFIG, "model_type", value="evil"),
        "another model": edit(CONFIG, "model_type", value="beit"),
        "no classifier": edit(CONFIG, "model_type", value="bert"),
        "another depth": edit(CONFIG, "num_hidden_layers", value=6),
        "depth of millions": edit(CONFIG, "num_hidden_layers", value=10**7),
        "huge width": edit(CONFIG, "hidden_size", value=1 << 22),
        "billions of labels": edit(CONFIG, "num_labels", value=10**10),
        "fewer labels": edit(CONFIG, "id2label", value={"0": "a"}),
        "unknown activation": edit(CONFIG, "hidden_act", value="os.system"),
        "attention from a repository": edit(CONFIG, "attn_implementation", value="evil/kernels"),
        "hidden attention": edit(CONFIG, "_attn_implementation", value="evil/kernels"),
        "attention of a type": edit(CONFIG, "attn_implementation", value={"": "evil/x"}),
        "quantised": edit(CONFIG, "quantization_config", value={"quant_method": "x"}),
        "an adapter": put("adapter_config.json", b"{}"),
    },
    "torchvision-vit": {
        "another class": edit(CONFIG, "name", value="Sequential"),
        "no arguments": edit(CONFIG, "kwargs", value=[]),
        "unknown argument": edit(CONFIG, "kwargs", "evil", value=1),
        "another depth": edit(CONFIG, "kwargs", "num_layers", value=6),
        "depth of millions": edit(CONFIG, "kwargs", "num_layers", value=10**7),
        "huge width": edit(CONFIG, "kwargs", "hidden_dim", value=1 << 22),
        "no heads": edit(CONFIG, "kwargs", "num_heads", value=0),
    },
}
CONFIG_CASES = [(name, what) for name, cases in WRONG_CONFIG.items() for what in cases]


@pytest.mark.parametrize(("name", "what"), CONFIG_CASES)
def test_wrong_configurations_are_refused(
    name: str, what: str, good: Callable[[str], Path]
) -> None:
    place = good(name)
    WRONG_CONFIG[name][what](place)
    assert refused(place).place in (place, place / CONFIG)


WRONG_PARTS = {
    "empty": put(PARTS, b""),
    "cut": cut(PARTS, keep=0.5),
    "extra": retensor(PARTS, extra),
    "renamed": retensor(PARTS, rename),
    "another shape": retensor(PARTS, wider),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_wrong_position_parts_are_refused(what: str, good: Callable[[str], Path]) -> None:
    place = good("timm-vit")
    WRONG_PARTS[what](place)
    assert refused(place).place == place / PARTS


def test_a_position_part_that_is_not_finite_is_refused(good: Callable[[str], Path]) -> None:
    place = good("timm-vit")
    retensor(PARTS, not_finite)(place)
    assert "encoding" in refused(place).cause


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
    assert refused(f"{scheme}{place}").place == place / file
    assert not (tmp_path / "ran").exists()


def test_a_pickle_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    assert refused(tmp_path / "model.pt").place == tmp_path / "model.pt"
    assert refused(tmp_path).place == tmp_path
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
    assert refused(f"hf:{tmp_path / 'wrapper'}").place == tmp_path / "wrapper" / CONFIG
    assert not (tmp_path / "ran").exists()
