"""`layershuffle swarm calibrate`: what accuracy to expect of fewer blocks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from layershuffle.cli.command import ComputingCommand, Reporting
from layershuffle.cli.words import MODEL
from layershuffle.ground.text import table

if TYPE_CHECKING:
    from layershuffle.gateway.calibration.calibration import Calibration


@dataclass(frozen=True)
class CalibrateCommand(ComputingCommand, Reporting):
    """Measure the accuracy of a model with 1 to all blocks in arbitrary order on test images:
    one block after the other and several side by side, in one pass and in two.

    The result is stored beside the model. A swarm reports it with its answers, and uses it to
    decide how many blocks run side by side and whether they run twice.
    """

    model: Annotated[str, MODEL]
    """Model to measure: the directory of a fit or of an export."""
    _: KW_ONLY
    data: str = "digit-pairs"
    """Test images: the test split of this data."""
    num_orders: int = 20
    """Random orders for every number of blocks."""
    max_images: int = 2000
    """Number of images, at most."""
    seed: int = 0
    """Seed of the orders."""

    def run(self) -> int:
        """Measure, store, and print the table."""
        from layershuffle.gateway.calibration.calibration import calibration_path, write_calibration
        from layershuffle.gateway.client.calibrate import calibrate
        from layershuffle.models import load

        # First: a model without a directory of its own is refused before minutes of work.
        path = calibration_path(self.model)
        with self.computing("calibrate") as progress:
            calibration = calibrate(
                load(self.model),
                self.data,
                orders=self.num_orders,
                images=self.max_images,
                seed=self.seed,
                device=self.device,
                progress=progress,
            )
        write_calibration(calibration, path)
        text = f"{_calibrated(calibration)}\nIn {path}"
        self.show(calibration.model_dump(mode="json", by_alias=True), text)
        return 0


def _calibrated(calibration: Calibration) -> str:
    """A row for each number of blocks, from all downwards, as they are lost; and where it stops."""
    from layershuffle.gateway.calibration.calibration import expected_accuracy, rounds_of

    rounds = rounds_of(calibration)
    rows = []
    for row in reversed(calibration.queue):
        cell = rounds.cell(row.kept)
        chosen = expected_accuracy(calibration, cell)
        then = "-" if chosen is None else f"{chosen.top1:.1f}"
        measured = (f"{row.top1:.1f}", f"{row.low:.1f} to {row.high:.1f}")
        rows.append((str(row.kept), *measured, str(cell.parallel), str(cell.passes), then))
    columns = ("blocks", "top-1 %", "95 % interval", "side by side", "passes", "then, %")
    lines = [
        table(columns, rows),
        f"{calibration.images:,} images of {calibration.data} ({calibration.split}), "
        f"{calibration.orders} orders each",
    ]
    if (sure := calibration.sureness) is not None:
        for stop in sure.stops:
            line = f"Ending at a chance of {100 * stop.confidence:g} %: {stop.blocks:.1f} blocks, "
            line += f"{stop.top1:.1f} % right"
            if stop.sure is not None:
                line += f", {stop.sure.top1:.1f} % of those that were sure"
            if stop.confidence == sure.confidence:
                line += " (the default of requests)"
            lines.append(line)
    return "\n".join(lines)
