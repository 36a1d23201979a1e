"""Every file in benchmarks/ runs, and its committed results are shown."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from _harness import read_results

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
RESULTS = ROOT / "benchmarks" / "results" / "claims.csv"


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("layershuffle.bench.machine._SIZE", {"cpu": 64})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", "--out", str(tmp_path)])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 0, capsys.readouterr()
    (written,) = tmp_path.iterdir()
    (result,) = read_results(written)
    assert result.command == f"python benchmarks/{path.name}"
    assert all(row.values for row in result.rows)
    exact = [row for row in result.rows if row.bound is not None and row.bound.kind == "equal"]
    assert all(row.holds for row in exact)
    assert "failed" not in " ".join(row.name for row in result.rows)


def test_every_claim_has_a_result_and_every_result_a_claim():
    commands = {result.command.rpartition("/")[2] for result in read_results(RESULTS)}
    files = {path.name for path in FILES}
    assert commands <= files
    assert files - commands <= {"gpu.py"}, "only what needs a GPU may be unmeasured"


def test_every_result_is_shown_once_in_a_table_or_named_in_prose():
    shown, prose = list[str](), ""
    for page in (ROOT / "docs").glob("*.md"):
        for text in re.findall(r"<!-- table\n(.*?)-->", page.read_text(), re.DOTALL):
            themes = yaml.safe_load(text).get("where", {}).get("theme", [])
            shown += themes if isinstance(themes, list) else [themes]
        prose += page.read_text()
    assert len(shown) == len(set(shown))
    for result in read_results(RESULTS):
        file = result.command.rpartition("/")[2].removesuffix(".py")
        assert result.theme in shown or f"`{file}`" in prose, result.theme
