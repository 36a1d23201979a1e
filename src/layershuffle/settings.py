"""The settings of every command, validated in one place. Plain data; torch is not imported.

Settings come from a YAML recipe and from flags, which have precedence. The docstring of a setting
is its text in `--help`. Unknown keys are refused, and the error names the nearest valid one.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_type_hints

import yaml
from cyclopts import Parameter
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from layershuffle.core.methods import METHOD_SETTINGS, Method
from layershuffle.core.policies import parse_modes
from layershuffle.errors import SettingsError, UsageError
from layershuffle.machine import Device
from layershuffle.text import nearest, one_line

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_HINT = "name a YAML file with a line per setting, as in `steps: 500`"
DEFAULT_EPOCHS = 20.0  # paper, section 4: performance "plateaus at 20 epochs the latest"


def _pair_of_flag(value: Any) -> Any:
    """The two numbers that a flag such as `--fixed 1,1` names; anything else as it is."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    text = ",".join(words)
    if not re.fullmatch(r"[0-9]{1,4},[0-9]{1,4}", text):
        raise ValueError(f"{text!r} is not two numbers of blocks, such as 1,1")
    return tuple(map(int, text.split(",")))


Positive = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0)]
NotBelow = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
BlockId = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Below 2 ** 32, the limit of numpy's generator, which augmentation uses."""
Precision = Literal["fp32", "bf16"]
"""The dtype of forwards whose results are scores."""
Ends = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]],
    BeforeValidator(_pair_of_flag),
    Parameter(n_tokens=1),
]
"""Numbers of first and last blocks that keep their place: [1, 1] in a recipe, 1,1 as a flag."""
Name = Annotated[str, Field(pattern=r"^[^/.][^/]*$")]
"""A name that becomes part of a path, so it has no slash and does not begin with a dot."""


AnySettings = TypeVar("AnySettings", bound="Settings")


class Settings(BaseModel):
    """Base class of settings: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **fields: Any) -> None:
        """Raises `SettingsError` with the key, the problem, and the nearest valid key."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems = [dict(details) for details in error.errors()]
            # A misspelt key is often the cause of another that is missing.
            unknown = [problem for problem in problems if problem["type"] in _UNKNOWN]
            texts = [_problem(type(self), problem) for problem in unknown or problems]
            raise SettingsError("; ".join(texts)) from error

    @model_validator(mode="before")
    @classmethod
    def _none(cls, fields: Any) -> Any:
        # The word of a flag, as in `--clip None`. What is no mapping is for pydantic to refuse.
        if not isinstance(fields, dict):
            return fields
        return {name: None if value == "None" else value for name, value in fields.items()}


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
    """How to train: anyorder (four orders per batch, one of them sequential, and an exit), or
    as in the paper: baseline, layershuffle, layershuffle-position, layershuffle-predict, layerdrop
    or truncated. Each is a set of the options that follow; every method takes every option."""
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
    """Peak learning rate of Adam (betas 0.9 and 0.999, eps 1e-6)."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Course of the learning rate after the warm-up; linear and cosine end at 0 (the paper does not
    say; the authors' code uses linear)."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly from 0 to its peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of AdamW; with 0 the optimiser is plain Adam."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient, to which longer ones are scaled; None does not clip (the paper
    does not say; the authors' code uses 1.0)."""
    activation_checkpointing: bool = False
    """Compute the activations inside blocks again in the backward pass: less memory, about a third
    more time."""

    augment: bool = False
    """Augment training images as timm does; without it they are only resized and cropped."""
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
    """Where to compute; auto takes a GPU if there is one."""
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
        if method.distinct is not None and self.parallel == "fsdp":
            raise ValueError("fsdp shards every block for itself, tied ones too: use parallel=ddp")
        return self

    def build_method(self) -> Method:
        """The method with its options set."""
        options = {name: getattr(self, name) for name in METHOD_SETTINGS}
        return Method(self.method, seed=self.seed, **options)


class ScoreSettings(Settings):
    """How scores are computed: images, seed and precision."""

    seed: Seed = 0
    """Seed of the drawn orders, and of drawn merges."""
    precision: Precision = "fp32"
    """Dtype of forwards; bf16 is faster on GPUs and keeps 8 bits of weights and states. Weights and
    outputs of several models are averaged in fp32 in any case."""
    compile: bool = False
    """Compile the blocks; on a CPU it takes minutes and gains little."""
    batch_size: Positive = 250
    """Images per forward."""
    max_images: Positive | None = None
    """Score only the first images of a fixed shuffle (default: all images)."""
    resize: Literal["crop", "squash"] | None = None
    """Scale the shorter side and crop the centre (crop), or scale both sides (squash). Default: as
    the model was trained."""
    skip_corrupt: bool = False
    """Skip unreadable images and report them, instead of stopping at the first one."""
    classes: Path | None = None
    """File that names the outputs of models without names of classes, one per line in their order
    (default: the order of the data; for checkpoints of timm, natural order)."""


class EvalSettings(ScoreSettings):
    """The modes of scores, and how they are computed."""

    modes: str = "sequential,arbitrary"
    """Comma-separated order modes: sequential, arbitrary, kept:9 (the number of blocks that run),
    kept:9:arbitrary, kept:9:sequential:spaced (or random, first, last); behind any of them
    :parallel=3 (blocks side by side), behind kept also :passes=2 (they run again)."""
    num_orders: Positive = 20
    """Number of orders drawn per mode."""
    draw: Literal["pass", "batch"] = "pass"
    """Draw an order for each pass over the data, or, as the paper did, for every batch."""
    fixed: Ends | None = None
    """How many blocks at the beginning and at the end keep their place, as in 1,1; with 0,0 any
    order runs (default: as the model was trained)."""

    @model_validator(mode="after")
    def _check(self) -> EvalSettings:
        # Parsed to refuse misspelt modes before a model is loaded.
        parse_modes(self.modes)
        return self


class _EveryKeyOnce(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for place, _ in node.value:
            # `<<` brings keys that the others may replace.
            merges = place.tag == "tag:yaml.org,2002:merge"
            key = place.value if merges else self.construct_object(place, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key!r} is there twice", problem_mark=place.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises `UsageError` if the file cannot be read, names a key twice, or holds something other
    than a mapping with text keys.
    """
    try:
        # A byte order mark is what some editors of Windows begin a file with.
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_EveryKeyOnce)
    except FileNotFoundError as error:
        # Plans and lists of hosts are read here, too: they have no steps.
        raise UsageError(
            "There is no such file", place=path, hint="name a YAML file that exists"
        ) from error
    # A few hundred nested brackets are enough for yaml's parser to end in a RecursionError.
    # YAML makes a date of 2024-13-45, which is a ValueError, as are bytes that are no UTF-8.
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"The recipe cannot be read ({one_line(error)})",
            place=path,
            hint=_HINT,
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError("A recipe must be a YAML mapping of settings", place=path, hint=_HINT)
    return content


@dataclass(frozen=True)
class KeysOf:
    """Marks a setting that is a mapping whose keys are `settings`, built from it later."""

    settings: type[Settings]


def digest(settings: Settings) -> str:
    """The SHA-256 of the settings, independent of the version of Python."""
    # Sorted, so fields may be reordered within their class.
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _problem(kind: type[Settings], error: dict[str, Any]) -> str:
    """An error of pydantic as a sentence."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] in _UNKNOWN:
        return _unknown(kind, name)
    # An error of this package within a validator has its own cause and hint.
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, UsageError):
        message = raised.cause if raised.hint is None else f"{raised.cause}: {raised.hint}"
    else:
        message = str(error["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
    return f"{name}: {message}" if name else message


def _unknown(kind: type[Settings], name: str) -> str:
    group, _, word = name.rpartition(".")
    # Keys of other groups come last, because `modle` is as near to `modes` as to `model`.
    match = nearest(word, _names_in(kind, group))
    # Groups with this key come before groups with similar keys.
    groups = sorted(kind.model_fields, key=lambda other: word not in _names_in(kind, other))
    for other in () if match else groups:
        # With its group, because the key may be valid there but not here.
        if elsewhere := nearest(word, _names_in(kind, other)):
            match = f"{other}.{elsewhere}"
            break
    return f"{name!r} is not a setting" + (f", did you mean {match!r}?" if match else "")


def _names_in(kind: type[Settings], group: str) -> list[str]:
    """The keys of a group of settings, or of `kind` itself if `group` is empty."""
    field = kind.model_fields.get(group)
    nested = kind if field is None else field.annotation
    for mark in () if field is None else field.metadata:
        nested = mark.settings if isinstance(mark, KeysOf) else nested
    if is_dataclass(nested):
        return [part.name for part in fields(nested)]
    if isinstance(nested, type) and issubclass(nested, Settings):
        return list(nested.model_fields)
    return []
