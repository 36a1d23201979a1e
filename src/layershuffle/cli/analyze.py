"""`layershuffle analyze NAME MODEL --data SPEC --out DIR`: ask one question about a model."""

from __future__ import annotations

import csv
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated

from layershuffle.analysis import ANALYSES, AnalysisSettings, run_analysis
from layershuffle.cli.command import ComputingCommand, Inline
from layershuffle.cli.words import ANALYSIS, MODEL
from layershuffle.ground.errors import LayerShuffleError, UsageError, of_the_machine
from layershuffle.ground.extras import require
from layershuffle.ground.files import explained
from layershuffle.ground.text import table


@dataclass(frozen=True)
class AnalyzeCommand(ComputingCommand):
    """Analyse what the blocks of a model learnt: one question, or all that apply."""

    name: Annotated[str, ANALYSIS]
    """The question: umap, norms, attention, attribution, leave-one-out or position; all asks
    every one that applies."""
    model: Annotated[str, MODEL]
    """Directory of a fit, or any model spec."""
    _: KW_ONLY
    data: str
    """Images: digit-pairs, folder:DIR, hf:NAME_OR_DIR, torchvision:NAME."""
    out: Path
    """Directory for tables, figures and the summary; with all, one directory in it per question."""
    settings: Inline[AnalysisSettings] = field(default_factory=AnalysisSettings)

    def run(self) -> int:
        """Run the analyses; print their numbers and the paths of their files.

        With all, what has no answer is listed with the reason; the exit code is 1 if another reason
        than the kind of the model is among them.
        """
        require("study")
        defaults = AnalysisSettings()
        for option in ("block", "neighbours"):
            changed = getattr(self.settings, option) != getattr(defaults, option)
            if changed and self.name not in ("umap", "all"):
                raise UsageError(
                    f"--{option} belongs to umap, not to {self.name}", hint="leave it out"
                )
        if self.name != "all":
            self._answer(self.name, self.out)
            return 0

        # Before an hour of analyses that could not be written.
        with explained(self.out, flag="--out"):
            self.out.mkdir(parents=True, exist_ok=True)

        # Imported late, because it imports torch.
        from layershuffle.analysis.subject import DoesNotApply

        failed: dict[str, LayerShuffleError] = {}
        for name in ANALYSES:
            try:
                self._answer(name, self.out / name)
            except LayerShuffleError as error:
                failed[name] = error
            except (OSError, RuntimeError) as error:
                # UMAP alone needs a cache that this user may write.
                sentence = of_the_machine(error)
                if sentence is None:
                    raise
                failed[name] = sentence
        if len(failed) == len(ANALYSES):
            raise next(iter(failed.values()))
        code = 0
        lines: list[str] = []
        for name, reason in failed.items():
            lines.append(f"{name} has no answer: {reason}")
            # A mixer has no attention, for example: that is no failure.
            if not isinstance(reason, DoesNotApply):
                code = 1
        print("\n".join(lines))
        return code

    def _answer(self, name: str, out: Path) -> None:
        with self.computing(name) as progress:
            summary = run_analysis(
                name,
                self.model,
                data_spec=self.data,
                settings=self.settings,
                out=out,
                device=self.device,
                progress=progress,
            )
        head, *rows = csv.reader((out / "numbers.csv").read_text(encoding="utf-8").splitlines())
        print(f"{summary['title']}\n{summary['answer']}\n{table(head, rows)}")
        print(f"All of it: {out / 'index.html'}\n")
