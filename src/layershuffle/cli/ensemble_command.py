"""`layershuffle ensemble MODEL... --data SPEC`: the mean of several models' answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from layershuffle.cli.merge_command import take_models
from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError
from layershuffle.merging.settings import EnsembleSettings

if TYPE_CHECKING:
    from layershuffle.merging.ensembles import EnsembleScore

_ABOUT = (
    "Score the ensemble of several models: the mean of their answers. MODEL is the directory of a "
    "fit or any model spec. Also takes --data SPEC and --json."
)


def run(argv: Sequence[str]) -> int:
    """Score and print a paragraph, or JSON that holds every order."""
    data, words = take_option(argv, "--data")
    as_json = "--json" in words
    models, words = take_models([word for word in words if word != "--json"])
    settings = settings_from(
        EnsembleSettings, words, recipe=None, command="ensemble MODEL...", about=_ABOUT
    )
    if data is None or not models:
        raise UsageError(
            "ensemble needs models and --data SPEC",
            hint="models come first; layershuffle ensemble --help",
        )

    from layershuffle.merging.scoring import score_ensemble

    scores, notes = score_ensemble(models, data, settings=settings)
    report = {
        "models": models,
        "data": data,
        "settings": settings.model_dump(mode="json"),
        "images": scores[0].images,
        **_summary(scores),
        "scores": [_score(score) for score in scores],
        "notes": list(notes),
    }
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 0


def _summary(scores: Sequence[EnsembleScore]) -> dict[str, Any]:
    from layershuffle.stats import estimate

    return {
        name: asdict(
            estimate(
                {0: [getattr(score, name) for score in scores]},
                images=scores[0].images,
                percent=name != "cross_entropy",
            )
        )
        for name in ("top1", "top5", "cross_entropy")
    }


def _score(score: EnsembleScore) -> dict[str, Any]:
    return {
        "orders": [str(order) for order in score.member_orders],
        "top1": score.top1,
        "top5": score.top5,
        "cross_entropy": score.cross_entropy,
    }


def _text(report: dict[str, Any]) -> str:
    settings, top1, count = report["settings"], report["top1"], len(report["scores"])
    over = "orders (t-interval)" if top1["kind"] == "orders" else "images (Wilson)"
    spread = "" if top1["sd_orders"] is None else f", sd {top1['sd_orders']:.2f}"
    orders = "" if settings["mode"] == "sequential" else f" {settings['orders']}"
    lines = [
        f"Ensemble of {len(report['models'])} models on {report['data']}, mean "
        f"{settings['combine']}, {settings['mode']}{orders} orders, "
        f"{count} draw{'s' * (count > 1)}, {report['images']} images, {settings['precision']}",
        f"top-1 {top1['mean']:.2f} %{spread}, 95 % {top1['low']:.1f} to {top1['high']:.1f} over "
        f"{over}; top-5 {report['top5']['mean']:.2f} %; "
        f"cross-entropy {report['cross_entropy']['mean']:.3f}",
    ]
    return "\n".join([*lines, *report["notes"]])
