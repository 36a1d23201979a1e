"""`layershuffle predict MODEL IMAGE...`: the classes of images, computed here."""

from __future__ import annotations

import json
import sys
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path

from layershuffle.cli.command import ComputingCommand, ImageFiles
from layershuffle.errors import DataError, UsageError
from layershuffle.machine import device_of
from layershuffle.text import ranked


@dataclass(frozen=True)
class PredictCommand(ComputingCommand):
    """Name the classes of images. The model runs here, all images in one execution order.

    Prints a line per image, then the order. A file that cannot be read is reported, and the others
    are answered; the exit code is then 1.
    """

    model: str
    """Directory of a fit, or any model spec: bundled:digits-swarm, timm:NAME, dir:PATH and
    others."""
    images: ImageFiles
    """Image files; bundled:digit-pair.png is included in this package."""
    _: KW_ONLY
    order: str | None = None
    """Run these blocks in this order ("3,0,2")."""
    modes: str | None = None
    """Draw the order of this mode instead: sequential (the default), arbitrary, kept:9,
    kept:9:arbitrary and others."""
    seed: int = 0
    """Seed of the drawn order."""
    top: int = 5
    """Classes to name per image."""
    classes: Path | None = None
    """File that names the outputs of a model without names of classes, one per line in their
    order."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Load, predict and print."""
        if self.order is not None and self.modes is not None:
            raise UsageError("--order and --modes exclude each other", hint="give one of them")

        from layershuffle.core.orders import ExecutionOrder
        from layershuffle.core.stack import depth_of
        from layershuffle.models import load, name_classes
        from layershuffle.predict import order_for, predict

        model = load(self.model)
        name_classes(model, self.classes, place=self.model)
        depth = depth_of(model)
        if self.order is not None:
            order = ExecutionOrder.parse(self.order, depth=depth)
        else:
            order = order_for(self.modes or "sequential", depth=depth, seed=self.seed)
        with self.computing("predict") as progress:
            model.to(device_of(self.device))
            predicted = predict(model, self.images, order=order, top=self.top, progress=progress)
        report, lines = [], []
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
        if self.json:
            document = {"model": self.model, "order": str(order), "images": report}
            print(json.dumps(document, indent=2))
        else:
            lines.append(f"{self.model}, {len(order)} of {depth} blocks in the order {order}")
            print("\n".join(lines))
        return code
