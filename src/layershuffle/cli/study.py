"""`layershuffle reproduce RECIPE`, a study from plan to report, and `layershuffle report DIR`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from layershuffle.cli.command import AtLeastOne, Command
from layershuffle.cli.words import RECIPE
from layershuffle.ground.bundled import asset, recipe_file
from layershuffle.ground.errors import LayerShuffleError, SettingsError, UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.settings import read_recipe
from layershuffle.study.dry_run import plan_text
from layershuffle.study.plan import check_plan, make_plan
from layershuffle.study.runner import LocalTeam, MakeTeam, run_study
from layershuffle.study.settings import StudySettings


@dataclass(frozen=True)
class ReproduceCommand(Command):
    """Run a study of the paper and write its report as Markdown and one HTML page.

    You can stop this command at any time; run it again to continue. Finished tasks are not
    repeated. Started on several machines with one --out on a disk that they share, it shares the
    work.
    """

    recipe: Annotated[Path, RECIPE]
    """Recipe of a study: a YAML file, or the name of a recipe of this package (digits-quick,
    digits-paper, imagenet-paper, cifar100-paper and others)."""
    _: KW_ONLY
    data: str | None = None
    """Images to use instead of those in the recipe, such as folder:DIR."""
    out: Path | None = None
    """Directory of the study (default: runs/NAME)."""
    workers: AtLeastOne | None = None
    """Runs side by side (default: one per GPU, else one per CPU core with a thread each)."""
    ray: str | None = None
    """Start the workers on a Ray cluster: its address, or auto for the one of this machine. --out
    must be on a disk that all its machines share."""
    dry_run: bool = False
    """Print the tasks of the study and run none. Needs no weights, no images and no network."""

    def run(self) -> int:
        """Run the study; raises `LayerShuffleError` if a run failed (the others are reported)."""
        study = _read_study(recipe_file(self.recipe), data=self.data)
        out = self.out or Path("runs") / study.name
        if self.dry_run:
            check_plan(study, out)
            print(plan_text(study, make_plan(study)))
            return 0
        require("study")

        from layershuffle.cli.progress import study_watcher

        make_team: MakeTeam = LocalTeam
        if self.ray is not None:
            # Ray is an extra: without --ray it need not be installed.
            from layershuffle.study.ray_workers import ray_team

            make_team = ray_team(self.ray)
        with study_watcher() as watch:
            failed = run_study(
                study,
                out,
                workers=self.workers,
                watch=watch,
                make_team=make_team,
            )
        _write_report(out)
        # The report comes first: it shows what finished, and names what did not.
        if failed:
            raise LayerShuffleError(
                f"{len(failed)} of the tasks failed: {', '.join(failed)}",
                place=out,
                hint="each has a failure.txt or log.txt in its directory (tasks that depend on a "
                "failed one have none); fix the cause and run the same command again",
            )
        return 0


@dataclass(frozen=True)
class ReportCommand(Command):
    """Write the report of a study from its results, finished or not; nothing is trained."""

    directory: Path
    """Directory of a study, finished or not."""

    def run(self) -> int:
        """Write the report; it names what is missing."""
        require("study")
        _write_report(self.directory)
        return 0


def _read_study(recipe: Path, *, data: str | None) -> StudySettings:
    """The study of a recipe, on other images where `data` names them.

    Raises `SettingsError` for settings that a study or one of its runs cannot have, `UsageError`
    for the recipe of a single training and for unknown images.
    """
    fields = read_recipe(recipe)
    if "method" in fields and "arms" not in fields:
        raise UsageError(
            "This is the recipe of a single training, not of a study",
            place=recipe,
            hint=f"layershuffle fit --recipe {quote(str(recipe))} --out DIR",
        )
    if data is not None:
        from layershuffle.data.loading import parse_spec  # imports torch

        parse_spec(data)
        fields["data"] = data
    try:
        study = StudySettings(**fields)
        make_plan(study)  # checks the settings of every run
        return study
    except SettingsError as error:
        raise SettingsError(
            error.cause, place=recipe, hint=f"{asset('recipes', 'digits-paper.yaml')} is an example"
        ) from None


def _write_report(out: Path) -> None:
    """Write the report of the study in `out`, print its table and where the files are."""
    from layershuffle.study.paper.report import report_text, write_report

    print(report_text(write_report(out)))
    print(f"Report: {out / 'report.html'} (also report.md, results.csv)")
