"""`layershuffle bench KIND`: speed and memory on this machine, in this run."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Literal

from layershuffle.bench.settings import BenchSettings
from layershuffle.cli.command import Command, Inline
from layershuffle.machine import torch_threads


@dataclass(frozen=True)
class BenchCommand(Command):
    """Measure speed and memory with random weights and generated images, without downloads."""

    kind: Literal["train", "eval"]
    """train: training steps as fit takes them; eval: forwards, each batch in its own order."""
    _: KW_ONLY
    json: bool = False
    """Print JSON with every number and the versions."""
    settings: Inline[BenchSettings] = field(default_factory=BenchSettings)

    def run(self) -> int:
        """Measure and print a report or JSON."""
        from layershuffle.bench.kinds import bench
        from layershuffle.bench.report import report_text
        from layershuffle.bench.settings import resolve
        from layershuffle.cli.progress import shown_progress

        title = f"bench {self.kind}"
        with torch_threads(self.settings.threads), shown_progress(title) as progress:
            report = bench(self.kind, resolve(self.settings), progress=progress)
        print(json.dumps(asdict(report), indent=2) if self.json else report_text(report))
        return 0
