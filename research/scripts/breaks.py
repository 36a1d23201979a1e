# Ran at commit 8550626.
"""Measure where shuffling breaks down, what position parts change, and how much data is needed.

    python scripts/breaks.py runs/breaks --workers 2
    python scripts/breaks_page.py

`STAGES` lists all runs. A finished run is added to `CSV` immediately, and runs that have a row are
not trained again; the directory holds the weights of models from which others start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from open_questions import RESULTS
from safetensors.torch import load_model, save_model
from timm.models.convmixer import ConvMixer
from timm.models.convnext import ConvNeXtBlock
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from trainings import TrainingRun, batches_of, key_of, stepper, train_with_bases

import layershuffle as ls
from layershuffle.core.tying import middle_blocks, tie
from layershuffle.data.digits import (
    CANVAS,
    CLASSES,
    DIGIT_VIEW,
    LEVELS,
    DigitPairs,
    compose,
    digit_images,
    digit_instances,
    draw_pairs,
)
from layershuffle.data.transforms import PixelFinish
from layershuffle.stats import mean

CSV = RESULTS / "breaks.csv"
KEY = ("question", "case", "arm", "seed")
BATCH, WIDTH, PATCH, DEPTH = 64, 64, 4, 12
PAIRS, TESTED, ORDERS = 20_000, 1_000, 8
finish = PixelFinish(DIGIT_VIEW, LEVELS)


# --- hosts of one width -----------------------------------------------------------------------


def attention(depth: int) -> nn.Module:
    """The architecture of `bundled:digits`."""
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=len(CLASSES),
        in_chans=1,
        img_size=CANVAS,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=depth,
        num_heads=4,
        mlp_ratio=2,
    )
    return model


def mixer(depth: int) -> nn.Module:
    """MLP-Mixer: a multilayer perceptron over tokens instead of attention."""
    sizes = {"img_size": CANVAS, "patch_size": PATCH, "embed_dim": WIDTH, "num_blocks": depth}
    model: nn.Module = MlpMixer(num_classes=len(CLASSES), in_chans=1, **sizes)
    return model


def convnext(depth: int) -> nn.Module:
    """Isotropic ConvNeXt: blocks of one width, without scales per channel, as in its paper."""
    blocks = [ConvNeXtBlock(WIDTH, ls_init_value=None) for _ in range(depth)]
    parts = {
        "stem": nn.Conv2d(1, WIDTH, PATCH, stride=PATCH),
        "blocks": nn.Sequential(*blocks),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "norm": nn.LayerNorm(WIDTH),
        "head": nn.Linear(WIDTH, len(CLASSES)),
    }
    return nn.Sequential(OrderedDict(parts))


def convmixer(depth: int) -> nn.Module:
    """ConvMixer: only the depthwise convolution has a skip connection."""
    model: nn.Module = ConvMixer(
        WIDTH, depth, kernel_size=5, patch_size=PATCH, in_chans=1, num_classes=len(CLASSES)
    )
    return model


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "attention": attention,
    "MLP-Mixer": mixer,
    "ConvNeXt": convnext,
    "ConvMixer": convmixer,
}


def scale_skips(model: nn.Module, scale: float) -> None:
    """Change every block from x + f(x) to `scale` * x + f(x)."""
    for block in ls.blocks_of(model):
        block.register_forward_hook(lambda _, inputs, out: out - (1 - scale) * inputs[0])


# --- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BreakRun(TrainingRun):
    """A training. `start`: "scratch", "bundled", or the case whose base is refined."""

    question: str
    case: str
    kind: str = "attention"
    depth: int = DEPTH
    skip: float = 1.0
    """Factor of the skip connections around whole blocks."""
    encoding: ls.EncodingForm | None = None
    prediction: ls.PredictionForm | None = None
    detached: bool = False
    """The gradient of the position loss does not reach the states."""
    table: str = "trained"
    """"trained", "frozen" as drawn, or "noise", drawn again in every step."""
    digits: int | None = None
    """Handwritten digits per class, all if `None`."""
    pairs: int = PAIRS


BASE_STEPS, BASE_RATE = 3000, 1e-3
ARMS = ("baseline", "layershuffle")
TIED, TIED_BLOCKS = "layershuffle-tied-3", 3
"""LayerShuffle of a model whose places share the weights of `TIED_BLOCKS` blocks."""
SKIPS = (0.0, 0.25, 0.5)
STRONGER_SKIPS = (0.75, 0.9)
ALL_DATA: dict[str, dict[str, Any]] = {f"{PAIRS} pairs": {}}
LESS_DATA: dict[str, dict[str, Any]] = {
    **{f"{pairs} pairs": {"pairs": pairs} for pairs in (200, 1_000, 5_000)},
    **{f"{digits} digits": {"digits": digits} for digits in (2, 5, 12, 31)},
}
EQUAL_EPOCHS: dict[str, dict[str, Any]] = {
    f"{pairs} pairs, equal epochs": {
        "pairs": pairs,
        "steps": BreakRun.steps * pairs // PAIRS,
        "warmup": max(1, BreakRun.warmup * pairs // PAIRS),
    }
    for pairs in (1_000, 5_000)
}
FIRST_BASES = {
    "MLP-Mixer": ("MLP-Mixer", DEPTH),
    "ConvNeXt": ("ConvNeXt", DEPTH),
    "depth 2": ("attention", 2),
    "depth 4": ("attention", 4),
}
MORE_BASES = {"ConvMixer": ("ConvMixer", DEPTH), "depth 6": ("attention", 6)}
DEEP_BASES = {"depth 24": ("attention", 24)}
DATA_SEEDS = range(3)
POSITION: dict[str, dict[str, Any]] = {
    "none (prediction, detached)": {"prediction": ls.PredictionForm(), "detached": True},
    "encoding, a table per block": {"encoding": ls.EncodingForm()},
    "encoding, shared table": {"encoding": ls.EncodingForm(table="shared")},
    "encoding, frozen table": {"encoding": ls.EncodingForm(), "table": "frozen"},
    "encoding, noise": {"encoding": ls.EncodingForm(), "table": "noise"},
    "encoding, table starts at zero": {"encoding": ls.EncodingForm(table_init="zero")},
    "encoding, adds zero at first": {"encoding": ls.EncodingForm(projection_init="zero")},
    "prediction, weight 0.01": {"prediction": ls.PredictionForm(weight=0.01)},
    "prediction, weight 0.1": {"prediction": ls.PredictionForm(weight=0.1)},
    "prediction, weight 1": {"prediction": ls.PredictionForm()},
    "prediction, weight 1, sum": {"prediction": ls.PredictionForm(loss="sum")},
}


def bases(cases: Mapping[str, tuple[str, int]], seed: int) -> Iterator[BreakRun]:
    """Models trained in order from random weights, as `bundled:digits` was, to be refined."""
    for case, (kind, depth) in cases.items():
        base = BreakRun(question="breaks", case=case, arm="base", seed=seed, start="scratch")
        yield replace(base, steps=BASE_STEPS, rate=BASE_RATE, kind=kind, depth=depth)


def refinements(cases: Mapping[str, tuple[str, int]], seed: int) -> Iterator[BreakRun]:
    """Both refinements of each base."""
    for base in bases(cases, seed):
        for arm in ARMS:
            yield replace(base, arm=arm, start=base.case, steps=BreakRun.steps, rate=BreakRun.rate)


def slower_runs(seed: int) -> Iterator[BreakRun]:
    """MLP-Mixer at the learning rate of its base, to exclude that the rate causes the breakdown."""
    for run in refinements({"MLP-Mixer": FIRST_BASES["MLP-Mixer"]}, seed):
        yield replace(run, case="MLP-Mixer, 1e-3", rate=BASE_RATE)


def skip_runs(seed: int, *, skips: Sequence[float] = SKIPS) -> Iterator[BreakRun]:
    """The bundled model, refined with weaker skip connections than it was trained with."""
    for skip in skips:
        for arm in ARMS:
            run = BreakRun(
                question="breaks", case=f"skip {skip:g}", arm=arm, seed=seed, start="bundled"
            )
            yield replace(run, skip=skip)


def position_runs(seed: int) -> Iterator[BreakRun]:
    """LayerShuffle with different position parts."""
    for case, parts in POSITION.items():
        run = BreakRun(
            question="position", case=case, arm="layershuffle", seed=seed, start="bundled"
        )
        yield replace(run, **parts)


def data_runs(
    sizes: Mapping[str, Mapping[str, Any]], seed: int, *, arms: Sequence[str] = ARMS
) -> Iterator[BreakRun]:
    """Fewer pairs of all digits, or fewer different digits, at equal steps or epochs."""
    for case, size in sizes.items():
        for arm in arms:
            run = BreakRun(question="data", case=case, arm=arm, seed=seed, start="bundled")
            yield replace(run, **size)


STAGES: tuple[tuple[BreakRun, ...], ...] = (
    tuple(bases(FIRST_BASES, 0)),
    (*refinements(FIRST_BASES, 0), *data_runs(ALL_DATA, 0), *skip_runs(0)),
    tuple(bases(MORE_BASES, 0)),
    (*refinements(MORE_BASES, 0), *slower_runs(0), *position_runs(0), *data_runs(LESS_DATA, 0)),
    (*position_runs(1), *data_runs({**ALL_DATA, **LESS_DATA}, 1), *skip_runs(1)),
    tuple(chain(*(data_runs(EQUAL_EPOCHS, seed) for seed in DATA_SEEDS))),
    tuple(bases(FIRST_BASES, 1)),
    (*refinements(FIRST_BASES, 1), *slower_runs(1)),
    tuple(data_runs({**ALL_DATA, **LESS_DATA}, 2)),
    tuple(bases(DEEP_BASES, 0)),
    tuple(refinements(DEEP_BASES, 0)),
    tuple(bases(MORE_BASES, 1)),
    tuple(refinements(MORE_BASES, 1)),
    tuple(chain(*(data_runs({**ALL_DATA, **LESS_DATA}, seed, arms=[TIED]) for seed in DATA_SEEDS))),
    tuple(bases(DEEP_BASES, 1)),
    tuple(refinements(DEEP_BASES, 1)),
    (
        *chain(*(skip_runs(seed, skips=STRONGER_SKIPS) for seed in DATA_SEEDS)),
        *position_runs(2),
    ),
)
"""A stage begins after the previous one has ended, because refinements need their bases."""


# --- training ---------------------------------------------------------------------------------


def train_pairs(run: BreakRun) -> tuple[Tensor, Tensor]:
    """Canvases and labels. Smaller sets are the beginnings of larger ones."""
    draws = draw_pairs("train", run.pairs)
    if run.digits is not None:
        draws = replace(draws, digits=fewer_digits(draws.digits, run.digits))
    return compose(draws)


def fewer_digits(drawn: Tensor, count: int) -> Tensor:
    """`drawn` with only `count` digits of each class, in the same shape.

    Every other digit is replaced by one of the same class. Larger `count`s include smaller ones.
    """
    _, values = digit_images()
    substitute, instances = torch.arange(len(values)), digit_instances()["train"]
    for value in range(10):
        members = instances[values[instances] == value]
        generator = torch.Generator().manual_seed(value)
        members = members[torch.randperm(len(members), generator=generator)]
        substitute[members] = members[torch.arange(len(members)) % count]
    return substitute[drawn]


def weights_of(base: BreakRun, directory: Path) -> Path:
    """The path of the weights of a base."""
    return directory / f"{base.case} {base.seed}.safetensors"


def begin(run: BreakRun, directory: Path) -> nn.Module:
    """The untrained model of the run, with the weights that `start` names."""
    torch.manual_seed(run.seed)
    if run.start == "bundled":
        model = ls.load("bundled:digits", seed=run.seed)
    else:
        model = ls.wrap(KINDS[run.kind](run.depth))
    if run.start not in {"bundled", "scratch"}:
        load_model(model, weights_of(replace(run, case=run.start), directory))
    if run.skip != 1:
        scale_skips(model, run.skip)
    if run.arm == TIED:
        tie(model, middle_blocks(TIED_BLOCKS, run.depth))
    return model


def train(run: BreakRun, directory: Path) -> tuple[nn.Module, ls.PositionedModel | None]:
    """Train in a loop as users write it. Returns the model, and the model with position parts."""
    model = begin(run, directory)
    canvases, labels = train_pairs(run)
    parts = add_parts(model, run)
    called = model if parts is None else parts
    weights = [weight for weight in called.parameters() if weight.requires_grad]
    # Only the host's are clipped, or gradients of position parts would shorten its steps.
    step_down = stepper(weights, run, clipped=list(model.parameters()))
    policy = ls.Shuffled() if run.arm in {"layershuffle", TIED} else ls.Sequential()
    noise = torch.Generator().manual_seed(run.seed)
    called.train()
    for step, rows in enumerate(batches_of(run, run.pairs, size=BATCH)):
        if run.table == "noise" and parts and parts.encoding:
            with torch.no_grad():
                parts.encoding.table.normal_(generator=noise)
        order = policy.draw(run.depth, seed=run.seed, step=step)
        guessing = parts.guessing() if parts and run.prediction else nullcontext()
        with ls.running(model, order), guessing as guesses:
            loss = F.cross_entropy(called(finish(canvases[rows])), labels[rows])
            if guesses is not None:
                loss = loss + guesses.loss()
        step_down(loss)
    return model, parts


def add_parts(model: nn.Module, run: BreakRun) -> ls.PositionedModel | None:
    """The model with the position parts of the run, `None` without any."""
    if not (run.encoding or run.prediction):
        return None
    parts = ls.add_position(model, encoding=run.encoding, prediction=run.prediction, seed=run.seed)
    if parts.encoding and run.table != "trained":
        parts.encoding.table.requires_grad_(False)
    if parts.prediction and run.detached:
        parts.prediction.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    return parts


# --- results ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BreakScores:
    """Top-1 in percent of a trained model on the test pairs. `any_order`: one value per order.

    `independent`: effective number of images, the least over the orders (`layershuffle.stats`).
    `guessed`: accuracy of the position prediction in percent; empty without prediction.
    """

    question: str
    case: str
    arm: str
    seed: int
    in_order: float
    any_order: str
    independent: float
    guessed: str


def pair_batches(pairs: DigitPairs, *, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of the pairs from `first` on, 250 at a time."""
    images, labels = finish(pairs.canvases[first:]), pairs.labels[first:]
    return list(zip(images.split(250), labels.split(250), strict=True))


def measure(run: BreakRun, directory: Path) -> BreakScores:
    """Train and score; save the weights of bases. Returns the scores."""
    torch.set_num_threads(1)
    model, parts = train(run, directory)
    if run.arm == "base":
        save_model(model, str(weights_of(run, directory)))
    test = DigitPairs("test", TESTED)
    batches = pair_batches(test)
    called, modes = model if parts is None else parts, "sequential,arbitrary"
    scores = ls.evaluate(called, batches, modes=modes, num_orders=ORDERS, groups=test.digits)
    in_order, *any_order = scores
    positions = f"{guessed(parts, batches[0][0]):.1f}" if parts and run.prediction else ""
    return BreakScores(
        question=run.question,
        case=run.case,
        arm=run.arm,
        seed=run.seed,
        in_order=in_order.top1,
        any_order=" ".join(f"{score.top1:.1f}" for score in any_order),
        independent=min(score.top1_n or 0.0 for score in scores),
        guessed=positions,
    )


def guessed(parts: ls.PositionedModel, images: Tensor) -> float:
    """Accuracy of the predicted positions in percent, the mean over the orders."""
    parts.eval()
    values = []
    for draw in range(ORDERS):
        order = ls.Shuffled().draw(DEPTH, seed=0, step=draw)
        with torch.no_grad(), ls.running(parts, order), parts.guessing() as guesses:
            parts(images)
            values.append(guesses.accuracy())
    return mean(values)


def missing(
    stages: Sequence[Sequence[BreakRun]], directory: Path, *, finished: set[tuple[str, ...]]
) -> list[list[BreakRun]]:
    """The runs left in each stage: unfinished ones, and bases whose weights those lack."""
    needed = {(run.start, run.seed) for run in chain(*stages) if key_of(run, KEY) not in finished}

    def is_lost_base(run: BreakRun) -> bool:
        is_needed = run.arm == "base" and (run.case, run.seed) in needed
        return is_needed and not weights_of(run, directory).exists()

    return [
        [run for run in stage if key_of(run, KEY) not in finished or is_lost_base(run)]
        for stage in stages
    ]


if __name__ == "__main__":
    train_with_bases(STAGES, measure, missing=missing, table=CSV, key=KEY)
