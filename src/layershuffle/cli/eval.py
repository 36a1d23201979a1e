"""`layershuffle eval MODEL --data SPEC` scores a model under many execution orders; `predict MODEL
IMAGE...` names the classes of images, computed here."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from layershuffle.cli.command import ComputingCommand, ImageFiles, Inline, Reporting
from layershuffle.cli.words import MODEL
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.machine import Device, device_of
from layershuffle.ground.text import counted, ranked, table
from layershuffle.scoring.settings import EvalSettings

if TYPE_CHECKING:
    from layershuffle.core.evaluation import Score
    from layershuffle.data import Split
    from layershuffle.scoring.evaluate_spec import Evaluation


@dataclass(frozen=True)
class EvalCommand(ComputingCommand, Reporting):
    """Score a model under many execution orders, in one pass over the data.

    Prints a table with a row per mode.
    """

    model: Annotated[str, MODEL]
    """Directory of a fit, or any model spec: bundled:digits, timm:NAME, dir:PATH and others."""
    _: KW_ONLY
    data: str
    """Images to score; their test split is read: digit-pairs, folder:DIR,
    hf:NAME_OR_DIR, torchvision:NAME."""
    order: str | None = None
    """Score this one execution order ("0,3,2,11") instead of drawn ones."""
    stop: float | None = None
    """An image stops at the first block of its order after which its largest probability reaches
    this (0.98), and is scored there; the table says how many blocks it takes."""
    settings: Inline[EvalSettings] = field(default_factory=EvalSettings)

    def run(self) -> int:
        """Evaluate and print a table or JSON."""
        for name in ("modes", "num_orders", "seed", "draw") if self.order is not None else ():
            if getattr(self.settings, name) != EvalSettings.model_fields[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"--order and {flag} exclude each other", hint="give one of them")

        from layershuffle.scoring.evaluate_spec import evaluate_spec

        with self.computing("eval") as progress:
            evaluation = evaluate_spec(
                self.model,
                self.data,
                settings=self.settings,
                order=self.order,
                stop=self.stop,
                device=self.device,
                progress=progress,
            )
        report = _report(
            evaluation, self.settings, model=self.model, device=self.device, stop=self.stop
        )
        self.show(report, _text(report))
        return 0


def _report(
    evaluation: Evaluation,
    settings: EvalSettings,
    *,
    model: str,
    device: Device,
    stop: float | None,
) -> dict[str, Any]:
    from layershuffle.ground.machine import hardware, versions

    split = evaluation.data.splits["test"]
    groups: dict[str, list[Score]] = {}  # in the order in which the modes were named
    for score in evaluation.scores:
        groups.setdefault(score.label, []).append(score)
    modes: list[dict[str, Any]] = []
    for name, scores in groups.items():
        modes.append({**score_report(name, scores, split=split), "kept": scores[0].kept})
    return {
        "model": model,
        "data": evaluation.data.spec,
        "split": "test",
        "notes": list(evaluation.data.notes),
        "draw": f"one order per {settings.draw}",
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "stop": stop,
        "fixed": list(evaluation.scores[0].fixed),
        "depth": evaluation.depth,
        "blocks": evaluation.blocks,
        "modes": modes,
        "hardware": hardware(settings.precision, device=device),
        "versions": versions(),
    }


def score_report(name: str, scores: Sequence[Score], *, split: Split) -> dict[str, Any]:
    """The scores of one model on `split` as JSON values.

    They are mean, spread and interval of every metric, and every score with its orders.
    """
    from layershuffle.ground.stats import estimate

    # One model: its interval covers orders, or for top-1 the images where there is one order.
    (independent,) = split.independent(scores[0].right[:, None])
    metrics = ["top1", "top5", "cross_entropy"]
    if scores[0].blocks is not None:
        metrics.append("blocks")
    report: dict[str, Any] = {"mode": name, "orders": len(scores), "images": scores[0].images}
    for metric in metrics:
        values = [getattr(score, metric) for score in scores]
        images = independent if metric == "top1" else None
        percent = metric in ("top1", "top5")
        report[metric] = asdict(estimate({0: values}, images=images, percent=percent))
    report["scores"] = []
    for score in scores:
        # With an order per batch there is no single one; such passes list batch_orders.
        entry: dict[str, Any] = {
            "order": None if score.order is None else str(score.order),
            "batch_orders": list(map(str, score.batch_orders)),
        }
        for metric in metrics:
            entry[metric] = getattr(score, metric)
        report["scores"].append(entry)
    return report


def score_table(
    rows: Sequence[tuple[str, int | str, dict[str, Any]]], *, columns: tuple[str, str]
) -> str:
    """A row for each name, number and report of scores, and a legend.

    `columns` are the heads of name and number. A report has the estimates of the three metrics, and
    the number of images.
    """
    lines = []
    for name, number, metrics in rows:
        top1 = metrics["top1"]
        spread = top1["sd_models"] if top1["models"] > 1 else top1["sd_orders"]
        lines.append(
            (
                # Broken at a colon, because a table wraps anywhere: "passes=2:paralle" and "l=3".
                re.sub(r"(.{20,30}:)", r"\1\n", name),
                str(number),
                str(top1["orders"]),
                f"{top1['mean']:.2f}",
                # A single order has no spread, and 0 would claim that all orders agree.
                "-" if spread is None else f"{spread:.2f}",
                f"{top1['low']:.1f} to {top1['high']:.1f}",
                f"{metrics['top5']['mean']:.2f}",
                f"{metrics['cross_entropy']['mean']:.3f}",
            )
        )
    sample = "orders"
    counts: list[int] = []
    for _, _, metrics in rows:
        top1 = metrics["top1"]
        if top1["models"] > 1:
            sample = "models, of one model over its orders"
        if top1["kind"] == "images":
            counts.append(round(top1["images"]))
    single = ""
    if counts:
        least = min(counts)
        most = max(counts)
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        single = (
            f"; of one order or equal scores Wilson over {span} images that count as independent"
        )
    header = (*columns, "orders", "top-1 %", "sd", "95 %", "top-5 %", "CE")
    return (
        f"{table(header, lines)}\n{counted(rows[0][2]['images'], 'image')} each. sd, and 95 % "
        f"(t-interval): over {sample}{single}. --json lists every score."
    )


def _drawn(fixed: Sequence[int], depth: int) -> str:
    """How many blocks the orders draw, if some keep their place."""
    ends = sum(fixed)
    return f"{depth - ends} of {depth} blocks drawn, " if ends else ""


def _text(report: dict[str, Any]) -> str:
    reason = report["blocks"]["reason"]
    head = (
        f"{report['model']} on {report['data']}, {report['draw']}, seed {report['seed']}, "
        f"{report['hardware']['precision']}, "
        + ("" if report["stop"] is None else f"stop at {report['stop']:g}, ")
        + _drawn(report["fixed"], report["depth"])
        + ("compiled blocks" if reason is None else f"eager mode: {reason}")
    )
    rows = []
    for mode in report["modes"]:
        ran = f"{mode['blocks']['mean']:.1f} of " if "blocks" in mode else ""
        rows.append((mode["mode"], f"{ran}{mode['kept']}", mode))
    columns = ("mode", "kept" if report["stop"] is None else "blocks")
    return "\n".join([head, score_table(rows, columns=columns), *report["notes"]])


@dataclass(frozen=True)
class PredictCommand(ComputingCommand, Reporting):
    """Name the classes of images. The model runs here, all images in one execution order.

    Prints a line per image, then the order. A file that cannot be read is reported, and the others
    are answered; the exit code is then 1.
    """

    model: Annotated[str, MODEL]
    """Directory of a fit, or any model spec: bundled:digits-swarm, timm:NAME, dir:PATH and
    others."""
    images: ImageFiles
    """Image files; bundled:digit-pair.png is included in this package."""
    _: KW_ONLY
    order: str | None = None
    """Run these blocks in this order ("0,3,2,11")."""
    modes: str | None = None
    """Draw the order of this mode instead: sequential (the default), arbitrary, kept:9,
    kept:9:arbitrary and others."""
    seed: int = 0
    """Seed of the drawn order."""
    fixed: Annotated[str | None, Parameter(metavar="FIRST,LAST")] = None
    """How many blocks at the beginning and at the end keep their place, as in 1,1; with 0,0 any
    order runs (default: as the model was trained)."""
    top: int = 5
    """Classes to name per image."""
    classes: Path | None = None
    """File that names the outputs of a model without names of classes, one per line in their
    order."""

    def __post_init__(self) -> None:
        """Refuse ends that are not two numbers, before a model is loaded."""
        self._ends()

    def run(self) -> int:
        """Load, predict and print."""
        if self.order is not None and self.modes is not None:
            raise UsageError("--order and --modes exclude each other", hint="give one of them")

        from layershuffle.core.orders import ExecutionOrder
        from layershuffle.core.stack import depth_of, fixed_of
        from layershuffle.models import load, name_classes
        from layershuffle.scoring.predict import drawn_order, predict

        model = load(self.model)
        name_classes(model, self.classes, place=self.model)
        depth = depth_of(model)
        fixed = self._ends() or fixed_of(model)
        if self.order is not None:
            order = ExecutionOrder.parse(self.order, depth=depth)
        else:
            mode = self.modes or "sequential"
            order = drawn_order(mode, depth=depth, seed=self.seed, fixed=fixed)
        with self.computing("predict") as progress:
            model.to(device_of(self.device))
            predicted = predict(
                model, self.images, order=order, fixed=fixed, top=self.top, progress=progress
            )
        report = []
        lines = []
        code = 0
        for image, answer in zip(self.images, predicted, strict=True):
            if isinstance(answer, DataError):
                code = answer.exit_code
                print(f"error: {answer}", file=sys.stderr)
                error = {"cause": answer.cause, "hint": answer.hint}
                report.append({"image": str(image), "error": error})
                continue
            report.append(asdict(answer))
            classes = ranked((guess.label, guess.probability) for guess in answer.top)
            lines.append(f"{image}: {classes}")
        lines.append(f"{self.model}, {len(order)} of {depth} blocks in the order {order}")
        document = {"model": self.model, "order": str(order), "images": report}
        self.show(document, "\n".join(lines))
        return code

    def _ends(self) -> tuple[int, int] | None:
        """The two numbers of --fixed. Raises `SettingsError` for anything else."""
        asked: dict[str, Any] = {"fixed": self.fixed}
        return EvalSettings(**asked).fixed
