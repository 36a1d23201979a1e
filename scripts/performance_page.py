"""Make the tables of docs/performance.md anew from the files in benchmarks/results.

python scripts/performance_page.py
"""

from __future__ import annotations

from pathlib import Path

from layershuffle.bench.page import newest, with_tables
from layershuffle.files import write_text

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"

if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), newest(RESULTS)))
    print(f"Written: {PAGE}")
