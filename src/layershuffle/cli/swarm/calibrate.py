"""`layershuffle swarm calibrate MODEL --data SPEC`: what to expect with any number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.swarm.plan import DEFAULT_MODEL

_ABOUT = (
    "Measure the accuracy of a model with 1 to all blocks in arbitrary order on held-out data, and "
    "store it beside the model, for the answers of a swarm."
)


@dataclass
class Options:
    """Flags of `swarm calibrate`."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """Model to measure: the directory of a fit, dir:PATH or bundled:NAME."""
    data: str = "digit-pairs"
    """Held-out images: the test split of this data."""
    orders: int = 20
    """Random orders for every number of blocks."""
    images: int = 2000
    """Most images."""
    seed: int = 0
    """Seed of the orders."""


def run(argv: Sequence[str]) -> int:
    """Measure, store, and print the table."""
    options = parse(Options, argv, command="swarm calibrate", about=_ABOUT)

    from layershuffle.models import load
    from layershuffle.swarm.calibration import calibrate, calibration_path, write_calibration

    path = calibration_path(options.model)
    calibration = calibrate(
        load(options.model),
        options.data,
        orders=options.orders,
        images=options.images,
        seed=options.seed,
    )
    write_calibration(calibration, path)
    print("blocks  top-1 %   95 % interval")
    for row in reversed(calibration.rows):
        print(f"{row.kept:>6}{row.top1:>9.1f}   {row.low:.1f} to {row.high:.1f}")
    print(
        f"{calibration.images} images of {calibration.data} ({calibration.split}), "
        f"{calibration.orders} orders each. In {path}"
    )
    return 0
