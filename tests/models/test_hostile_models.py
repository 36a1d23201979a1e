"""Hostile and damaged model directories: one `ModelFileError` each, and nothing is ever run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

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

import layershuffle as ls
from common import FAMILIES
from layershuffle.models import num_classes_of

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
        "no depth": edit(FACTS, "depth", value=0),
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
        "unknown activation": edit(CONFIG, "hidden_act", value="os.system"),
        "attention from a repository": edit(CONFIG, "attn_implementation", value="evil/kernels"),
        "hidden attention": edit(CONFIG, "_attn_implementation", value="evil/kernels"),
        "attention of a type": edit(CONFIG, "attn_implementation", value={"": "evil/x"}),
        "kernels": edit(CONFIG, "use_kernels", value=True),
    },
    "torchvision-vit": {
        "another class": edit(CONFIG, "name", value="Sequential"),
        "no arguments": edit(CONFIG, "kwargs", value=[]),
        "unknown argument": edit(CONFIG, "kwargs", "evil", value=1),
        "another depth": edit(CONFIG, "kwargs", "num_layers", value=6),
        "huge width": edit(CONFIG, "kwargs", "hidden_dim", value=1 << 22),
        "no heads": edit(CONFIG, "kwargs", "num_heads", value=0),
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
