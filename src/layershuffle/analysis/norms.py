"""Does a block switch itself off where it is out of place? (paper, section 5: "further analysis")

A block adds two vectors to every token of the stream, from its attention and its MLP. Their L2
norms, and the ratios to the norm of the token, are averaged over tokens and images per (block,
position). The vectors are computed from the stream: a pre-norm block passes the stream to a norm
before each branch, so a branch adds the difference between the inputs of two successive norms. This
includes all scales after the branch (LayerScale).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import exp
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor, nn

from layershuffle.analysis.position_table import (
    Floats,
    PositionMeans,
    draw_maps,
    evenly,
    home_less_elsewhere,
    interval,
    position_table,
    read_map,
)
from layershuffle.analysis.results import Measurement, Tables, with_interval
from layershuffle.analysis.subject import DoesNotApply, Subject
from layershuffle.core.hooks import Step
from layershuffle.core.stack import blocks_of
from layershuffle.core.tensors import in_float64

# Names of the attention module in the model libraries; other children keep their names.
_NAMES = {"attn": "attention", "self_attn": "attention", "self_attention": "attention"}

_SWITCHED_OFF = 2.0  # a block that adds half as much away from home counts as switched off


@dataclass(frozen=True)
class Branch:
    """One branch of a block: input `stream` and update `added`, `[batch, tokens, width]`."""

    name: str
    stream: Tensor
    added: Tensor


@dataclass
class BranchWatch:
    """Splits the update of every block into its branches.

    Use it as a context manager, within which the blocks have torch hooks. `branches` are those of
    the block that ran last. Raises `DoesNotApply` for blocks that are not a sequence of pre-norm
    branches.
    """

    model: nn.Module
    branches: list[Branch] = field(default_factory=list)
    _seen: list[tuple[str, nn.Module, Tensor | None]] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> BranchWatch:
        for block in blocks_of(self.model):
            self._hooks.append(block.register_forward_pre_hook(self._start))
            self._hooks.append(block.register_forward_hook(self._finish))
            for name, child in block.named_children():
                note = partial(self._note, name)
                self._hooks.append(child.register_forward_pre_hook(note))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _start(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = [("", block, inputs[0])]

    def _note(self, name: str, child: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen.append((name, child, inputs[0] if inputs else None))

    def _finish(self, block: nn.Module, _inputs: tuple[Any, ...], out: Any) -> None:
        (_, _, start), *calls = self._seen
        norms = []
        points = []
        for number, (_, child, point) in enumerate(calls):
            if "Norm" in type(child).__name__:
                norms.append(number)
                points.append(point)
        # The first norm must get the block's input, or a computation before it would belong to no
        # branch.
        if len(points) < 2 or norms[0] != 0 or points[0] is not start:
            raise _not_in_branches(block)
        ends = [*points[1:], out[0] if isinstance(out, tuple) else out]
        self.branches = []
        for index, stream, end in zip(norms, points, ends, strict=True):
            # If a norm is followed by another norm or by nothing, it is not at the start of a
            # branch, and the difference between two inputs is not one branch.
            if index + 1 == len(calls) or index + 1 in norms or stream is None or end is None:
                raise _not_in_branches(block)
            name = calls[index + 1][0]
            self.branches.append(Branch(_NAMES.get(name, name), stream, end - stream))


def _not_in_branches(block: nn.Module) -> DoesNotApply:
    return DoesNotApply(
        f"{type(block).__name__} is not made of branches in a row that begin with a norm each "
        "(x + attention(norm(x)), then x + mlp(norm(x))), so what they add cannot be separated"
    )


@dataclass
class _NormMeans:
    """A block hook with running means per branch of the norm of the update, and of its ratio.

    `first` is the number of the first image of the current batch.
    """

    watch: BranchWatch
    drawn: range
    first: int = 0
    means: dict[str, dict[str, PositionMeans]] = field(default_factory=dict)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Return the input unchanged."""
        del step
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """Add the norms of the block that just ran."""
        del state
        for branch in self.watch.branches:
            # In float64, because squares of 768 fp32 numbers are summed and then divided.
            norm = in_float64(branch.added).norm(dim=-1)
            ratio = norm / in_float64(branch.stream).norm(dim=-1)
            for name, value in (("norm", norm), ("ratio", ratio)):
                means = self.means.setdefault(branch.name, {})
                mean = means.setdefault(name, PositionMeans(self.drawn))
                mean.add(step.block, step.position, values=value.mean(-1), first=self.first)


def measure(subject: Subject) -> Measurement:
    """norms.csv: branch, block, position, norm (of what is added), ratio (to that of the stream).

    norm_half and ratio_half are half their 95 % intervals. Numbers of a branch: its mean ratio, and
    how many times as large that is at home positions as elsewhere.
    """
    with BranchWatch(subject.model) as watch:
        sums = _NormMeans(watch, subject.drawn)
        for batch in subject.batches():
            sums.first = batch.first
            for order in batch.orders:
                subject.run(batch.images, order, sums)
    clusters = subject.clusters(by_batch=True)
    count = len(subject.drawn)
    tables = []
    branches = {}
    for name, means in sums.means.items():
        columns: dict[str, Floats] = {}
        for column, mean in means.items():
            columns |= mean.columns(column, clusters)
        tables.append(position_table(columns, drawn=subject.drawn, branch=name))
        ratio = columns["ratio"]
        home = home_less_elsewhere(count)
        # Of logarithms, because blocks and positions change a ratio by a factor. Their derivative
        # is 1 / ratio.
        factor = float((np.log(ratio) * home).sum())
        log_bounds = interval(factor, means["ratio"].half_width(clusters, home / ratio))
        ratio_half = means["ratio"].half_width(clusters, evenly(count))
        branches[name] = {
            "ratio": float(ratio.mean()),
            "home_factor": exp(factor),
            "intervals": {
                "ratio": interval(float(ratio.mean()), ratio_half),
                "home_factor": log_bounds and {end: exp(v) for end, v in log_bounds.items()},
            },
        }
    facts = {**subject.counts, "branches": branches}
    return Measurement(tables={"norms": pd.concat(tables, ignore_index=True)}, facts=facts)


MEANINGS = {
    "branch": "what adds to the stream: the block's attention or its MLP",
    "norm": "L2 norm of what the branch adds to a token, mean over tokens and images",
    "ratio": "that norm as a share of the norm of the token to which it is added",
    "home factor": "the ratio at a block's own place, as a multiple of that elsewhere",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: how much more a block adds where it is at home."""
    parts = []
    verdict = "No"
    for name, facts in measured.facts["branches"].items():
        factor = with_interval(facts, "home_factor", form=".2f")
        parts.append(f"{name} adds {factor} times as much at a block's own place as elsewhere")
        bounds = facts["intervals"]["home_factor"]
        if facts["home_factor"] >= _SWITCHED_OFF:
            verdict = "Yes"
        elif bounds and bounds["low"] > 1 and verdict == "No":
            verdict = "Hardly"
    return f"{verdict}: {', and '.join(parts)}."


def figures(tables: Tables) -> dict[str, Figure]:
    """norms.svg: per branch the ratio to the stream, and the norm itself."""
    maps = []
    for name, rows in tables["norms"].groupby("branch", sort=False):
        for column, title, meaning in (
            ("ratio", "share of the stream", "|added| / |stream|"),
            ("norm", "norm of what is added", "L2 norm"),
        ):
            maps.append(read_map(rows, column, title=f"{name}: {title}", meaning=meaning))
    return {"norms": draw_maps(maps)}
