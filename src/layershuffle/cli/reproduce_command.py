"""`layershuffle reproduce RECIPE --out DIR`: a study, from plan to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.errors import LayerShuffleError, SettingsError, UsageError
from layershuffle.recipes import read_recipe
from layershuffle.settings import check_known
from layershuffle.study.dry_run import forecast, forecast_text, plan_text
from layershuffle.study.plan import read_plan
from layershuffle.study.selection import tasks_for
from layershuffle.study.settings import StudySettings

if TYPE_CHECKING:
    from layershuffle.study.runner import MakePool

_ABOUT = (
    "Run a study of the paper and write its report: Markdown, CSV and one self-contained HTML "
    "page. Stopped or killed at any moment, the same command goes on and repeats no finished run."
)


@dataclass
class _Options:
    recipe: Annotated[Path, tyro.conf.Positional]
    """YAML recipe of a study, e.g. recipes/digits-quick.yaml."""
    out: Path | None = None
    """Directory of the study (default: runs/NAME)."""
    workers: int | None = None
    """Runs side by side (default: one per GPU, else one per CPU core with a thread each)."""
    only: str | None = None
    """Tables and figures to make, with all that they need: table1, fig1b, fig1c, fig4, table2,
    fig5, budget, or an analysis; comma-separated (default: all)."""
    ray: str | None = None
    """Run on a Ray cluster: its address, or auto for the one of this machine. --out must be on a
    disk that all its machines share."""
    dry_run: bool = False
    """Print the tasks with the time and disk that they will take, from a short measured probe."""


def run(argv: Sequence[str]) -> int:
    """Run the study; exit code 1 if a run failed (the others are done and reported)."""
    options = parse(_Options, argv, command="reproduce", about=_ABOUT)
    if options.workers is not None and options.workers < 1:
        raise UsageError(
            f"--workers is a number of processes, not {options.workers}",
            hint="leave it out for one per GPU or core",
        )
    study = _study(options.recipe)
    out = options.out or Path("runs") / study.name
    tasks = tasks_for(study, options.only)
    if options.dry_run:
        print(plan_text(study, tasks))
        print(forecast_text(forecast(study, tasks, out=out, workers=options.workers), out))
        return 0

    from layershuffle.cli.study_progress import study_watcher
    from layershuffle.study.runner import local_pool, run_study

    pool = local_pool if options.ray is None else _on_ray(options.ray)
    with study_watcher() as watch:
        failed = run_study(
            study, out, only=options.only, workers=options.workers, watch=watch, make_pool=pool
        )
    show_report(out)
    if failed:
        raise LayerShuffleError(
            f"{len(failed)} of the tasks failed: {', '.join(failed)}",
            place=out,
            hint="each has a failure.txt or log.txt in its directory (those held back have none); "
            "mend the cause and give the same command",
        )
    return 0


def _on_ray(address: str) -> MakePool:
    from layershuffle.study.ray_pool import ray_pool

    return ray_pool(address)


def _study(recipe: Path) -> StudySettings:
    fields = read_recipe(recipe)
    try:
        check_known(StudySettings, fields)
        return StudySettings(**fields)
    except SettingsError as error:
        raise SettingsError(
            error.cause, place=recipe, hint="recipes/digits-quick.yaml is an example"
        ) from None


def show_report(out: Path) -> None:
    """Write the report of the study in `out`, print its table and where the files are."""
    from layershuffle.study.report import write_report

    read_plan(out)
    report = write_report(out)
    print(report.text)
    print(f"Report: {out / 'report.html'} (also report.md, table.md, results.csv)")
