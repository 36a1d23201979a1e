"""Questions that the paper leaves open, each with the option's name, its default, and this study's
value.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import EvalSettings, FitSettings, Settings
from layershuffle.study.paper.markdown import grid, section
from layershuffle.study.paper.tables import unique
from layershuffle.study.settings import StudySettings


def open_choices(study: StudySettings) -> str:
    """The section on the questions A1 to A19 with this study's answers."""
    rows = (
        (number, text, option, *_answers(study, paths, method))
        for number, text, option, paths, method in QUESTIONS
    )
    return section(
        "What the paper leaves open, and what was done here",
        "What has an option can be changed in the recipe. A7 is fixed because a block's work must "
        "not depend on blocks that come after it; A2 and A9 are how this report counts.",
        grid(("", "Question", "Option", "Default", "This study"), rows),
    )


def _answers(study: StudySettings, paths: str, method: str) -> tuple[str, str]:
    """(default, the study's values) of options, `KIND: NAME, NAME; ...`; other text is an answer.

    `method`: the arms that have the option; several values if they differ.
    """
    if ":" not in paths:
        return paths, paths
    arms = [arm for arm in study.arms if method in ("", arm.method)]
    # Model and data are required, but no question is about them.
    kept = 1 if method == "truncated" else None  # required by this method
    fit = FitSettings(method=method or "layershuffle", model="none", data="none", kept=kept)
    defaults: list[str] = []
    values: list[str] = []
    for part in paths.split("; "):
        kind, _, names = part.partition(": ")
        settings: dict[str, tuple[Settings, list[Settings], str]] = {
            # Settings do not depend on the seed, so the first one is enough.
            "fit": (
                fit,
                [study.fit_settings(arm, study.seeds_of(arm)[0]) for arm in arms],
                "not in this study",
            ),
            "scores": (EvalSettings(), [study.evaluate_settings(arm) for arm in study.arms], ""),
            "merges": (MergingSettings(), [m.options for m in study.merging], "no merging"),
        }
        default, used, nothing = settings[kind]
        title = f"{kind}: " if values else ""
        defaults.append(title + _show(default, names))
        values.append(title + ("; ".join(unique(_show(each, names) for each in used)) or nothing))
    return "; ".join(defaults), "; ".join(values)


def _show(settings: Settings, names: str) -> str:
    """The settings at these dotted paths, each with its name."""
    texts = []
    for path in names.split(", "):
        value: Any = attrgetter(path)(settings)
        # With spaces, so a long list of modes can be wrapped.
        text = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
        texts.append(f"{path} {text if isinstance(value, tuple) else text.replace(',', ', ')}")
    return ", ".join(texts)


# The numbers never change, because pages, the log and decisions refer to them.
QUESTIONS: tuple[tuple[str, str, str, str, str], ...] = (
    ("A1", "When does the order change in evaluation?", "evaluate.draw, evaluate.num_orders",
     "scores: draw, num_orders", ""),
    ("A2", "What does +- vary over?", "(fixed)", "models and orders, each printed", ""),
    ("A3", "Position table: per block or shared, which start?", "fit.encoding.table, .table_init",
     "fit: encoding.table, encoding.table_init", "layershuffle-position"),
    ("A4", "Projection of the position encoding at the start",
     "fit.encoding.projection_init, .dropout",
     "fit: encoding.projection_init, encoding.dropout", "layershuffle-position"),
    ("A5", "What the position is predicted from", "fit.prediction.pooling",
     "fit: prediction.pooling", "layershuffle-predict"),
    ("A6", "Position loss: sum or mean over blocks, weight. The text has the sum, the authors' "
     "code the mean; the sum outweighs the class loss (research/decisions/003-position-parts.md)",
     "fit.prediction.loss, .weight",
     "fit: prediction.loss, prediction.weight", "layershuffle-predict"),
    ("A7", "Positions of a pruned model", "(fixed)", "0 to kept-1, as the blocks run", ""),
    ("A8", "Which blocks are kept", "evaluate.modes (kept:K:ORDER:CHOICE)", "scores: modes", ""),
    ("A9", "Axis of Figure 1: blocks removed or kept", "(fixed)", "blocks kept", ""),
    ("A10", "Which pretrained blocks seed a reduced-depth model, how it is trained",
     "fit.choose, fit.steps, fit.lr", "fit: choose, steps, epochs, lr", "truncated"),
    ("A11", "May two blocks of a merge come from one model?",
     "merging.options.replacement, .merges", "merges: replacement, merges", ""),
    ("A12", "Stem and head of a merge", "merging.options.ends", "merges: ends", ""),
    ("A13", "Execution order of a merge; orders and average of an ensemble",
     "merging.options.draw, .ensemble_orders, .ensemble_combine",
     "merges: draw, ensemble_orders, ensemble_combine", ""),
    ("A14", "What the checkpoint is picked on", "fit.paper_protocol, fit.holdout, fit.select_by",
     "fit: paper_protocol, holdout, select_by", ""),
    ("A15", "Preprocessing and augmentation", "fit.resize, fit.augment",
     "fit: resize, augment", ""),
    ("A16", "Which checkpoint is refined", "model", "fit: model", ""),
    ("A17", "Schedule, clipping, weight decay, precision",
     "fit.schedule, .warmup, .clip, .weight_decay, .precision; evaluate.precision, "
     "merging.options.precision",
     "fit: schedule, warmup, clip, weight_decay, precision; scores: precision; merges: precision",
     ""),
    ("A18", "Scope of an order under accumulation", "fit.accumulate", "fit: accumulate", ""),
    ("A19", "Batch size of each arm", "fit.batch_size", "fit: batch_size", ""),
)  # fmt: skip
