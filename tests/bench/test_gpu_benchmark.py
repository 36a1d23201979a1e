"""benchmarks/gpu.py under failures of a GPU machine."""

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from _clocks import SMOKE, Effort
from _harness import ClaimRow

ROOT = Path(__file__).resolve().parents[2]
ONCE = Effort(pairs=1, seconds=0.0, warm_up=1)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"), run_name="gpu"))


def broken(error):
    def a_section(chosen, effort):
        yield ClaimRow(name="before", what="", values=(1.0,))
        raise error

    return a_section


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel"), MemoryError(), subprocess.CalledProcessError(1, "ptxas")]
)
def test_a_section_that_fails_is_a_row_and_the_others_run(script, error):
    before, failed = script.attempted(broken(error), script.TRIAL, ONCE)
    assert before.name == "before"
    assert (failed.name, failed.holds) == ("a section: failed", False)
    assert failed.what.startswith(f"{type(error).__name__}: ")
    with pytest.raises(type(error)):
        list(script.attempted(broken(error), script.TRIAL, SMOKE))


def test_sections_without_time_left_are_rows_too(script, monkeypatch):
    """So the result is complete and names what it lacks."""
    monkeypatch.setitem(script.rows.__globals__, "MOST_SECONDS", -1)
    rows = list(script.rows(ONCE))
    assert len(rows) == len(script.SECTIONS)
    assert not any(row.holds for row in rows)
    assert "eight minutes" in rows[0].what
