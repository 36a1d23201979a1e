"""Pico host models: one builder per supported family, depth 4, width 32, 32x32 images, patch 8.

Every parameter is drawn again from a seeded generator: the libraries start LayerScale gammas near
zero and some heads at zero, and then the order of the blocks would not show in the output.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import timm
import torch
import transformers
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers.models.vit import modeling_vit

import layershuffle as ls

DEPTH, WIDTH, SIZE, PATCH, HEADS, CLASSES = 4, 32, 32, 8, 2, 5

# A tiny model of digit pairs: what commands, runs and studies of the tests take.
DIGITS_VIT = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=32&depth=4&num_heads=2&mlp_ratio=2"
)
SEQUENTIAL = (0, 1, 2, 3)
PERMUTED = (2, 0, 3, 1)
PRUNED = (3, 1)
REPEATED = (1, 1, 3)
LONGER = (0, 2, 2, 1, 3, 0)
ORDERS = {"permuted": PERMUTED, "pruned": PRUNED, "repeated": REPEATED, "longer": LONGER}


@dataclass(frozen=True)
class Family:
    """A host model: how to build it, and where its blocks stand."""

    name: str
    library: str
    path: str
    make: Callable[[], nn.Module]

    def plain(self) -> nn.Module:
        """A fresh unwrapped model in eval mode, the same at every call."""
        data, tensors = _pickled(self)
        return _Unpickler(data, tensors).load()

    def wrapped(self) -> nn.Module:
        """A fresh wrapped model in eval mode with the weights of `plain`."""
        return ls.wrap(self.plain())

    def container(self, model: nn.Module) -> nn.Module:
        """Returns the block container inside `model`."""
        return model.get_submodule(self.path)


@cache
def _built(family: Family) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family.make()
    return redraw(model, seed=1).eval()


class _Pickler(pickle.Pickler):
    """Pickles a model without its tensors, which it lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, thing: object) -> int | None:
        """The index of a tensor in the list, `None` for other objects, which are pickled."""
        if not isinstance(thing, Tensor):
            return None
        self.tensors.append(thing)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Makes a model with copies of the tensors. Users of one tensor share its copy."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors, self.copies = tensors, {}

    def persistent_load(self, pid: int) -> Tensor:
        """A copy of the tensor with that index."""
        return copy.deepcopy(self.tensors[pid], self.copies)


@cache
def _pickled(family: Family) -> tuple[bytes, list[Tensor]]:
    # The contracts take thousands of copies, and a deepcopy takes five times as long.
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(_built(family))
    return file.getvalue(), pickler.tensors


@torch.no_grad()
def redraw(model: nn.Module, *, seed: int) -> nn.Module:
    """`model` itself with new random parameters, so large that each block changes its input."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
        else:
            around_one = name.endswith(("weight", "gamma", "gamma_1", "gamma_2", "lambda1"))
            parameter.copy_(noise * 0.3 + around_one)
    return model


def images(batch: int = 3, *, seed: int = 7) -> Tensor:
    """Noise images `[batch, 3, 32, 32]`."""
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def logits_of(output: Any) -> Tensor:
    """Logits `[batch, classes]`; those of both heads concatenated if a model returns two."""
    output = getattr(output, "logits", output)
    return torch.cat(output, dim=-1) if isinstance(output, tuple) else output


def score(output: Any) -> Tensor:
    """A scalar sum over samples in which every logit weighs differently: gradients start here."""
    logits = logits_of(output)
    return (logits * torch.linspace(-1.0, 2.0, logits.shape[-1]) + 0.5 * logits**2).sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by parameter name."""
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether both are `None`, or both are equal bit for bit."""
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def assert_same_gradients(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Same names, each gradient absent in both or equal bit for bit."""
    assert got.keys() == wanted.keys()
    different = [name for name in got if not same(got[name], wanted[name])]
    assert not different, f"gradients differ: {different}"


def assert_close(got: Tensor, wanted: Tensor, *, tolerance: float) -> None:
    """Largest error at most `tolerance`; the largest and the mean error are in the message."""
    assert got.shape == wanted.shape
    error = (got - wanted).abs()
    assert error.max() <= tolerance, (
        f"max error {error.max():.3e}, mean error {error.mean():.3e}, tolerance {tolerance:.0e}"
    )


@contextmanager
def global_generators_untouched() -> Iterator[None]:
    """Fails if the block moves the state of Python's, numpy's or torch's global generator."""
    before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state())
    yield
    assert random.getstate() == before[0], "random moved"
    assert repr(np.random.get_state()) == before[1], "numpy.random moved"
    assert torch.equal(torch.get_rng_state(), before[2]), "torch's generator moved"


def _timm(name: str, **changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH}
    sizes |= {"depth": DEPTH, "num_heads": HEADS, "num_classes": CLASSES, **changes}
    return timm.create_model(name, **{k: v for k, v in sizes.items() if v is not None})


def _mixer() -> nn.Module:
    return timm.models.mlp_mixer.MlpMixer(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, num_blocks=DEPTH, num_classes=CLASSES
    )


def _distilled_training() -> nn.Module:
    model = _timm("deit_tiny_distilled_patch16_224")
    model.set_distilled_training(True)
    return model


_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "image_size": SIZE,
    "patch_size": PATCH,
}


def _hf(name: str, path: str, *, kind: str, variant: str = "", **changes: Any) -> Family:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**_VISION, num_labels=CLASSES, **changes)
        return getattr(transformers, f"{kind}ForImageClassification{variant}")(config)

    return Family(f"hf-{name}", "transformers", path, make)


def _siglip() -> nn.Module:
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.SiglipConfig(vision_config=_VISION, text_config=text, num_labels=CLASSES)
    return transformers.SiglipForImageClassification(config)


def _timm_wrapper() -> nn.Module:
    config = transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        num_labels=CLASSES,
        model_args={
            "img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH,
            "depth": DEPTH, "num_heads": HEADS,
        },
    )  # fmt: skip
    return transformers.TimmWrapperForImageClassification(config)


def _torchvision() -> nn.Module:
    return TorchvisionViT(
        image_size=SIZE, patch_size=PATCH, num_layers=DEPTH, num_heads=HEADS,
        hidden_dim=WIDTH, mlp_dim=2 * WIDTH, num_classes=CLASSES,
    )  # fmt: skip


# Older releases of transformers have the blocks of these inside of an encoder.
_LAYERS = "encoder.layer" if hasattr(modeling_vit, "ViTEncoder") else "layers"
_ALL = (
    Family("timm-vit", "timm", "blocks", lambda: _timm("vit_tiny_patch16_224")),
    Family("timm-deit", "timm", "blocks", lambda: _timm("deit_tiny_patch16_224")),
    Family(
        "timm-deit-distilled", "timm", "blocks", lambda: _timm("deit_tiny_distilled_patch16_224")
    ),
    Family("timm-deit-distilled-training", "timm", "blocks", _distilled_training),
    Family("timm-deit3", "timm", "blocks", lambda: _timm("deit3_small_patch16_224")),
    Family("timm-beit", "timm", "blocks", lambda: _timm("beit_base_patch16_224")),
    Family("timm-eva02", "timm", "blocks", lambda: _timm("eva02_tiny_patch14_224")),
    Family("timm-dinov3", "timm", "blocks", lambda: _timm("vit_small_patch16_dinov3")),
    Family("timm-xcit", "timm", "blocks", lambda: _timm("xcit_nano_12_p8_224", patch_size=None)),
    Family("timm-mixer", "timm", "blocks", _mixer),
    _hf("vit", f"vit.{_LAYERS}", kind="ViT"),
    _hf("deit", f"deit.{_LAYERS}", kind="DeiT"),
    _hf("deit-teacher", f"deit.{_LAYERS}", kind="DeiT", variant="WithTeacher"),
    _hf("beit", f"beit.{_LAYERS}", kind="Beit", drop_path_rate=0.0),
    _hf("dinov2", "dinov2.encoder.layer", kind="Dinov2"),
    _hf("dinov2-registers", "dinov2_with_registers.encoder.layer", kind="Dinov2WithRegisters"),
    Family("hf-siglip", "transformers", "vision_model.encoder.layers", _siglip),
    Family("hf-timm-wrapper", "transformers", "timm_model.blocks", _timm_wrapper),
    Family("torchvision-vit", "torchvision", "encoder.layers", _torchvision),
)
FAMILIES = {family.name: family for family in _ALL}
