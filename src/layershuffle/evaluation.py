"""Score a model under many execution orders in one pass over the data.

A *mode* says which orders are meant (`layershuffle.modes`); `evaluate` draws them, and every score
carries its order, so that it can be replayed. Two draws: one order per pass over the data, and one
per batch, as the paper's section 4.2 has it ("randomly for every forward path").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layershuffle.errors import DataError
from layershuffle.models import logits_of
from layershuffle.modes import Mode, parse_modes
from layershuffle.orders import ExecutionOrder
from layershuffle.stack import blocks_of, depth_of
from layershuffle.trie import build_trie, forward_trie, images_at_once

Draw = Literal["pass", "batch"]
Batches = Iterable[tuple[Tensor, Tensor]]
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Score:
    """One mode under one drawn order; drawn per batch, one pass with a new order for every batch.

    `top1` and `top5` in percent, `cross_entropy` in nats, over `images` images. `index` numbers the
    draws of the mode. `order` is `None` when drawn per batch; `batch_orders` then holds the order
    of every batch.
    """

    mode: Mode
    index: int
    order: ExecutionOrder | None
    images: int
    top1: float
    top5: float
    cross_entropy: float
    batch_orders: tuple[ExecutionOrder, ...] = ()


@dataclass
class Tally:
    """Right answers and losses added up, the losses in float64.

    The sums stay where the logits are until they are asked for: adding makes no host wait for a
    GPU.
    """

    images: int = 0
    right: int | Tensor = 0
    among: int | Tensor = 0
    loss: float | Tensor = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits `[n, classes]`, labels `[n]`."""
        logits = logits.float()
        ranks = logits.topk(min(_TOP, logits.shape[-1])).indices == labels[:, None]
        self.images += len(labels)
        self.right = self.right + ranks[:, 0].sum()
        self.among = self.among + ranks.sum()
        losses = F.cross_entropy(logits, labels, reduction="sum")
        self.loss = self.loss + losses.double()

    @property
    def top1(self) -> float:
        """In percent."""
        return 100.0 * int(self.right) / self.images

    @property
    def top5(self) -> float:
        """In percent."""
        return 100.0 * int(self.among) / self.images

    @property
    def cross_entropy(self) -> float:
        """In nats, per image."""
        return float(self.loss) / self.images


@dataclass
class _Column:
    """A score in the making."""

    mode: Mode
    index: int
    order_at: Callable[[int], ExecutionOrder]
    order: ExecutionOrder | None = None
    tally: Tally = field(default_factory=Tally)
    batch_orders: list[ExecutionOrder] = field(default_factory=list)

    def next_order(self, batch: int) -> ExecutionOrder:
        """The order for batch number `batch`, kept where every batch has its own."""
        order = self.order_at(batch)
        if self.order is None:
            self.batch_orders.append(order)
        return order

    def score(self) -> Score:
        return Score(
            mode=self.mode,
            index=self.index,
            order=self.order,
            images=self.tally.images,
            top1=self.tally.top1,
            top5=self.tally.top5,
            cross_entropy=self.tally.cross_entropy,
            batch_orders=tuple(self.batch_orders),
        )


def evaluate(
    model: nn.Module,
    batches: Batches,
    *,
    modes: str | Sequence[Mode],
    num_orders: int = 20,
    seed: int = 0,
    draw: Draw = "pass",
) -> list[Score]:
    """The scores of every mode and draw, from one pass over `batches`.

    `batches` yields (images `[n, channels, height, width]`, labels `[n]`); images are taken in the
    dtype of the model's blocks, logits are compared in fp32. `modes` as in
    "sequential,arbitrary,kept:9" (`layershuffle.modes`). A mode with a single
    order gets one score, the others `num_orders`. Orders with common beginnings share their work
    (`layershuffle.trie`). The model comes back in the train or eval mode it was in. Raises
    `UsageError` for a mode that does not fit the depth, `DataError` if there is no image.
    """
    wanted = parse_modes(modes) if isinstance(modes, str) else modes
    columns = [
        _column(mode, index, depth_of(model), seed=seed, draw=draw)
        for mode in wanted
        for index in range(mode.draws(num_orders))
    ]
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for number, (images, labels) in enumerate(batches):
                _score_batch(model, (images, labels), columns=columns, number=number)
    finally:
        model.train(was_training)
    if not columns or not columns[0].tally.images:
        raise DataError("There is nothing to evaluate: no image or no mode was given")
    return [column.score() for column in columns]


def _column(mode: Mode, index: int, depth: int, *, seed: int, draw: Draw) -> _Column:
    policy = mode.policy()
    order = policy.draw(depth, seed=seed, step=index)  # also refuses a mode that does not fit
    if draw == "pass" or not mode.is_drawn:
        return _Column(mode, index, lambda _: order, order)
    return _Column(
        mode, index, lambda batch: policy.draw(depth, seed=seed, step=batch, micro_batch=index)
    )


def _score_batch(
    model: nn.Module, batch: tuple[Tensor, Tensor], *, columns: Sequence[_Column], number: int
) -> None:
    trie = build_trie([column.next_order(number) for column in columns])
    for images, labels in micro_batches(model, batch):
        results = forward_trie(model, images, trie=trie, forward=lambda x: logits_of(model(x)))
        for indices, logits in results:
            for index in indices:
                columns[index].tally.add(logits, labels)


def micro_batches(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Batches:
    """A batch of images and labels for `model`, in parts that fit a CPU's cache.

    They go where it is; floating images become of its blocks' dtype.
    """
    block = blocks_of(model)[0]  # a norm in the stem may be of another
    weight = next(p for p in block.parameters() if p.is_floating_point())
    images, labels = (tensor.to(weight.device) for tensor in batch)
    if images.is_floating_point():
        images = images.to(weight.dtype)
    size = images_at_once(model, images, forward=lambda x: logits_of(model(x)))
    return zip(torch.split(images, size), torch.split(labels, size), strict=True)
