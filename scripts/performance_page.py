"""Make the tables of docs/performance.md and docs/swarm.md anew from benchmarks/results.

python scripts/performance_page.py
"""

from __future__ import annotations

from pathlib import Path

from layershuffle.bench.page import newest, with_claims, with_tables
from layershuffle.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {ROOT / "docs" / "performance.md": with_tables, ROOT / "docs" / "swarm.md": with_claims}

if __name__ == "__main__":
    for page, made in PAGES.items():
        write_text(page, made(page.read_text(encoding="utf-8"), newest(RESULTS)))
        print(f"Written: {page}")
