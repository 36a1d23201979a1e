"""`layershuffle analyze NAME MODEL --data SPEC --out DIR`: ask one question about a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from layershuffle.analysis import ANALYSES, AnalysisSettings, read_analysis, run_analysis
from layershuffle.cli.command import Command, Inline
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import listing


@dataclass(frozen=True, kw_only=True)
class AnalyzeCommand(Command):
    """Ask one question about what the blocks of a model learnt, or every question that applies."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """The question: umap, norms, attention, attribution, leave-one-out, cka or position; all asks
    every one that applies."""
    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Directory of a fit, or any model spec."""
    data: str | None = None
    """Images: digit-pairs, folder:DIR, hf:NAME_OR_DIR, cifar100:DIR, wds:SHARDS."""
    out: Path | None = None
    """Directory for tables, figures and the summary; with all, one directory in it per question."""
    # --list alone is a whole command, which is why tyro does not require the arguments above.
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the questions and stop; nothing else is needed."""
    settings: Inline[AnalysisSettings]

    def run(self) -> int:
        """Run the analyses; print what they say and where their files are."""
        if self.list:
            print(listing([(name, analysis.question) for name, analysis in ANALYSES.items()]))
            return 0
        if self.name is None or self.model is None or self.data is None or self.out is None:
            raise UsageError(
                "analyze needs the name of an analysis, a model, --data SPEC and --out DIR",
                hint="layershuffle analyze --list shows the names",
            )
        require("study")
        if self.name != "all":
            self._answer(self.name, model=self.model, data=self.data, out=self.out)
            return 0

        # Imported late because torch comes with it.
        from layershuffle.analysis.subject import DoesNotApply

        # A mixer has no attention to look at: what does not apply is named, and is no failure.
        refused = []
        for name in ANALYSES:
            try:
                self._answer(name, model=self.model, data=self.data, out=self.out / name)
            except DoesNotApply as reason:
                refused.append(f"{name} does not apply: {reason}")
        print("\n".join(refused) or "All analyses apply to this model.")
        return 0

    def _answer(self, name: str, *, model: str, data: str, out: Path) -> None:
        from rich.console import Console

        # On standard error, so that a pipe gets the answers alone.
        with Console(stderr=True).status(name) as status:
            run_analysis(
                name,
                model,
                data_spec=data,
                settings=self.settings,
                out=out,
                progress=lambda text: status.update(f"{name}: {text}"),
            )
        # Read back, so that what is printed is what the files hold.
        result = read_analysis(out)
        print(f"{result.title}\n{result.paragraph}")
        print(f"In {out}: {', '.join(result.files)}\n")
