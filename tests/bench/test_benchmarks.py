"""Every file in benchmarks/ runs, and the page agrees with the committed results."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from _harness import Bound, ClaimRow, newest, read_result
from performance_page import with_claims, with_tables

from layershuffle.errors import LayerShuffleError

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
ROOT = Path(__file__).resolve().parents[2]
LOAD = ROOT / "benchmarks" / "swarm_load.py"  # a form of its own
FILES = sorted({*(ROOT / "benchmarks").glob("[!_]*.py")} - {LOAD})
MARKS = "<!-- begin: cpu -->\n<!-- end: cpu -->\n<!-- begin: gpu --><!-- end: gpu -->\n"


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("layershuffle.bench.machine._SIZE", {"cpu": 64})


def run_smoke(path, out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", "--out", str(out)])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 0, capsys.readouterr()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_runs(path, tmp_path, monkeypatch, capsys):
    run_smoke(path, tmp_path, monkeypatch, capsys)
    (written,) = tmp_path.iterdir()
    result = read_result(written)
    assert result.rows
    assert result.complete
    assert result.command == f"python benchmarks/{path.name}"
    assert all(row.values for row in result.rows)
    counts = [row for row in result.rows if row.bound is not None and row.bound.kind == "equal"]
    assert all(row.holds for row in counts)  # exact even in a smoke
    assert "failed" not in " ".join(row.name for row in result.rows)


def test_the_swarm_under_load_runs(tmp_path, monkeypatch, capsys):
    run_smoke(LOAD, tmp_path / "load.json", monkeypatch, capsys)
    results = json.loads((tmp_path / "load.json").read_text())
    for routing in ("order-free", "sequential"):
        assert len(results[routing]["kills"]) == 2
        shares = ("answered", "degraded", "failed", "late")
        assert sum(results[routing][share] for share in shares) == pytest.approx(100)
    sequential = results["sequential"]
    # Four of 24 requests: those under way when a host dies.
    foreseen = sequential["foreseen"]["failed"]
    assert sequential["failed"] == pytest.approx(foreseen, abs=17)
    assert results["order-free"]["failed"] == 0
    assert results["order-free"]["degraded"] > 0
    assert results["slow"]["p99_slow_ms"] > 0
    assert results["memory"]["gateway_mb"][0] > 100


def test_the_page_agrees_with_the_result_files():
    page = (ROOT / "docs" / "performance.md").read_text()
    results = newest(ROOT / "benchmarks" / "results")
    assert page == with_tables(page, results), "run scripts/performance_page.py"
    for name in ("rounds", "swarm"):
        claims = (ROOT / "docs" / f"{name}.md").read_text()
        assert claims == with_claims(claims, results), "run scripts/performance_page.py"
    swarm = (ROOT / "docs" / "swarm.md").read_text()
    assert swarm.count("<!-- begin: swarm-") == 4
    measured_on_gpu = any(result.theme == "gpu" for result in results)
    assert ("not measured yet" in page) == (not measured_on_gpu)


def test_every_claim_has_a_result_and_every_result_a_claim():
    results = newest(ROOT / "benchmarks" / "results")
    assert all(result.complete for result in results)
    commands = {result.command.rpartition("/")[2] for result in results}
    files = {path.name for path in FILES}
    assert commands <= files
    assert files - commands <= {"gpu.py"}, "only what needs a GPU may be unmeasured"


def example(**changes):
    path = next((ROOT / "benchmarks" / "results").glob("*.json"))
    row = ClaimRow(name="a row", what="A / B", values=(1.0, 2.0), bound=Bound("at_most", 1.2))
    return replace(read_result(path), theme="theme", rows=(row,), **changes)


def test_tables_are_replaced_between_their_marks():
    page = with_tables(MARKS, [example()])
    assert "| a row | A / B | 1.500 | 1 to 2 | 2 | at most 1.2 | **missed** |" in page
    assert page.count("not measured yet") > 5
    assert with_tables(page, [example()]) == page
    gpu = example(hardware={"gpu": "NVIDIA H200", "precision": "bf16"})
    both = with_tables(page, [example(), replace(gpu, theme="gpu")])
    assert "not measured yet" not in both
    assert "On NVIDIA H200, bf16" in both
    with pytest.raises(LayerShuffleError, match="begin: cpu"):
        with_tables("no marks", [])
