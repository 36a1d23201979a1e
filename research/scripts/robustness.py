# Ran at commit 8550626.
"""Measure corruptions, shifted data and attacks for docs/open-questions.md.

python scripts/adversarial.py runs/digits-tied  # adversarial training
python scripts/robustness.py runs/digits-tied runs/digits-recipes  # measure missing rows
python scripts/robustness.py                    # only write the tables again
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path

import torch
from open_questions import PAGE, RESULTS, SEEDS, keep, model_of, rows_of
from performance_page import with_marked
from PIL import Image
from science_page import ARMS, interval, verdict
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as pixels

import layershuffle as ls
from layershuffle.core.losses import logits_of
from layershuffle.data.digits import DIGIT_VIEW, LEVELS, DigitPairs
from layershuffle.files import write_text
from layershuffle.stats import compare, mean
from layershuffle.text import markdown_table

ADVERSARIAL = {
    "baseline-adversarial": "ordinary training on attacks",
    "layershuffle-adversarial": "LayerShuffle on attacks",
}
WINNER = {"layershuffle-tied-3-mixed-exit": "tied, three blocks, four orders, exit loss"}
USUAL = ("baseline", "layershuffle", "layershuffle-depth", "layershuffle-tied-3", *WINNER)
MEASURED = (*USUAL, *ADVERSARIAL)
# Ordinary models have only 2 % in a random order, so they have nothing to lose.
IN_ORDER = ("baseline", "baseline-adversarial")
ORDER_WORDS = {"sequential": "in order", "arbitrary": "any order"}
CELLS = [
    (arm, order)
    for arm in MEASURED
    for order in ORDER_WORDS
    if arm not in IN_ORDER or order == "sequential"
]
LABELS = {arm.name: arm.label for arm in ARMS} | WINNER | ADVERSARIAL
IMAGES, ATTACKED, STEPS, RESTARTS = 400, 100, 20, 2
AVERAGED_ORDERS, JUDGED_ORDERS = 8, 4
RADII = tuple(k / 255 for k in range(2, 33, 2))
"""Candidates for the largest change of a pixel in [0, 1]."""
HALF = 50.0
SEQUENTIAL = (ls.ExecutionOrder.sequential(12),)


def _affine(
    image: Tensor, *, sign: int, angle: float = 0, move: float = 0, scale: float = 1
) -> Tensor:
    return pixels.affine(
        image, angle=sign * angle, translate=[sign * move, sign * move], scale=scale, shear=[0.0],
        interpolation=v2.InterpolationMode.BILINEAR,
    )  # fmt: skip


def _across(image: Tensor, reach: float, sign: int) -> Tensor:
    """Move one digit `reach` pixels into the half of the other, which is moved to its far edge.

    Up to 2 pixels both digits stay whole and apart: ink is at most 8 pixels of a half's 10 wide.
    """
    half = image.shape[-1] // 2
    out = torch.zeros_like(image)
    for side in (0, 1):
        alone = torch.zeros_like(image)
        alone[..., side * half : (side + 1) * half] = image[..., side * half : (side + 1) * half]
        first, *_, last = alone.amax(dim=(0, 1)).nonzero().flatten().tolist()
        if sign > 0:
            move = (half - 1 + reach if side == 0 else 2 * half - 1) - last
        else:
            move = (0 if side == 0 else half - reach) - first
        moved = pixels.affine(
            alone, angle=0.0, translate=[move, 0.0], scale=1.0, shear=[0.0],
            interpolation=v2.InterpolationMode.BILINEAR,
        )  # fmt: skip
        out = torch.maximum(out, moved)
    return out


def _bent(image: Tensor, degrees: float) -> Tensor:
    affine = v2.RandomAffine(
        degrees, shear=[-degrees, degrees], interpolation=v2.InterpolationMode.BILINEAR
    )
    return affine(image)  # type: ignore[no-any-return]


def _jpeg(image: Tensor, quality: float) -> Tensor:
    # With Pillow, because torchvision's JPEG encoder is deprecated (torch 2.15 warns of it).
    file = BytesIO()
    pixels.to_pil_image(image).save(file, "JPEG", quality=int(quality))
    return pixels.pil_to_tensor(Image.open(file)).float() / 255


ImageChange = Callable[[Tensor, float, int], Tensor]  # image [1, H, W] in [0, 1], strength, sign
CORRUPTIONS: dict[str, tuple[ImageChange, tuple[float, ...]]] = {
    "noise": (lambda x, s, _: v2.GaussianNoise(sigma=s)(x), (0.05, 0.1, 0.15, 0.2, 0.3)),
    "blur": (lambda x, s, _: pixels.gaussian_blur(x, [5, 5], [s, s]), (0.4, 0.6, 0.8, 1.0, 1.3)),
    "JPEG": (lambda x, s, _: _jpeg(x, s), (50, 30, 20, 10, 5)),
    "contrast": (lambda x, s, _: pixels.adjust_contrast(x, s), (0.7, 0.5, 0.4, 0.3, 0.2)),
    "elastic": (lambda x, s, _: v2.ElasticTransform(alpha=s, sigma=2.0)(x), (4, 8, 12, 16, 20)),
    "affine": (lambda x, s, _: _bent(x, s), (5, 10, 15, 20, 25)),
    "erasing": (
        lambda x, s, _: v2.RandomErasing(p=1.0, scale=(s, s), ratio=(1.0, 1.0))(x),
        (0.02, 0.04, 0.08, 0.12, 0.16),
    ),
}
# In pixels, pixels, factors, and degrees. Training already draws some of the first.
SHIFTS: dict[str, tuple[ImageChange, tuple[float, ...]]] = {
    "moved": (lambda x, s, sign: _affine(x, sign=sign, move=s), (0.5, 1, 1.5, 2, 2.5)),
    "across the middle": (_across, (0.4, 0.8, 1.2, 1.6, 2)),
    "scaled": (lambda x, s, sign: _affine(x, sign=sign, scale=s), (0.95, 0.9, 0.85, 0.8, 0.75)),
    "rotated": (lambda x, s, sign: _affine(x, sign=sign, angle=s), (5, 10, 15, 20, 30)),
}


@dataclass(frozen=True, kw_only=True)
class ChangedRow:
    """Top-1 in percent on changed images at strengths 1 to 5, the mean over the orders."""

    arm: str
    seed: int
    change: str
    order: str
    at1: float
    at2: float
    at3: float
    at4: float
    at5: float


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """Top-1 in percent under an attack, the mean over the scored orders."""

    arm: str
    seed: int
    attack: str
    radius: float
    top1: float


def loaded(studies: Sequence[Path], arm: str, seed: int) -> nn.Module:
    """A trained model of the first study that has it, or one of scripts/adversarial.py."""
    name, first = f"{arm}-seed{seed}", studies[0]
    if arm in ADVERSARIAL:
        return ls.load(f"dir:{first / 'adversarial' / name}").eval()
    study = next((study for study in studies if (study / "runs" / name).is_dir()), first)
    return model_of(study, arm, seed).eval()


def changed(images: Tensor, change: ImageChange, strength: float) -> Tensor:
    """`images` [n, 1, H, W] in [0, 1], changed by draws per image, the same in every call."""
    # torchvision's transforms take no generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = [change(image, strength, 1 if k % 2 else -1) for k, image in enumerate(images)]
    return torch.stack(out).clamp(0, 1)


def normalised(images: Tensor) -> Tensor:
    """The model's input for pixels in [0, 1]."""
    return (images - DIGIT_VIEW.mean[0]) / DIGIT_VIEW.std[0]


def drawn(count: int, *, first: int = 0) -> tuple[ls.ExecutionOrder, ...]:
    """`count` random orders, beginning with draw number `first`."""
    return tuple(ls.Shuffled().draw(12, seed=0, step=first + step) for step in range(count))


def top1(
    model: nn.Module, images: Tensor, labels: Tensor, orders: Sequence[ls.ExecutionOrder]
) -> float:
    """Top-1 in percent on pixels in [0, 1], the mean over `orders`."""
    scores = ls.evaluate(model, [(normalised(images), labels)], orders=list(orders))
    return mean([score.top1 for score in scores])


def attack_gradient(
    model: nn.Module, images: Tensor, labels: Tensor, orders: Sequence[ls.ExecutionOrder]
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy [n] of each image over `orders`, and its gradient [n, 1, H, W]."""
    images = images.detach().requires_grad_()
    losses = torch.zeros(len(images))
    for order in orders:
        with ls.running(model, order):
            logits = logits_of(model(normalised(images)))
        losses = losses + functional.cross_entropy(logits, labels, reduction="none") / len(orders)
    (gradient,) = torch.autograd.grad(losses.sum(), images)
    return losses.detach(), gradient


def attacked(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    orders_at: Callable[[int], Sequence[ls.ExecutionOrder]],
    *,
    radius: float,
    steps: int = STEPS,
    restarts: int = RESTARTS,
) -> Tensor:
    """Images in [0, 1] attacked by projected gradient descent (L-inf, arXiv 1706.06083).

    The loss of step k is the mean over `orders_at(k)`. With a single drawn order the attack would
    fit that order, and another draw would look robust; likewise, but less, with the same orders in
    every step. The restart with the highest loss, in orders of its own, is used for each image.
    """
    generator = torch.Generator().manual_seed(0)
    worst, most = images.clone(), torch.full((len(images),), -torch.inf)
    for _ in range(restarts):
        noise = torch.rand(images.shape, generator=generator)
        current = (images + radius * (2 * noise - 1)).clamp(0, 1)
        for step in range(steps):
            _, gradient = attack_gradient(model, current, labels, orders_at(step))
            current = current + 2.5 * radius / steps * gradient.sign()
            current = (images + (current - images).clamp(-radius, radius)).clamp(0, 1)
        losses, _ = attack_gradient(model, current, labels, orders_at(steps))
        better = losses > most
        most = torch.where(better, losses, most)
        worst[better] = current[better]
    return worst


def in_order(_: int) -> tuple[ls.ExecutionOrder, ...]:
    """Orders of an attacker who knows that the blocks run in order."""
    return SEQUENTIAL


def many_orders(step: int) -> tuple[ls.ExecutionOrder, ...]:
    """Orders of an attacker who averages over new ones in every step, none of which is scored."""
    return drawn(AVERAGED_ORDERS, first=JUDGED_ORDERS + AVERAGED_ORDERS * (1 + step))


def split_images(split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` pairs of a split: pixels in [0, 1] and labels."""
    pairs = DigitPairs(split, count)
    return pairs.canvases.float() / LEVELS, pairs.labels


def chosen_radius(studies: Sequence[Path]) -> float:
    """The first of `RADII` that takes ordinary models below `HALF` percent on validation pairs.

    Raises `RuntimeError` if none does.
    """
    images, labels = split_images("validation", ATTACKED)
    for radius in RADII:
        scores = []
        for seed in SEEDS:
            model = loaded(studies, "baseline", seed)
            worst = attacked(model, images, labels, in_order, radius=radius)
            scores.append(top1(model, worst, labels, SEQUENTIAL))
        if mean(scores) < HALF:
            return radius
    raise RuntimeError("no radius halves the accuracy of the ordinary models")


def measure_changed(studies: Sequence[Path], arms: Sequence[str]) -> Iterator[ChangedRow]:
    """Score every corruption and shift at five strengths, in order and in random orders."""
    images, labels = split_images("test", IMAGES)
    cells = {
        name: [changed(images, change, strength) for strength in strengths]
        for name, (change, strengths) in (CORRUPTIONS | SHIFTS).items()
    } | {"none": [images] * 5}
    for arm in arms:
        for seed in SEEDS:
            model = loaded(studies, arm, seed)
            for name, levels in cells.items():
                for word, orders in (("sequential", SEQUENTIAL), ("arbitrary", drawn(2))):
                    if (arm, word) not in CELLS:
                        continue
                    scores = [round(top1(model, level, labels, orders), 2) for level in levels]
                    fields = {f"at{k}": score for k, score in enumerate(scores, start=1)}
                    yield ChangedRow(arm=arm, seed=seed, change=name, order=word, **fields)
            print(f"changed: {arm}, seed {seed}", flush=True)


def measure_attacks(
    studies: Sequence[Path], arms: Sequence[str], *, radius: float, seed: int
) -> Iterator[AttackRow]:
    """Score attacks that know the order, average over orders, or use another model."""
    images, labels = split_images("test", ATTACKED)
    judges = drawn(JUDGED_ORDERS)
    ordinary = loaded(studies, "baseline", seed)
    foreign = attacked(ordinary, images, labels, in_order, radius=radius)
    for arm in arms:
        model = loaded(studies, arm, seed)
        every = SEQUENTIAL if arm in IN_ORDER else judges
        informed = foreign
        if arm != "baseline":
            informed = attacked(
                model, images, labels, lambda _, answering=every: answering[:1], radius=radius
            )
        cases = {"none": (images, every), "order known": (informed, every[:1])}
        if arm not in IN_ORDER:
            averaged = attacked(model, images, labels, many_orders, radius=radius)
            cases["order drawn"] = (averaged, every)
        if arm != "baseline":
            cases["transfer"] = (foreign, every)
        for attack, (worst, orders) in cases.items():
            score = top1(model, worst, labels, orders)
            yield AttackRow(
                arm=arm, seed=seed, attack=attack, radius=round(radius, 4), top1=round(score, 2)
            )
        print(f"attacks: {arm}, seed {seed}", flush=True)


def error_of(
    rows: Sequence[Mapping[str, str]], arm: str, order: str, changes: Sequence[str]
) -> dict[int, float]:
    """The mean error in percent over `changes` and their strengths, by the seed of the model."""
    errors: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if (row["arm"], row["order"]) == (arm, order) and row["change"] in changes:
            errors[int(row["seed"])] += [100 - float(row[f"at{k}"]) for k in range(1, 6)]
    return {seed: mean(values) for seed, values in errors.items()}


def relative_error(
    rows: Sequence[Mapping[str, str]], arm: str, order: str, changes: Sequence[str]
) -> float:
    """The error divided by that of ordinary training in order, the mean over `changes`.

    This is the "mean corruption error" of arXiv 1903.12261, which gives hard kinds equal weight.
    """
    ratios = []
    for change in changes:
        errors = mean(error_of(rows, arm, order, [change]))
        ratios.append(errors / mean(error_of(rows, "baseline", "sequential", [change])))
    return mean(ratios)


Errors = Mapping[int, float]  # in percent, by the seed of the model


def more_errors(errors: Errors, usual: Errors) -> str:
    """The difference in points, paired by model, and the verdict; fewer errors are better."""
    judged = verdict(compare(usual, errors))
    return f"{interval(compare(errors, usual))} **{judged}**"


def changed_table() -> str:
    """The table of every arm's mean errors and their difference to those of ordinary training.

    Also of the errors added to those on clean images. An arm with more errors on clean images has
    fewer right answers to lose.
    """
    scores = rows_of("changed.csv")
    groups = {"clean": ["none"], "corrupted": [*CORRUPTIONS], "shifted": [*SHIFTS]}
    ordinary = {name: error_of(scores, "baseline", "sequential", groups[name]) for name in groups}
    head = ["arm", "order", "clean"]
    for name in ("corrupted", "shifted"):
        head += [name, "relative", "beside ordinary training", "added"]
    rows = []
    for arm, order in CELLS:
        errors = {name: error_of(scores, arm, order, groups[name]) for name in groups}
        cells = [LABELS[arm], ORDER_WORDS[order], f"{mean(errors['clean']):.1f}"]
        for name in ("corrupted", "shifted"):
            cells.append(f"{mean(errors[name]):.1f}")
            cells.append(f"{relative_error(scores, arm, order, groups[name]):.2f}")
            added, usual = (
                {seed: table[name][seed] - table["clean"][seed] for seed in errors[name]}
                for table in (errors, ordinary)
            )
            judged = [more_errors(errors[name], ordinary[name]), more_errors(added, usual)]
            cells += ["", ""] if arm == "baseline" else judged
        rows.append(cells)
    return markdown_table(head, rows, align="llr" + "rrll" * 2)


def by_change_table() -> str:
    """The table of every arm's mean error under each kind of change, over its strengths."""
    scores = rows_of("changed.csv")
    cells = [(arm, order) for arm, order in CELLS if arm in USUAL]  # more would be too wide
    names = [f"{LABELS[arm]}, {ORDER_WORDS[order]}" for arm, order in cells]
    rows = []
    for change in (*CORRUPTIONS, *SHIFTS):
        errors = [f"{mean(error_of(scores, arm, order, [change])):.1f}" for arm, order in cells]
        rows.append([change, *errors])
    return markdown_table(["change", *names], rows, align="l" + "r" * len(names))


ATTACKS = ("none", "order known", "order drawn", "transfer")


def attack_table() -> str:
    """The table of top-1 under every attack, with the lowest and the highest of three models."""
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows_of("attacks.csv"):
        values[row["arm"], row["attack"]][int(row["seed"])] = float(row["top1"])
    rows = []
    for arm in MEASURED:
        cells = [LABELS[arm]]
        for attack in ATTACKS:
            scores = values[arm, attack]
            cells.append("")
            if scores:
                low, high = min(scores.values()), max(scores.values())
                cells[-1] = f"{mean(scores):.1f} ({low:.1f} to {high:.1f})"
        own = (arm, "order known" if arm in IN_ORDER else "order drawn")
        pairs = [(own, (arm, "order known")), (own, ("baseline", "order known"))]
        for sample, reference in (*pairs, ((arm, "transfer"), (arm, "none"))):
            cells.append("")
            if sample != reference and values[sample]:
                gap = compare(values[sample], values[reference])
                cells[-1] = f"{interval(gap)} **{verdict(gap)}**"
        rows.append(cells)
    head = ["arm", *ATTACKS, "drawn less known", "less ordinary training", "transfer less none"]
    return markdown_table(head, rows, align="l" + "r" * len(ATTACKS) + "lll")


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    page = with_marked(page, "changed", changed_table())
    page = with_marked(page, "by-change", by_change_table())
    return with_marked(page, "attacks", attack_table())


def measure(studies: Sequence[Path]) -> None:
    """Measure the arms that the results lack, and add them to the existing rows."""
    kept = {
        name: [row(**fields) for fields in rows_of(name)] if (RESULTS / name).exists() else []
        for name, row in (("changed.csv", ChangedRow), ("attacks.csv", AttackRow))
    }
    arms = [arm for arm in MEASURED if arm not in {row.arm for row in kept["changed.csv"]}]
    keep("changed.csv", [*kept["changed.csv"], *measure_changed(studies, arms)])
    before = kept["attacks.csv"]
    arms = [arm for arm in MEASURED if arm not in {row.arm for row in before}]
    if before:  # rows have it rounded to four digits
        radius = min(RADII, key=lambda candidate: abs(candidate - float(before[0].radius)))
    else:
        radius = chosen_radius(studies)
    fresh = (measure_attacks(studies, arms, radius=radius, seed=seed) for seed in SEEDS)
    keep("attacks.csv", [*before, *chain.from_iterable(fresh)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        measure([Path(directory) for directory in sys.argv[1:]])
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
