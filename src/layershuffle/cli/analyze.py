"""`layershuffle analyze NAME MODEL --data SPEC --out DIR`: ask one question about a model."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from layershuffle.analysis import ANALYSES, AnalysisSettings, run_analysis
from layershuffle.cli.command import ComputingCommand, Inline, required
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import listing, table


@dataclass(frozen=True, kw_only=True)
class AnalyzeCommand(ComputingCommand):
    """Analyse what the blocks of a model learnt: one question, or all that apply."""

    name: Annotated[str | None, tyro.conf.Positional, required(metavar="NAME")] = None
    """The question: umap, norms, attention, attribution, leave-one-out, cka or position; all asks
    every one that applies."""
    model: Annotated[str | None, tyro.conf.Positional, required(metavar="MODEL")] = None
    """Directory of a fit, or any model spec."""
    data: Annotated[str | None, required()] = None
    """Images: digit-pairs, formula, folder:DIR, hf:NAME_OR_DIR, torchvision:NAME."""
    out: Annotated[Path | None, required()] = None
    """Directory for tables, figures and the summary; with all, one directory in it per question."""
    # --list needs no other argument, so tyro does not require the arguments above.
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the questions and stop; nothing else is needed."""
    json: bool = False
    """Print JSON: the numbers and the files of every question."""
    settings: Inline[AnalysisSettings]

    def run(self) -> int:
        """Run the analyses; print their numbers and the paths of their files."""
        if self.list:
            print(listing([*ANALYSES.items()]))
            return 0
        if self.name is None or self.model is None or self.data is None or self.out is None:
            raise UsageError(
                "analyze needs the name of an analysis, a model, --data SPEC and --out DIR",
                hint="layershuffle analyze --list shows the names",
            )
        require("study")
        if self.name != "all":
            answer = self._answer(self.name, model=self.model, data=self.data, out=self.out)
            if self.json:
                print(json.dumps(answer, indent=2))
            return 0

        # Imported late, because it imports torch.
        from layershuffle.analysis.subject import DoesNotApply

        # A mixer has no attention, for example; an analysis that does not apply is not a failure.
        answers, refused = [], {}
        for name in ANALYSES:
            try:
                answers.append(
                    self._answer(name, model=self.model, data=self.data, out=self.out / name)
                )
            except DoesNotApply as reason:
                refused[name] = str(reason)
        if self.json:
            print(json.dumps({"answers": answers, "do_not_apply": refused}, indent=2))
            return 0
        lines = [f"{name} does not apply: {reason}" for name, reason in refused.items()]
        print("\n".join(lines) or "All analyses apply to this model.")
        return 0

    def _answer(self, name: str, *, model: str, data: str, out: Path) -> dict[str, Any]:
        """Answer one question, and print the answer unless all are printed as JSON."""
        with self.computing(name) as progress:
            summary = run_analysis(
                name,
                model,
                data_spec=data,
                settings=self.settings,
                out=out,
                device=self.device,
                progress=progress,
            )
        if not self.json:
            head, *rows = csv.reader((out / "numbers.csv").read_text(encoding="utf-8").splitlines())
            print(f"{summary['title']}\n{table(head, rows)}\nAll of it: {out / 'index.html'}\n")
        return {**summary, "directory": str(out)}
