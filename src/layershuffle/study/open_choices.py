"""What the paper leaves open: each question with the option's name, its default, and this study's
value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import EvalSettings, FitSettings
from layershuffle.study.settings import StudySettings
from layershuffle.study.tables import Section, Table

_FIXED = "(fixed)"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One silence of the paper. `options`: what to set; `of`: (default, this study's value)."""

    number: str
    text: str
    options: str
    of: Callable[[StudySettings], tuple[str, str]]


def open_choices(study: StudySettings) -> Section:
    """The questions A1 to A19 with what this study answers."""
    rows = []
    for question in QUESTIONS:
        default, used = question.of(study)
        rows.append((question.number, question.text, question.options, default, used))
    return Section(
        title="What the paper leaves open, and what was done here",
        sentences=(
            "What has an option can be changed in the recipe. A7 is fixed because a block's work "
            "must not depend on blocks that come after it; A2 and A9 are how this report counts.",
        ),
        tables=(
            Table(
                head=("", "Question", "Option", "Default", "This study"),
                rows=tuple(rows),
            ),
        ),
    )


def _evaluate(*names: str) -> Callable[[StudySettings], tuple[str, str]]:
    def of(study: StudySettings) -> tuple[str, str]:
        used = [_shown(study.evaluate_settings(arm), names) for arm in study.arms]
        return _shown(EvalSettings(), names), "; ".join(dict.fromkeys(used))

    return of


def _fit(*names: str, method: str = "") -> Callable[[StudySettings], tuple[str, str]]:
    """The values in the runs of a method, or of all; several where the arms differ."""

    def of(study: StudySettings) -> tuple[str, str]:
        kept = 1 if method == "truncated" else None
        name = method or "layershuffle"
        bare = FitSettings(method=name, model="none", data="none", kept=kept)
        arms = [arm for arm in study.arms if method in ("", arm.method)]
        used = [_shown(study.fit_settings(arm, study.seeds_of(arm)[0]), names) for arm in arms]
        return _shown(bare, names), "; ".join(dict.fromkeys(used)) or "not in this study"

    return of


def _numerics(study: StudySettings) -> tuple[str, str]:
    trained = _fit("schedule", "warmup", "clip", "weight_decay", "precision")(study)
    scored = _evaluate("precision")(study)
    merged = _merging("precision")(study)
    default, used = (
        f"{fit}; scores: {one}; merges: {other}"
        for fit, one, other in zip(trained, scored, merged, strict=True)
    )
    return default, used


def _merging(*names: str) -> Callable[[StudySettings], tuple[str, str]]:
    def of(study: StudySettings) -> tuple[str, str]:
        default = _shown(MergingSettings(), names)
        used = "no merging" if study.merging is None else _shown(study.merging.options, names)
        return default, used

    return of


def _always(text: str) -> Callable[[StudySettings], tuple[str, str]]:
    def of(study: StudySettings) -> tuple[str, str]:
        del study
        return text, text

    return of


def _shown(settings: object, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {_plain(_value(settings, name))}" for name in names)


def _value(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def _plain(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


QUESTIONS = (
    Question(
        number="A1", text="When does the order change in evaluation?",
        options="evaluate.draw, evaluate.num_orders", of=_evaluate("draw", "num_orders"),
    ),
    Question(
        number="A2", text="What does +- vary over?", options=_FIXED,
        of=_always("models and orders, each printed"),
    ),
    Question(
        number="A3", text="Position table: per block or shared, which start?",
        options="fit.encoding.table, .table_init",
        of=_fit("encoding.table", "encoding.table_init", method="layershuffle-position"),
    ),
    Question(
        number="A4", text="Projection of the position encoding at the start",
        options="fit.encoding.projection_init, .dropout",
        of=_fit("encoding.projection_init", "encoding.dropout", method="layershuffle-position"),
    ),
    Question(
        number="A5", text="What the position is predicted from", options="fit.prediction.pooling",
        of=_fit("prediction.pooling", method="layershuffle-predict"),
    ),
    Question(
        number="A6", text="Position loss: sum or mean over blocks, weight",
        options="fit.prediction.loss, .weight",
        of=_fit("prediction.loss", "prediction.weight", method="layershuffle-predict"),
    ),
    Question(
        number="A7", text="Positions of a pruned model", options=_FIXED,
        of=_always("0 to kept-1, as the blocks run"),
    ),
    Question(
        number="A8", text="Which blocks are kept", options="evaluate.modes (kept:K:ORDER:CHOICE)",
        of=_evaluate("modes"),
    ),
    Question(
        number="A9", text="Axis of Figure 1: blocks removed or kept", options=_FIXED,
        of=_always("blocks kept"),
    ),
    Question(
        number="A10", text="Which pretrained blocks seed a reduced-depth model, how it is trained",
        options="fit.choose, fit.steps, fit.lr",
        of=_fit("choose", "steps", "epochs", "lr", method="truncated"),
    ),
    Question(
        number="A11", text="May two blocks of a merge come from one model?",
        options="merging.options.replacement, .merges",
        of=_merging("replacement", "merges"),
    ),
    Question(
        number="A12", text="Stem and head of a merge", options="merging.options.ends",
        of=_merging("ends"),
    ),
    Question(
        number="A13", text="Execution order of a merge; orders and average of an ensemble",
        options="merging.options.draw, .ensemble_orders, .ensemble_combine",
        of=_merging("draw", "ensemble_orders", "ensemble_combine"),
    ),
    Question(
        number="A14", text="What the checkpoint is picked on",
        options="fit.paper_protocol, fit.holdout, fit.select_by",
        of=_fit("paper_protocol", "holdout", "select_by"),
    ),
    Question(
        number="A15", text="Preprocessing and augmentation", options="fit.resize, fit.augment",
        of=_fit("resize", "augment"),
    ),
    Question(
        number="A16", text="Which checkpoint is refined", options="model",
        of=_fit("model"),
    ),
    Question(
        number="A17", text="Schedule, clipping, weight decay, precision",
        options="fit.schedule, .warmup, .clip, .weight_decay, .precision; evaluate.precision, "
        "merging.options.precision",
        of=_numerics,
    ),
    Question(
        number="A18", text="Scope of an order under accumulation", options="fit.accumulate",
        of=_fit("accumulate"),
    ),
    Question(
        number="A19", text="Batch size of each arm", options="fit.batch_size",
        of=_fit("batch_size"),
    ),
)  # fmt: skip
