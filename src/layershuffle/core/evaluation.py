"""Score a model under many execution orders in one pass over the data.

The orders are given one by one, or drawn for a *mode* (`core.policies`); every score stores its
order, so that it can be repeated. One order is drawn per pass over the data, or one per batch as in
the paper's section 4.2 ("randomly for every forward path").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layershuffle.core.checks.orders import checked_fixed
from layershuffle.core.checks.outputs import refuse_answers
from layershuffle.core.checks.trials import forget
from layershuffle.core.forwards import images_at_once, run_many
from layershuffle.core.orders import ExecutionOrder, check_ends, order_of
from layershuffle.core.policies import Mode, parse_modes
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, running, stack_of
from layershuffle.core.tensors import Logits, in_float64, logits_of
from layershuffle.ground.errors import DataError, UsageError

Draw = Literal["pass", "batch"]
Batches = Iterable[tuple[Tensor, Tensor]]
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a model under one order or, if orders are drawn per batch, in one pass.

    `top1` and `top5` in percent, `cross_entropy` in nats, over `images` images. `right` bool
    `[images]`, on the CPU: which images were answered right, in the order of the data. `blocks`:
    with `stop`, the mean number of blocks that an image ran. `fixed`: the ends that kept their
    place. `mode` is the mode for which the order was drawn, and `index` numbers its draws; a given
    order has no mode. `order` is `None` when drawn per batch; `batch_orders` then holds the order
    of every batch.
    """

    mode: Mode | None
    index: int
    order: ExecutionOrder | None
    images: int
    top1: float
    top5: float
    cross_entropy: float
    right: Tensor = field(repr=False, compare=False)
    batch_orders: tuple[ExecutionOrder, ...] = ()
    blocks: float | None = None
    fixed: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        """The mode as its text, or the given order: "kept:9:sequential", "order:3,0,2"."""
        return f"order:{self.order}" if self.mode is None else str(self.mode)

    @property
    def kept(self) -> int:
        """The number of blocks that ran, each counted once; of a given order, that of its steps."""
        steps = len(self.batch_orders[0] if self.order is None else self.order)
        return steps if self.mode is None else self.mode.kept_of(steps, fixed=self.fixed)


@dataclass
class Tally:
    """Sums of correct answers and of losses, the losses in float64.

    The sums stay on the device of the logits until they are read, so that adding does not make the
    CPU wait for a GPU. `right` holds for every batch which answers are right, bool `[n]`.
    """

    right: list[Tensor] = field(default_factory=list)
    images: int = 0
    top5_hits: int | Tensor = 0
    invalid_labels: int | Tensor = 0
    loss: float | Tensor = 0.0
    steps: int | Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, *, steps: Tensor | None = None) -> None:
        """Count a batch: logits `[n, classes]`, labels `[n]`, and the `steps` `[n]` that images ran
        if they stopped on their own."""
        classes = logits.shape[-1]
        self.invalid_labels = self.invalid_labels + ((labels < 0) | (labels >= classes)).sum()
        # A GPU would abort the process on a label that is not a class, and torch ignores -100.
        labels = labels.clamp(0, classes - 1)
        # In bf16, several of 1,000 classes may tie, and a loss would have only two digits.
        logits = logits.float()
        hits = logits.topk(min(_TOP, logits.shape[-1])).indices == labels[:, None]
        self.images += len(labels)
        self.top5_hits = self.top5_hits + hits.sum()
        self.right.append(hits[:, 0].clone())  # without the other four columns
        losses = F.cross_entropy(logits, labels, reduction="sum")
        # In float64, because thousands of batches are added up.
        self.loss = self.loss + in_float64(losses)
        if steps is not None:
            self.steps = (self.steps or 0) + steps.sum()

    def check(self) -> None:
        """Raises `DataError` for no image, and for a label that is not a class of the model."""
        if not self.images:
            raise DataError("There is nothing to evaluate: no image was given")
        if invalid := int(self.invalid_labels):
            raise DataError(
                f"{invalid} of {self.images} labels are not class numbers of the model",
                hint="number the classes from 0; give the model a head with as many outputs",
            )

    def values(self) -> dict[str, Any]:
        """What a `Score` says of the images; the numbers are read from the device here."""
        right = torch.cat(self.right).cpu()
        values: dict[str, Any] = {
            "images": self.images,
            "top1": 100.0 * int(right.sum()) / self.images,
            "top5": 100.0 * int(self.top5_hits) / self.images,
            "cross_entropy": float(self.loss) / self.images,
            "right": right,
        }
        if self.steps is not None:
            values["blocks"] = int(self.steps) / self.images
        return values


@dataclass
class _PendingScore:
    """An unfinished score; `order` is `None` if every batch gets its own order."""

    mode: Mode | None
    index: int
    order: ExecutionOrder | None
    tally: Tally = field(default_factory=Tally)
    batch_orders: list[ExecutionOrder] = field(default_factory=list)


def evaluate(
    model: nn.Module,
    batches: Batches,
    *,
    modes: str | Sequence[str | Mode] = (),
    orders: Sequence[ExecutionOrder | str] = (),
    num_orders: int = 20,
    seed: int = 0,
    draw: Draw = "pass",
    stop: float | None = None,
    fixed: tuple[int, int] | None = None,
    logits: Logits | None = None,
    on_images: Callable[[int], object] | None = None,
) -> list[Score]:
    """The scores of all `orders`, then of every mode and draw, from one pass over `batches`.

    `batches` yields (images `[n, channels, height, width]`, labels `[n]`); images are converted to
    the dtype of the model's blocks, logits are compared in fp32. `modes` as in
    "sequential,arbitrary,kept:9" (`core.policies`), or a list of them. A mode with a single
    order gets one score, the others `num_orders`. Orders with common beginnings share their work
    (`core.forwards`).
    `stop`: an image stops at the first block of its order after which the largest probability
    reaches it, and is scored by the answer there: `evaluate(model, batches, modes="arbitrary",
    stop=0.98)[0].blocks`. All blocks run all the same, so this saves no time here.
    `fixed`: the ends that all orders keep, the first and last blocks of the model; by default those
    with which it was trained. An image that stops passes through the last ones before its answer.
    `logits` takes the logits `[n, classes]` out of what the model returns, where that is neither
    such a tensor nor an object with `logits`: `evaluate(model, batches, modes="arbitrary",
    logits=lambda output: output[0])`.
    `on_images` is called after every part of a batch with the number of images that were scored.
    The train or eval mode of every module is restored.

    Raises `UsageError` for a model without a classifier or with another output, for a mode or an
    order that does not fit the depth or moves the ends, and for a `stop` outside (0, 1]. Raises
    `StackError` for rounds in a backbone that does more between its blocks than pass the state on.
    Raises `DataError` if there is no image, and for labels that are no classes.
    """
    check_classifier(model)
    _check_stop(stop)
    _check_draws(draw, num_orders)
    depth = depth_of(model)
    fixed = fixed_of(model) if fixed is None else checked_fixed(fixed)
    pending = _pending_scores(
        depth, modes=modes, orders=orders, num_orders=num_orders, seed=seed, draw=draw, fixed=fixed
    )
    if not pending:
        raise DataError("There is nothing to evaluate: no mode and no order was given")
    # A gate that was zero at the last verdict may have been trained since.
    forget(stack_of(model))
    # Training calls this between two steps: dropout must be off here and on again afterwards.
    # Not inference_mode: backbones cache tensors (BEiT), with which they could not be trained.
    with in_eval(model), torch.no_grad():
        for number, batch in enumerate(batches):
            for score in pending:
                if score.order is None and score.mode is not None:
                    policy = score.mode.policy(fixed=fixed)
                    order = policy.draw(depth, seed=seed, step=number, micro_batch=score.index)
                    score.batch_orders.append(order)
            _score_batch(
                model,
                batch,
                pending=pending,
                stop=stop,
                fixed=fixed,
                forward=partial(_answers, model, logits),
                on_images=on_images,
            )
    pending[0].tally.check()
    finished: list[Score] = []
    for score in pending:
        finished.append(
            Score(
                mode=score.mode,
                index=score.index,
                order=score.order,
                batch_orders=tuple(score.batch_orders),
                fixed=fixed,
                **score.tally.values(),
            )
        )
    return finished


def _answers(model: nn.Module, logits: Logits | None, images: Tensor) -> Tensor:
    """The logits `[n, classes]` of `model` for `images`."""
    output = model(images)
    if logits is None:
        return logits_of(output, model)
    named = logits(output)
    refuse_answers(named)
    return named


def _check_draws(draw: str, num_orders: int) -> None:
    if draw not in get_args(Draw):
        raise UsageError(f"draw is {' or '.join(get_args(Draw))}, not {draw!r}")
    if num_orders < 1:
        raise UsageError(f"num_orders is at least 1, not {num_orders}")


def _check_stop(stop: float | None) -> None:
    if stop is not None and not 0 < stop <= 1:
        raise UsageError(
            f"stop is a probability above 0 and at most 1, not {stop}", hint="for example 0.98"
        )


def _pending_scores(
    depth: int,
    *,
    modes: str | Sequence[str | Mode],
    orders: Sequence[ExecutionOrder | str],
    num_orders: int,
    seed: int,
    draw: Draw,
    fixed: tuple[int, int],
) -> list[_PendingScore]:
    given = [order_of(order, depth) for order in orders]
    check_ends(given, fixed)
    pending: list[_PendingScore] = []
    for index, order in enumerate(given):
        pending.append(_PendingScore(None, index, order))
    names = [modes] if isinstance(modes, str) else list(map(str, modes))
    for mode in parse_modes(",".join(names)) if names else ():
        for index in range(mode.draws(num_orders, depth=depth, fixed=fixed)):
            # Drawn even if every batch draws its own: this refuses a mode that does not fit.
            drawn = mode.policy(fixed=fixed).draw(depth, seed=seed, step=index)
            per_batch = draw == "batch" and mode.is_drawn(depth, fixed=fixed)
            pending.append(_PendingScore(mode, index, None if per_batch else drawn))
    return pending


def check_classifier(model: nn.Module) -> None:
    """Raises `UsageError` for a model without a classifier."""
    # The features of such a model would be scored as if they were classes.
    if getattr(model, "num_classes", None) == 0:
        raise UsageError(
            "The model has no classifier, so it has no accuracy",
            hint="layershuffle fit MODEL --data ... gives it one",
        )


def _score_batch(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    pending: Sequence[_PendingScore],
    stop: float | None,
    fixed: tuple[int, int],
    forward: Callable[[Tensor], Tensor],
    on_images: Callable[[int], object] | None,
) -> None:
    # All modes together: the orders of kept:3:arbitrary begin those of kept:9:arbitrary.
    orders = [score.order or score.batch_orders[-1] for score in pending]
    # An image that stops when it is sure runs along every beginning of its order.
    one_order = stop is None and len(set(orders)) == 1
    for images, labels in micro_batches(model, batch, one_order=one_order, forward=forward):
        if one_order:
            # Who drew or gave the order has checked its ends.
            with running(model, orders[0], fixed=(0, 0)):
                logits = forward(images)
            for score in pending:
                score.tally.add(logits, labels)
        elif stop is None:
            for index, logits in run_many(model, images, orders=orders, forward=forward):
                pending[index].tally.add(logits, labels)
        else:
            answers = _answers_at_stop(
                model, images, orders=orders, stop=stop, fixed=fixed, forward=forward
            )
            for index, logits, steps in answers:
                pending[index].tally.add(logits, labels, steps=steps)
        # Called here and not per batch, because a batch in many orders may take minutes.
        if on_images is not None:
            on_images(pending[0].tally.images)


def _answers_at_stop(
    model: nn.Module,
    images: Tensor,
    *,
    orders: Sequence[ExecutionOrder],
    stop: float,
    fixed: tuple[int, int],
    forward: Callable[[Tensor], Tensor],
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index in `orders`, logits `[n, classes]` where each image stopped, its steps `[n]`).

    An image can stop after each step of its order between the ends, and then passes through the
    last blocks, which count among its steps.
    """
    first, last = fixed
    # The beginnings of all orders, and for each the index of its order.
    beginnings: list[ExecutionOrder] = []
    indices: list[int] = []
    waiting: dict[int, int] = {}
    for index, order in enumerate(orders):
        drawn_end = len(order) - last
        for count in range(min(first + 1, drawn_end), drawn_end + 1):
            beginnings.append(order.beginning(count, last=last))
            indices.append(index)
        waiting[index] = indices.count(index)
    answers: dict[int, tuple[Tensor, Tensor]] = {}
    # The beginnings of an order come in any sequence: they differ in where the last blocks run.
    for place, logits in run_many(model, images, orders=beginnings, forward=forward):
        index = indices[place]
        answer = logits.float()
        count = len(beginnings[place])
        steps = torch.full(images.shape[:1], count, device=images.device)
        if count < len(orders[index]):
            sure = answer.softmax(-1).amax(-1) >= stop
            steps = torch.where(sure, steps, len(orders[index]) + 1)
        if index in answers:
            other, ran = answers[index]
            earlier = steps < ran
            answer = torch.where(earlier[:, None], answer, other)
            steps = torch.where(earlier, steps, ran)
        answers[index] = answer, steps
        waiting[index] -= 1
        if not waiting[index]:
            yield index, *answers.pop(index)


def micro_batches(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    one_order: bool = False,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Batches:
    """A batch of images and labels for `model`, in parts that fit a CPU's cache.

    `forward(images)` calls the model; by default it returns its logits.

    They are moved to the model's device; floating images are cast to the dtype of its blocks.
    `one_order`: all of them run along the same one, so nothing is tried and the batch stays whole.
    Raises `DataError` for a batch that is no pair, and for labels that are no class numbers.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"A batch must be a pair (images, labels), got a {type(batch).__name__}",
            hint="scores need labels; without labels, call the model itself, or type layershuffle "
            "predict MODEL IMAGE",
        )
    # Use the dtype of a block: the model's first weight may be a norm that stays in fp32.
    block = blocks_of(model)[0]
    weight = next(p for p in block.parameters() if p.is_floating_point())
    images = batch[0].to(weight.device)
    labels = batch[1].to(weight.device)
    whole_numbers = not (labels.is_floating_point() or labels.is_complex())
    if not whole_numbers or labels.dtype == torch.bool or labels.shape != images.shape[:1]:
        raise DataError(
            f"Labels must be one class number (int64) for each of the {len(images)} images, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}",
            hint="labels.argmax(1) makes class numbers of one-hot labels",
        )
    labels = labels.long()
    if images.is_floating_point():
        images = images.to(weight.dtype)
    if one_order:
        size = max(1, len(images))
    else:
        size = images_at_once(model, images, forward=forward or partial(_answers, model, None))
    return zip(torch.split(images, size), torch.split(labels, size), strict=True)
