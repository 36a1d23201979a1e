"""Can the position of a block be read from its output, and from its input?

If the model has a prediction part, its accuracy is measured (paper, section 4.2: 99.99 %). For
every model, a linear classifier per block (discriminant analysis with a shrunk covariance) is
fitted on frozen tokens of held-out training images and scored on test images. Its features are
those of the prediction part: the token that the part pools (without a part, the mean of all
tokens), normalised. It is fitted on the block's output, like the part, and on its input, which
shows how much of the position is in the stream before the block runs. The input is recorded before
a position encoding is added.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from layershuffle.analysis.features import FeatureWatch, Token, Turn
from layershuffle.analysis.position_table import (
    Clusters,
    Interval,
    PositionMeans,
    draw_maps,
    evenly,
    interval,
    position_table,
    read_map,
    refuse_gaps,
)
from layershuffle.analysis.results import Measurement, Tables, with_interval
from layershuffle.analysis.subject import Batch, Subject
from layershuffle.core.position import Guesses, PositionedModel
from layershuffle.ground.stats import independent_images, wilson_interval

_SHARE = 0.5  # orders per image for fitting, as a share of the depth
_SOURCES = {"input": "probe on the block's input", "output": "probe on the block's output"}
_PART = "the model's own prediction part"


def measure(subject: Subject) -> Measurement:
    """position.csv: source, block, position, accuracy (% of test images), accuracy_half.

    The last is half the 95 % interval of the accuracy.
    """
    probes = _fit(subject)
    means = {name: PositionMeans(subject.drawn) for name in _SOURCES.values()}
    for batch in subject.batches():
        _score(subject, batch, probes, means)
    clusters = subject.clusters(by_batch=True)
    tables = []
    sources = {}
    for source, mean in means.items():
        columns = mean.columns("accuracy", clusters)
        tables.append(position_table(columns, drawn=subject.drawn, source=source))
        sources[source] = {
            "accuracy": float(mean.mean().mean()),
            "intervals": {"accuracy": _bounds(mean, clusters)},
        }
    facts = {
        **subject.counts,
        "chance": 100.0 / len(subject.drawn),
        "sources": sources,
    }
    return Measurement(tables={"position": pd.concat(tables, ignore_index=True)}, facts=facts)


def _bounds(accuracy: PositionMeans, clusters: Clusters) -> Interval:
    values = accuracy.mean()
    half = accuracy.half_width(clusters, evenly(len(values)))
    if clusters is not None and half == 0:
        # If all or none are right, the spread is 0, but other images may be wrong.
        independent = float(independent_images(np.zeros(len(clusters)), clusters))
        low, high = wilson_interval(values.mean(), independent)
        return {"low": low, "high": high}
    return interval(float(values.mean()), half, limits=(0.0, 100.0))


def _probed_token(model: nn.Module) -> Token:
    part = model.prediction if isinstance(model, PositionedModel) else None
    return "mean" if part is None else part.form.pooling


def _probed(turn: Turn, token: Token) -> dict[str, Tensor]:
    """The features of the probes of input and output, `[rows, width]`.

    They are normalised as in the prediction part, but without its scale and shift, which a linear
    classifier can represent.
    """
    vectors = {"input": turn.vectors["input"], "output": turn.vectors[token]}
    probed = {}
    for source, rows in vectors.items():
        probed[source] = F.layer_norm(rows, rows.shape[-1:])
    return probed


def _fit(subject: Subject) -> dict[tuple[str, int], Any]:
    """A fitted classifier per (source, block), for the blocks that do not keep their place."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    token = _probed_token(subject.model)
    vectors: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    positions: dict[int, list[int]] = defaultdict(list)
    for batch in subject.batches(split="holdout", share=_SHARE):
        for order in batch.orders:
            watch = FeatureWatch((token,), inputs=True)
            subject.run(batch.images, order, watch)
            for turn in watch.turns:
                if turn.step.block not in subject.drawn:
                    continue
                positions[turn.step.block] += [turn.step.position] * len(batch.images)
                for source, rows in _probed(turn, token).items():
                    vectors[source, turn.step.block].append(rows)
    # A probe would never name a position that it did not see.
    refuse_gaps(sum(len({*seen}) for seen in positions.values()), depth=len(subject.drawn))
    probes = {}
    for number, (key, features) in enumerate(vectors.items()):
        subject.progress("probes", number, len(vectors))
        # Shrunk, because there may be more features than images; a closed form needs no seed.
        probe = make_pipeline(
            StandardScaler(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
        )
        probes[key] = probe.fit(torch.cat(features).numpy(), np.array(positions[key[1]]))
    return probes


def _score(
    subject: Subject,
    batch: Batch,
    probes: dict[tuple[str, int], Any],
    means: dict[str, PositionMeans],
) -> None:
    """Count the correct predictions of the probes, and of the prediction part if there is one."""
    token = _probed_token(subject.model)
    for order in batch.orders:
        watch = FeatureWatch((token,), inputs=True)
        guessing: AbstractContextManager[Guesses | None] = nullcontext()
        if isinstance(subject.model, PositionedModel) and subject.model.prediction is not None:
            guessing = subject.model.guessing()
        with guessing as guesses:
            subject.run(batch.images, order, watch)
        for turn in watch.turns:
            block = turn.step.block
            position = turn.step.position
            if block not in subject.drawn:
                continue
            # A probe per block, because a common one would have to recognise the block first.
            for source, rows in _probed(turn, token).items():
                predicted = probes[source, block].predict(rows.numpy())
                right = 100.0 * torch.from_numpy(predicted == position)
                means[_SOURCES[source]].add(block, position, values=right, first=batch.first)
        for guess in guesses.items if guesses else ():
            block = guess.step.block
            position = guess.step.position
            right = 100.0 * (guess.logits.argmax(-1) == position)
            # Only models with a prediction part have this source.
            part = means.setdefault(_PART, PositionMeans(subject.drawn))
            part.add(block, position, values=right, first=batch.first)


MEANINGS = {
    "source": "what reads the position, and from what",
    "accuracy": "share of images whose position is read right, in percent",
    "chance": "that share by guessing",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: the accuracy of every reader beside chance."""
    facts = measured.facts
    parts = []
    better = False
    for source, numbers in facts["sources"].items():
        parts.append(f"{source}: {with_interval(numbers, 'accuracy', form='.0f')} %")
        bounds = numbers["intervals"]["accuracy"]
        better = better or bool(bounds and bounds["low"] > facts["chance"])
    verdict = "Yes, better than by guessing" if better else "Not that these images show"
    return f"{verdict} ({facts['chance']:.0f} % right): {'; '.join(parts)}."


def figures(tables: Tables) -> dict[str, Figure]:
    """position.svg: accuracy per block and position, a map per source."""
    maps = []
    for source, rows in tables["position"].groupby("source", sort=False):
        maps.append(
            read_map(rows, "accuracy", title=source, meaning="right (%)", limits=(0.0, 100.0))
        )
    return {"position": draw_maps(maps, columns=3)}
