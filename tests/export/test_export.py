"""ONNX files of a model: the same numbers as torch, in every order, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import layershuffle as ls
from common import FAMILIES, images, logits_of
from exported import HOSTED, SHIPPED, exported_digits
from layershuffle.cli import main
from layershuffle.core.position_forms import EncodingForm
from layershuffle.core.stack import blocks_of
from layershuffle.export import export_model, export_whole, folder
from layershuffle.export.folder import _accuracy, _constants
from layershuffle.export.graphs import BlockForm, BlockPrecision, block_alone, form_of
from layershuffle.gateway.hosts.served_model import served_directory
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import ModelFileError, StackError, UsageError
from layershuffle.ground.text import unheard
from layershuffle.merging.group import MergeGroup
from layershuffle.models import class_names_of, image_view
from layershuffle.models.files import weights_digest
from layershuffle.models.manifest import CALIBRATION, MANIFEST
from layershuffle.models.onnx_models import OnnxGraph
from layershuffle.models.origin import training_settings
from layershuffle_host.blocks import Block
from refusals import refuses

ORDERS = ("0,1,2,3,4,5,6,7,8,9,10,11", "0,7,3,5,2,9,1,10,4,8,6,11", "0,4,1,4,11")


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_digits(tmp_path_factory)


def facts_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / MANIFEST).read_text())


def picture(batch: int) -> Tensor:
    return torch.randn(batch, 1, 12, 20, generator=torch.Generator().manual_seed(3))


# --- the files ------------------------------------------------------------------------------------


def test_the_manifest_says_what_is_there(shipped: Path) -> None:
    facts = facts_of(shipped)
    names = {path.name for path in shipped.iterdir()} - {MANIFEST}
    weights = {f"block-{block:02d}.weights" for block in HOSTED}
    others = {"stem.onnx", "block.onnx", "head.onnx", "calibration.json"}
    assert names == {*others, *weights} == set(facts["files"])
    assert facts["weights"] == weights_digest(ls.load(SHIPPED))
    for name, stored in facts["files"].items():
        content = (shipped / name).read_bytes()
        assert stored == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert facts["state"] == {"shape": [16, 64], "dtype": "float32"}
    assert (facts["precision"], facts["depth"], facts["classes"]) == ("fp32", 12, 100)
    assert facts["opset"] == onnx.load(shipped / "stem.onnx").opset_import[0].version == 20
    assert facts["class_names"] == list(class_names_of(ls.load(SHIPPED)) or ())
    assert facts["trained"] == {
        "method": "anyorder", "data": "digit-pairs", "holdout": 0.05, "paper_protocol": False,
    }  # fmt: skip
    held_out = training_settings(ls.load(SHIPPED))["holdout"]
    assert training_settings(ls.load(str(shipped)))["holdout"] == held_out
    assert facts["fixed"] == [1, 1]
    assert {"torch", "onnxruntime", "layershuffle"} <= facts["versions"].keys()
    assert max(block["parity"] for block in facts["blocks"]) <= 1e-5
    assert facts["speed"]["block_ms"] > 0
    # Nothing of the machine that wrote them.
    root = str(Path(ls.__file__).parents[2]).encode()
    assert [path.name for path in shipped.iterdir() if root in path.read_bytes()] == []


def test_another_runtime_that_knows_nothing_of_us_gets_the_same(
    shipped: Path, tmp_path: Path
) -> None:
    """ONNX Runtime reads the graph from disk, with the weights beside it under their name."""
    model = ls.load(SHIPPED)
    state = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    shutil.copy(shipped / "block.onnx", tmp_path)
    for block in HOSTED:
        shutil.copy(shipped / f"block-{block:02d}.weights", tmp_path / "weights")
        session = ort.InferenceSession(tmp_path / "block.onnx")
        (got,) = session.run(None, {"state": state.numpy()})
        with torch.no_grad():
            wanted = blocks_of(model)[block](state).numpy()
        assert np.abs(got - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


def test_the_files_that_ship_are_those_of_the_shipped_model(shipped: Path) -> None:
    """Weights byte by byte; the graphs of another torch may differ, and not in what they give."""
    for path in shipped.glob("*.weights"):
        assert path.read_bytes() == asset("digits-onnx", path.name).read_bytes()
    ours, theirs = ls.load("bundled:digits-onnx"), ls.load(str(shipped))
    with torch.no_grad(), ls.running(ours, ORDERS[1]), ls.running(theirs, ORDERS[1]):
        got, wanted = ours(picture(3)), theirs(picture(3))
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


# --- the same numbers -----------------------------------------------------------------------------


class NoProducts(TorchDispatchMode):
    """Fails if torch multiplies matrices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("mm", "linear", "conv", "attention", "norm", "softmax", "gelu")
        assert not any(name in str(func) for name in names), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 5])
def test_the_files_answer_as_the_model_in_every_order(shipped: Path, batch: int) -> None:
    model, files = ls.load(SHIPPED), ls.load(str(shipped))
    assert image_view(files) == image_view(model)
    for order in ORDERS:
        with torch.no_grad(), ls.running(model, order):
            wanted = model(picture(batch))
        with torch.no_grad(), ls.running(files, order), NoProducts():
            got = files(picture(batch))
        assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_a_table_of_positions_in_every_block(tmp_path: Path) -> None:
    """As DINOv3 has it."""
    model = FAMILIES["timm-dinov3"].wrapped()
    ls.save(model, tmp_path / "model")
    facts = export_model(str(tmp_path / "model"), tmp_path / "files")
    assert {block["graph"] for block in facts["blocks"]} == {"block.onnx"}
    assert max(block["parity"] for block in facts["blocks"]) <= 1e-5
    files = ls.load(str(tmp_path / "files"))
    with torch.no_grad(), ls.running(model, "2,0,3"), ls.running(files, "2,0,3"):
        got, wanted = files(images(4)), logits_of(model(images(4)))
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.fixture(scope="module")
def form() -> BlockForm:
    """Of the blocks of the shipped model, traced once."""
    block = blocks_of(ls.load(SHIPPED))[0]
    return form_of(block_alone(block, ((), {})), torch.randn(2, 16, 64))


def test_fp16_halves_the_weights(form: BlockForm) -> None:
    block = blocks_of(ls.load(SHIPPED))[7]
    state = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = block(state)
    sizes = []
    for precision, least, most in (("fp32", 0, 1e-6), ("fp16", 1e-6, 1e-3), ("int8", 1e-4, 5e-2)):
        graph, weights = form.files(block, precision)
        error = (OnnxGraph(graph, weights)(state) - wanted).abs().max() / wanted.abs().max()
        assert least <= float(error) < most
        sizes.append(len(weights))
    whole, half, quarter = sizes
    assert half < 0.52 * whole
    assert quarter < 0.3 * whole
    with torch.no_grad():
        block.mlp.fc1.weight[0, 0] = 1e6
    with refuses(StackError):
        form.files(block, "fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_an_answer_does_not_depend_on_the_others_of_its_batch(
    form: BlockForm, precision: BlockPrecision
) -> None:
    """In int8 they would share a scale, and an honest host would differ from its reference."""
    graph, weights = form.files(blocks_of(ls.load(SHIPPED))[7], precision)
    states = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1))
    states *= torch.tensor([1.0, 3.0, 0.2])[:, None, None]
    host, file = Block(graph, weights, shape=(16, 64), threads=1), OnnxGraph(graph, weights)
    for together in (host.run(states.numpy()), file(states).numpy()):
        alone = np.concatenate([host.run(state[None].numpy()) for state in states])
        assert np.abs(together - alone).max() < (1e-7 if precision == "int8" else 1e-5)


def test_int8_is_taken_if_it_is_measured(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(UsageError):
        export_model(SHIPPED, tmp_path / "files", precision="int8")
    data = "digit-pairs?test=300"
    facts = export_model(SHIPPED, tmp_path / "files", precision="int8", data=data)
    accuracy = facts["accuracy"]
    assert accuracy["images"] == 300
    for mode in ("in_order", "any_order"):
        assert abs(accuracy["torch"][mode] - accuracy["files"][mode]) <= 1.0
        assert accuracy["torch"][mode] > 90
    graph = onnx.load(tmp_path / "files" / "block.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("MatMulInteger") == 4
    assert facts["speed"]["fp32_block_ms"] > 0
    # As if it cost more than it may.
    monkeypatch.setattr(folder, "_MOST_LOST", -200.0)
    with refuses(UsageError, SHIPPED):
        _accuracy(SHIPPED, shipped, data="digit-pairs?test=20", precision="int8", progress=unheard)


def test_a_whole_model_in_one_order(tmp_path: Path) -> None:
    order, out = "0,3,2,11", tmp_path / "whole"
    assert main(["export", SHIPPED, "--out", str(out), "--whole", "--order", order]) == 0
    session = ort.InferenceSession(out / "model.onnx")
    (got,) = session.run(None, {"images": picture(3).numpy()})
    model = ls.load(SHIPPED)
    with torch.no_grad(), ls.running(model, order):
        wanted = model(picture(3)).numpy()
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert facts_of(out)["order"] == order
    with refuses(UsageError):
        export_whole(SHIPPED, out, order="0,12,11")
    # It is no directory of parts.
    with refuses(ModelFileError, out / MANIFEST):
        ls.load(str(out))


# --- graphs ---------------------------------------------------------------------------------------


def exported(
    model: nn.Module, out: Path, monkeypatch: pytest.MonkeyPatch, *, directory: Path | None = None
) -> dict[str, Any]:
    """The manifest of a model that no spec builds, whose files are in `directory`."""
    monkeypatch.setattr(folder, "load", lambda spec: ls.load(spec) if ":/" in spec else model)
    monkeypatch.setattr(folder, "own_directory", lambda _: directory)
    return export_model("mine", out)


def test_a_block_without_a_tensor_of_the_first_has_a_graph_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES["timm-vit"].wrapped()
    blocks_of(model)[2].mlp.fc2.bias = None
    facts = exported(model, tmp_path / "files", monkeypatch)
    graphs = [block["graph"] for block in facts["blocks"]]
    assert graphs == ["block.onnx", "block.onnx", "block-02.onnx", "block.onnx"]


def test_blocks_share_a_graph_if_they_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are equal, zero or one are stored as all others are."""
    model = FAMILIES["timm-deit3"].wrapped()
    with torch.no_grad():
        for name, weight in blocks_of(model)[0].named_parameters():
            weight.fill_(float(name.endswith("gamma")))
    blocks_of(model)[2].norm1.eps = 0.1
    facts = exported(model, tmp_path / "files", monkeypatch)
    graphs = [block["graph"] for block in facts["blocks"]]
    assert graphs == ["block.onnx", "block.onnx", "block-02.onnx", "block.onnx"]
    for block in blocks_of(model):
        tensors = load_file(tmp_path / "files" / "block-00.weights")
        assert len(tensors) == len(list(block.parameters()))
    files = ls.load(str(tmp_path / "files"))
    with torch.no_grad():
        got, wanted = files(images(2)), model(images(2))
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


# --- refused --------------------------------------------------------------------------------------


class Moody(nn.Module):
    """Computes one thing or another, depending on the numbers."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, state: Tensor) -> Tensor:
        return self.inside(state) if state.mean() > 0 else state


class Scaled(nn.Module):
    """A block that gets a factor beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: Tensor, factor: Tensor) -> Tensor:
        return state + factor * self.linear(state)


class OfTheImages(nn.Module):
    """A backbone whose blocks get a number of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        state = batch.flatten(2)[..., :4]
        for block in self.blocks:
            state = block(state, batch.mean())
        return state.mean(1)


def test_models_that_cannot_be_exported_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "files"
    model = FAMILIES["timm-vit"].wrapped()
    for block in blocks_of(model):
        block.mlp = Moody(block.mlp)
    with refuses(StackError):
        exported(model, out, monkeypatch)
    model = ls.add_position(FAMILIES["timm-vit"].wrapped(), encoding=EncodingForm()).eval()
    with refuses(UsageError, "mine"):
        exported(model, out, monkeypatch)
    with refuses(StackError):
        _constants(ls.wrap(OfTheImages()), images(3))
    assert not out.exists()


def test_changed_files_and_a_manifest_that_lies_are_refused(shipped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shipped, copy)
    weights = copy / "block-05.weights"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with refuses(ModelFileError, weights):
        ls.load(str(copy))
    weights.unlink()
    with refuses(ModelFileError, weights):
        ls.load(str(copy))
    shutil.copy(shipped / weights.name, weights)
    facts = facts_of(shipped)
    (copy / "block.onnx").write_bytes(b"no graph")
    facts["files"]["block.onnx"]["sha256"] = hashlib.sha256(b"no graph").hexdigest()
    (copy / MANIFEST).write_text(json.dumps(facts))
    with refuses(ModelFileError):
        ls.load(str(copy))
    stored = facts["files"]
    for lie in (
        {"schema": 1},
        {"files": {**stored, "../secret": stored["stem.onnx"]}},
        {"files": {name: stored[name] for name in stored if name != "head.onnx"}},
    ):
        (copy / MANIFEST).write_text(json.dumps({**facts, **lie}))
        with refuses(ModelFileError, copy / MANIFEST):
            ls.load(str(copy))


@pytest.mark.parametrize("spec", ["{}", "hf:{}", "timm:vit_tiny_patch16_224?checkpoint={}/best"])
def test_a_swarm_exports_a_model_again_when_its_files_change(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        out = Path(words[-1])
        out.mkdir()
        (out / MANIFEST).touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", export)
    model = tmp_path / "model"
    model.mkdir()
    places = []
    for content in ("begun", "begun", "trained on"):
        (model / "best").write_text(content)
        places.append(served_directory(spec.format(model)))
    assert places[0] == places[1] != places[2]


def test_a_calibration_stays_where_the_same_model_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To measure it takes an hour; that of another model is not deleted."""
    out = tmp_path / "files"
    model = FAMILIES["timm-vit"].wrapped()
    exported(model, out, monkeypatch)
    measured = json.dumps({"weights": weights_digest(model), "rows": []})
    (out / CALIBRATION).write_text(measured)
    exported(model, out, monkeypatch)
    assert (out / CALIBRATION).read_text() == measured
    own = tmp_path / "own"
    own.mkdir()
    (own / CALIBRATION).write_text("beside the model")
    for directory in (None, own):
        for other in ('{"weights": "of another"}', "[]", ""):
            (out / CALIBRATION).write_text(other)
            with refuses(UsageError, out / CALIBRATION):
                exported(model, out, monkeypatch, directory=directory)
            assert (out / CALIBRATION).read_text() == other
    # What an export copied is there again.
    (out / CALIBRATION).unlink()
    for text in ("beside the model", "measured anew"):
        (own / CALIBRATION).write_text(text)
        exported(model, out, monkeypatch, directory=own)
        assert (out / CALIBRATION).read_text() == text


def test_files_can_only_be_run(shipped: Path, tmp_path: Path) -> None:
    model = ls.load(str(shipped))
    with refuses(UsageError):
        ls.save(model, tmp_path / "saved")
    with refuses(UsageError):
        ls.load(str(shipped), num_classes=3)
    with refuses(UsageError):
        model(picture(2).bfloat16())
    again = tmp_path / "export"
    again.symlink_to(shipped)
    with refuses(UsageError, str(again)):
        export_model(str(again), tmp_path / "again")
    for combine in (MergeGroup, ls.uniform_soup):
        with refuses(UsageError, "0"):
            combine([model, model])


@pytest.mark.parametrize("words", [["--whole", "--data", "digit-pairs"], ["--order", "3,0"]])
def test_flags_that_exclude_each_other(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", SHIPPED, "--out", str(tmp_path / "x"), *words]) == 2
    assert "--whole" in capsys.readouterr().err
