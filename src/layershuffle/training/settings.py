"""The settings of a training. Plain data; torch is not imported."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_type_hints

from pydantic import (
    Field,
    create_model,
    model_validator,
)

from layershuffle.core.methods import METHOD_SETTINGS, Method
from layershuffle.ground.machine import Device, check_device
from layershuffle.ground.settings import Ends, NotBelow, Positive, Seed, Settings, Share

DEFAULT_EPOCHS = 20.0  # paper, section 4: performance "plateaus at 20 epochs the latest"
AnySettings = TypeVar("AnySettings", bound="Settings")


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The docstrings below the annotated attributes of a class, by name, read from its source."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    texts: dict[str, str] = {}
    for attribute, below in pairwise(cast(ast.ClassDef, definition).body):
        match attribute, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = inspect.cleandoc(str(text))
    return texts


def _with_method_options(kind: type[AnySettings]) -> type[AnySettings]:
    """`kind` with the options of `Method`, their types and docstrings, as further settings.

    `None` keeps the value that the method has of its own.
    """
    types = {**get_type_hints(Method), "fixed": Ends}
    texts = _attribute_docstrings(Method)
    options: dict[str, Any] = {}
    for option in fields(Method):
        if option.name not in METHOD_SETTINGS:
            continue
        if option.default_factory is MISSING:
            annotation = types[option.name] | None
            default = None
        else:
            annotation = types[option.name]
            default = option.default_factory()
        options[option.name] = (annotation, Field(default, description=texts[option.name]))
    return create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **options
    )


@_with_method_options
class MethodSettings(Settings):
    """The method and what it trains; its options follow these settings."""

    method: str = "anyorder"
    """How to train: anyorder (four orders per batch, one of them sequential, and an exit; the first
    and the last block keep their place, and the others add little at first), or as in the paper:
    baseline, layershuffle, layershuffle-position, layershuffle-predict, layerdrop or truncated.
    Each is a set of the options that follow; the others can be added to it."""
    model: str
    """Backbone: bundled:digits, timm:NAME, hf:NAME_OR_DIR or dir:PATH."""
    data: str
    """Images: digit-pairs, folder:DIR, hf:NAME_OR_DIR or torchvision:NAME."""
    seed: Seed = 0
    """Seed of orders, data order, augmentation, dropout and new weights."""


class FitSettings(MethodSettings):
    """One training run. The defaults are those of the paper's section 4, if it gives them."""

    if TYPE_CHECKING:
        # Type checkers do not see the options of the method.
        def __init__(self, **fields: Any) -> None: ...

    steps: Positive | None = None
    """Number of optimiser steps; excludes epochs."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data (default: 20 if steps are not given)."""
    batch_size: Positive = 128
    """Images per optimiser step, over all processes (the paper used 640 and 128)."""
    accumulate: Positive = 1
    """Forwards per optimiser step, each with its own order; has to divide batch_size."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    opt: str = "adamw"
    """Optimiser of timm: adamw and adam (betas 0.9 and 0.999, eps 1e-6), or sgd, lamb, lion, muon
    and others with timm's defaults."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor by which the learning rate falls with every layer before the head, as 0.75. It goes
    with the block, wherever that runs (default: one learning rate for all)."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that keep their weights, by their names in the model: patch_embed,
    blocks.[0-5]."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Course of the learning rate after the warm-up; linear and cosine end at 0 (the paper does not
    say; the authors' code uses linear)."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly from 0 to its peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of matrices (decoupled with adamw, which is plain Adam with 0)."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient, to which longer ones are scaled; None does not clip (the paper
    does not say; the authors' code uses 1.0)."""
    activation_checkpointing: bool = False
    """Compute the activations inside blocks again in the backward pass: less memory, about a third
    more time."""

    keep_features: Annotated[float, Field(gt=0)] | None = None
    """Weight of a loss that keeps the features for other tasks, as 3: what the classifier reads
    stays near what it read before, for a forward more, of the untouched model (default: no such
    loss)."""
    augment: bool = False
    """Augment training images as timm does; without it they are only resized and cropped."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing, as 0.1."""
    mixup: NotBelow = 0.0
    """Alpha of mixup, as 0.8: images and labels of a batch are mixed in pairs, by timm; with cutmix
    as well, each takes half of the batches."""
    cutmix: NotBelow = 0.0
    """Alpha of cutmix, as 1.0: a rectangle of one image is put into another, by timm."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Rate of timm's stochastic depth in the last block: the branches of a block are skipped, image
    by image; it rises with the number of the block (default: that of the model)."""
    resize: Literal["crop", "squash"] | None = None
    """Scale the shorter side and crop the centre (crop), or scale both sides (squash). Default: as
    the model's own configuration says."""
    classes: Path | None = None
    """File that names the outputs of a model without names of classes, one per line in their order
    (default: the order of the data; for checkpoints of timm, natural order)."""
    holdout: Share = 0.05
    """Share of the training data that is held out to pick the checkpoint."""
    paper_protocol: bool = False
    """Pick the checkpoint on the split that is reported, as the paper did; reports say so."""
    skip_corrupt: bool = False
    """Skip unreadable images and report them, instead of stopping at the first one."""
    data_changed: bool = False
    """Go on with a run whose images are others now: other classes, files or sizes of files."""

    eval_every: Positive | None = None
    """Steps between evaluations on held-out data (default: once per epoch)."""
    eval_orders: Positive = 4
    """Number of drawn orders in the arbitrary-order score of an evaluation."""
    eval_batch_size: Positive = 250
    """Images per forward of an evaluation."""
    select_by: Literal["method", "sequential", "arbitrary"] = "method"
    """Order mode whose held-out cross-entropy picks the checkpoint; method takes the mode in which
    the method trains."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints from which a killed run resumes (default: as eval_every)."""
    log_every: Positive = 50
    """Steps between the rows of history.csv, and the losses that are shown."""
    log_with: Literal["tensorboard", "wandb", "mlflow", "trackio"] | None = None
    """Also log to one of these, which has to be installed (tensorboard writes to OUT/logs)."""

    device: Device = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1 (this one of several) or
    mps (the GPU of a Mac)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of forwards: fp32, or bf16 by autocast; auto is bf16 on GPUs that have it, else fp32.
    Weights are fp32 in all cases."""
    threads: Positive | None = None
    """CPU threads of torch (default: torch's own choice)."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that load images (default: none for digit-pairs, else one less than the CPU cores
    and at most 16)."""
    compile: bool | None = None
    """Compile the blocks (default: yes on a GPU; no on a CPU, where it takes minutes and gains
    nothing)."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun every process holds the whole model (ddp) or a shard of it (fsdp, FSDP2)."""
    rank_orders: Literal["same", "own"] = "same"
    """Under torchrun all processes run a forward in the same order, or each in its own (only with
    ddp)."""

    @model_validator(mode="after")
    def _check(self) -> FitSettings:
        # Raises for options that exclude each other.
        check_device(self.device)
        method = self.build_method()
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs exclude each other: give one")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}"
            )
        # Every group needs an image.
        if method.orders_per_batch > self.batch_size // self.accumulate:
            raise ValueError(
                f"orders_per_batch={method.orders_per_batch} is more than the "
                f"{self.batch_size // self.accumulate} images of a forward"
            )
        if self.parallel == "fsdp" and self.rank_orders == "own":
            raise ValueError(
                "under fsdp all processes must run the same order (rank_orders=same): shards of "
                "different blocks would be mixed without an error"
            )
        if self.parallel == "fsdp" and self.opt not in ("adam", "adamw"):
            raise ValueError(
                f"opt={self.opt} was not tried on shards of weights: use adamw, or parallel=ddp"
            )
        if method.distinct is not None and self.parallel == "fsdp":
            raise ValueError("fsdp shards every block for itself, tied ones too: use parallel=ddp")
        return self

    def build_method(self) -> Method:
        """The method with its options set."""
        options = {name: getattr(self, name) for name in METHOD_SETTINGS}
        return Method(self.method, seed=self.seed, **options)

    def resolved(self) -> dict[str, Any]:
        """The settings as JSON, with the method's own values in place of `None`.

        A record of a run holds these: a later version may give a method other values.
        """
        return self.model_copy(update=self.build_method().options).model_dump(mode="json")
