"""Every setting in one validated place. Plain data, no torch.

Settings come from a YAML recipe and from flags; a flag wins over the recipe. Unknown keys are
refused with the nearest valid one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from layershuffle.errors import SettingsError, UsageError
from layershuffle.methods import Method, find_method
from layershuffle.modes import parse_modes
from layershuffle.policies import Choice
from layershuffle.position_forms import EncodingForm, PredictionForm

DEFAULT_EPOCHS = 20.0  # paper, section 4: performance "plateaus at 20 epochs the latest"
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""What numpy's generator, which augmentation uses, can take."""
Precision = Literal["fp32", "bf16"]
"""Of models that are scored."""
Name = Annotated[str, Field(pattern=r"^[^/.][^/]*$")]
"""Becomes part of a path."""


class Settings(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **fields: Any) -> None:
        """Raises `SettingsError` in one paragraph: which key, what is wrong, the nearest key."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems = (_problem(type(self), dict(one)) for one in error.errors())
            raise SettingsError("; ".join(problems)) from error


class FitSettings(Settings):
    """One training run. Defaults are the paper's section 4 where it speaks."""

    method: str
    """baseline, layershuffle, layershuffle-position, layershuffle-predict, layerdrop, truncated or
    layershuffle-depth."""
    model: str
    """Host model: bundled:digits, timm:NAME, hf:NAME_OR_DIR, torchvision:NAME, dir:PATH."""
    data: str
    """Images: digit-pairs, folder:DIR, hf:NAME_OR_DIR, cifar100:DIR, wds:SHARDS."""
    seed: Seed = 0
    """Seed of orders, data order, augmentation, dropout and new weights."""
    drop: float | None = None
    """layerdrop: drop probability (0.2); layershuffle: leave blocks out at random as well."""
    min_blocks: Positive | None = None
    """layershuffle-depth: fewest blocks kept (3)."""
    kept: Positive | None = None
    """truncated: how many of the pretrained blocks the model is made of."""
    choose: Choice | None = None
    """truncated: which ones: spaced (evenly, the default), first, last or random (by the seed)."""
    encoding: EncodingForm = EncodingForm()
    """Form of the position encoding (layershuffle-position)."""
    prediction: PredictionForm = PredictionForm()
    """Form of the position prediction (layershuffle-predict)."""

    steps: Positive | None = None
    """Optimiser steps; instead of epochs."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data (20 when neither steps nor epochs are given)."""
    batch_size: Positive = 128
    """Images per optimiser step (the paper: 640 or 128)."""
    accumulate: Positive = 1
    """Forwards per optimiser step, each with an order of its own; divides batch_size."""
    orders_per_batch: Positive = 1
    """Groups of the images of a forward, each with an order of its own; no more block runs."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate of Adam(0.9, 0.999, eps 1e-6)."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after warm-up (the paper is silent; the authors' code: linear to 0)."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; 0 makes the optimiser plain Adam."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest gradient norm (the paper is silent; the authors' code: 1.0)."""
    ema: Share | None = None
    """Decay of an exponential moving average of the weights, which is then what is kept."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    augment: bool = False
    """timm's training augmentation; off is the plain resize and crop."""
    resize: Literal["crop", "squash"] = "crop"
    """Shorter side to size and centre crop, or both sides to size."""
    holdout: Share = 0.05
    """Share of the training data held out to pick the checkpoint."""
    paper_protocol: bool = False
    """Pick the checkpoint on the reported split, as the paper did; the report says so."""
    skip_corrupt: bool = False
    """Leave unreadable images out, counted and named, instead of stopping."""
    streaming: bool = False
    """Read hf: data as a stream."""

    eval_every: Positive | None = None
    """Steps between evaluations on held-out data (default: once per epoch)."""
    eval_orders: Positive = 4
    """Orders drawn for the arbitrary-order score that picks the checkpoint."""
    eval_batch_size: Positive = 250
    """Images per evaluation forward."""
    select_by: Literal["method", "sequential", "arbitrary"] = "method"
    """Order mode whose held-out cross-entropy picks the checkpoint; method: as it trains."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints to resume from (default: eval_every)."""
    log_every: Positive = 50
    """Steps between progress lines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16", "bf16-pure"] = "auto"
    """auto: bf16 on GPUs that have it, fp32 elsewhere. bf16 is autocast; bf16-pure computes a whole
    forward in bf16. Weights are fp32 in all of them."""
    threads: Positive | None = None
    """CPU threads of torch (default: torch's own choice)."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Loader processes (default: none for data in memory, else the cores but one, at most 16)."""
    compile: bool | None = None
    """Compile the blocks (default: on a GPU yes; on a CPU no, minutes for no gain)."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a whole model in every process, or a shard of it (FSDP2)."""
    rank_orders: Literal["same", "own"] = "same"
    """Under torchrun: all processes in one order per forward, or each in its own (ddp only)."""

    @model_validator(mode="after")
    def _check(self) -> FitSettings:
        self.find_method()
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs exclude each other: give one")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}"
            )
        if self.orders_per_batch > self.batch_size // self.accumulate:
            raise ValueError(
                f"orders_per_batch={self.orders_per_batch} is more than the "
                f"{self.batch_size // self.accumulate} images of a forward"
            )
        if self.parallel == "fsdp" and self.rank_orders == "own":
            raise ValueError(
                "under fsdp all processes must run the same order (rank_orders=same): shards of "
                "different blocks would be mixed without an error"
            )
        if self.parallel == "fsdp" and self.precision == "bf16-pure":
            raise ValueError("bf16-pure rounds whole weights: use parallel=ddp, or precision=bf16")
        if self.parallel == "fsdp" and self.ema is not None:
            raise ValueError("ema needs whole weights in every process: use parallel=ddp")
        return self

    def find_method(self) -> Method:
        """The method with its options set."""
        return find_method(
            self.method,
            drop=self.drop,
            min_blocks=self.min_blocks,
            kept=self.kept,
            choose=self.choose,
        )


class EvalSettings(Settings):
    """What to score and how."""

    modes: str = "sequential,arbitrary"
    """Comma-separated: sequential, arbitrary, kept:9, kept:9:arbitrary, kept:9:sequential:spaced
    (choices: random, spaced, first, last)."""
    num_orders: Positive = 20
    """Orders drawn per mode."""
    seed: Seed = 0
    """Seed of the drawn orders."""
    draw: Literal["pass", "batch"] = "pass"
    """One order per pass over the data, or a new one for every batch as in the paper."""
    precision: Precision = "fp32"
    """fp32 is what scores mean; bf16, faster on GPUs, rounds weights and states to 8 bits."""
    compile: bool = False
    """Compile the blocks: for GPUs (on a CPU it takes minutes and gains nothing)."""
    batch_size: Positive = 250
    """Images per forward."""
    max_images: Positive | None = None
    """Score the first images only (of a fixed shuffle)."""
    resize: Literal["crop", "squash"] = "crop"
    """Shorter side to size and centre crop, or both sides to size; as the model was trained."""
    skip_corrupt: bool = False
    """Leave unreadable images out, counted and named, instead of stopping."""
    streaming: bool = False
    """Read hf: data as a stream."""

    @model_validator(mode="after")
    def _check(self) -> EvalSettings:
        parse_modes(self.modes)
        return self


class CacheSettings(Settings):
    """How images are kept in a cache."""

    size: Positive = 256
    """Pixels of the shorter side; smaller images stay as they are."""
    quality: Annotated[int, Field(ge=1, le=100)] = 90
    """JPEG quality."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes (default: the cores but one, at most 16)."""
    skip_corrupt: bool = False
    """Leave unreadable images out, counted and named, instead of stopping."""


def check_known(kind: type[Settings], fields: Mapping[str, Any]) -> None:
    """Raises `SettingsError` for keys that are no settings, with the nearest that is one."""
    unknown = [name for name in fields if name not in kind.model_fields]
    if unknown:
        raise SettingsError("; ".join(_unknown(kind, name) for name in unknown))


def field_value(kind: type[Settings], name: str, *, value: Any) -> Any:
    """`value` as the type of that setting: YAML reads 1e-3 as text, and groups as mappings.

    Raises `SettingsError` for a value that the setting cannot have.
    """
    try:
        return TypeAdapter(kind.model_fields[name].rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        problems = (_problem(kind, {**one, "loc": (name, *one["loc"])}) for one in error.errors())
        raise SettingsError("; ".join(problems)) from error


def digest(settings: Settings) -> str:
    """A SHA-256 over the settings: equal for equal settings, in any version of Python."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _problem(kind: type[Settings], error: dict[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(kind, name)
    message = _message(error)
    return f"{name}: {message}" if name else message


def _message(error: dict[str, Any]) -> str:
    ours = error.get("ctx", {}).get("error")
    if not isinstance(ours, UsageError):
        return str(error["msg"]).removeprefix("Value error, ")
    return ours.cause if ours.hint is None else f"{ours.cause}: {ours.hint}"


def _unknown(kind: type[Settings], name: str) -> str:
    group, _, word = name.rpartition(".")
    near = get_close_matches(word, _names_in(kind, group), n=1)
    # A key of another group last: `modle` is as near to `modes` as it is to `model`.
    near += [m for g in kind.model_fields for m in get_close_matches(word, _names_in(kind, g), n=1)]
    return f"{name!r} is not a setting" + (f", did you mean {near[0]!r}?" if near else "")


def _names_in(kind: type[Settings], group: str) -> list[str]:
    """The keys of a group of settings; of the settings themselves for the empty word."""
    nested = kind.model_fields[group].annotation if group in kind.model_fields else kind
    if is_dataclass(nested):
        return [field.name for field in dataclass_fields(nested)]
    if isinstance(nested, type) and issubclass(nested, Settings):
        return list(nested.model_fields)
    return []
