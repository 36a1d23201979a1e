"""What a study will do, as plain data: runs, their settings, their evaluation.

A plan is a pure function of the study's settings. `--dry-run` prints it, the runner executes it,
`plan.json` keeps it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle._version import __version__
from layershuffle.errors import UsageError
from layershuffle.files import write_text
from layershuffle.modes import parse_modes
from layershuffle.settings import DEFAULT_EPOCHS, FitSettings, StudySettings, digest

PLAN_FILE = "plan.json"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training and its evaluation."""

    name: str
    arm: str
    settings: FitSettings

    def directory(self, out: Path) -> Path:
        """Where the run keeps everything."""
        return out / "runs" / self.name


def runs_of(study: StudySettings) -> tuple[RunSpec, ...]:
    """All runs, seed by seed, so that a half-done study has every arm."""
    return tuple(
        RunSpec(
            name=f"{arm.label}-seed{seed}", arm=arm.label, settings=study.fit_settings(arm, seed)
        )
        for seed in study.seeds
        for arm in study.arms
    )


def write_plan(study: StudySettings, out: Path) -> None:
    """Keep the plan in `out`; raises `UsageError` naming what differs if another study lives there.

    The number of workers may change at any time, the evaluation until a run is finished.
    """
    path = out / PLAN_FILE
    if path.is_file():
        differing = _differing(read_plan(out), study)
        finished = any(out.glob("runs/*/result.json"))
        free = {"workers"} if finished else {"workers", "evaluate"}
        if set(differing) - free:
            raise UsageError(
                f"This directory holds a study with other settings: {', '.join(differing)}",
                place=path,
                hint="give the same recipe to go on, or another --out to start afresh",
            )
        if not differing:
            return
    write_text(path, json.dumps(plan_json(study), indent=2))


def _differing(one: StudySettings, two: StudySettings) -> list[str]:
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(two, name)]


def plan_json(study: StudySettings) -> dict[str, Any]:
    """The plan in JSON types."""
    return {
        "schema": _SCHEMA,
        "name": study.name,
        "code_version": __version__,
        "settings_hash": digest(study),
        "recipe": study.model_dump(mode="json"),
        "runs": [
            {
                "name": run.name,
                "arm": run.arm,
                "method": run.settings.method,
                "seed": run.settings.seed,
            }
            for run in runs_of(study)
        ],
    }


def read_plan(out: Path) -> StudySettings:
    """The study that `out` holds. Raises `UsageError` if there is none or it cannot be read."""
    path = out / PLAN_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return StudySettings(**stored["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"There is no readable study here ({type(error).__name__}: {error})",
            place=path,
            hint="layershuffle reproduce RECIPE --out DIR makes one",
        ) from error


def plan_text(study: StudySettings) -> str:
    """What `--dry-run` prints."""
    runs = runs_of(study)
    modes = parse_modes(study.evaluate.modes)
    orders = sum(study.evaluate.num_orders if mode.is_drawn else 1 for mode in modes)
    lines = [f"{study.name}: {len(runs)} runs on {study.data} from {study.model}"]
    lines += [
        f"  {run.name}: {run.settings.method}, {_length(run.settings)} of "
        f"{run.settings.batch_size} images at {run.settings.lr:g}"
        for run in runs
    ]
    lines.append(
        f"Each is scored under {orders} orders ({study.evaluate.modes}), drawn one per "
        f"{study.evaluate.draw}, on {study.evaluate.max_images or 'all'} test images"
    )
    return "\n".join(lines)


def _length(settings: FitSettings) -> str:
    if settings.steps is not None:
        return f"{settings.steps} steps"
    return f"{settings.epochs or DEFAULT_EPOCHS:g} epochs"
