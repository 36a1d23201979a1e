"""`layershuffle compare RUN RUN`: what differs between two runs, in settings and in scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from layershuffle.cli.command import ComputingCommand, Inline, Reporting
from layershuffle.cli.words import MODEL
from layershuffle.ground.bundled import packaged_file
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import counted, table
from layershuffle.models.metadata import METADATA_FILE, read_record
from layershuffle.models.spec import parse_spec
from layershuffle.scoring.settings import EvalSettings

if TYPE_CHECKING:
    from layershuffle.scoring.paired import PairedScore

_WIDEST = 30  # characters of a setting in the table


@dataclass(frozen=True)
class CompareCommand(ComputingCommand, Reporting):
    """Compare two runs: the settings that differ, and scores in pairs.

    Both models run along the same orders on the same images, so most of what moves one score moves
    the other, too, and the difference is known more exactly than the scores.
    """

    first: Annotated[str, MODEL]
    """Directory of a fit, or any model spec."""
    second: Annotated[str, MODEL]
    """The one to compare with it."""
    _: KW_ONLY
    data: str | None = None
    """Images to score; their test split is read (default: those of the runs, if both have the
    same)."""
    settings: Inline[EvalSettings] = field(default_factory=EvalSettings)

    def run(self) -> int:
        """Score both, then print a table of settings, one of scores, and a sentence."""
        for spec in (self.first, self.second):
            parse_spec(spec)  # a misspelt path is none without a record
        ours = settings_of(self.first)
        theirs = settings_of(self.second)
        data = self.data or self._common_images(ours, theirs)

        from layershuffle.scoring.evaluate_spec import evaluate_spec
        from layershuffle.scoring.paired import paired_scores

        with self.computing("compare") as progress:
            evaluations = []
            for spec in (self.first, self.second):
                evaluations.append(
                    evaluate_spec(
                        spec, data, settings=self.settings, device=self.device, progress=progress
                    )
                )
        first, second = evaluations
        if first.depth != second.depth:
            raise UsageError(
                f"The models have {first.depth} and {second.depth} blocks, so they have no orders "
                "in common",
                hint="score each: layershuffle eval",
            )
        split = first.data.splits["test"]
        scores = paired_scores(first.scores, second.scores, split=split)
        known = bool(ours and theirs)
        differing = different(ours, theirs) if known else {}
        report = {
            "first": self.first,
            "second": self.second,
            "data": data,
            "images": split.size,
            "seed": self.settings.seed,
            "settings": {name: list(values) for name, values in differing.items()},
            "scores": [asdict(score) for score in scores],
        }
        self.show(report, _text(self, scores, differing if known else None, images=split.size))
        return 0

    def _common_images(self, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
        """The images that both were trained on, by the settings of both."""
        for spec, settings in ((self.first, ours), (self.second, theirs)):
            if "data" not in settings:
                raise UsageError(
                    "There is no record of the images that it was trained on",
                    place=spec,
                    hint="name the directory of a fit, or the images: --data SPEC",
                )
        if ours["data"] != theirs["data"]:
            raise UsageError(
                f"The runs were trained on different images: {ours['data']} and {theirs['data']}",
                hint="name those to score: --data SPEC",
            )
        return str(ours["data"])


def settings_of(spec: str) -> dict[str, Any]:
    """The settings that were in force in the training of a run or a saved model, by name.

    Settings of settings are named as their flags: encoding.table. Empty without a record.
    """
    from layershuffle.models.spec import model_directory

    place = model_directory(user_path(packaged_file(Path(spec.removeprefix("dir:")))))
    stored: dict[str, Any] = {}
    if (place / METADATA_FILE).is_file():
        stored = read_record(place).get("settings", {})
    flat: dict[str, Any] = {}
    for name, value in stored.items():
        if isinstance(value, dict):
            for part, inner in value.items():
                flat[f"{name}.{part}"] = inner
        else:
            flat[name] = value
    return flat


def different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, with both values; one that a run does not have is `None` there."""
    differing = {}
    for name in [*first, *(name for name in second if name not in first)]:
        values = (first.get(name), second.get(name))
        if values[0] != values[1]:
            differing[name] = values
    return differing


def _text(
    command: CompareCommand,
    scores: Sequence[PairedScore],
    differing: dict[str, tuple[Any, Any]] | None,
    *,
    images: int,
) -> str:
    lines = [f"first:  {command.first}", f"second: {command.second}", ""]
    if differing is None:
        lines.append("One of them has no record of its settings.")
    elif not differing:
        lines.append("All settings are the same.")
    else:
        settings = [(name, _shown(one), _shown(other)) for name, (one, other) in differing.items()]
        lines.append(table(("setting", "first", "second"), settings))
    rows = []
    for score in scores:
        rows.append(
            (
                score.mode,
                str(score.kept),
                str(score.orders),
                f"{score.first:.2f}",
                f"{score.second:.2f}",
                f"{score.difference:+.2f}",
                f"{score.low:+.2f} to {score.high:+.2f}",
            )
        )
    head = ("mode", "kept", "orders", "first %", "second %", "difference", "95 %")
    lines += [
        "",
        table(head, rows),
        f"{counted(images, 'image')} each, top-1, in pairs: both run "
        f"along the same orders (seed {command.settings.seed}). The interval is over images.",
    ]
    lines += [_sentence(score) for score in scores]
    return "\n".join(lines)


def _sentence(score: PairedScore) -> str:
    """What the row of a mode says."""
    if score.low <= 0 <= score.high:
        return f"{score.mode}: no difference that these images show."
    better = "second" if score.difference > 0 else "first"
    return f"{score.mode}: the {better} is right on {abs(score.difference):.1f} more of 100 images."


def _shown(value: Any) -> str:
    """A setting in a table: long ones lose their middle."""
    text = "-" if value is None else str(value)
    if len(text) <= _WIDEST:
        return text
    half = (_WIDEST - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
