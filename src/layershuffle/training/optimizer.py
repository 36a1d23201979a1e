"""The optimiser of a training: timm's by its name, a group of weights per rate and decay, and the
weights that do not train."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.optim import Optimizer

from layershuffle.core.stack import blocks_of
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import did_you_mean, shortened
from layershuffle.training.settings import FitSettings

_ADAM = ("adam", "adamw")
# bnb and fused need a package of their own; adahessian needs a second backward; kron draws numbers
# that no checkpoint holds.
_REFUSED = ("bnb", "fused", "adahessian", "kron")


def check_optimizer(name: str) -> None:
    """Raises `UsageError` unless timm has an optimiser of that name with which a run can resume."""
    known = [each for each in list_optimizers() if not each.startswith(_REFUSED)]
    if name in known:
        return
    if name.startswith(_REFUSED) and name in list_optimizers():
        raise UsageError(
            f"A run with the optimiser {name!r} could not resume with the same numbers, or it "
            "needs another package",
            place="--opt",
            hint="take adamw, lamb, lion, muon, sgd or another of timm.optim.list_optimizers()",
        )
    otherwise = "such as adamw, lamb, lion, muon or sgd; timm.optim.list_optimizers() lists them"
    raise UsageError(
        f"timm has no optimiser {name!r}",
        place="--opt",
        hint=did_you_mean(name, known, otherwise=otherwise),
    )


def make_optimizer(model: nn.Module, settings: FitSettings) -> Optimizer:
    """The optimiser of the weights that train.

    Weights with at least two dimensions decay; biases, norms and scales do not. With `layer_decay`
    every layer has a learning rate of its own.
    """
    layers = layer_numbers(model)
    last = max(layers.values())
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        decays = weight.dim() > 1 and "bias" not in name  # a table of biases has two dimensions
        layer = last if settings.layer_decay is None else layers[name]
        scale = (settings.layer_decay or 1.0) ** (last - layer)
        group = groups.setdefault(
            (not decays, layer),
            {
                "params": [],
                "weight_decay": settings.weight_decay if decays else 0.0,
                "lr": settings.lr * scale,
            },
        )
        group["params"].append(weight)
    options: dict[str, Any] = {}
    if settings.opt in _ADAM:
        # Fused is 2.7 times as fast as torch's default on a CPU. Without decay AdamW is Adam.
        options = {"betas": (0.9, 0.999), "eps": 1e-6, "fused": True}
    # Those that decay come first, as in every checkpoint of before.
    ordered = [groups[key] for key in sorted(groups)]
    optimizer: Optimizer = create_optimizer_v2(ordered, opt=settings.opt, lr=settings.lr, **options)
    return optimizer


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The layer of every parameter, by its name, as BEiT counts them (arXiv 2106.08254).

    What stands before the blocks is layer 0, block i is layer i + 1 in whatever order it runs, and
    what stands behind them is the last layer. A weight that several blocks share belongs to the
    first of them.
    """
    blocks = blocks_of(model)
    numbers: dict[int, int] = {}
    for block, module in enumerate(blocks):
        for weight in module.parameters():
            numbers.setdefault(id(weight), block + 1)
    layers: dict[str, int] = {}
    outside = 0
    for name, weight in model.named_parameters():
        if id(weight) in numbers:
            layers[name] = numbers[id(weight)]
            outside = len(blocks) + 1
        else:
            layers[name] = outside
    return layers


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude weights of `model` from training, in place.

    A pattern names parameters, or modules with all that is in them; `*`, `?` and `[0-5]` are those
    of file names: `patch_embed`, `cls_token`, `blocks.[0-5]`, `*.norm?`. Raises `UsageError` for a
    pattern that names nothing, and if nothing is left to train.
    """
    for pattern in patterns:
        named = []
        for name, weight in model.named_parameters():
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
                named.append(weight)
        if not named:
            children = dict.fromkeys(name.partition(".")[0] for name, _ in model.named_parameters())
            otherwise = f"its parts are {shortened(list(children))}"
            raise UsageError(
                f"The model has no part {pattern!r} to freeze",
                place="--freeze",
                hint=did_you_mean(
                    pattern,
                    [name for name, _ in model.named_modules() if name],
                    otherwise=otherwise,
                ),
            )
        for weight in named:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UsageError(
            f"{shortened(list(patterns))} name all weights, so nothing would train",
            place="--freeze",
            hint="freeze fewer of them",
        )
