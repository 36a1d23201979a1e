# Ran at commit 8550626.
"""Train LayerShuffle with one change at a time, at equal numbers of block runs.

    python scripts/changed_training.py --workers 2
    python scripts/recipes_page.py

A finished run is added to `CSV` immediately, and runs that have a row are not trained again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from breaks import BATCH, DEPTH, PAIRS, finish, pair_batches
from open_questions import RESULTS, SEEDS
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from trainings import (
    WHAT_IS_MISSING,
    TrainingRun,
    batches_of,
    finished,
    key_of,
    read_arguments,
    stepper,
    train_stages,
)

import layershuffle as ls
from layershuffle.core.tying import middle_blocks, tie
from layershuffle.data.digits import DigitPairs

CSV = RESULTS / "changed-training.csv"
KEY = ("arm", "budget", "seed")
TESTED, ORDERS = 2_000, 6
MODES = "sequential,arbitrary,kept:6:arbitrary,kept:6:arbitrary:passes=2,kept:3:arbitrary:passes=4"
DROP, EXIT_WEIGHT, LONGEST_DECAY = 0.2, 0.3, 0.982
PLAIN, ROUNDS, RAMP, LAST_THIRD, RADIUS, EXIT, BOTH, DISTILLED, AVERAGED = CHANGES = (
    "plain LayerShuffle",
    "rounds of 1 to 4 blocks",
    "blocks left out, a share from 0 to 0.2",
    "layershuffle-depth in the last third",
    "radius of the shuffle grows in the first tenth",
    "exit loss at a random position, weight 0.3",
    "half of the images, in both orders",
    "half of the images, in both orders, KL from the sequential one",
    "weights averaged over the last 55 steps",
)
TIED = "one tied block"
RANKS = {
    TIED: 0,
    "one tied block, rank 4 per place": 4,
    "one tied block, rank 16 per place": 16,
    "one tied block, full rank per place": 64,
}
TIED_ROUNDS = "one tied block, rounds of 1 to 4 blocks"
NAMES = (*CHANGES, *RANKS, TIED_ROUNDS)
REFERENCES = {DISTILLED: BOTH} | {name: TIED for name in (*RANKS, TIED_ROUNDS) if name != TIED}
"""The reference of each training that is not compared with plain LayerShuffle."""
LONGER = (PLAIN, ROUNDS, RAMP, LAST_THIRD, RADIUS, EXIT, *RANKS, TIED_ROUNDS)
"""Also trained for more steps: those not worse in any order after few steps, and tied blocks."""
BUDGETS = {500: NAMES, 2_000: LONGER}
"""The trainings by budget, in steps of twelve blocks."""
PRODUCT = (".down.weight", ".up.weight")
# These run 10 and 12.5 % fewer blocks per step, so they take more steps with more images.
SHARES_RUN = {RAMP: 1 - DROP / 2, LAST_THIRD: 1 - 0.375 / 3}
SEQUENTIAL = ls.ExecutionOrder.sequential(DEPTH)


@dataclass(frozen=True, kw_only=True)
class ChangedRun(TrainingRun):
    """A training that costs as much as `budget` steps of twelve blocks."""

    budget: int


def training(name: str, *, seed: int, budget: int = 500) -> ChangedRun:
    """The training of the change `name`."""
    steps = round(budget / SHARES_RUN.get(name, 1))
    return ChangedRun(
        arm=name, seed=seed, start="bundled", budget=budget, steps=steps, warmup=budget // 10
    )


def order_of(run: ChangedRun, step: int) -> ls.ExecutionOrder:
    """The order of a step."""
    share, policy = step / run.steps, ls.Shuffled()
    if run.arm == RADIUS and share < 0.1:
        return nearby(10 * share * DEPTH, seed=run.seed, step=step)
    if run.arm in (ROUNDS, TIED_ROUNDS):
        policy = ls.Shuffled(parallel=(1, 4))
    elif run.arm == RAMP:
        policy = ls.Shuffled(drop=DROP * share)
    elif run.arm == LAST_THIRD and share >= 2 / 3:
        policy = ls.Shuffled(depth=(3, None))
    return policy.draw(DEPTH, seed=run.seed, step=step)


def nearby(radius: float, *, seed: int, step: int) -> ls.ExecutionOrder:
    """A random order in which two blocks `radius` or more apart keep their sequence."""
    keys = torch.arange(DEPTH) + radius * torch.rand(DEPTH, generator=generator_of(seed, step))
    return ls.ExecutionOrder(keys.argsort(stable=True).tolist(), DEPTH)


def generator_of(seed: int, step: int) -> torch.Generator:
    """The generator for the other random choices of a step than its order."""
    return torch.Generator().manual_seed(1_000_000 * seed + step)


def loss_of(
    model: nn.Module, images: Tensor, labels: Tensor, *, run: ChangedRun, step: int
) -> Tensor:
    """The loss of a step."""
    order = order_of(run, step)
    if run.arm in (BOTH, DISTILLED):
        weight = 1.0 if run.arm == DISTILLED else 0.0
        return in_both_orders(model, images, labels, order, weight=weight)
    if run.arm == EXIT:
        return with_exit(model, images, labels, order, generator=generator_of(run.seed, step))
    with ls.running(model, order):
        return F.cross_entropy(model(images), labels)


def in_both_orders(
    model: nn.Module, images: Tensor, labels: Tensor, order: ls.ExecutionOrder, *, weight: float
) -> Tensor:
    """The loss of half of the images in both orders.

    `weight`: weight of the divergence of the drawn order's probabilities from the sequential ones.
    """
    half = len(images) // 2
    with ls.running(model, [SEQUENTIAL] * half + [order] * half):
        logits = model(images[:half].repeat(2, 1, 1, 1))
    teacher, student = logits.log_softmax(dim=1).split(half)
    divergence = F.kl_div(student, teacher.detach(), log_target=True, reduction="batchmean")
    return F.cross_entropy(logits, labels[:half].repeat(2)) + weight * divergence


def with_exit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    order: ls.ExecutionOrder,
    *,
    generator: torch.Generator,
) -> Tensor:
    """The loss with an exit after a random one of the first eleven blocks."""
    steps = 1 + int(torch.randint(DEPTH - 1, (), generator=generator))
    with ls.running(model, [order] * len(images), exit_after=steps):
        logits, early = model(images).chunk(2)
    return F.cross_entropy(logits, labels) + EXIT_WEIGHT * F.cross_entropy(early, labels)


def averaged(mean: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
    """An average over about the last ninth of the steps so far, at most 55."""
    decay = min(LONGEST_DECAY, (1 + int(count)) / (10 + int(count)))
    return torch.lerp(weight, mean, decay)


class Adapted(nn.Module):
    """A linear layer plus a product of two matrices of a given rank (LoRA, arXiv 2106.09685).

    The product starts at zero. It is divided by the rank, or its updates would grow with the rank.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear, self.scale = linear, 1 / rank
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.linear(x) + self.scale * self.up(self.down(x))  # type: ignore[no-any-return]


def tied(model: nn.Module, *, rank: int) -> nn.Module:
    """`model` itself, with one block's weights in all places, and a product of `rank` per place."""
    tie(model, middle_blocks(1, DEPTH))
    for block in ls.blocks_of(model) if rank else ():
        layers = [(name, x) for name, x in block.named_modules() if isinstance(x, nn.Linear)]
        for path, linear in layers:
            block.set_submodule(path, Adapted(linear, rank))
    return model


def train(run: ChangedRun, *, pairs: int = PAIRS) -> nn.Module:
    """`bundled:digits`, refined by the run."""
    torch.manual_seed(run.seed)
    model = ls.load("bundled:digits", seed=run.seed)
    if run.arm in (*RANKS, TIED_ROUNDS):
        model = tied(model, rank=RANKS.get(run.arm, 0))
    data = DigitPairs("train", pairs)
    # Without the products, whose gradients would shorten the steps of the tied weights.
    clipped = [w for name, w in model.named_parameters() if not name.endswith(PRODUCT)]
    step_down = stepper(list(model.parameters()), run, clipped=clipped)
    average = AveragedModel(model, avg_fn=averaged) if run.arm == AVERAGED else None
    model.train()
    for step, rows in enumerate(batches_of(run, pairs, size=BATCH)):
        images, labels = finish(data.canvases[rows]), data.labels[rows]
        step_down(loss_of(model, images, labels, run=run, step=step))
        if average is not None:
            average.update_parameters(model)
    return model if average is None else average.module


@dataclass(frozen=True, kw_only=True)
class ChangedScores:
    """Top-1 in percent of a trained model on the test pairs: one value per drawn order."""

    arm: str
    budget: int
    seed: int
    in_order: str
    any_order: str
    six: str
    six_twice: str
    three_four_times: str


def measure(run: ChangedRun) -> ChangedScores:
    """Train and score. Returns the scores."""
    torch.set_num_threads(1)
    model = train(run).eval()
    batches = pair_batches(DigitPairs("test", TESTED))
    scores = ls.evaluate(model, batches, modes=MODES, num_orders=ORDERS)
    values = [f"{score.top1:.2f}" for score in scores]
    drawn = [" ".join(values[at : at + ORDERS]) for at in range(1, len(values), ORDERS)]
    any_order, six, six_twice, three_four_times = drawn
    return ChangedScores(
        arm=run.arm, budget=run.budget, seed=run.seed, in_order=values[0], any_order=any_order,
        six=six, six_twice=six_twice, three_four_times=three_four_times,
    )  # fmt: skip


if __name__ == "__main__":
    arguments = read_arguments(WHAT_IS_MISSING)
    done = finished(CSV, KEY)
    runs = [
        training(name, seed=seed, budget=budget)
        for budget, names in BUDGETS.items()
        for name in names
        for seed in SEEDS
    ]
    train_stages(
        [[run for run in runs if key_of(run, KEY) not in done]],
        measure,
        table=CSV,
        key=KEY,
        workers=arguments.workers,
    )
