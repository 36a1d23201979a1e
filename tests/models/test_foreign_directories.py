"""Directories that transformers wrote, and the readers of single files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_models import WEIGHTS, cut, refused, retensor, without_the_last_block
from torch import nn

import layershuffle as ls
from common import FAMILIES
from layershuffle.errors import ModelFileError
from layershuffle.models import (
    image_view,
    num_classes_of,
    read_record,
)
from layershuffle.models.files import (
    MAX_JSON_BYTES,
    read_json,
    stack_depth,
    tensor_shapes,
    weight_files,
    write_tensors,
)

pytestmark = pytest.mark.usefixtures("bounded")


def test_a_backbone_without_a_head_gets_one_loudly(
    hf_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retensor(
        WEIGHTS, lambda ts: {n: t for n, t in ts.items() if not n.startswith("classifier")}
    )(hf_directory)  # fmt: skip
    torch.manual_seed(1)
    first: nn.Module = ls.load(f"hf:{hf_directory}", seed=3)
    assert "no classification head" in caplog.text
    torch.manual_seed(2)
    second = ls.load(f"hf:{hf_directory}", seed=3)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_tensors_of_another_task_are_named_and_left_out(
    hf_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retensor(WEIGHTS, lambda ts: {**ts, "vit.pooler.dense.bias": torch.zeros(32)})(hf_directory)
    assert num_classes_of(ls.load(f"hf:{hf_directory}")) == 5
    assert "vit.pooler.dense.bias" in caplog.text


def test_missing_blocks_are_never_initialised(hf_directory: Path) -> None:
    retensor(WEIGHTS, without_the_last_block)(hf_directory)
    assert "holds 3 blocks, 4 are expected" in refused(f"hf:{hf_directory}")


def test_a_directory_without_weights_says_so(hf_directory: Path) -> None:
    (hf_directory / WEIGHTS).unlink()
    assert "no model.safetensors here" in refused(f"hf:{hf_directory}")
    assert ls.depth_of(ls.load(f"hf:{hf_directory}?pretrained=false")) == 4


def test_shards_are_read_and_checked(tmp_path: Path) -> None:
    model = FAMILIES["hf-vit"].plain()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 1
    again = ls.load(f"hf:{tmp_path}")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    cut(weight_files(tmp_path)[-1].name, keep=0.5)(tmp_path)
    assert "not a whole safetensors file" in refused(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "model.bin", "absent.safetensors", 3]
)
def test_an_index_cannot_point_elsewhere(shard: object, hf_directory: Path) -> None:
    (hf_directory / WEIGHTS).rename(hf_directory.parent / "secret.safetensors")
    index = {"weight_map": {"classifier.bias": shard}}
    (hf_directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "shard" in refused(f"hf:{hf_directory}")


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"longest": 3}},
        {"size": "large"},
        {"size": {"height": "a", "width": 2}},
        {"image_mean": "abc"},
        {"image_mean": []},
        {"image_mean": ["a", "b", "c"]},
        {"image_std": [0, 0, 0]},
        {"resample": "best"},
        {"size": 0},
        {"size": 10**12},
    ],
)
def test_wrong_image_processors_are_refused(settings: dict[str, Any], hf_directory: Path) -> None:

    (hf_directory / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError):
        image_view(ls.load(f"hf:{hf_directory}"))


def test_json_at_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": "' + b"x" * (MAX_JSON_BYTES - 9) + b'"}')
    assert path.stat().st_size == MAX_JSON_BYTES
    assert len(read_json(path)["a"]) == MAX_JSON_BYTES - 9


def test_a_directory_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_json(tmp_path)
    with pytest.raises(ModelFileError):
        tensor_shapes(tmp_path)
    with pytest.raises(ModelFileError):
        read_record(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.json").chmod(0)
    with pytest.raises(ModelFileError, match="Permission denied"):
        read_json(tmp_path / "x.json")


def test_tensors_that_share_memory_are_written_whole(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    write_tensors({"a": base, "b": base.t(), "c": base[0]}, tmp_path / "x.safetensors")
    again = load_file(tmp_path / "x.safetensors")
    assert torch.equal(again["a"], base)
    assert torch.equal(again["b"], base.t())
    assert torch.equal(again["c"], base[0])


@pytest.mark.parametrize(
    ("names", "depth"),
    [
        (["blocks.0.norm", "blocks.1.norm", "blocks.11.norm", "head.weight"], 3),
        (["vit.encoder.layer.0.mlp.0.x", "vit.encoder.layer.1.mlp.0.x"], 2),
        (["encoder.layers.encoder_layer_0.a", "encoder.layers.encoder_layer_1.a"], 2),
        (["head.weight"], 0),
        ([], 0),
    ],
)
def test_the_depth_is_read_from_names(names: list[str], depth: int) -> None:
    assert stack_depth(names) == depth
