"""`layershuffle analyze NAME MODEL --data SPEC --out DIR`: ask one question about a model."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from layershuffle.analysis import ANALYSES, AnalysisSettings, read_analysis, run_analysis
from layershuffle.cli.command import ComputingCommand, Inline
from layershuffle.extras import require


@dataclass(frozen=True)
class AnalyzeCommand(ComputingCommand):
    """Analyse what the blocks of a model learnt: one question, or all that apply."""

    name: str
    """The question: umap, norms, attention, attribution, leave-one-out, cka or position; all asks
    every one that applies."""
    model: str
    """Directory of a fit, or any model spec."""
    _: KW_ONLY
    data: str
    """Images: digit-pairs, formula, folder:DIR, hf:NAME_OR_DIR, cifar100:DIR, wds:SHARDS."""
    out: Path
    """Directory for tables, figures and the summary; with all, one directory in it per question."""
    json: bool = False
    """Print JSON: the sentence, the numbers and the files of every question."""
    settings: Inline[AnalysisSettings] = field(default_factory=AnalysisSettings)

    def run(self) -> int:
        """Run the analyses; print their sentences and the paths of their files."""
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
            run_analysis(
                name,
                model,
                data_spec=data,
                settings=self.settings,
                out=out,
                device=self.device,
                progress=progress,
            )
        # Read back, so that the printed answer is the one in the files.
        result = read_analysis(out)
        if not self.json:
            print(f"{result.title}\n{result.paragraph}")
            print(f"In {out}: {', '.join(result.files)}\n")
        return {
            "name": result.name,
            "title": result.title,
            "sentence": result.paragraph,
            "facts": result.facts,
            "directory": str(out),
            "files": list(result.files),
        }
