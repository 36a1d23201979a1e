"""Directories that transformers wrote, and the readers of single files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_models import (
    WEIGHTS,
    assert_same_model,
    cut,
    edit,
    refused,
    retensor,
    without_the_last_block,
)
from timm.models import save_for_hf
from torch import Tensor, nn

import layershuffle as ls
from common import FAMILIES
from layershuffle.errors import ModelFileError
from layershuffle.models import (
    class_names_of,
    num_classes_of,
)
from layershuffle.models.files import (
    weight_files,
)
from refusals import refuses


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
    assert refused(f"hf:{hf_directory}").place == hf_directory


def test_a_directory_without_weights_says_so(hf_directory: Path) -> None:
    (hf_directory / WEIGHTS).unlink()
    assert refused(f"hf:{hf_directory}").place == hf_directory
    assert ls.depth_of(ls.load(f"hf:{hf_directory}?pretrained=false")) == 4


def test_shards_are_read_and_checked(tmp_path: Path) -> None:
    model = FAMILIES["hf-vit"].plain()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 1
    again = ls.load(f"hf:{tmp_path}")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    shard = weight_files(tmp_path)[-1]
    cut(shard.name, keep=0.5)(tmp_path)
    assert refused(f"hf:{tmp_path}").place == shard


# --- what other people's files are like -----------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "hf-timm-wrapper"])
def test_names_that_begin_with_those_of_a_wrapper(
    prefix: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As DataParallel and torch.compile save them."""
    stock = FAMILIES[name].plain()
    if name == "timm-vit":
        save_for_hf(stock, tmp_path, safe_serialization=True)
    else:
        stock.save_pretrained(tmp_path)
    retensor(WEIGHTS, lambda tensors: {prefix + n: t for n, t in tensors.items()})(tmp_path)
    # transformers' trainer writes pickles beside the weights; they are ignored.
    (tmp_path / "training_args.bin").write_bytes(b"pickle")
    assert_same_model(ls.load(str(tmp_path)), FAMILIES[name].wrapped())
    assert caplog.text == ""


def test_names_with_a_wrapper_around_one_block(hf_directory: Path) -> None:
    """As torch.compile saves blocks that were compiled one by one."""
    wanted = ls.load(f"hf:{hf_directory}")
    rename = {"layer.0.": "layer.0._orig_mod.", "layer.1.": "layer.1._orig_mod."}

    def wrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for plain, name in rename.items():
            tensors = {key.replace(plain, name): value for key, value in tensors.items()}
        return tensors

    retensor(WEIGHTS, wrapped)(hf_directory)
    assert_same_model(ls.load(f"hf:{hf_directory}"), wanted)


def test_one_name_with_and_without_a_wrapper_is_refused(hf_directory: Path) -> None:
    def twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, **{f"module.{name}": value + 1 for name, value in tensors.items()}}

    retensor(WEIGHTS, twice)(hf_directory)
    with refuses(ModelFileError, hf_directory / WEIGHTS):
        ls.load(f"hf:{hf_directory}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit"])
def test_quantised_weights_are_refused(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """Without their scales they would be another model, in silence."""
    stock = FAMILIES[name].plain()
    if name == "timm-vit":
        save_for_hf(stock, tmp_path, safe_serialization=True)
    else:
        stock.save_pretrained(tmp_path)
    retensor(
        WEIGHTS,
        lambda tensors: {n: t.to(dtype) if t.dim() == 2 else t for n, t in tensors.items()},
    )(tmp_path)
    with refuses(ModelFileError, tmp_path):
        ls.load(str(tmp_path))


def test_a_pointer_of_git_lfs_is_named(hf_directory: Path) -> None:
    (hf_directory / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1")
    with refuses(ModelFileError, hf_directory / WEIGHTS):
        ls.load(f"hf:{hf_directory}")


def test_names_of_classes_that_do_not_begin_with_0_are_refused(hf_directory: Path) -> None:
    """The last of them would be lost, and all others move."""
    edit("config.json", "id2label", value={str(n + 1): f"c{n}" for n in range(5)})(hf_directory)
    with refuses(ModelFileError, hf_directory / "config.json"):
        ls.load(f"hf:{hf_directory}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit"])
def test_weights_of_another_dtype_are_computed_in_float32(
    dtype: torch.dtype, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = FAMILIES[name].plain().to(dtype)
    if name == "timm-vit":
        save_for_hf(stock, tmp_path, safe_serialization=True)
    else:
        stock.save_pretrained(tmp_path)
    model = ls.load(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    pairs = zip(model.state_dict().values(), stock.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in pairs)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_another_number_of_classes_without_names(hf_directory: Path) -> None:
    """transformers then takes the number for two, which no weight fits."""
    edit("config.json", "id2label", value=...)(hf_directory)
    edit("config.json", "label2id", value=...)(hf_directory)
    error = refused(f"hf:{hf_directory}")
    assert error.place == hf_directory
    assert "(5," in error.cause
    assert "(2," in error.cause


def test_names_of_classes_may_be_numbers(hf_directory: Path) -> None:
    edit("config.json", "id2label", value={str(n): 10 * n for n in range(5)})(hf_directory)
    assert class_names_of(ls.load(f"hf:{hf_directory}")) == ("0", "10", "20", "30", "40")
