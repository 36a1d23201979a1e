"""`layershuffle reproduce RECIPE --out DIR`: a study, from plan to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.errors import LayerShuffleError, SettingsError, UsageError
from layershuffle.recipes import read_recipe
from layershuffle.settings import StudySettings, check_known
from layershuffle.study.plan import plan_text, read_plan

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
    dry_run: bool = False
    """Print the plan and do nothing."""


def run(argv: Sequence[str]) -> int:
    """Run the study; exit code 1 if a run failed (the others are done and reported)."""
    options = parse(_Options, argv, command="reproduce", about=_ABOUT)
    if options.workers is not None and options.workers < 1:
        raise UsageError(f"--workers is a number of processes, not {options.workers}")
    study = _study(options.recipe)
    out = options.out or Path("runs") / study.name
    if options.dry_run:
        print(plan_text(study))
        return 0

    from layershuffle.cli.study_progress import study_watcher
    from layershuffle.study.runner import run_study

    with study_watcher() as watch:
        failed = run_study(study, out, workers=options.workers, watch=watch)
    show_report(out)
    if failed:
        raise LayerShuffleError(
            f"{len(failed)} of the runs failed: {', '.join(failed)}",
            place=out / "runs",
            hint="each has a failure.txt or log.txt; mend the cause and give the same command",
        )
    return 0


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
