"""The training methods: presets of options, and the loss that trains them in any loop.

A method is a name for options that every training can have. `Method(name, **options)` is what `fit`
trains with, and what a loop of your own calls once per forward. Plain data: torch is imported with
the first loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from layershuffle.core.checks.methods import check_name, check_options, other_depth
from layershuffle.core.checks.orders import checked_fixed
from layershuffle.core.draws import Stream, whole_number
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import (
    Choice,
    Kept,
    LayerDrop,
    OrderMode,
    OrderPolicy,
    Sequential,
    Shuffled,
    drawn_blocks,
)
from layershuffle.core.position_forms import EncodingForm, PredictionForm

if TYPE_CHECKING:
    from torch import Tensor, nn

    Criterion = Callable[[Tensor, Tensor], Tensor]

PositionPart = Literal["none", "encode", "predict"]


PRESETS: dict[str, tuple[OrderMode, dict[str, Any]]] = {
    # Ours. Exits are those of arXiv 2404.16710, and their second teacher that of arXiv 2604.09168.
    "anyorder": (
        "arbitrary",
        {
            "orders_per_batch": 4,
            "sequential_every": 4,
            "exit_weight": 0.3,
            "self_distillation": 0.3,
            "branch_scale": 0.1,
            "fixed": (1, 1),
        },
    ),
    # The paper's: sections 4, 3.2, 3.3 and 3.4. `layerdrop` is arXiv 1909.11556 at the rate of
    # section 4.2, as is `truncated`, a model made of some of the blocks.
    "baseline": ("sequential", {}),
    "layershuffle": ("arbitrary", {}),
    "layershuffle-position": ("arbitrary", {"position": "encode"}),
    "layershuffle-predict": ("arbitrary", {"position": "predict"}),
    "layerdrop": ("sequential", {"block_drop": 0.2}),
    "truncated": ("sequential", {}),
}
"""By name: how blocks are drawn, which is also the score that selects, and the options."""

# `None` for options that have a value in every preset: `__post_init__` puts that in its place, so
# their type is that of the value.
_KEEP: Any = None
# What they are where the preset says nothing.
_IN_ALL = {"orders_per_batch": 1, "branch_scale": 1.0, "position": "none", "fixed": (0, 0)}


@dataclass(frozen=True)
class Method:
    """How a model is trained: a preset by its name, and options that change it.

    `None` keeps the value of the preset; the fields then hold the values in force. Every option
    goes with every other one, except for the few combinations that `docs/methods.md` lists. Methods
    with equal fields are equal. Raises `UsageError` for an unknown name (with the nearest one) and
    for options that exclude each other.

        method = ls.Method("anyorder")
        model = timm.create_model("vit_small_patch16_224", num_classes=10)
        model = method.prepare(model, torch.zeros(1, 3, 224, 224))
        for step, (images, labels) in enumerate(loader):
            loss = method.loss(model, images, labels, step=step)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
    """

    name: str = "anyorder"
    _: KW_ONLY
    orders_per_batch: int = _KEEP
    """Number of groups into which the images of a forward are split; each group has its own order,
    and the number of block runs per image stays the same (anyorder: 4; the others: 1)."""
    sequential_every: int | None = None
    """Every n-th order runs all blocks in sequence, counted over steps and the groups of a batch
    (anyorder: 4; the others: none)."""
    exit_weight: float | None = None
    """Weight of a second loss: the state after a random number of blocks is classified as well
    (anyorder: 0.3; the others: no such loss)."""
    self_distillation: float | None = None
    """Weight of a third loss: the answer after all blocks teaches the one after a random number of
    them, by the divergence of their probabilities (anyorder: 0.3; the others: no such loss)."""
    branch_scale: float = _KEEP
    """Factor for what each drawn block adds to the state: weights are multiplied by it once, before
    the first step (anyorder: 0.1; the others: 1, the weights stay as they are)."""
    block_drop: float | None = None
    """Probability with which a block is left out (layerdrop: 0.2; the others: none is left out)."""
    min_kept: int | None = None
    """Fewest blocks that a forward runs; their number is drawn, from this one to all (default: all
    run)."""
    max_parallel: int | None = None
    """Most blocks that run side by side in a round, whose sizes are drawn (default: one block after
    the other)."""
    fixed: tuple[int, int] = _KEEP
    """How many blocks at the beginning and at the end keep their place, as in 1,1: they run in
    every order, each in a round of its own, and an exit goes through the last ones before the head
    (anyorder: 1,1; the others: 0,0, all blocks are drawn)."""
    distinct: int | None = None
    """Number of different blocks, whose weights the places of the model share (default: every place
    has its own). Blocks that keep their place have their own and do not count."""
    position: PositionPart = _KEEP
    """Position parts, sections 3.3 and 3.4 of the paper: encode (layershuffle-position), predict
    (layershuffle-predict) or none."""
    kept: int | None = None
    """Number of pretrained blocks that the model is made of (truncated needs it; default: all)."""
    choose: Choice | None = None
    """Which of them: spaced (evenly, the default), first, last or random (by the seed)."""
    encoding: EncodingForm = field(default_factory=EncodingForm)
    """Form of the position encoding, with position encode."""
    prediction: PredictionForm = field(default_factory=PredictionForm)
    """Form of the position prediction, with position predict."""
    seed: int = 0
    """Seed of orders, exits and new position parts."""

    def __post_init__(self) -> None:
        check_name(self.name, PRESETS)
        _, preset = PRESETS[self.name]
        for option, value in {**_IN_ALL, **preset}.items():
            if getattr(self, option) is None:
                object.__setattr__(self, option, value)  # the class is frozen
        object.__setattr__(self, "fixed", checked_fixed(self.fixed))
        runs_in_rounds = self.max_parallel is not None
        check_options(
            self.name,
            self.options,
            seed=self.seed,
            parts=get_args(PositionPart),
            shuffles=self.selects_by == "arbitrary",
            is_sequential=self.selects_by == "sequential" and self.runs_all and not runs_in_rounds,
        )
        # Both check what is left: probabilities, ranges and words.
        _ = self.policy, self.blocks

    @property
    def selects_by(self) -> OrderMode:
        """The order mode in which held-out data picks the checkpoint."""
        return PRESETS[self.name][0]

    # Cached, because a policy checks its options, which does not need to be done for every batch.
    @cached_property
    def policy(self) -> OrderPolicy:
        """What draws the orders."""
        rounds = None if self.max_parallel is None else (1, self.max_parallel)
        number = None if self.min_kept is None else (self.min_kept, None)
        every = self.sequential_every
        if self.selects_by == "arbitrary":
            return Shuffled(
                self.block_drop, number, parallel=rounds, sequential_every=every, fixed=self.fixed
            )
        if self.block_drop is not None:
            return LayerDrop(
                self.block_drop, parallel=rounds, sequential_every=every, fixed=self.fixed
            )
        return Sequential(parallel=rounds, kept=number, sequential_every=every, fixed=self.fixed)

    @property
    def runs_all(self) -> bool:
        """Whether no order leaves a block out."""
        return self.block_drop is None and self.min_kept is None

    @property
    def blocks(self) -> Kept | None:
        """What draws the pretrained blocks that the model is made of; `None`: all of them."""
        if self.kept is None:
            return None
        return Kept(self.kept, choose=self.choose or "spaced", fixed=self.fixed)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are in force, by name: what a record of the training holds."""
        return {name: getattr(self, name) for name in METHOD_OPTIONS}

    def orders(
        self, depth: int, *, step: int, micro_batch: int = 0, rank: int = 0
    ) -> tuple[ExecutionOrder, ...]:
        """The orders of one forward of a model with `depth` blocks: one for each group.

        A pure function of its arguments and the seed. `step` counts over all epochs, `micro_batch`
        the forwards of a step under gradient accumulation; `rank` is for processes that draw orders
        of their own. Raises `UsageError` for one that is not an integer.
        """
        groups = self.orders_per_batch
        # A policy without a step counts for itself, and a method does not.
        step = whole_number("step", step)
        micro_batch = whole_number("micro_batch", micro_batch)
        # Every group of a step has a number of its own, so that no two draw from one stream.
        return tuple(
            self.policy.draw(
                depth,
                seed=self.seed,
                step=step,
                micro_batch=micro_batch * groups + group,
                rank=rank,
            )
            for group in range(groups)
        )

    def exit_after(
        self,
        orders: Sequence[ExecutionOrder],
        *,
        step: int,
        micro_batch: int = 0,
        rank: int = 0,
    ) -> int | None:
        """The number of steps of `orders` after which the states also go to the head.

        Uniform in 1 to one less than the longest order has; an order that is shorter than that
        counts with its end. With ends, the steps before and after them are no exits: at least one
        drawn block has run, at least one has not, and the last blocks run behind the exit. `None`
        without an exit.
        """
        if self.exit_weight is None and self.self_distillation is None:
            return None
        # No group has this number, so exits do not depend on the draws of the orders.
        stream = Stream(self.seed, step, micro_batch=-1 - micro_batch, rank=rank)
        first, last = self.fixed
        drawn = max(map(len, orders)) - first - last
        return first + 1 + stream.below(max(1, drawn - 1))

    def prepare(self, model: nn.Module, images: Tensor | None = None) -> nn.Module:
        """`model` as the method begins to train it.

        It is wrapped and tied (in place), gets position parts, and knows the ends of the method,
        which its scores then keep in their place. What its drawn blocks add to the state is
        multiplied by `branch_scale`, unless it is frozen (`requires_grad`) or the model was
        prepared for drawn orders before: one that is trained again keeps its weights, also as a
        copy and from a file. So weights of a
        trained model are loaded into one that is prepared, and not before that. Position parts are
        modules around the model, so the result may be another module: give its parameters to the
        optimiser.

        `images` `[n, channels, height, width]`, of any values: the model runs them once, to find
        the layers that `branch_scale` multiplies. Raises `UsageError` if they are needed and
        missing, or if the model has another number of blocks than the method keeps, and
        `StackError` for blocks of which no layers say how much they add.
        """
        from layershuffle.core.branches import last_layers, scale_branches
        from layershuffle.core.checks.parts import check_position_parts, not_begun
        from layershuffle.core.losses import positioned_in
        from layershuffle.core.position import add_position
        from layershuffle.core.stack import stack_of, wrap
        from layershuffle.core.tying import tie

        stack = stack_of(wrap(model))
        depth = stack.depth
        begins = self.branch_scale != 1 and not stack.shuffled
        if self.blocks is not None and depth != self.kept:
            chosen = self.blocks.draw(depth, seed=self.seed, step=0)
            raise other_depth(depth, self.kept, chosen=chosen)
        drawn = drawn_blocks(depth, self.fixed)  # raises where no block is left
        scaled: list[str] = []
        if begins:
            if images is None:
                raise not_begun(self.name, self.branch_scale)
            # Before anything is changed, because it may raise.
            scaled = last_layers(model, images, block=drawn.start)
        stack.fixed = self.fixed
        if self.distinct is not None:
            tie(model, distinct=self.distinct)
        scale_branches(model, scaled, factor=self.branch_scale)
        stack.shuffled = self.selects_by == "arbitrary"
        positioned = positioned_in(model)
        if positioned is not None:
            check_position_parts(positioned, name=self.name, position=self.position)
            return model
        if self.position == "none":
            return model
        return add_position(
            model,
            encoding=self.encoding if self.position == "encode" else None,
            prediction=self.prediction if self.position == "predict" else None,
            seed=self.seed,
        )

    def loss(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        step: int,
        micro_batch: int = 0,
        rank: int = 0,
        criterion: Criterion | tuple[Criterion, Criterion] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """The loss of one forward: a scalar in fp32, attached to the graph.

        It draws the orders of this step, and runs `model` on `images` `[n, channels, height,
        width]` along them: row i of the batch is in group i mod `orders_per_batch`. It adds the
        exit loss and, for a model that predicts positions, the position loss. `model` is a wrapped
        model, or that model inside the wrappers of DDP, accelerate or Lightning.
        `criterion(logits, labels)` is a mean over its rows, by default the cross-entropy with
        `labels` int64 `[n]`.

        A model may return logits `[n, classes]`, an object with `logits`, or the pair of timm's
        distilled models; for all else `logits` takes out what the criterion gets: `logits=lambda
        output: output[0]`. Self-distillation compares softmaxes over the classes of `[n, classes]`;
        for other answers, such as maps or several labels, `criterion` is a pair of the criterion
        and of `divergence(early, final)`, a mean over the rows.

        `step`, `micro_batch` and `rank` as in `orders`. Raises `UsageError` for a model without the
        parts that the method trains (`prepare` adds them), and `StackError` where the backbone
        cannot run along such orders.
        """
        from layershuffle.core.checks.steps import warn_of_step_again
        from layershuffle.core.stack import depth_of, stack_of

        place = {"step": step, "micro_batch": micro_batch, "rank": rank}
        loss, _ = self.loss_and_logits(
            model,
            images,
            labels,
            orders=self.orders(depth_of(model), **place),
            criterion=criterion,
            logits=logits,
            **place,
        )
        warn_of_step_again(stack_of(model), images, method=self, step=(step, micro_batch, rank))
        return loss

    def loss_and_logits(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        orders: Sequence[ExecutionOrder],
        step: int,
        micro_batch: int = 0,
        rank: int = 0,
        criterion: Criterion | tuple[Criterion, Criterion] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss as in `loss`, and the logits `[n, classes]` of the whole orders, in fp32.

        `orders`: what `Method.orders` returns for this step, or others that the caller draws.
        `loss` warns of a step that comes again, because its orders do too; here nothing is drawn.
        Raises the errors of `loss`.
        """
        from layershuffle.core.checks.parts import check_parts
        from layershuffle.core.losses import loss_of_orders

        check_parts(
            model,
            name=self.name,
            branch_scale=self.branch_scale,
            distinct=self.distinct,
            position=self.position,
            fixed=self.fixed,
        )
        return loss_of_orders(
            model,
            images,
            labels=labels,
            orders=orders,
            exit_after=self.exit_after(orders, step=step, micro_batch=micro_batch, rank=rank),
            exit_weight=self.exit_weight or 0.0,
            self_distillation=self.self_distillation or 0.0,
            criterion=criterion,
            logits=logits,
        )


METHOD_SETTINGS = tuple(part.name for part in fields(Method) if part.name not in ("name", "seed"))
"""The names of the options and of the two forms, which are also settings of `fit`."""
_FORMS = ("encoding", "prediction")
METHOD_OPTIONS = tuple(name for name in METHOD_SETTINGS if name not in _FORMS)
"""The names of the options alone."""
