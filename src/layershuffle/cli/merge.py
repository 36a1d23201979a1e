"""`layershuffle merge` and `layershuffle ensemble`: combine several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from layershuffle.cli.command import AtLeastOne, ComputingCommand, Inline, Models, Reporting
from layershuffle.cli.eval import score_report, score_table
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import counted
from layershuffle.merging.settings import EnsembleSettings, MergingOptions, MergingSettings

if TYPE_CHECKING:
    from layershuffle.ground.rows import MergingRow


@dataclass(frozen=True)
class MergeCommand(ComputingCommand, Reporting):
    """Build models from the blocks of several models.

    There are two forms. `merge RECIPE.yaml --out DIR` writes the model whose blocks come from the
    donors that the recipe names. `merge MODEL... --random N --data SPEC` draws N merges and scores
    them beside their donors, soups and ensembles.
    """

    models: Models
    """The recipe, a YAML file; or with --random the donors: directories of fits or model specs."""
    _: KW_ONLY
    out: Path | None = None
    """Directory of the model that a recipe makes, which needs it; with --random a CSV file for
    every score."""
    overwrite: bool = False
    """Replace an older model at --out, or with --random a file. Donors are never replaced."""
    merges: Annotated[AtLeastOne | None, Parameter(name="--random")] = None
    """Draw this many merges, no two alike, and score them (the paper: 100)."""
    data: str | None = None
    """--random, which needs it: images to score; their test split is read (and held-out images for
    greedy soups)."""
    modes: Literal["sequential", "arbitrary"] = "arbitrary"
    """--random: order mode in which every model runs."""
    base: str | None = None
    """--random: the base checkpoint, for donors that do not name it."""
    options: Inline[MergingOptions] = field(default_factory=MergingOptions)

    def run(self) -> int:
        """Merge as a recipe says, or at random."""
        if self.merges is not None:
            return self._run_random(self.merges)
        if self.out is None or len(self.models) != 1:
            raise UsageError(
                "merge needs RECIPE.yaml and --out DIR, or MODEL... with --random N and --data "
                "SPEC",
                hint="layershuffle merge --help",
            )
        return _merge_by_recipe(Path(self.models[0]), self.out, overwrite=self.overwrite)

    def _run_random(self, merges: int) -> int:
        if self.data is None:
            raise UsageError(
                "merge --random needs --data SPEC",
                hint="layershuffle merge MODEL... --random N --data SPEC",
            )
        # Built anew, because a copy would not refuse a count of 0.
        settings = MergingSettings(**dict(self.options), merges=merges)

        from layershuffle.ground.rows import group_rows, write_rows
        from layershuffle.merging.scoring import score_merging
        from layershuffle.models.output import check_output

        if self.out is not None:
            # Checked before hours of scoring whose results could not be written.
            check_output(self.out, reads=self.models, overwrite=self.overwrite)
            if self.out.is_dir():
                raise UsageError(
                    "--out must be a file for the scores, not a directory",
                    place=self.out,
                    hint="such as --out merges.csv",
                )
        with self.computing("merge") as progress:
            rows, notes = score_merging(
                list(self.models),
                self.data,
                settings=settings,
                mode=self.modes,
                base=self.base,
                device=self.device,
                progress=progress,
            )
        if self.out is not None:
            # Before anything is printed: a closed pipe must not cost the scores.
            write_rows(self.out, rows)
        report = {
            "donors": list(self.models),
            "data": self.data,
            "modes": self.modes,
            "settings": settings.model_dump(mode="json"),
            "groups": list(map(_merging_group, group_rows(rows).values())),
            "notes": notes,
            "rows": [row.model_dump() for row in rows],
        }
        self.show(report, _merging_text(report))
        return 0


def _merge_by_recipe(path: Path, out: Path, *, overwrite: bool) -> int:
    from layershuffle.merging.recipe import merge_recipe, read_merge_recipe

    record = merge_recipe(read_merge_recipe(path), out, overwrite=overwrite)
    merge = record["provenance"]["merge"]
    for number, donor in enumerate(merge["donors"]):
        blocks: list[str] = []
        for block, source in enumerate(merge["blocks"]):
            if source == number:
                blocks.append(str(block))
        print(f"blocks {','.join(blocks)} from {donor['model']}")
    print(
        f"stem {merge['stem']}, head {merge['head']}\nModel: {out}\n"
        f"Next: layershuffle eval {quote(str(out))} --data SPEC"
    )
    return 0


def _merging_group(rows: Sequence[MergingRow]) -> dict[str, Any]:
    """Means per model, then over models: the interval covers models where there are several."""
    from layershuffle.ground.rows import score_of

    first = rows[0]
    # Donors have different names, so a group of donors has none.
    name = "" if first.kind == "donor" else first.name
    what = " ".join(filter(None, (first.kind, first.ends, name)))
    return {
        "what": what,
        "main": bool(first.main),
        "images": first.n,
        "top1": asdict(score_of(rows, "top1")),
        "top5": asdict(score_of(rows, "top5")),
        "cross_entropy": asdict(score_of(rows, "cross_entropy")),
    }


def _merging_text(report: dict[str, Any]) -> str:
    head = (
        f"{counted(len(report['donors']), 'donor')} on {report['data']}, {report['modes']} order, "
        f"seed {report['settings']['seed']}, {report['settings']['precision']}. *: what the "
        "settings name first"
    )
    rows: list[tuple[str, int, dict[str, Any]]] = []
    for group in report["groups"]:
        name = f"{group['what']} *" if group["main"] else group["what"]
        rows.append((name, group["top1"]["models"], group))
    return "\n".join([head, score_table(rows, columns=("", "models")), *report["notes"]])


@dataclass(frozen=True)
class EnsembleCommand(ComputingCommand, Reporting):
    """Score the ensemble of several models: the mean of their answers."""

    models: Models
    """Members of the ensemble: directories of fits or model specs."""
    _: KW_ONLY
    data: str
    """Images to score; their test split is read."""
    settings: Inline[EnsembleSettings] = field(default_factory=EnsembleSettings)

    def run(self) -> int:
        """Score and print a paragraph or JSON."""
        from layershuffle.merging.scoring import score_ensemble

        models = list(self.models)
        if len(models) < 2:
            raise UsageError(
                "An ensemble has at least two models", hint="layershuffle eval scores a single one"
            )
        with self.computing("ensemble") as progress:
            scores, scored_data = score_ensemble(
                models,
                self.data,
                settings=self.settings,
                device=self.device,
                progress=progress,
            )
        how = self.settings
        report = score_report(how.modes, scores, split=scored_data.splits["test"])
        notes = list(scored_data.notes)
        for shown, score in zip(report["scores"], scores, strict=True):
            shown["orders"] = list(map(str, score.member_orders))
        facts = {"models": models, "data": self.data, "settings": how.model_dump(mode="json")}
        head = (
            f"Ensemble of {counted(len(models), 'model')} on {self.data}, mean "
            f"{how.ensemble_combine}, {how.ensemble_orders} orders, {how.precision}"
        )
        scored = score_table([(how.modes, len(models), report)], columns=("mode", "models"))
        self.show({**facts, **report, "notes": notes}, "\n".join([head, scored, *notes]))
        return 0
