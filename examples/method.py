"""The whole method in one file: a vision transformer whose blocks run in any order, or are missing.

Trained as usual, a transformer needs its twelve blocks one after the other, all of them. Here every
batch runs along orders that are drawn anew, so that no block learns to rely on the one before it
(arXiv 2407.04513). Afterwards the blocks run in any order, some of them may be gone, and the blocks
of two such models make a third one. The first and the last block keep their place: whichever
block runs second reads the state of the first, and the head always reads that of the last.

    python examples/method.py

prints this after three minutes on one core (top-1 accuracy in percent, on 100 classes):

                        in order  any order   9 kept   6 kept   3 kept
    trained as usual        86.4       14.4     11.5      7.0      3.2
    shuffled, seed 0        90.0       88.7     85.8     80.9     66.0
    shuffled, seed 1        89.6       88.2     85.4     79.9     65.1
    these two, merged       86.1       84.7     81.1     75.3     59.5

The package does this for every transformer whose blocks have one shape, and much beside it. Of the
package this file imports two things: the images, and the stream of random numbers from which orders
are drawn.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import count
from statistics import mean

import timm
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer as ViT
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from layershuffle.core.draws import Stream
from layershuffle.data.digits import LEVELS, PAIRS, DigitPairs

DEPTH = 12  # blocks of the model, of which the first and the last keep their place
GROUPS = 4  # parts of a batch, each with an order of its own
BATCH = 64
STEPS = 600
WARMUP = 50

Order = Sequence[int]  # the blocks to run, from the first to the last


def pretrained() -> ViT:
    """A model of 0.4 million weights that was trained as usual, with its blocks in sequence."""
    folder = files("layershuffle") / "assets" / "digits"
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def digits(split: str, number: int) -> tuple[Tensor, Tensor]:
    """Images of two handwritten digits, float32 [number, 1, 12, 20], and their classes, 0 to 99."""
    pairs = DigitPairs(split, number)
    return (pairs.canvases / LEVELS - 0.2) / 0.35, pairs.labels


def begin(model: ViT) -> None:
    """Let each drawn block add a tenth of what it did to the state: orders then differ little."""
    with torch.no_grad():
        for block in model.blocks[1:-1]:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.mul_(0.1)
                layer.bias.mul_(0.1)


# --- orders ---------------------------------------------------------------------------------------


def drawn_order(stream: Stream, kept: int = DEPTH) -> Order:
    """`kept` of the blocks: the first, others in any order, each as likely as another, the last."""
    first, *inner, last = range(DEPTH)
    return [first, *stream.shuffled(inner)[: kept - 2], last]


def training_orders(seed: int, step: int) -> list[Order]:
    """An order for each group of a batch. One of the four is in sequence; the paper has none."""
    orders: list[Order] = []
    for group in range(GROUPS):
        if (step + group) % 4 == 0:
            orders.append(range(DEPTH))
        else:
            orders.append(drawn_order(Stream(seed, step, micro_batch=group)))
    return orders


# --- forwards -------------------------------------------------------------------------------------


def stem(model: ViT, images: Tensor) -> Tensor:
    """What comes before the blocks: the first state, [batch, tokens, width]."""
    state = model._pos_embed(model.patch_embed(images))
    return model.norm_pre(model.patch_drop(state))


def head(model: ViT, state: Tensor) -> Tensor:
    """What comes after the blocks: the logits [batch, 100]. It can be asked after any block."""
    return model.forward_head(model.norm(state))


def run(model: ViT, images: Tensor, order: Order) -> Tensor:
    """The logits of `images` when the blocks run in `order`. A block that is not in it is lost."""
    state = stem(model, images)
    for block in order:
        state = model.blocks[block](state)
    return head(model, state)


def run_groups(
    model: ViT, images: Tensor, orders: Sequence[Order], exit_after: int
) -> tuple[Tensor, Tensor]:
    """The logits of `images` after their whole orders, and after the first blocks of the orders,
    which the last block follows.

    Row i is in group i % 4 and runs along the order of its group. Groups that need the same block
    at the same position run it together, so four orders cost hardly more than one.
    """
    rows = torch.arange(len(images)).view(-1, GROUPS).T.flatten()  # 0, 4, 8, ..., 1, 5, 9, ...
    states = list(stem(model, images[rows]).chunk(GROUPS))
    for position in range(DEPTH):
        if position == exit_after:
            early_states = model.blocks[-1](torch.cat(states))
        for block in sorted({order[position] for order in orders}):
            members = [group for group in range(GROUPS) if orders[group][position] == block]
            news = model.blocks[block](torch.cat([states[group] for group in members]))
            for group, state in zip(members, news.chunk(len(members)), strict=True):
                states[group] = state
    logits, early_logits = head(model, torch.cat([*states, early_states])).chunk(2)
    back = rows.argsort()
    return logits[back], early_logits[back]


# --- training -------------------------------------------------------------------------------------


def loss_of(model: ViT, images: Tensor, labels: Tensor, *, seed: int, step: int) -> Tensor:
    """The loss of a batch, in which the state after a random number of blocks answers as well.

    That early answer learns from the labels, and from the answer of the whole order. So every block
    leaves a state that the head can read, and the blocks that come after it may be missing.
    """
    # After 2 to 10 of 12 blocks. No group has the number -1, so the draw is one of its own.
    exit_after = 2 + Stream(seed, step, micro_batch=-1).below(DEPTH - 3)
    logits, early_logits = run_groups(model, images, training_orders(seed, step), exit_after)
    teacher = logits.detach().log_softmax(-1)
    student = early_logits.log_softmax(-1)
    distillation = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    exit_loss = 0.3 * F.cross_entropy(early_logits, labels) + 0.3 * distillation
    return F.cross_entropy(logits, labels) + exit_loss


def batches(number: int, seed: int) -> Iterator[Tensor]:
    """The rows of one batch after the other, without end. Every epoch has its own permutation."""
    for epoch in count():
        generator = torch.Generator().manual_seed(Stream(seed, epoch).below(1 << 63))
        yield from torch.randperm(number, generator=generator).split(BATCH)


def learning_rate(step: int) -> float:
    """The share of the highest rate: it rises linearly, then falls along half a cosine."""
    if step < WARMUP:
        return step / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def train(model: ViT, *, seed: int) -> Iterator[float]:
    """Refine `model` in place, and yield the loss of every step."""
    images, labels = digits("train", PAIRS["train"])
    begin(model)
    optimizer = AdamW(model.parameters(), lr=4e-3, eps=1e-6, weight_decay=0.0, fused=True)
    schedule = LambdaLR(optimizer, learning_rate)
    model.train()
    for step, rows in zip(range(STEPS), batches(len(images), seed), strict=False):
        loss = loss_of(model, images[rows], labels[rows], seed=seed, step=step)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()


# --- what comes of it -----------------------------------------------------------------------------


def merged(model: ViT, other: ViT) -> ViT:
    """A third model: even blocks of `model`, odd blocks of `other`, and the mean of all else."""
    weights = model.state_dict()
    for name, weight in other.state_dict().items():
        if not name.startswith("blocks."):
            weights[name] = (weights[name] + weight) / 2
        elif int(name.split(".")[1]) % 2 == 1:
            weights[name] = weight
    third = copy.deepcopy(model)
    third.load_state_dict(weights)
    return third


@torch.no_grad()
def accuracy(model: ViT, images: Tensor, labels: Tensor, orders: Sequence[Order]) -> float:
    """Top-1 accuracy in percent, the mean over `orders`."""
    model.eval()
    right = 0
    for order in orders:
        right += int((run(model, images, order).argmax(-1) == labels).sum())
    return 100 * right / len(orders) / len(labels)


def scores(model: ViT, images: Tensor, labels: Tensor, *, num_orders: int) -> list[float]:
    """A row of the table: all blocks in order, all in any order, then 9, 6 and 3 of them."""
    row = [accuracy(model, images, labels, [range(DEPTH)])]
    for kept in (12, 9, 6, 3):
        orders = [drawn_order(Stream(0, draw), kept) for draw in range(num_orders)]
        row.append(accuracy(model, images, labels, orders))
    return row


def main() -> None:
    """Train two models that differ in their seed, merge them, and print what each of them can."""
    torch.set_num_threads(1)  # the table above is that of one thread
    shuffled = [pretrained(), pretrained()]
    for seed, model in enumerate(shuffled):
        losses: list[float] = []
        for loss in train(model, seed=seed):
            losses.append(loss)
            if len(losses) % 200 == 0:
                latest = mean(losses[-200:])
                print(f"seed {seed}, step {len(losses)}: loss {latest:.2f}", flush=True)

    models = {
        "trained as usual": pretrained(),
        "shuffled, seed 0": shuffled[0],
        "shuffled, seed 1": shuffled[1],
        "these two, merged": merged(*shuffled),
    }
    images, labels = digits("test", 1000)
    print(f"{'':20}in order  any order   9 kept   6 kept   3 kept")
    for name, model in models.items():
        row = scores(model, images, labels, num_orders=5)
        print(f"{name:19}{row[0]:9.1f}{row[1]:11.1f}{row[2]:9.1f}{row[3]:9.1f}{row[4]:9.1f}")


if __name__ == "__main__":
    main()
