"""Hostile and damaged directories: one `ModelFileError` each, and nothing is ever run; then what
other people's files are like."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from saved_models import (
    CONFIG,
    FACTS,
    LIBRARIES,
    PARTS,
    WEIGHTS,
    Change,
    Sentinel,
    assert_same_model,
    cut,
    drop,
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
from timm.models._hub import save_for_hf
from torch import nn

import layershuffle as ls
from common import FAMILIES
from layershuffle.ground.errors import ModelFileError
from layershuffle.models import class_names_of, num_classes_of
from layershuffle.models.files import weight_files
from refusals import refuses

DEEP = b'{"a":' * 100_000
# What is done to a good directory of every library, by the file that the error names. The library's
# own words come with the directory.
DAMAGE: dict[str, dict[str, Change]] = {
    WEIGHTS: {
        "no tensors": put(WEIGHTS, bytes(range(256)) * 64),
        "cut off": cut(WEIGHTS, keep=0.9),
        "bytes after the end": lambda place: put(WEIGHTS, (place / WEIGHTS).read_bytes() + b"x")(
            place
        ),
        "a pointer of git lfs": put(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid"),
    },
    "": {
        "a tensor of another name": retensor(WEIGHTS, rename),
        "a tensor more": retensor(WEIGHTS, extra),
        "a block fewer": retensor(WEIGHTS, without_the_last_block),
        "a tensor of another shape": retensor(WEIGHTS, wider),
        "no tensors": retensor(WEIGHTS, lambda _: {}),
        "a weight that is NaN": retensor(WEIGHTS, not_finite),
        "a part that is NaN": retensor(PARTS, not_finite),
        "no facts": drop(FACTS),
        "no configuration": drop(CONFIG),
        "no weights": drop(WEIGHTS),
        "another library": edit(FACTS, "library", value="timm"),
        **{
            f"a configuration that is {what}": put(CONFIG, content)
            for what, content in {"no JSON": b"{nope", "a list": b"[1, 2]", "deep": DEEP}.items()
        },
    },
    FACTS: {
        "no JSON": put(FACTS, b"{nope"),
        "a list": put(FACTS, b"[1, 2]"),
        "deep": put(FACTS, DEEP),
        "of the future": edit(FACTS, "schema", value=2),
        "an unknown fact": edit(FACTS, "polciy", value={}),
        "another depth": edit(FACTS, "depth", value=10**12),
        "other classes": edit(FACTS, "num_classes", value=1000),
        "other blocks": edit(FACTS, "blocks", value="head"),
        "a view without numbers": edit(FACTS, "image_view", "mean", value="abc"),
        "a view with zero std": edit(FACTS, "image_view", "std", value=[0, 0, 0]),
        "an impossible part": edit(FACTS, "position", "encoding", "dropout", value=7),
    },
    PARTS: {
        "none": drop(PARTS),
        "empty": put(PARTS, b""),
        "cut off": cut(PARTS, keep=0.5),
        "a part more": retensor(PARTS, extra),
        "a part of another name": retensor(PARTS, rename),
        "a part of another shape": retensor(PARTS, wider),
        "one that is not named": edit(FACTS, "position", "encoding", value=None),
        "all not named": edit(FACTS, "position", value={"encoding": None, "prediction": None}),
        "of another size": edit(FACTS, "position", "encoding", "features", value=10**9),
    },
}
# What is written into config.json, by library.
WRONG_CONFIG: dict[str, dict[str, Change]] = {
    "timm-vit": {
        "unknown architecture": edit(CONFIG, "architecture", value="evil_net"),
        "architecture elsewhere": edit(CONFIG, "architecture", value="hf-hub:evil/net"),
        "a checkpoint elsewhere": edit(CONFIG, "model_args", "checkpoint_path", value="evil.pth"),
        "unknown argument": edit(CONFIG, "model_args", "evil", value=1),
        "another depth": edit(CONFIG, "model_args", "depth", value=6),
        "huge width": edit(CONFIG, "model_args", "embed_dim", value=1 << 22),
        "an activation that is none": edit(CONFIG, "model_args", "act_layer", value="os.system"),
    },
    "hf-vit": {
        "unknown model": edit(CONFIG, "model_type", value="evil"),
        "another model": edit(CONFIG, "model_type", value="beit"),
        "no classifier": edit(CONFIG, "model_type", value="bert"),
        "another depth": edit(CONFIG, "num_hidden_layers", value=6),
        "huge width": edit(CONFIG, "hidden_size", value=1 << 22),
        "fewer labels": edit(CONFIG, "id2label", value={"0": "a"}),
        # The last of them would be lost, and all others move.
        "labels from 1 on": edit(CONFIG, "id2label", value={str(n + 1): f"c{n}" for n in range(5)}),
        # transformers then takes the number for two, which no weight fits.
        "no labels": edit(CONFIG, "id2label", value=...),
        "unknown activation": edit(CONFIG, "hidden_act", value="os.system"),
        "attention from a repository": edit(CONFIG, "attn_implementation", value="evil/kernels"),
        "hidden attention": edit(CONFIG, "_attn_implementation", value="evil/kernels"),
        "attention of a type": edit(CONFIG, "attn_implementation", value={"": "evil/x"}),
        "kernels": edit(CONFIG, "use_kernels", value=True),
    },
}
CASES = [
    (name, file, what)
    for name in LIBRARIES
    for file, cases in (*DAMAGE.items(), (CONFIG, WRONG_CONFIG[name]))
    for what in cases
    if (name, what) != ("timm-vit", "another library")
]


@pytest.mark.parametrize(("name", "file", "what"), CASES)
def test_a_damaged_directory_is_refused_with_its_place(
    name: str, file: str, what: str, good: Callable[[str], Path]
) -> None:
    place = good(name)
    (WRONG_CONFIG[name] if file == CONFIG else DAMAGE[file])[what](place)
    error = refused(place)
    if file in ("", CONFIG):
        assert Path(error.place) in (place, *(place / file for file in (FACTS, CONFIG, WEIGHTS)))
        assert "nan" in error.cause or "NaN" not in what
        assert ("(5," in error.cause and "(2," in error.cause) or what != "no labels"
    else:
        assert error.place == place / file


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "Model.PTH"])
@pytest.mark.parametrize("scheme", ["dir:", "hf:", ""])
def test_a_pickle_is_never_read(
    scheme: str, file: str, name: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside the weights it is left alone; without them it is refused."""
    place = good(name)
    (place / file).write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    assert num_classes_of(ls.load(str(place))) == 5
    (place / WEIGHTS).unlink()
    assert refused(f"{scheme}{place}").place == place / file
    assert refused(place / file).place == place / file
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


def test_timm_inside_transformers_reads_no_other_files(tmp_path: Path) -> None:
    FAMILIES["hf-timm-wrapper"].plain().save_pretrained(tmp_path / "wrapper")
    (tmp_path / "x.pth").write_bytes(pickle.dumps(Sentinel(tmp_path / "ran")))
    edit(CONFIG, "model_args", "checkpoint_path", value=str(tmp_path / "x.pth"))(
        tmp_path / "wrapper"
    )
    assert refused(f"hf:{tmp_path / 'wrapper'}").place == tmp_path / "wrapper" / CONFIG
    assert not (tmp_path / "ran").exists()


# --- what other people's files are like -----------------------------------------------------------


def save_stock(model: nn.Module, place: Path) -> None:
    """As timm or transformers saves it."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(place)
    else:
        save_for_hf(model, place, safe_serialization=True)


def test_a_backbone_without_a_head_gets_one_loudly(
    hf_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retensor(
        WEIGHTS, lambda ts: {n: t for n, t in ts.items() if not n.startswith("classifier")}
    )(hf_directory)  # fmt: skip
    torch.manual_seed(1)
    first = ls.load(f"hf:{hf_directory}", seed=3)
    assert "no classification head" in caplog.text
    torch.manual_seed(2)
    second = ls.load(f"hf:{hf_directory}", seed=3)
    assert_same_model(first, second)


def test_tensors_of_another_task_are_named_and_left_out(
    hf_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retensor(WEIGHTS, lambda ts: {**ts, "vit.pooler.dense.bias": torch.zeros(32)})(hf_directory)
    assert num_classes_of(ls.load(f"hf:{hf_directory}")) == 5
    assert "vit.pooler.dense.bias" in caplog.text


def test_a_directory_without_weights_says_so(hf_directory: Path) -> None:
    (hf_directory / WEIGHTS).unlink()
    assert refused(f"hf:{hf_directory}").place == hf_directory
    assert ls.depth_of(ls.load(f"hf:{hf_directory}?pretrained=false")) == 4


def test_shards_are_read_and_checked(tmp_path: Path) -> None:
    model = FAMILIES["hf-vit"].plain()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 1
    assert_same_model(ls.load(f"hf:{tmp_path}"), ls.wrap(model))
    shard = weight_files(tmp_path)[-1]
    cut(shard.name, keep=0.5)(tmp_path)
    assert refused(f"hf:{tmp_path}").place == shard


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "hf-timm-wrapper"])
def test_names_that_begin_with_those_of_a_wrapper(
    prefix: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As DataParallel and torch.compile save them."""
    save_stock(FAMILIES[name].plain(), tmp_path)
    retensor(WEIGHTS, lambda tensors: {prefix + n: t for n, t in tensors.items()})(tmp_path)
    # transformers' trainer writes pickles beside the weights; they are ignored.
    (tmp_path / "training_args.bin").write_bytes(b"pickle")
    assert_same_model(ls.load(str(tmp_path)), FAMILIES[name].wrapped())
    assert caplog.text == ""


def test_names_with_a_wrapper_around_one_block(hf_directory: Path) -> None:
    """As torch.compile saves blocks that were compiled one by one; one name twice is refused."""
    wanted = ls.load(f"hf:{hf_directory}")
    retensor(WEIGHTS, lambda ts: {n.replace("layer.1.", "layer.1._orig_mod."): t for n, t in
                                  ts.items()})(hf_directory)  # fmt: skip
    assert_same_model(ls.load(f"hf:{hf_directory}"), wanted)
    retensor(WEIGHTS, lambda ts: {**ts, **{f"module.{n}": t + 1 for n, t in ts.items()}})(
        hf_directory
    )
    with refuses(ModelFileError, hf_directory / WEIGHTS):
        ls.load(f"hf:{hf_directory}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit"])
def test_quantised_weights_are_refused(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """Without their scales they would be another model, in silence."""
    save_stock(FAMILIES[name].plain(), tmp_path)
    retensor(
        WEIGHTS,
        lambda tensors: {n: t.to(dtype) if t.dim() == 2 else t for n, t in tensors.items()},
    )(tmp_path)
    with refuses(ModelFileError, tmp_path):
        ls.load(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit"])
def test_weights_of_another_dtype_are_computed_in_float32(
    dtype: torch.dtype, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = FAMILIES[name].plain().to(dtype)
    save_stock(stock, tmp_path)
    model = ls.load(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    pairs = zip(model.state_dict().values(), stock.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in pairs)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_names_of_classes_may_be_numbers(hf_directory: Path) -> None:
    edit("config.json", "id2label", value={str(n): 10 * n for n in range(5)})(hf_directory)
    try:
        transformers.AutoConfig.from_pretrained(hf_directory)
    except StrictDataclassFieldValidationError:
        # transformers 5.4 does, and so do we.
        with refuses(ModelFileError, hf_directory):
            ls.load(f"hf:{hf_directory}")
        return
    assert class_names_of(ls.load(f"hf:{hf_directory}")) == ("0", "10", "20", "30", "40")
