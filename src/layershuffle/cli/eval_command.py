"""`layershuffle eval DIR --data SPEC`: score a model under many execution orders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError
from layershuffle.settings import EvalSettings

if TYPE_CHECKING:
    from layershuffle.evaluation import Evaluation, Score

_ABOUT = (
    "Score a model under many execution orders, in one pass over the data. MODEL is the directory "
    "of a fit or any model spec. Also takes --data SPEC, --order 3,0,2 (that one order instead of "
    "the modes) and --json."
)


def run(argv: Sequence[str]) -> int:
    """Evaluate and print a table, or JSON that holds every drawn order."""
    data, words = take_option(argv, "--data")
    order, words = take_option(words, "--order")
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    wants_help = any(word in ("-h", "--help") for word in words)
    model, words = (None, words) if wants_help else _take_model(words)
    settings = settings_from(EvalSettings, words, recipe=None, command="eval MODEL", about=_ABOUT)
    if data is None or model is None:
        raise UsageError("eval needs a model and --data SPEC", hint="layershuffle eval --help")

    from layershuffle.evaluation import evaluate_spec

    evaluation = evaluate_spec(model, data, settings=settings, order=order)
    report = _report(evaluation, settings, model=model)
    print(json.dumps(report, indent=2) if as_json else _table(report))
    return 0


def _take_model(words: list[str]) -> tuple[str | None, list[str]]:
    if not words or words[0].startswith("-"):
        return None, words
    return words[0], words[1:]


def _report(evaluation: Evaluation, settings: EvalSettings, *, model: str) -> dict[str, Any]:
    from layershuffle.machine import hardware, versions

    groups: dict[str, list[Score]] = {}
    for score in evaluation.scores:
        groups.setdefault(score.label, []).append(score)
    return {
        "model": model,
        "data": evaluation.data.spec,
        "split": "test",
        "notes": list(evaluation.data.notes),
        "draw": f"one order per {settings.draw}",
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "blocks": evaluation.blocks,
        "modes": [_mode_report(name, group) for name, group in groups.items()],
        "hardware": hardware(settings.precision),
        "versions": versions(),
    }


def _mode_report(name: str, scores: list[Score]) -> dict[str, Any]:
    from layershuffle.stats import estimate

    images = scores[0].images
    return {
        "mode": name,
        "kept": scores[0].kept,
        "orders": len(scores),
        "images": images,
        "top1": asdict(estimate({0: [s.top1 for s in scores]}, images=images)),
        "top5": asdict(estimate({0: [s.top5 for s in scores]}, images=images)),
        "cross_entropy": asdict(
            estimate({0: [s.cross_entropy for s in scores]}, images=images, percent=False)
        ),
        "scores": [
            {
                "order": None if s.order is None else str(s.order),
                "batch_orders": [str(order) for order in s.batch_orders],
                "top1": s.top1,
                "top5": s.top5,
                "cross_entropy": s.cross_entropy,
            }
            for s in scores
        ],
    }


def _table(report: dict[str, Any]) -> str:
    head = (
        f"{'mode':<28}{'kept':>5}{'orders':>8}{'top-1 %':>9}{'sd':>6}{'95 %':>16}"
        f"{'top-5 %':>9}{'CE':>8}"
    )
    reason = report["blocks"]["reason"]
    lines = [
        f"{report['model']} on {report['data']}, {report['draw']}, seed {report['seed']}, "
        f"{report['hardware']['precision']}, "
        + ("compiled blocks" if reason is None else f"eager mode: {reason}"),
        head,
    ]
    for mode in report["modes"]:
        top1, spread = mode["top1"], mode["top1"]["sd_orders"]
        interval = f"{top1['low']:.1f} to {top1['high']:.1f}"
        lines.append(
            f"{mode['mode']:<28}{mode['kept']:>5}{mode['orders']:>8}{top1['mean']:>9.2f}"
            f"{'-' if spread is None else format(spread, '.2f'):>6}{interval:>16}"
            f"{mode['top5']['mean']:>9.2f}{mode['cross_entropy']['mean']:>8.3f}"
        )
    lines.append(
        f"{report['modes'][0]['images']} images each. sd: over orders. 95 %: t-interval over "
        "orders, Wilson interval over images where there is one order. --json lists the orders."
    )
    return "\n".join([*lines, *report["notes"]])
