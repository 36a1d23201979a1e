"""Copy what documentation keeps of a study: results and report, no weights, no logs.

    python scripts/keep_study.py runs/digits-paper docs/results/digits-paper

The copy is a study of its own: `layershuffle report` reads it, and `layershuffle reproduce` with a
copy of it as --out goes on where it ended.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

KEPT = (
    "plan.json",
    "*.md",
    "*.svg",
    "*.png",
    "results.csv",
    "runs/*/result.json",
    "runs/*/results.csv",
    "merging/*/result.json",
    "merging/*/results.csv",
    "analysis/*/result.json",
    "analysis/*/files/*",
)


def keep(study: Path, out: Path) -> int:
    """Copy the kept files of `study` into `out`, in place of what was there; how many."""
    if out.exists():
        shutil.rmtree(out)
    files = [path for pattern in KEPT for path in sorted(study.glob(pattern))]
    for path in files:
        target = out / path.relative_to(study)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return len(files)


if __name__ == "__main__":
    print(f"{keep(Path(sys.argv[1]), Path(sys.argv[2]))} files")
