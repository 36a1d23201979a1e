"""Questions that the paper leaves open, each with the option's name, its default, and this study's
value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import EvalSettings, FitSettings
from layershuffle.study.paper.markdown import grid, section
from layershuffle.study.paper.tables import unique
from layershuffle.study.settings import StudySettings

Answerer = Callable[[StudySettings], tuple[str, str]]
"""A function from a study to (default, the study's value)."""


def open_choices(study: StudySettings) -> str:
    """The section on the questions A1 to A19 with this study's answers."""
    rows = ((number, text, option, *answer(study)) for number, text, option, answer in QUESTIONS)
    return section(
        "What the paper leaves open, and what was done here",
        "What has an option can be changed in the recipe. A7 is fixed because a block's work must "
        "not depend on blocks that come after it; A2 and A9 are how this report counts.",
        grid(("", "Question", "Option", "Default", "This study"), rows),
    )


def _show(settings: Any, *paths: str) -> str:
    """The settings at these dotted paths, each with its name."""
    texts = []
    for path in paths:
        value = settings
        for name in path.split("."):
            value = getattr(value, name)
        # With spaces, so a long list of modes can be wrapped.
        text = (
            "/".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(",", ", ")
        )
        texts.append(f"{path} {text}")
    return ", ".join(texts)


def _evaluate(*paths: str) -> Answerer:
    def answer(study: StudySettings) -> tuple[str, str]:
        used = (_show(study.evaluate_settings(arm), *paths) for arm in study.arms)
        return _show(EvalSettings(), *paths), "; ".join(unique(used))

    return answer


def _fit(*paths: str, method: str = "") -> Answerer:
    """The values in the runs of a method, or of all methods; several if the arms differ."""

    def answer(study: StudySettings) -> tuple[str, str]:
        # Model and data are required, but no question is about them.
        default = FitSettings(
            method=method or "layershuffle",
            model="none",
            data="none",
            kept=1 if method == "truncated" else None,  # required by this method
        )
        # Settings do not depend on the seed, so the first one is enough.
        arms = [arm for arm in study.arms if method in ("", arm.method)]
        used = (_show(study.fit_settings(arm, study.seeds_of(arm)[0]), *paths) for arm in arms)
        return _show(default, *paths), "; ".join(unique(used)) or "not in this study"

    return answer


def _merging(*paths: str) -> Answerer:
    def answer(study: StudySettings) -> tuple[str, str]:
        used = unique(_show(merging.options, *paths) for merging in study.merging)
        return _show(MergingSettings(), *paths), "; ".join(used) or "no merging"

    return answer


def _numerics(study: StudySettings) -> tuple[str, str]:
    answers = (
        _fit("schedule", "warmup", "clip", "weight_decay", "precision")(study),
        _evaluate("precision")(study),
        _merging("precision")(study),
    )
    default, used = (
        "{}; scores: {}; merges: {}".format(*texts) for texts in zip(*answers, strict=True)
    )
    return default, used


def _always(text: str) -> Answerer:
    return lambda _: (text, text)


# The numbers never change, because pages, the log and decisions refer to them.
QUESTIONS: tuple[tuple[str, str, str, Answerer], ...] = (
    ("A1", "When does the order change in evaluation?", "evaluate.draw, evaluate.num_orders",
     _evaluate("draw", "num_orders")),
    ("A2", "What does +- vary over?", "(fixed)", _always("models and orders, each printed")),
    ("A3", "Position table: per block or shared, which start?", "fit.encoding.table, .table_init",
     _fit("encoding.table", "encoding.table_init", method="layershuffle-position")),
    ("A4", "Projection of the position encoding at the start",
     "fit.encoding.projection_init, .dropout",
     _fit("encoding.projection_init", "encoding.dropout", method="layershuffle-position")),
    ("A5", "What the position is predicted from", "fit.prediction.pooling",
     _fit("prediction.pooling", method="layershuffle-predict")),
    ("A6", "Position loss: sum or mean over blocks, weight. The text has the sum, the authors' "
     "code the mean; the sum outweighs the class loss (docs/decisions/003-position-parts.md)",
     "fit.prediction.loss, .weight",
     _fit("prediction.loss", "prediction.weight", method="layershuffle-predict")),
    ("A7", "Positions of a pruned model", "(fixed)", _always("0 to kept-1, as the blocks run")),
    ("A8", "Which blocks are kept", "evaluate.modes (kept:K:ORDER:CHOICE)", _evaluate("modes")),
    ("A9", "Axis of Figure 1: blocks removed or kept", "(fixed)", _always("blocks kept")),
    ("A10", "Which pretrained blocks seed a reduced-depth model, how it is trained",
     "fit.choose, fit.steps, fit.lr", _fit("choose", "steps", "epochs", "lr", method="truncated")),
    ("A11", "May two blocks of a merge come from one model?",
     "merging.options.replacement, .merges", _merging("replacement", "merges")),
    ("A12", "Stem and head of a merge", "merging.options.ends", _merging("ends")),
    ("A13", "Execution order of a merge; orders and average of an ensemble",
     "merging.options.draw, .ensemble_orders, .ensemble_combine",
     _merging("draw", "ensemble_orders", "ensemble_combine")),
    ("A14", "What the checkpoint is picked on", "fit.paper_protocol, fit.holdout, fit.select_by",
     _fit("paper_protocol", "holdout", "select_by")),
    ("A15", "Preprocessing and augmentation", "fit.resize, fit.augment",
     _fit("resize", "augment")),
    ("A16", "Which checkpoint is refined", "model", _fit("model")),
    ("A17", "Schedule, clipping, weight decay, precision",
     "fit.schedule, .warmup, .clip, .weight_decay, .precision; evaluate.precision, "
     "merging.options.precision", _numerics),
    ("A18", "Scope of an order under accumulation", "fit.accumulate", _fit("accumulate")),
    ("A19", "Batch size of each arm", "fit.batch_size", _fit("batch_size")),
)  # fmt: skip
