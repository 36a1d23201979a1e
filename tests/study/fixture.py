"""A made-up study on disk: four arms, seeded scores near those of the digit-pairs prototype."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import DIGITS_VIT
from layershuffle.ground.rows import MergingRow, ScoreRow
from layershuffle.study.plan import make_plan, read_plan, write_plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_stored, record
from layershuffle.study.tasks import RunSpec

DEPTH, IMAGES = 12, 5000
# sequential at 12, arbitrary at 12, arbitrary at 9 / 6 / 3, sequential at 9 / 6 / 3
LEVELS = {
    "baseline": (89.9, 3.3, 3.3, 3.3, 2.6, 24.0, 6.1, 2.4),
    "layershuffle": (81.9, 74.5, 55.5, 29.7, 9.9, 57.6, 31.0, 10.4),
    "layerdrop": (88.7, 4.1, 4.0, 3.7, 3.0, 78.2, 47.9, 9.8),
    "layershuffle-depth": (78.4, 76.9, 71.3, 60.2, 31.5, 72.0, 61.1, 32.2),
}
CONDITIONS = [
    ("sequential", 12),
    ("arbitrary", 12),
    *(("arbitrary", kept) for kept in (9, 6, 3)),
    *(("sequential", kept) for kept in (9, 6, 3)),
]

# Unlike the made-up study, this one is small enough to be run.
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": DIGITS_VIT,
    "data": "digit-pairs?train=64&validation=32&test=32",
    "arms": [{"method": "baseline"}, {"method": "layershuffle"}],
    "fit": {"steps": 4, "batch_size": 16, "lr": 1e-3, "eval_every": 2, "log_every": 1},
    "evaluate": {"modes": "sequential,arbitrary,kept:2:arbitrary", "num_orders": 2},
}


def done_here(study: StudySettings, out: Path) -> None:
    """Do every task of a study in this process, because new processes import for seconds."""
    write_plan(study, out)
    for task in make_plan(study).tasks:
        record(task, out, say=lambda text, share: None)


def results(out: Path) -> dict[str, Any]:
    """The rows of scores of every finished task."""
    return read_stored(out).rows


class Told:
    """A task whose result is told, and not worked out."""

    def __init__(self, name: str, **result: Any) -> None:
        self.name, self._rows = name, result.pop("rows", ())
        self._facts = result

    def run(self, out: Path, say: Any) -> Any:
        return SimpleNamespace(rows=tuple(self._rows), model_dump=lambda mode: self._facts)


def tell(out: Path, name: str, **result: Any) -> None:
    """Finish a task of the study in `out` with these facts and `rows`."""
    record(Told(name, **result), out, say=lambda text, share: None)  # type: ignore[arg-type]


def run_of(out: Path, name: str) -> RunSpec:
    """The run of this name in the plan of `out`."""
    return next(run for run in make_plan(read_plan(out)).runs if run.name == name)


def write_study(
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    orders: int = 20,
    arms: dict[str, str] | None = None,
    undone: Sequence[str] = (),
    failed: dict[str, str] | None = None,
    hostile: str = "",
    more_arms: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> Path:
    """Write a study into `out`; `arms` maps arm to method, `undone` and `failed` name runs.

    `more_arms` are planned and not written. `fields` are further ones of the recipe, as `merging`.
    """
    arms = arms or {arm: arm.removesuffix("-depth") for arm in LEVELS}
    study = StudySettings(
        name="digits-quick",
        model="bundled:digits",
        data=f"digit-pairs{hostile}",
        seeds=seeds,
        arms=[*({"method": method, "name": arm} for arm, method in arms.items()), *more_arms],
        fit={"steps": 1500, "batch_size": 64, "lr": 0.001, "warmup": 50},
        evaluate={"modes": "sequential,arbitrary", "num_orders": orders},
        **fields,
    )
    write_plan(study, out)
    for task in make_plan(study).runs:
        if task.name in (failed or {}):
            task.directory(out).mkdir(parents=True)
            (task.directory(out) / "failure.txt").write_text((failed or {})[task.name])
        elif task.name not in undone and task.arm in arms:
            tell(out, task.name, **facts(task, hostile=hostile), rows=run_rows(task, orders))
    return out


def write_merging(out: Path, arm: str, rows: Sequence[MergingRow]) -> None:
    """Finish a merging task of the study in `out`."""
    plan = make_plan(read_plan(out))
    (task,) = (task for task in plan.mergings if task.arm == arm)
    rows = [row.model_copy(update={"arm": arm}) for row in rows]
    tell(out, task.name, donors=list(task.needs), rows=rows)


def merging_rows(donors: Sequence[float], merges: Sequence[float]) -> list[MergingRow]:
    """Scores of single models, merges, a soup and two ensembles."""

    def row(kind: Any, index: int, top1: float, name: str = "", main: int = 1) -> MergingRow:
        return MergingRow(
            kind=kind,
            index=index,
            name=name,
            ends="average" if kind == "merge" else "",
            donors="0,1",
            mode="arbitrary",
            order="1,0",
            n=1000,
            top1=top1,
            top5=top1 + 1,
            cross_entropy=1.0,
            main=main,
        )

    return [
        *(row("donor", i, top1, f"dir:{i}") for i, top1 in enumerate(donors)),
        *(row("merge", i, top1) for i, top1 in enumerate(merges)),
        row("soup", 0, 50.0, "uniform"),
        row("ensemble", 0, 80.0, "logits-independent"),
        row("ensemble", 1, 79.0, "logits-same", main=0),
    ]


def run_rows(task: RunSpec, orders: int) -> list[ScoreRow]:
    # An arm with options has its own level; others have that of their method, whatever their name.
    seed, arm = task.settings.seed, task.arm
    method = arm if arm == "layershuffle-depth" else task.settings.method
    noise = random.Random(f"{method}-{seed}")
    shift, rows = noise.gauss(0, 0.8), []
    for (mode, kept), level in zip(CONDITIONS, LEVELS[method], strict=True):
        alone = (mode, kept) == ("sequential", DEPTH)
        for k in range(1 if alone else orders):
            order = random.Random(f"order-{k}").sample(range(DEPTH), DEPTH)[:kept]
            order = sorted(order) if mode == "sequential" else order
            spread = 0.3 if alone else min(3.0, level / 4)
            top1 = min(99.9, max(0.2, level + shift * level / 80 + noise.gauss(0, spread)))
            top1 = 100 * round(top1 * IMAGES / 100) / IMAGES
            row = ScoreRow(
                method=arm,
                seed=seed,
                mode=mode,
                kept=kept,
                choose="" if kept == DEPTH else "random",
                order_seed=k,
                order=",".join(map(str, order)),
                n=IMAGES,
                top1=top1,
                top5=min(100.0, top1 + 8.5),
                cross_entropy=1.0,
            )
            rows.append(row)
    return rows


def facts(
    task: RunSpec,
    *,
    hostile: str = "",
    steps: int = 1500,
) -> dict[str, Any]:
    noise = random.Random(f"facts-{task.name}")
    mode = "arbitrary" if task.settings.method.startswith("layershuffle") else "sequential"
    return {
        "finished": "2026-11-21T05:00:00Z",
        "train_seconds": round(noise.uniform(140, 160), 1),
        "eval_seconds": round(noise.uniform(18, 25), 1),
        "steps": steps,
        "selected": {
            "step": 1450,
            "metric": f"holdout cross-entropy, {mode} orders",
            "value": round(noise.uniform(0.3, 0.9), 4),
        },
        "paper_protocol": False,
        "data": {
            "spec": f"digit-pairs{hostile}",
            "classes": 100,
            "sizes": {"train": 20000, "holdout": 2000, "test": 5000},
            "notes": [f"digits split by instance before pairs are made{hostile}"],
        },
        "hardware": {"processor": "x86_64, 2.5 GHz", "gpu": None},
    }
