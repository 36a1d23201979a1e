"""The accuracy to expect of an answer, by how its blocks ran (`rounds.Cell`).

It is measured once on test images (`measuring`), stored as calibration.json beside the model, and
looked up for every answer. `expectations` applies it to answers and to the router.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.files import write_text
from layershuffle.manifest import CALIBRATION
from layershuffle.results import Count, Percent
from layershuffle.swarm.rounds import Cell
from layershuffle.swarm.sureness import CalibrationPart, Sureness

if TYPE_CHECKING:
    from layershuffle.swarm.served import ServedModel

_AGAIN = "run layershuffle swarm calibrate again"


@dataclass(frozen=True)
class CalibrationFacts:
    """The data that the expected accuracies were measured on."""

    data: str
    split: str
    orders: int
    images: int


class CellAccuracy(CalibrationPart):
    """Top-1 in percent of a cell (`rounds.Cell`); `sd_orders`: its spread over orders.

    `low`, `high`: 95 % interval of `top1`. `orders_low`, `orders_high`: the 5 % and 95 % quantiles
    over orders, which keep different blocks. `effective`: number of independent images; `None`
    without groups of images.
    """

    kept: Count
    passes: Count = 1
    parallel: Count = 1
    top1: Percent
    low: Percent
    high: Percent
    orders_low: Percent
    orders_high: Percent
    sd_orders: float | None
    effective: Annotated[float, Field(ge=1)] | None = None

    @property
    def cell(self) -> Cell:
        """The cell of this row."""
        return Cell(self.kept, self.passes, self.parallel)


class Calibration(CalibrationPart):
    """The content of calibration.json. `weights`: digest of the measured model.

    `late`: top-1 in percent with all blocks one after the other, if the last read a state that was
    1, 2 ... versions old. `sureness`: `None` if the data have no held-out images. `tied`: in old
    files, whose places with the same weights were not measured side by side.
    """

    schema_: Literal[3] = Field(3, alias="schema")
    weights: str
    data: str
    split: str
    seed: int
    orders: Count
    images: Count
    classes: tuple[str, ...]
    rows: tuple[CellAccuracy, ...]
    late: tuple[Percent, ...] = ()
    tied: tuple[int, ...] | None = None
    sureness: Sureness | None = None

    @model_validator(mode="after")
    def _whole(self) -> Calibration:
        kept = [row.kept for row in self.queue]
        whole = kept and kept == [*range(1, len(kept) + 1)]
        if not whole or len(self.temperatures) not in (0, len(kept)):
            raise ValueError("the rows need 1, 2, 3, ... blocks, with temperatures for all or none")
        return self

    @property
    def temperatures(self) -> tuple[float, ...]:
        """By the number of blocks; none if they were not measured."""
        return () if self.sureness is None else self.sureness.temperatures

    @property
    def queue(self) -> tuple[CellAccuracy, ...]:
        """The rows in which blocks run one after the other, each once, by the number of blocks."""
        return tuple(row for row in self.rows if row.passes == row.parallel == 1)

    @property
    def facts(self) -> CalibrationFacts:
        """The measurement's data, as answers show it."""
        return CalibrationFacts(
            data=self.data, split=self.split, orders=self.orders, images=self.images
        )


def calibration_path(model: str) -> Path:
    """The path of the calibration of the model with this spec, beside its weights.

    Raises `UsageError` for models without a directory of their own.
    """
    from layershuffle.models.output import own_directory

    directory = own_directory(model)
    if directory is None:
        raise UsageError(
            f"{model} has no directory of its own to keep a calibration in",
            hint="save it first: layershuffle.save(model, DIR), or layershuffle fit",
        )
    return directory / CALIBRATION


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path`, atomically."""
    write_text(path, calibration.model_dump_json(by_alias=True, indent=1) + "\n")


def calibration_of(model: ServedModel) -> Calibration | None:
    """The calibration among the files of an exported model, `None` without one.

    Raises `ModelFileError` if it is damaged, or was measured on other weights.
    """
    return read_calibration(model.directory / CALIBRATION, weights=model.manifest.weights)


def read_calibration(path: Path, *, weights: str) -> Calibration | None:
    """The calibration stored at `path`, or `None` if there is none.

    Raises `ModelFileError` if it is damaged, of another version, or was measured on weights of
    another digest.
    """
    if not path.is_file():
        return None
    try:
        calibration = Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            why = " ".join([*map(str, first["loc"]), first["msg"]])
        raise ModelFileError(
            f"The calibration cannot be read, or is of another version ({why})",
            place=path,
            hint=_AGAIN,
        ) from error
    # A model that was refined further has other accuracies than its old file says.
    if calibration.weights != weights:
        raise ModelFileError(
            "The calibration was measured on other weights than the model has",
            place=path,
            hint=_AGAIN,
        )
    return calibration
