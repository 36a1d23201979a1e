"""What does each block add to the right answer, by position? (paper's second abstract)

If the scale of the final LayerNorm is fixed at its value for an image, pooling, norm and linear
head are an affine function of the last state. So the centred logit (that of the right class minus
the mean over all classes) is a sum: the projected update of every block, the stem's part, and a
constant (the biases). A position encoding counts as part of its block. The sum is checked on every
batch; models with more than that between blocks and logits (class attention, a pooler with tanh)
fail the check and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layershuffle.analysis.position_table import (
    PositionMeans,
    draw_maps,
    evenly,
    home_less_elsewhere,
    position_table,
    read_map,
    weighted_means,
)
from layershuffle.analysis.results import Measurement, Tables, with_interval
from layershuffle.analysis.subject import DoesNotApply, Subject
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import running, tap
from layershuffle.core.tensors import in_float64
from layershuffle.models.stem_head import refuse_more_than_blocks, run_head, run_stem

_TOLERANCE = 1e-3  # of the centred logit, relative to the largest of the batch


class _FrozenScale(TorchFunctionMode):
    """Computes norms with a constant scale: that of this call, or one of an earlier pass."""

    def __init__(self, scales: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.scales: list[Tensor] = []
        self._given = iter(tuple(scales))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute `F.layer_norm` and `F.rms_norm` in plain steps; call other functions as usual."""
        if func is F.layer_norm:
            return self._norm(*args, **(kwargs or {}))
        if func is F.rms_norm:
            return self._norm(*args, **(kwargs or {}), centred=False)
        return func(*args, **(kwargs or {}))

    def _norm(
        self,
        input: Tensor,  # noqa: A002 -- torch's own name, which callers may use
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        eps: float | None = 1e-5,
        centred: bool = True,
    ) -> Tensor:
        dims = tuple(range(-len(normalized_shape), 0))
        out = input - input.mean(dims, keepdim=True) if centred else input
        # The default of F.rms_norm, which takes None.
        floor = torch.finfo(input.dtype).eps if eps is None else eps
        scale = torch.rsqrt(out.square().mean(dims, keepdim=True) + floor).detach()
        self.scales.append(scale)
        # The replay calls the same norms in the same order, so scales match by their index.
        out = out * next(self._given, scale)
        out = out if weight is None else out * weight
        return out if bias is None else out + bias


@dataclass(frozen=True, kw_only=True)
class LogitSplit:
    """The centred logits `[batch]` of one forward as a sum over its parts, each `[batch]`.

    `blocks` in execution order; `logit` = `stem` + `constant` + the blocks.
    """

    logit: Tensor
    blocks: tuple[Tensor, ...]
    stem: Tensor
    constant: Tensor


def split_logits(
    subject: Subject, images: Tensor, *, labels: Tensor, stem_state: Tensor, order: ExecutionOrder
) -> LogitSplit:
    """The parts of the right class's centred logit under `order`.

    `stem_state`: the state of `images` before the first block. Raises `DoesNotApply` if the parts
    do not add up, because the head is not affine.
    """
    with torch.no_grad(), running(subject.model, order), tap(subject.model) as tapped:
        logit = _centred(subject.logits(images), labels)
    states = [stem_state, *(record.tensor for record in tapped.records)]
    # With a fixed scale of the final norm, everything after the blocks is affine in the last state:
    # its gradient projects every update, its value at zero is the constant.
    last = states[-1].detach().requires_grad_(True)
    with torch.enable_grad():
        frozen = _FrozenScale()
        again = _head(subject, images, labels, last, mode=frozen)
        (slope,) = torch.autograd.grad(again.sum(), last)
    with torch.no_grad():
        replay = _FrozenScale(frozen.scales)
        constant = _head(subject, images, labels, torch.zeros_like(last), mode=replay)
        stem = (slope * stem_state).flatten(1).sum(1)
        blocks = []
        for entering, leaving in pairwise(states):
            update = leaving - entering
            blocks.append((slope * update).flatten(1).sum(1))
    split = LogitSplit(logit=logit, blocks=tuple(blocks), stem=stem, constant=constant)
    _check_sum(split)
    return split


def _head(
    subject: Subject, images: Tensor, labels: Tensor, state: Tensor, *, mode: _FrozenScale
) -> Tensor:
    """Centred logits `[batch]` if `state` is the state after the last block."""
    with mode:
        logits = run_head(subject.model, images, state=state, forward=subject.logits)
        return _centred(logits, labels)


def _centred(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels[:, None])[:, 0] - logits.mean(1)


def _check_sum(split: LogitSplit) -> None:
    # Relative to the largest part, because large parts that cancel leave rounding errors.
    total = torch.stack([split.stem, split.constant, *split.blocks]).sum(0)
    error = float((total - split.logit).abs().max())
    largest = max(float(part.abs().max()) for part in (split.logit, split.stem, *split.blocks))
    if error > _TOLERANCE * max(largest, 1e-6):
        raise DoesNotApply(
            "Between the blocks and the logits of this model there is more than pooling, a norm "
            f"and a linear head: the parts miss the logit by {error:.3g}, so they explain nothing"
        )


def measure(subject: Subject) -> Measurement:
    """attribution.csv: block, position, contribution (to the centred logit of the right class).

    contribution_half is half its 95 % interval. Raises `StackError` for a model that computes
    something between its blocks.
    """
    subject.require_classes()
    drawn = subject.drawn
    means = PositionMeans(drawn)
    runs = 0
    sums = {"logit": 0.0, "stem": 0.0, "constant": 0.0}
    if len(drawn) < subject.depth:
        sums["ends"] = 0.0  # of the blocks that keep their place
    for batch in subject.batches():
        if not runs:
            refuse_more_than_blocks(subject.model, batch.images, forward=subject.logits)
        with torch.no_grad():
            stem_state, _ = run_stem(subject.model, batch.images, forward=subject.logits)
        for order in batch.orders:
            split = split_logits(
                subject, batch.images, labels=batch.labels, stem_state=stem_state, order=order
            )
            for position, (block, part) in enumerate(zip(order, split.blocks, strict=True)):
                means.add(block, position, values=part, first=batch.first)
                if block not in drawn:
                    sums["ends"] += float(in_float64(part).sum())
            for name in ("logit", "stem", "constant"):
                sums[name] += float(in_float64(getattr(split, name)).sum())
            runs += len(batch.images)
    clusters = subject.clusters(by_batch=True)
    count = len(drawn)
    numbers = {
        "blocks": (means, count * evenly(count)),
        "excess_at_home": (means, home_less_elsewhere(count)),
    }
    facts = {
        **subject.counts,
        **{name: total / runs for name, total in sums.items()},
        **weighted_means(numbers, clusters),
    }
    table = position_table(means.columns("contribution", clusters), drawn=drawn)
    return Measurement(tables={"attribution": table}, facts=facts)


MEANINGS = {
    "contribution": "what a block adds to the logit of the right class, minus the mean of classes",
    "logit": "the logit of the right class, minus the mean over classes",
    "stem": "the part of the logit that is there before the first block",
    "ends": "the part of the blocks that keep their place",
    "constant": "the part of the biases behind the blocks",
    "blocks": "the part of all drawn blocks together",
    "excess at home": "what a block adds at its own place, minus what it adds elsewhere",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: the sum of the blocks, the largest of them, and what home adds."""
    facts = measured.facts
    table = measured.tables["attribution"]
    of_block = table.groupby("block").contribution.mean()
    of_position = table.groupby("position").contribution.mean()
    return (
        f"Together the blocks add {with_interval(facts, 'blocks', form='.1f')} of the logit of "
        f"{facts['logit']:.1f}; block {of_block.idxmax()} adds most ({of_block.max():.1f}), "
        f"and what runs at position {of_position.idxmax()} adds most ({of_position.max():.1f}); "
        "at its own place a block adds "
        f"{with_interval(facts, 'excess_at_home', form='+.2f')} to what it adds elsewhere."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """attribution.svg: contribution per block and position."""
    contribution = read_map(
        tables["attribution"],
        "contribution",
        title="contribution to the right class",
        meaning="logit (centred)",
        signed=True,
    )
    return {"attribution": draw_maps([contribution])}
