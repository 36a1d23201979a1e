"""Layer-position encoding and prediction, beside the backbone (paper, sections 3.3 and 3.4).

The parts have their own parameters, which never enter the backbone's `state_dict`.
`PositionedModel` holds the backbone and the parts, so that one optimiser, `.to()` and `.train()`
reach both, and the backbone can still be saved alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from layershuffle.core.checks.position import (
    check_guessed,
    check_position,
    missing_class_token,
    missing_prediction,
    unknown_width,
)
from layershuffle.core.hooks import Step, begins_forward
from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.core.runs import holders
from layershuffle.core.stack import depth_of, stack_of, with_hooks, wrap
from layershuffle.core.tensors import to_device

_LATE_CLASS_TOKEN = ("cls_attn_blocks", "blocks_token_only")  # XCiT, CaiT
_WIDTH_NAMES = ("embed_dim", "hidden_dim", "hidden_size", "num_features")


class PositionEncoding(nn.Module):
    """A block hook that adds the position to a block's input before it runs.

    z + Dropout(GELU(Linear(LayerNorm([z; e])))), where e is row `position` of the block's table.
    Raises `UsageError` at positions from `depth` on, which orders with repeats can reach.
    """

    def __init__(self, depth: int, width: int, *, form: EncodingForm, seed: int) -> None:
        super().__init__()
        self.form = form
        rows = (depth,) if form.table == "shared" else (depth, depth)
        self.table = nn.Parameter(torch.empty(*rows, form.features))
        self.norms = nn.ModuleList(nn.LayerNorm(width + form.features) for _ in range(depth))
        self.projections = nn.ModuleList(
            _linear(width + form.features, width) for _ in range(depth)
        )
        self.dropout = nn.Dropout(form.dropout)
        # A separate generator, so that position parts do not shift any other draws.
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        if self.form.table_init == "normal":
            nn.init.normal_(self.table, generator=generator)
        else:
            nn.init.zeros_(self.table)
        for projection in self.projections:
            _initialise_linear(projection, generator, self.form.projection_init)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """`state` `[batch, tokens, width]` with the position added; same shape."""
        check_position(step, self.table.shape[-2], part="encoding")
        place = (step.position,) if self.table.dim() == 2 else (step.block, step.position)
        # Under autocast the state may be bf16 while the table stays in fp32.
        embedding = self.table[place].to(state.dtype).expand(*state.shape[:-1], -1)
        hidden = self.norms[step.block](torch.cat([state, embedding], dim=-1))
        mixed: Tensor = self.dropout(F.gelu(self.projections[step.block](hidden)))
        return state + mixed

    def after(self, state: Tensor, step: Step) -> None:
        """Does nothing with the output."""


class PositionPrediction(nn.Module):
    """Predicts a block's position from its output: Linear(LayerNorm(pooled)) -> `depth` logits."""

    def __init__(self, depth: int, width: int, *, form: PredictionForm, seed: int) -> None:
        super().__init__()
        self.form = form
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.classifiers = nn.ModuleList(_linear(width, depth) for _ in range(depth))
        generator = torch.Generator().manual_seed(seed)
        for classifier in self.classifiers:
            _initialise_linear(classifier, generator, form.init)

    def forward(self, state: Tensor, block: int) -> Tensor:
        """Logits `[batch, depth]` over positions, from the output `[batch, tokens, width]`."""
        pooled = state[:, 0] if self.form.pooling == "class" else state.mean(dim=1)
        logits: Tensor = self.classifiers[block](self.norms[block](pooled))
        return logits


@dataclass(frozen=True)
class PositionGuess:
    """The position logits `[rows, depth]` of one step."""

    step: Step
    logits: Tensor


@dataclass
class Guesses:
    """A block hook that collects the position predictions of the last forward."""

    prediction: PositionPrediction
    items: list[PositionGuess] = field(default_factory=list)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Returns the input unchanged; a new forward begins a new collection."""
        # The guesses of two forwards together would count every sample twice.
        if begins_forward(step, [guess.step for guess in self.items]):
            self.items = []
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """Predict the position from the output; a replay repeats this for the backward pass.

        Raises `UsageError` at positions from `depth` on, which orders with repeats can reach.
        """
        if step.early:
            return
        check_position(step, len(self.prediction.norms), part="prediction")
        logits = self.prediction(state, step.block)
        if not step.replay:
            # In fp32, because the loss is a sum of many.
            self.items.append(PositionGuess(step, logits.float()))

    def loss(self) -> Tensor:
        """The prediction loss of section 3.4 for one forward: a scalar, weight included.

        It is the cross-entropy of the true positions, the mean over samples of the sum (or mean)
        over the positions of the sample, so that with an order per sample, of any length, every
        sample counts as if it had run alone. Raises `UsageError` if no forward was run.
        """
        check_guessed(self.items)
        form = self.prediction.form
        # The number of positions of each sample, which may differ with an order per sample.
        runs: Counter[int] = Counter()
        for guess in self.items:
            runs.update(_samples(guess))
        losses: list[Tensor] = []
        for guess in self.items:
            losses.append((_losses(guess) * _share(guess, runs, form)).sum())
        return form.weight * torch.stack(losses).sum() / len(runs)

    def accuracy(self) -> float:
        """Percentage of (sample, position) pairs guessed correctly; raises as `loss` does."""
        check_guessed(self.items)
        right = 0
        rows = 0
        for guess in self.items:
            right += int((guess.logits.argmax(-1) == guess.step.position).sum())
            rows += len(guess.logits)
        return 100.0 * right / rows


def _samples(guess: PositionGuess) -> Sequence[int]:
    return range(len(guess.logits)) if guess.step.rows is None else guess.step.rows


def _losses(guess: PositionGuess) -> Tensor:
    """Cross-entropy `[rows]` of the step's true position."""
    truth = torch.full_like(guess.logits[:, 0], guess.step.position, dtype=torch.long)
    return F.cross_entropy(guess.logits, truth, reduction="none")


def _share(guess: PositionGuess, runs: Mapping[int, int], form: PredictionForm) -> Tensor | float:
    """The weight of each row's loss at this step in the loss of its sample."""
    if form.loss == "sum":
        return 1.0
    counts = [runs[row] for row in _samples(guess)]
    if min(counts) == max(counts):
        return 1.0 / counts[0]  # the usual case: no tensor, so no copy to the GPU
    shares = torch.tensor(counts, dtype=guess.logits.dtype).reciprocal()
    return to_device(shares, guess.logits.device)


class PositionedModel(nn.Module):
    """A wrapped backbone with position parts. Call it as you would call the backbone."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        encoding: PositionEncoding | None = None,
        prediction: PositionPrediction | None = None,
    ) -> None:
        super().__init__()
        self.backbone = wrap(backbone)
        self.encoding = encoding
        self.prediction = prediction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the backbone; with an encoding, every block receives its position."""
        # Hooks are set only around this call: the backbone alone runs without position parts.
        if self.encoding is None:
            return self.backbone(*args, **kwargs)
        with with_hooks(self.backbone, self.encoding):
            return self.backbone(*args, **kwargs)

    @contextmanager
    def guessing(self) -> Iterator[Guesses]:
        """Collect the position guesses of the last forward.

        Raises `UsageError` for a model that predicts no positions.
        """
        if self.prediction is None:
            raise missing_prediction()
        guesses = Guesses(self.prediction)
        with with_hooks(self.backbone, guesses):
            yield guesses


def add_position(
    model: nn.Module,
    *,
    encoding: EncodingForm | None = None,
    prediction: PredictionForm | None = None,
    seed: int = 0,
) -> PositionedModel:
    """`model` with freshly initialised position parts of the given forms, on its device and dtype.

    Raises `StackError` if the model's blocks or its width cannot be found,
    `UsageError` for class-token pooling without a class token.
    """
    depth = depth_of(wrap(model))
    width = width_of(model)
    if prediction is not None and prediction.pooling == "class" and not has_class_token(model):
        raise missing_class_token(model)
    encoder = None
    if encoding is not None:
        encoder = PositionEncoding(depth, width, form=encoding, seed=seed)
    predictor = None
    if prediction is not None:
        # Another seed, because with one seed both parts would begin with the same numbers.
        predictor = PositionPrediction(depth, width, form=prediction, seed=seed + 1)
    positioned = PositionedModel(model, encoding=encoder, prediction=predictor)
    # The new parts take the device and the dtype of the backbone.
    reference = next(model.parameters())
    return positioned.to(reference.device, reference.dtype)


def width_of(model: nn.Module) -> int:
    """Width of the state between the blocks, by the attribute names that libraries use.

    Raises `StackError` if no module around the stack has such an attribute.
    """
    # From the inside out: a model around another one may have its own widths.
    for owner in reversed(holders(model, stack_of(model))):
        config = getattr(owner, "config", None)
        for place in (owner, config, getattr(config, "vision_config", None)):
            for name in _WIDTH_NAMES:
                value = getattr(place, name, None)
                if isinstance(value, int):
                    return value
    raise unknown_width(model, _WIDTH_NAMES)


def has_class_token(model: nn.Module) -> bool:
    """Whether the first token between the blocks is a class token.

    Such models have a parameter of that name, but XCiT and CaiT add theirs after the blocks, in
    separate blocks.
    """
    for owner in holders(model, stack_of(model)):
        for name in _LATE_CLASS_TOKEN:
            if hasattr(owner, name):
                return False
    return any(name.endswith(("cls_token", "class_token")) for name, _ in model.named_parameters())


def _linear(inputs: int, outputs: int) -> nn.Linear:
    # Skip the initialisation, because nn.Linear would draw from torch's global generator.
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    return layer


def _initialise_linear(module: nn.Module, generator: torch.Generator, law: str) -> None:
    """`law`: "default" (torch's for Linear: uniform, +-1/sqrt(inputs)), "normal" or "zero"."""
    weight = module.get_parameter("weight")
    bias = module.get_parameter("bias")
    nn.init.zeros_(bias)
    if law == "default":
        bound = 1.0 / math.sqrt(weight.shape[1])
        nn.init.uniform_(weight, -bound, bound, generator=generator)
        nn.init.uniform_(bias, -bound, bound, generator=generator)
    elif law == "normal":
        # The deviation of transformers' ViT, from which the authors' code inherits it.
        nn.init.normal_(weight, std=0.02, generator=generator)
    else:
        nn.init.zeros_(weight)


def backbone_of(model: nn.Module) -> nn.Module:
    """The backbone of a `PositionedModel`; any other model unchanged."""
    return model.backbone if isinstance(model, PositionedModel) else model
