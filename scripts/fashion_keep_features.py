"""Refine the real backbone by `anyorder`, with its features kept near those of the untouched model.

    python scripts/real_backbone.py data/fashion-dinov2
    python scripts/fashion_keep_features.py data/fashion-dinov2 RUN --fixed 2,2

The loop of docs/own-loop.md ("Keep the features") on the data, the steps and the rate of the recipe
`fashion-ends`. Saves the last state in RUN, and adds its row to
docs/results/tables/fashion-dinov2-kept.csv: top-1 in percent on the 10,000 test images, three
orders a mode, as in that recipe. `scripts/fashion_features.py` scores its features.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import layershuffle as ls
from layershuffle.data import open_data
from layershuffle.data.splits import ImageData
from layershuffle.models import image_view
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings
from layershuffle.training.loop import epoch_rows

TABLE = Path(__file__).resolve().parent.parent / "docs/results/tables/fashion-dinov2-kept.csv"
CLASSES = 10
BATCH = 64
WARMUP = 50  # steps
RATE = 2.5e-5
MODES = {"in_order": "sequential", "any_order": "arbitrary", "six": "kept:6:arbitrary"}
SCORED = 3220232092  # seed of the drawn orders of that recipe's scores


class LogitsAndFeatures(nn.Module):
    """A classifier that returns what it reads behind its logits: `[n, classes + width]`."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, features: Tensor) -> Tensor:
        """Logits, then features."""
        return torch.cat([self.classifier(features), features], dim=-1)


def right_and_near(both: Tensor, labels: Tensor, *, features: Tensor, weight: float) -> Tensor:
    """The cross-entropy, and how far the features are from those of the untouched model."""
    nearness = F.cosine_similarity(both[:, CLASSES:], features, dim=-1).mean()
    return F.cross_entropy(both[:, :CLASSES], labels) + weight * (1 - nearness)


def divergence(early: Tensor, final: Tensor) -> Tensor:
    """The KL divergence of the classes at the exit from those at the end."""
    taught = early[:, :CLASSES].log_softmax(-1)
    own = final[:, :CLASSES].log_softmax(-1)
    return F.kl_div(taught, own, log_target=True, reduction="batchmean")


def rate_share(step: int, *, steps: int) -> float:
    """The learning rate of a step as a share of the highest one: a warm-up, half a cosine."""
    if step < WARMUP:
        return step / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def batches(data: ImageData, *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images `[64, 3, 56, 56]` and labels, epoch after epoch, without end."""
    images = data.splits["train"].dataset
    for epoch in count():
        rows = epoch_rows(data.splits["train"].size, seed=seed, epoch=epoch)
        for start in range(0, len(rows), BATCH):
            pixels, labels = zip(*(images[row] for row in rows[start : start + BATCH]), strict=True)
            yield data.finish(torch.stack(pixels)), torch.tensor(labels)


def trained(asked: argparse.Namespace, data: ImageData) -> nn.Module:
    """The model after the last step."""
    untouched = ls.load(f"dir:{asked.place / 'base'}").eval()
    model = ls.load(f"dir:{asked.place / 'base'}")
    method = ls.Method("anyorder", seed=asked.seed, fixed=asked.fixed)
    stream = batches(data, seed=asked.seed)
    model = method.prepare(model, data.finish(data.splits["train"].dataset[0][0][None]))
    model.classifier = LogitsAndFeatures(model.get_submodule("classifier"))
    seen: list[Tensor] = []
    untouched.get_submodule("classifier").register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].float())
    )
    optimiser = AdamW(model.parameters(), lr=RATE, eps=1e-6, weight_decay=0.0, fused=True)
    schedule = LambdaLR(optimiser, partial(rate_share, steps=asked.steps))
    model.train()
    for step, (images, labels) in enumerate(islice(stream, asked.steps)):
        with torch.autocast("cpu", torch.bfloat16):
            seen.clear()
            with torch.no_grad():
                untouched(images)
            near = partial(right_and_near, features=seen[0], weight=asked.weight)
            loss = method.loss(model, images, labels, step=step, criterion=(near, divergence))
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}, loss {loss.item():.3f}", flush=True)
    model.classifier = model.classifier.classifier
    return model.eval()


def main() -> None:
    """Train, save and score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", type=Path, help="the directory of scripts/real_backbone.py")
    parser.add_argument("run", type=Path, help="a new directory for the model")
    parser.add_argument("--fixed", type=ends, default=(1, 1), metavar="FIRST,LAST")
    parser.add_argument("--weight", type=float, default=3.0, help="of the features in the loss")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    spec = f"hf:{asked.place / 'data'}"
    base = ls.load(f"dir:{asked.place / 'base'}")
    ls.save(trained(asked, open_data(spec, image_view(base))), asked.run)
    scores = evaluate_spec(
        f"dir:{asked.run}",
        spec,
        settings=EvalSettings(
            modes=",".join(MODES.values()),
            num_orders=3,
            seed=SCORED,
            precision="bf16",
            batch_size=500,
        ),
    ).scores
    row = {"fixed": "{},{}".format(*asked.fixed), "weight": f"{asked.weight:g}"}
    row |= {"steps": str(asked.steps), "seed": str(asked.seed)}
    for column, mode in MODES.items():
        row[column] = f"{mean(score.top1 for score in scores if score.label == mode):.2f}"
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


def ends(text: str) -> tuple[int, int]:
    """The two numbers of --fixed."""
    first, last = text.split(",")
    return int(first), int(last)


if __name__ == "__main__":
    main()
