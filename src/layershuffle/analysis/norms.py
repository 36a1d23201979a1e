"""Does a block switch itself off where it is out of place? (paper, section 5: "further analysis")

A block adds two vectors to every token of the stream: that of its attention and that of its MLP.
Their L2 norms, and their ratio to the norm of the token they are added to, are averaged over
tokens and images per (block, position). What is added is read off the stream itself: a pre-norm
block hands the stream to a norm before each branch, so a branch is the difference between what two
norms in a row were given. That holds whatever scales stand behind the branch (LayerScale).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from layershuffle.analysis.cells import Cells, cell_table, cells_of, draw_maps, home_effect, stacked
from layershuffle.analysis.results import Facts, Measured, Table, Tables
from layershuffle.analysis.subject import DoesNotApply, Subject
from layershuffle.hooks import Step
from layershuffle.stack import blocks_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"attn": "attention", "self_attn": "attention", "self_attention": "attention"}
_SAME = 1.1  # ratios nearer than ten percent are called equal
_OFF = 2.0  # a branch is called off elsewhere if it is at home more than twice what it is there


@dataclass(frozen=True)
class Branch:
    """What one branch of a block added: `stream` and `added` are `[batch, tokens, width]`."""

    name: str
    stream: Tensor
    added: Tensor


@dataclass
class BranchWatch:
    """Splits what every block adds to the stream into its branches. A part of the stack.

    Use it as a context manager: inside, the blocks carry hooks. `branches` are those of the block
    that ran last. Raises `DoesNotApply` for blocks that are not made of pre-norm branches in a row.
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
                note = self._note(name)
                self._hooks.append(child.register_forward_pre_hook(note))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _start(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = [("", block, inputs[0])]

    def _note(self, name: str) -> Any:
        def note(child: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._seen.append((name, child, inputs[0] if inputs else None))

        return note

    def _finish(self, block: nn.Module, _inputs: tuple[Any, ...], out: Any) -> None:
        (_, _, start), *calls = self._seen
        norms = [k for k, (_, child, _) in enumerate(calls) if "Norm" in type(child).__name__]
        points = [calls[k][2] for k in norms]
        if len(points) < 2 or norms[0] != 0 or points[0] is not start:
            raise _not_in_branches(block)
        ends = [*points[1:], out[0] if isinstance(out, tuple) else out]
        self.branches = []
        for at, stream, end in zip(norms, points, ends, strict=True):
            # A norm behind a branch, or beside one, is followed by another norm or by nothing.
            if at + 1 == len(calls) or at + 1 in norms or stream is None or end is None:
                raise _not_in_branches(block)
            name = calls[at + 1][0]
            self.branches.append(Branch(_NAMES.get(name, name), stream, end - stream))


def _not_in_branches(block: nn.Module) -> DoesNotApply:
    return DoesNotApply(
        f"{type(block).__name__} is not made of branches in a row that begin with a norm each "
        "(x + attention(norm(x)), then x + mlp(norm(x))), so what they add cannot be told apart"
    )


@dataclass
class _Sums:
    """Running means per branch of added norm, stream norm, and their ratio."""

    watch: BranchWatch
    depth: int
    means: dict[str, tuple[Cells, Cells, Cells]] = field(default_factory=dict)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Leaves the input alone."""
        del step
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """Adds up what the block that just ran has added."""
        del state
        for branch in self.watch.branches:
            added = branch.added.double().norm(dim=-1)
            stream = branch.stream.double().norm(dim=-1)
            cells = self.means.setdefault(
                branch.name, (Cells(self.depth), Cells(self.depth), Cells(self.depth))
            )
            for cell, value in zip(cells, (added, stream, added / stream), strict=True):
                cell.add(step.block, step.position, total=float(value.sum()), count=value.numel())


def measure(subject: Subject) -> Measured:
    """norms.csv: branch, block, position, norm (of what is added), stream, ratio."""
    images = orders = 0
    with BranchWatch(subject.model) as watch:
        sums = _Sums(watch, subject.depth)
        for batch in subject.batches():
            images, orders = images + len(batch.images), orders + len(batch.orders)
            for order in batch.orders:
                subject.run(batch.images, order, sums)
    tables = [
        cell_table(
            dict(zip(("norm", "stream", "ratio"), (c.mean() for c in cells), strict=True)),
            branch=name,
        )
        for name, cells in sums.means.items()
    ]
    table = stacked(tables)
    return Measured(tables={"norms": table}, facts=_facts(table, images, orders))


def _facts(table: Table, images: int, orders: int) -> Facts:
    branches = {}
    for name in dict.fromkeys(table.column("branch")):
        ratio = cells_of(table.where(branch=name), "ratio")
        stream = cells_of(table.where(branch=name), "stream")
        home = home_effect(np.log(ratio))
        branches[name] = {
            "ratio": float(ratio.mean()),
            "ratio_home": float(np.diag(ratio).mean()),
            "ratio_elsewhere": float(ratio[~np.eye(len(ratio), dtype=bool)].mean()),
            "home_factor": float(np.exp(home.excess)),
            "correlation_with_distance": home.correlation,
            "stream_first": float(stream[:, 0].mean()),
            "stream_last": float(stream[:, -1].mean()),
            "lowest_ratio": float(ratio.min()),
        }
    return {"images": images, "orders": orders, "branches": branches}


def paragraph(facts: Facts) -> str:
    """What the numbers say, in sentences."""
    first = next(iter(facts["branches"].values()))
    sentences = [
        f"Over {facts['images']} images and {facts['orders']} orders the norm of a token goes from "
        f"{first['stream_first']:.1f} at the first position to {first['stream_last']:.1f} at the "
        "last."
    ]
    for name, one in facts["branches"].items():
        sentences.append(
            f"The {name} branch adds {one['ratio']:.2f} of the stream's norm on average: "
            f"{one['ratio_home']:.2f} where a block runs at its home position, "
            f"{one['ratio_elsewhere']:.2f} elsewhere, never less than {one['lowest_ratio']:.2f}. "
            f"With differences between blocks and between positions taken out it is "
            f"{one['home_factor']:.2f} times as large at home as elsewhere (rank correlation with "
            f"the distance from home {one['correlation_with_distance']:+z.2f}): {_verdict(one)}."
        )
    return " ".join(sentences)


def _verdict(branch: dict[str, float]) -> str:
    factor = branch["home_factor"]
    if factor >= _OFF:
        return "blocks do switch it off where they are out of place"
    if factor >= _SAME:
        return "blocks turn it down where they are out of place, but not off"
    if factor <= 1 / _SAME:
        return "blocks turn it up where they are out of place"
    return "being out of place does not switch it off"


def figures(tables: Tables) -> dict[str, Figure]:
    """norms.svg: per branch the ratio to the stream, and the norm itself."""
    maps = []
    for name in dict.fromkeys(tables["norms"].column("branch")):
        rows = tables["norms"].where(branch=name)
        maps.append((f"{name}: share of the stream", "|added| / |stream|", cells_of(rows, "ratio")))
        maps.append((f"{name}: norm of what is added", "L2 norm", cells_of(rows, "norm")))
    return {"norms": draw_maps(maps)}
