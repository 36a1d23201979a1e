"""Write the tables of docs/performance.md, rounds.md and swarm.md from benchmarks/results.

python scripts/performance_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from layershuffle.files import write_text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from _harness import newest, with_claims, with_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    ROOT / "docs" / "performance.md": with_tables,
    ROOT / "docs" / "rounds.md": with_claims,
    ROOT / "docs" / "swarm.md": with_claims,
}


def medians_of(theme: str) -> dict[str, float]:
    """The median of every row in the newest result of a benchmark, by name."""
    results = [result for result in newest(RESULTS) if result.theme == theme]
    return {row.name: row.median for row in max(results, key=lambda result: result.date).rows}


if __name__ == "__main__":
    for page, with_results in PAGES.items():
        write_text(page, with_results(page.read_text(encoding="utf-8"), newest(RESULTS)))
        print(f"Written: {page}")
