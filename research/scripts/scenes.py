# Ran at commit 8550626.
"""Train LayerShuffle for segmentation and detection of digit scenes, and measure both.

    python scripts/scenes.py runs/scenes --workers 2
    python scripts/scenes_page.py

`STAGES` lists all runs. A finished run is added to `CSV` immediately, and runs that have a row are
not trained again; the directory holds the weights of models from which others start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

import breaks
import timm
import torch
import torch.nn.functional as F
from digit_scenes import CLASSES, SIDE, Scenes, scenes
from open_questions import RESULTS
from safetensors.torch import load_file, save_model
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.segmentation import MeanIoU
from torchvision.ops import batched_nms, generalized_box_iou_loss, sigmoid_focal_loss
from trainings import TrainingRun, batches_of, key_of, stepper, train_with_bases

import layershuffle as ls
from layershuffle.core.methods import METHODS
from layershuffle.core.tying import middle_blocks, tie
from layershuffle.data.digits import CANVAS, DIGIT_VIEW, LEVELS
from layershuffle.data.transforms import PixelFinish
from layershuffle.training.order_schedule import OrderSchedule, orders_by_row

CSV = RESULTS / "scenes.csv"
KEY = ("arm", "seed")
BATCH, PATCH, DEPTH, VALUES = 32, 4, breaks.DEPTH, CLASSES - 1
GRID = SIDE // PATCH
TRAINED, TESTED, ORDERS = 8_000, 300, 4
finish = PixelFinish(replace(DIGIT_VIEW, height=SIDE, width=SIDE), LEVELS)
PIXELS = PATCH * PATCH * CLASSES
OUTPUTS = PIXELS + VALUES + 4 + 1
"""Outputs of a token: classes of its pixels; class, box and centreness of its detection."""
BOX_SIDE = 10.0
"""The side in pixels of a box with predicted log width and log height 0."""
DETECTIONS, OVERLAP = 20, 0.5
EXISTING = 0.01
"""Initial probability of each digit, which keeps the first focal losses small."""


# --- the model --------------------------------------------------------------------------------


def dense_model(weights: dict[str, Tensor]) -> nn.Module:
    """`bundled:digits` for scenes, with `weights`. Those of a classifier get a new linear head.

    With `global_pool=""` timm applies its head to all tokens, so the model returns
    [batch, 1 + 64, OUTPUTS], and `wrap` and `running` work unchanged.
    """
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=OUTPUTS,
        global_pool="",
        in_chans=1,
        img_size=SIDE,
        patch_size=PATCH,
        embed_dim=breaks.WIDTH,
        depth=DEPTH,
        num_heads=4,
        mlp_ratio=2,
    )
    if weights["head.bias"].shape != (OUTPUTS,):  # weights of a classifier of digit pairs
        grid = [side // PATCH for side in CANVAS]
        positions = resample_abs_pos_embed(weights["pos_embed"], [GRID, GRID], grid)
        head = {name: value for name, value in model.state_dict().items() if "head." in name}
        bias = torch.zeros(OUTPUTS)
        bias[PIXELS : PIXELS + VALUES] = -math.log(1 / EXISTING - 1)
        weights = {**weights, **head, "pos_embed": positions, "head.bias": bias}
    model.load_state_dict(weights)
    return ls.wrap(model)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The outputs of a model for a batch, before any threshold.

    `pixels` [n, 11, 32, 32] and `values` [n, 64, 10]: logits. `boxes` [n, 64, 4] in pixels;
    `centreness` [n, 64]: logits.
    """

    pixels: Tensor
    values: Tensor
    boxes: Tensor
    centreness: Tensor


def predict(model: nn.Module, images: Tensor) -> Predicted:
    """The dense outputs of `model` for images [n, 1, 32, 32]."""
    tokens = model(images)[:, 1:]  # the first is the class token
    pixels, values, box, centreness = tokens.split([PIXELS, VALUES, 4, 1], dim=2)
    count = len(tokens)  # an exit doubles them
    # [n, row, column, row in the patch, column in the patch, class] -> whole images.
    pixels = pixels.view(count, GRID, GRID, PATCH, PATCH, CLASSES).permute(0, 5, 1, 3, 2, 4)
    centre = token_centres() + PATCH * box[..., :2]
    half = BOX_SIDE / 2 * box[..., 2:].clamp(max=2).exp()  # so that exp stays finite
    return Predicted(
        pixels=pixels.reshape(count, CLASSES, SIDE, SIDE),
        values=values,
        boxes=torch.cat([centre - half, centre + half], dim=2),
        centreness=centreness.squeeze(2),
    )


@cache
def token_centres() -> Tensor:
    """Column and row of the middle of each patch, in pixels: [64, 2]."""
    middle = PATCH * (torch.arange(GRID) + 0.5)
    rows, columns = torch.meshgrid(middle, middle, indexing="ij")
    return torch.stack([columns, rows], dim=2).view(-1, 2)


def assigned(boxes: Tensor, values: Tensor) -> Tensor:
    """The box assigned to each token, int64 [n, 64], -1 for none; boxes [n, 5, 4], values [n, 5].

    As in FCOS (arXiv 1904.01355) it is the smallest box that contains the centre of the patch. A
    patch also gets boxes centred in it, because a narrow digit may contain no patch centre.
    """
    centres = token_centres()[None, :, None]  # [1, 64, 1, 2]
    low, high = boxes[:, None, :, :2], boxes[:, None, :, 2:]
    inside = ((centres > low) & (centres < high)).all(3)
    middle = (low + high) / 2
    home = ((middle >= centres - PATCH / 2) & (middle < centres + PATCH / 2)).all(3)
    area = (high - low).prod(3).expand_as(inside)
    area = area.masked_fill(~((inside | home) & (values[:, None] >= 0)), math.inf)
    smallest, box = area.min(2)
    return box.masked_fill(smallest == math.inf, -1)


def centreness_of(boxes: Tensor, centres: Tensor) -> Tensor:
    """1 at the centre of a box, 0 at its edges and outside (FCOS, equation 3); boxes [..., 4]."""
    near = torch.cat([centres - boxes[..., :2], boxes[..., 2:] - centres], dim=-1).clamp(min=0)
    across, down = near[..., 0::2], near[..., 1::2]
    ratios = [side.amin(-1) / side.amax(-1).clamp(min=1e-6) for side in (across, down)]
    return (ratios[0] * ratios[1]).sqrt()


def loss_of(predicted: Predicted, truth: Scenes, rows: Tensor) -> Tensor:
    """The sum of the losses: pixels, and class, box and centreness of the tokens with a digit."""
    box = assigned(truth.boxes[rows], truth.values[rows])
    chosen = box >= 0
    image, token = chosen.nonzero(as_tuple=True)
    targets = truth.boxes[rows][image, box[image, token]]
    classes = torch.zeros_like(predicted.values)
    classes[image, token, truth.values[rows][image, box[image, token]]] = 1
    focal = sigmoid_focal_loss(predicted.values, classes, reduction="sum") / len(image)
    overlap = generalized_box_iou_loss(predicted.boxes[chosen], targets, reduction="mean")
    central = centreness_of(targets, token_centres()[token])
    centre = F.binary_cross_entropy_with_logits(predicted.centreness[chosen], central)
    pixels = F.cross_entropy(predicted.pixels, truth.mask[rows].long())
    loss: Tensor = pixels + focal + overlap + centre
    return loss


# --- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SceneRun(TrainingRun):
    """A training on scenes; `start`: "bundled", "base", or the arm of a classifier to freeze."""

    method: str = "baseline"


BASE = SceneRun(arm="base", seed=0, start="bundled", steps=1_500)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training settings of a method: its orders and how many per batch.

    `different`: number of blocks with weights of their own; `exit_weight`: weight of the exit loss.
    """

    policy: ls.OrderPolicy
    per_batch: int = 1
    different: int = DEPTH
    exit_weight: float | None = None


SOME_IN_ORDER = METHODS["layershuffle-mixed"].policy
RECIPES = {
    "baseline": Recipe(policy=METHODS["baseline"].policy),
    "layershuffle": Recipe(policy=METHODS["layershuffle"].policy),
    "layershuffle-mixed": Recipe(policy=SOME_IN_ORDER, per_batch=4),
    "layershuffle-tied-3-mixed-exit": Recipe(
        policy=SOME_IN_ORDER, per_batch=4, different=3, exit_weight=0.3
    ),
}
FROZEN = ("baseline", "layershuffle")


def refinements(seed: int) -> Iterator[SceneRun]:
    """The refinement of the base by each method."""
    for method in RECIPES:
        yield SceneRun(arm=method, seed=seed, start="base", method=method)


def heads(seed: int) -> Iterator[SceneRun]:
    """The trainings of heads on frozen classifiers."""
    for method in FROZEN:
        yield SceneRun(arm=f"frozen {method}", seed=seed, start=method, method=method)


STAGES: tuple[tuple[SceneRun, ...], ...] = (
    (BASE, *heads(0)),
    (*refinements(0), *refinements(1), *heads(1)),
    (*refinements(2), *heads(2)),
)
"""A stage begins after the previous one has ended, because refinements need their base."""


# --- training ---------------------------------------------------------------------------------


def begin(run: SceneRun, directory: Path) -> nn.Module:
    """The model from which the run starts."""
    torch.manual_seed(run.seed)
    if run.start == "base":
        model = dense_model(load_file(weights_of(BASE, directory)))
        different = RECIPES[run.method].different
        return model if different == DEPTH else tie(model, middle_blocks(different, DEPTH))
    if run.start == "bundled":
        return dense_model(ls.load("bundled:digits").state_dict())
    # As in docs/open-questions.md. Its training digits do not occur in the test scenes either.
    pairs = breaks.data_runs(breaks.ALL_DATA, run.seed)
    classifier, _ = breaks.train(next(each for each in pairs if each.arm == run.start), directory)
    return with_frozen_blocks(dense_model(classifier.state_dict()))


def with_frozen_blocks(model: nn.Module) -> nn.Module:
    """`model` itself, with only the head trainable."""
    model.requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    return model


def orders_of(run: SceneRun) -> OrderSchedule:
    """The schedule of orders that `layershuffle fit` uses."""
    recipe = RECIPES[run.method]
    return OrderSchedule(
        policy=recipe.policy,
        depth=DEPTH,
        seed=run.seed,
        per_batch=recipe.per_batch,
        exits=recipe.exit_weight is not None,
    )


def train(model: nn.Module, run: SceneRun, truth: Scenes) -> nn.Module:
    """`model` itself, trained on these scenes by a loop as a user would write it."""
    images = finish(truth.ink)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    step_down = stepper(weights, run, clipped=weights)
    orders, exit_weight = orders_of(run), RECIPES[run.method].exit_weight
    model.train()
    for step, rows in enumerate(batches_of(run, len(images), size=BATCH)):
        drawn = orders.draw(step=step, micro_batch=0)
        exit_after = orders.exit_after(drawn, step=step, micro_batch=0)
        with ls.running(model, orders_by_row(drawn, BATCH), exit_after=exit_after):
            predicted = predict(model, images[rows])
        if exit_weight is None:
            loss = loss_of(predicted, truth, rows)
        else:
            whole, early = halves(predicted)
            loss = loss_of(whole, truth, rows) + exit_weight * loss_of(early, truth, rows)
        step_down(loss)
    return model


def halves(predicted: Predicted) -> tuple[Predicted, Predicted]:
    """The outputs after all blocks, and those at the exit, whose rows are last."""
    pairs = {name: part.chunk(2) for name, part in vars(predicted).items()}
    whole, early = ({name: pair[half] for name, pair in pairs.items()} for half in (0, 1))
    return Predicted(**whole), Predicted(**early)


def weights_of(run: SceneRun, directory: Path) -> Path:
    """The path of the weights of a base."""
    return directory / f"{run.arm} {run.seed}.safetensors"


# --- results ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SceneScores:
    """Scores in percent of a trained model on the test scenes; `any_*`: one value per order."""

    arm: str
    seed: int
    miou: float
    any_miou: str
    map: float
    any_map: str


@dataclass(frozen=True, kw_only=True)
class OrderScore:
    """Mean intersection over union of the digits' pixels, and mean average precision, in percent.

    Both are the mean over the ten digits, over all scenes together; the precision also over the
    overlaps of 0.5 to 0.95 of COCO.
    """

    miou: float
    map: float


@torch.no_grad()
def predictions(model: nn.Module, ink: Tensor, order: ls.ExecutionOrder) -> list[Predicted]:
    """The outputs of `model` for scenes in one order, in batches of 100."""
    model.eval()
    with ls.running(model, order):
        return [predict(model, images) for images in torch.split(finish(ink), 100)]


def scored(parts: Sequence[Predicted], truth: Scenes) -> OrderScore:
    """The scores of a model's outputs for all scenes of `truth`."""
    # All scenes as one "image", because the metric ignores classes missing in an image.
    overlap = MeanIoU(num_classes=CLASSES, include_background=False, input_format="index")
    classes = torch.cat([part.pixels.argmax(1) for part in parts])
    overlap.update(classes.view(1, -1, SIDE), truth.mask.long().view(1, -1, SIDE))
    precision = MeanAveragePrecision(backend="faster_coco_eval")
    precision.update(
        [each for part in parts for each in detections(part)],
        [
            {"boxes": boxes[values >= 0], "labels": values[values >= 0]}
            for boxes, values in zip(truth.boxes, truth.values, strict=True)
        ],
    )
    area = float(precision.compute()["map"])
    return OrderScore(miou=100 * float(overlap.compute()), map=100 * area)


def detections(predicted: Predicted) -> list[dict[str, Tensor]]:
    """The `DETECTIONS` most confident boxes of each image after non-maximum suppression."""
    sure = predicted.values.sigmoid() * predicted.centreness.sigmoid().unsqueeze(2)
    found = []
    for scores, boxes in zip(sure.sqrt(), predicted.boxes, strict=True):
        # A token may predict several digits, with the same box.
        flat = scores.flatten()
        repeated = boxes.repeat_interleave(VALUES, dim=0)
        labels = torch.arange(VALUES).repeat(len(boxes))
        surest = batched_nms(repeated, flat, labels, OVERLAP)[:DETECTIONS]
        found.append({"boxes": repeated[surest], "scores": flat[surest], "labels": labels[surest]})
    return found


def measure(run: SceneRun, directory: Path) -> SceneScores:
    """Train and score; save the weights of the base. Returns the scores."""
    torch.set_num_threads(1)
    model = train(begin(run, directory), run, scenes("train", range(TRAINED)))
    if run == BASE:
        save_model(model, str(weights_of(run, directory)))
    truth = scenes("test", range(TESTED))
    orders = [ls.ExecutionOrder.sequential(DEPTH)]
    orders += [ls.Shuffled().draw(DEPTH, seed=0, step=draw) for draw in range(ORDERS)]
    in_order, *drawn = (scored(predictions(model, truth.ink, order), truth) for order in orders)
    return SceneScores(
        arm=run.arm,
        seed=run.seed,
        miou=round(in_order.miou, 2),
        any_miou=" ".join(f"{each.miou:.2f}" for each in drawn),
        map=round(in_order.map, 2),
        any_map=" ".join(f"{each.map:.2f}" for each in drawn),
    )


def missing(
    stages: Sequence[Sequence[SceneRun]], directory: Path, *, finished: set[tuple[str, ...]]
) -> list[list[SceneRun]]:
    """The runs left in each stage: unfinished ones, and the base if those lack its weights."""
    left = [run for run in chain(*stages) if key_of(run, KEY) not in finished]
    lost = any(run.start == "base" for run in left) and not weights_of(BASE, directory).exists()
    return [[run for run in stage if run in left or (lost and run == BASE)] for stage in stages]


if __name__ == "__main__":
    train_with_bases(STAGES, measure, missing=missing, table=CSV, key=KEY)
