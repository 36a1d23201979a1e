"""benchmarks/gpu.py under failures of a GPU machine, and the command that runs it."""

import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from _harness import ClaimRow

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.core.compiling import BlockCompiler

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
    "error",
    [
        RuntimeError("no kernel"),
        TypeError("a new argument"),
        ValueError("a bad one"),
        KeyError("gone"),
        AttributeError("renamed"),
        ImportError("no triton"),
        OSError("no compiler"),
        ZeroDivisionError("no time"),
        MemoryError(),
        subprocess.CalledProcessError(1, "ptxas"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_section_that_fails_is_a_row_and_the_others_run(script, error):
    before, failed = script.attempted(broken(error), script.TRIAL, ONCE)
    assert before.name == "before"
    assert (failed.name, failed.holds) == ("a section: failed", False)
    assert failed.what.startswith(f"{type(error).__name__}: ")
    with pytest.raises(type(error)):
        list(script.attempted(broken(error), script.TRIAL, SMOKE))
    with pytest.raises(KeyboardInterrupt):
        list(script.attempted(broken(KeyboardInterrupt()), script.TRIAL, ONCE))


def test_sections_without_time_left_are_rows_too(script, monkeypatch):
    """So the result is complete and names what it lacks."""
    monkeypatch.setitem(script.rows.__globals__, "MOST_SECONDS", -1)
    rows = list(script.rows(ONCE))
    assert len(rows) == len(script.SECTIONS)
    assert not any(row.holds for row in rows)
    assert "eight minutes" in rows[0].what


def against_two_seconds(script, side, compiler):
    """The row of a compiled side, compared with one of two seconds."""
    return script.compared_blocks(
        "inference, compiled",
        a=lambda: 2.0,
        b=side,
        effort=ONCE,
        compiler=compiler,
        compiled=[side],
    )


def test_graphs_are_counted_after_the_pairs(script):
    compiler = BlockCompiler(backend="eager")

    def side():
        compiler.graphs += 1
        return 1.0

    row = against_two_seconds(script, side, compiler)
    # One by `compiled` itself; the warm-up and the pair are two more, after it.
    assert row.facts == {"name": "compiled", "reason": None, "graphs": 3, "recompiles": 2}
    assert row.what == "eager / compiled"


def test_a_fallback_is_reported_in_its_row(script):
    compiler = BlockCompiler(backend="eager")

    def side():
        compiler.give_up("no compiler here")
        return 1.0

    row = against_two_seconds(script, side, compiler)
    assert row.facts["name"] == "eager"
    assert row.what == "eager / compiled, NOT compiled: no compiler here"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("installed", [True, False])
def test_the_command_needs_no_network_where_the_package_is(installed, tmp_path):
    """With the package installed it measures at once, else it creates an environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *layershuffle.bench*) '
        f"exit {int(not installed)};; *venv*) exit 7;; esac\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "bench-gpu", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, check=False
    )
    ran = log.read_text().splitlines()
    measured = [f"benchmarks/{name}.py" for name in ("gpu", "rounds")]
    measured.append("scripts/tables.py")
    assert (ran[1:] == measured) is installed, done
    assert any("venv" in words for words in ran) is not installed
    assert (done.returncode == 0) is installed
