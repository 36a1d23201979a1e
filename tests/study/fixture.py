"""A made-up study on disk: four arms, seeded scores near those of the digit-pairs prototype."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import BboxBase

from layershuffle.results import MergingRow, ScoreRow, write_rows
from layershuffle.study.plan import RunSpec, runs_of, tasks_of, write_plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.worker import execute

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
    "model": "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=32&depth=4&num_heads=2&mlp_ratio=2",
    "data": "digit-pairs?train=64&validation=32&test=32",
    "arms": [{"method": "baseline"}, {"method": "layershuffle"}],
    "fit": {"steps": 4, "batch_size": 16, "lr": 1e-3, "eval_every": 2, "log_every": 1},
    "evaluate": {"modes": "sequential,arbitrary,kept:2:arbitrary", "num_orders": 2},
}


def done_here(study: StudySettings, out: Path) -> None:
    """Do every task of a study in this process, because new processes import for seconds."""
    write_plan(study, out)
    for task in tasks_of(study):
        task.directory(out).mkdir(parents=True)
        execute(task, out)


def results(out: Path) -> dict[str, str]:
    """The scores of every finished run, as they are on disk."""
    return {path.parent.name: path.read_text() for path in sorted(out.glob("runs/*/results.csv"))}


def write_study(
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    orders: int = 20,
    arms: dict[str, str] | None = None,
    undone: Sequence[str] = (),
    failed: dict[str, str] | None = None,
    draw: str = "pass",
    hostile: str = "",
    name: str = "digits-quick",
    more_arms: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> Path:
    """Write a study into `out`; `arms` maps arm to method, `undone` and `failed` name runs.

    `more_arms` are planned and not written. `fields` are further ones of the recipe, as `merging`.
    """
    arms = arms or {arm: arm.removesuffix("-depth") for arm in LEVELS}
    study = StudySettings(
        name=name,
        model="bundled:digits",
        data=f"digit-pairs{hostile}",
        seeds=seeds,
        arms=[*({"method": method, "name": arm} for arm, method in arms.items()), *more_arms],
        fit={"steps": 1500, "batch_size": 64, "lr": 0.001, "warmup": 50},
        evaluate={"modes": "sequential,arbitrary", "num_orders": orders, "draw": draw},
        **fields,
    )
    write_plan(study, out)
    for task in runs_of(study):
        if task.name in undone or task.arm not in arms:
            continue
        task.directory(out).mkdir(parents=True)
        if task.name in (failed or {}):
            (task.directory(out) / "failure.txt").write_text((failed or {})[task.name])
        else:
            write_run(out, task, run_rows(task, orders, draw), hostile=hostile)
    return out


def write_run(out: Path, task: RunSpec, rows: list[ScoreRow], **fields: Any) -> None:
    """Write the files of a finished run."""
    write_rows(task.directory(out) / "results.csv", rows, padded=False)
    (task.directory(out) / "result.json").write_text(json.dumps(facts(task, **fields), indent=1))


def write_merging(out: Path, arm: str, rows: Sequence[MergingRow]) -> None:
    """Finish a merging task of the study in `out`."""
    directory = out / "merging" / arm
    directory.mkdir(parents=True)
    write_rows(directory / "results.csv", rows, padded=False)
    (directory / "result.json").write_text(json.dumps({"schema": 1, "name": f"merging-{arm}"}))


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


def run_rows(task: RunSpec, orders: int, draw: str) -> list[ScoreRow]:
    # An arm with options has its own level; others have that of their method, whatever their name.
    method, seed = task.settings.method, task.settings.seed
    method = task.arm if task.arm == "layershuffle-depth" else method
    noise = random.Random(f"{method}-{seed}")
    shift = noise.gauss(0, 0.8)
    rows = []
    for (mode, kept), level in zip(CONDITIONS, LEVELS[method], strict=True):
        for k in range(1 if (mode, kept) == ("sequential", DEPTH) else orders):
            shuffled = random.Random(f"order-{k}").sample(range(DEPTH), DEPTH)[:kept]
            order = sorted(shuffled) if mode == "sequential" else shuffled
            spread = 0.3 if (mode, kept) == ("sequential", DEPTH) else min(3.0, level / 4)
            top1 = min(99.9, max(0.2, level + shift * level / 80 + noise.gauss(0, spread)))
            correct = round(top1 * IMAGES / 100)
            rows.append(
                ScoreRow(
                    method=task.arm,
                    seed=seed,
                    mode=mode,
                    kept=kept,
                    choose="" if kept == DEPTH else "random",
                    order_seed=k,
                    order=",".join(map(str, order)) if draw == "pass" else "",
                    n=IMAGES,
                    top1=100 * correct / IMAGES,
                    top5=min(100.0, 100 * correct / IMAGES + 8.5),
                    cross_entropy=round(4.6 * (1 - top1 / 105), 4),
                    draw=draw,
                )
            )
    return rows


def facts(
    task: RunSpec,
    *,
    hostile: str = "",
    steps: int = 1500,
    held_out: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    method = task.settings.method
    noise = random.Random(f"facts-{task.name}")
    arbitrary = method.startswith("layershuffle")
    return {
        "schema": 1,
        "run": task.name,
        "arm": task.arm,
        "method": method,
        "seed": task.settings.seed,
        "settings_hash": f"{noise.getrandbits(64):016x}",
        "finished": "2026-11-21T05:00:00Z",
        "train_seconds": round(noise.uniform(140, 160), 1),
        "eval_seconds": round(noise.uniform(18, 25), 1),
        "images_per_second": round(noise.uniform(600, 700), 1),
        "steps": steps,
        "selected": {
            "step": noise.choice([1400, 1450, 1500]),
            "metric": f"holdout cross-entropy, {'arbitrary' if arbitrary else 'sequential'} orders",
            "value": round(noise.uniform(0.3, 0.9), 4) if held_out is None else held_out,
        },
        "paper_protocol": False,
        "settings": {
            "method": method,
            "steps": steps,
            "batch_size": 64,
            "lr": 0.001,
            "precision": "fp32",
            "policy": {"policy": "shuffled" if arbitrary else "sequential", "drop": None},
            **settings,
        },
        "data": {
            "spec": f"digit-pairs{hostile}",
            "classes": 100,
            "sizes": {"train": 20000, "holdout": 2000, "test": 5000},
            "notes": [f"digits split by instance before pairs are made{hostile}"],
        },
        "hardware": {
            "processor": "x86_64, 2.5 GHz",
            "cores": 2,
            "threads": 1,
            "gpu": None,
            "precision": "fp32",
        },
        "versions": {
            "layershuffle": "0.1.0",
            "torch": "2.9.1",
            "timm": "1.0.22",
            "transformers": "5.9.0",
            "python": "3.11.2",
        },
    }


def outside(figure: Figure) -> list[BboxBase]:
    """Artists beyond the edge of the canvas, measured by matplotlib's renderer."""
    figure.canvas.draw()
    legends = [legend for part in figure.subfigs for legend in part.legends]
    boxes = [*(a.get_tightbbox() for a in figure.axes), *(x.get_window_extent() for x in legends)]
    right, top = figure.bbox.width + 0.5, figure.bbox.height + 0.5
    return [box for box in boxes if min(box.p0) < -0.5 or box.x1 > right or box.y1 > top]
