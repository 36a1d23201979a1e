"""`layershuffle eval MODEL --data SPEC`: score a model under many execution orders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from layershuffle.cli.command import ComputingCommand, Inline
from layershuffle.errors import UsageError
from layershuffle.settings import EvalSettings
from layershuffle.text import counted, counted_as, table

if TYPE_CHECKING:
    from layershuffle.core.evaluation import Score
    from layershuffle.scoring import Evaluation


@dataclass(frozen=True)
class EvalCommand(ComputingCommand):
    """Score a model under many execution orders, in one pass over the data.

    Prints a table with a row per mode.
    """

    model: str
    """Directory of a fit, or any model spec: bundled:digits, timm:NAME, dir:PATH and others."""
    _: KW_ONLY
    data: str
    """Images to score; their test split is read: digit-pairs, formula, folder:DIR,
    hf:NAME_OR_DIR, cifar100:DIR, wds:SHARDS."""
    order: str | None = None
    """Score this one execution order ("3,0,2") instead of drawn ones."""
    json: bool = False
    """Print JSON with every drawn order and its scores."""
    settings: Inline[EvalSettings] = field(default_factory=EvalSettings)

    def run(self) -> int:
        """Evaluate and print a table or JSON."""
        defaults = EvalSettings()
        for name in ("modes", "num_orders", "seed", "draw") if self.order is not None else ():
            if getattr(self.settings, name) != getattr(defaults, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"--order and {flag} exclude each other", hint="give one of them")

        from layershuffle.scoring import evaluate_spec

        with self.computing("eval") as progress:
            evaluation = evaluate_spec(
                self.model,
                self.data,
                settings=self.settings,
                order=self.order,
                device=self.device,
                progress=progress,
            )
        report = _report(evaluation, self.settings, model=self.model)
        print(json.dumps(report, indent=2) if self.json else _text(report))
        return 0


def _report(evaluation: Evaluation, settings: EvalSettings, *, model: str) -> dict[str, Any]:
    from layershuffle.machine import hardware, versions

    groups: dict[str, list[Score]] = {}  # in the order in which the modes were named
    for score in evaluation.scores:
        groups.setdefault(score.label, []).append(score)
    why = evaluation.precision_why
    return {
        "model": model,
        "data": evaluation.data.spec,
        "split": "test",
        "notes": [
            *evaluation.data.notes,
            *([f"precision {evaluation.precision}: {why}"] if why else []),
        ],
        "draw": f"one order per {settings.draw}",
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "blocks": evaluation.blocks,
        "modes": [
            score_report(name, scores, kept=scores[0].kept) for name, scores in groups.items()
        ],
        "hardware": hardware(evaluation.precision),
        "versions": versions(),
    }


def score_report(name: str, scores: Sequence[Score], *, kept: int | None) -> dict[str, Any]:
    """The scores of one model as JSON values: mean, spread and interval of each metric, and each
    score with its orders."""
    from layershuffle.stats import estimate

    metrics = ("top1", "top5", "cross_entropy")
    return {
        "mode": name,
        "kept": kept,
        "orders": len(scores),
        "images": scores[0].images,
        **{
            metric: asdict(
                estimate(
                    # One model: its interval covers orders, or images where there is one order.
                    {0: [getattr(score, metric) for score in scores]},
                    images=scores[0].images,
                    effective=getattr(scores[0], f"{metric}_n", None),
                    percent=metric != "cross_entropy",
                )
            )
            for metric in metrics
        },
        "scores": [
            {
                # With an order per batch there is no single one; such passes list batch_orders.
                "order": None if score.order is None else str(score.order),
                "batch_orders": [str(order) for order in score.batch_orders],
                **{metric: getattr(score, metric) for metric in metrics},
            }
            for score in scores
        ],
    }


def score_table(reports: Sequence[dict[str, Any]]) -> str:
    """A row for each report of `score_report`, and what the columns mean."""
    rows = []
    for report in reports:
        top1, spread = report["top1"], report["top1"]["sd_orders"]
        rows.append(
            (
                # Broken at a colon, because a table wraps anywhere: "passes=2:paralle" and "l=3".
                re.sub(r"(.{20,30}:)", r"\1\n", report["mode"]),
                "-" if report["kept"] is None else str(report["kept"]),
                str(report["orders"]),
                f"{top1['mean']:.2f}",
                # A single order has no spread, and 0 would claim that all orders agree.
                "-" if spread is None else f"{spread:.2f}",
                f"{top1['low']:.1f} to {top1['high']:.1f}",
                f"{report['top5']['mean']:.2f}",
                f"{report['cross_entropy']['mean']:.3f}",
            )
        )
    over_images = [r["top1"]["effective"] for r in reports if r["top1"]["kind"] == "images"]
    single = f"; of one order or equal scores Wilson over the images, {counted_as(over_images)}"
    header = ("mode", "kept", "orders", "top-1 %", "sd", "95 %", "top-5 %", "CE")
    return (
        f"{table(header, rows)}\n{counted(reports[0]['images'], 'image')} each. sd: over orders. "
        f"95 %: t-interval over orders, of these images{single if over_images else ''}. --json "
        "lists the orders."
    )


def _text(report: dict[str, Any]) -> str:
    reason = report["blocks"]["reason"]
    head = (
        f"{report['model']} on {report['data']}, {report['draw']}, seed {report['seed']}, "
        f"{report['hardware']['precision']}, "
        + ("compiled blocks" if reason is None else f"eager mode: {reason}")
    )
    return "\n".join([head, score_table(report["modes"]), *report["notes"]])
