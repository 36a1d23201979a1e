"""Every file in benchmarks/ runs, its results are shown, and pairs are compared as they should."""

import gc
import math
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from _clocks import SMOKE, Effort
from _harness import (
    Bound,
    Claim,
    ClaimRow,
    compare,
    interval_of_median,
    read_results,
    run_claim,
    write_results,
)

from layershuffle.cli.swarm_demo import PIPELINE
from layershuffle.ground.errors import LayerShuffleError
from refusals import refuses

# torch's own, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
RESULTS = ROOT / "benchmarks" / "results" / "claims.csv"


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    monkeypatch.setattr("_machine._SIZE", {"cpu": 64})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", "--out", str(tmp_path)])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 0, capsys.readouterr()
    (written,) = tmp_path.iterdir()
    (result,) = read_results(written)
    assert result.command == f"python benchmarks/{path.name} --smoke --out {tmp_path}"
    assert all(row.values for row in result.rows)
    exact = [row for row in result.rows if row.bound is not None and row.bound.kind == "equal"]
    assert all(row.holds for row in exact)
    assert "failed" not in " ".join(row.name for row in result.rows)


def script_of(result):
    """The file name of the script that its command runs."""
    return Path(result.command.split()[1]).name


def test_every_claim_has_a_result_and_every_result_a_claim():
    commands = {script_of(result) for result in read_results(RESULTS)}
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
        file = script_of(result).removesuffix(".py")
        assert result.theme in shown or f"`{file}`" in prose, result.theme


def test_the_demo_quotes_the_pipeline_as_it_was_measured():
    (result,) = [r for r in read_results(RESULTS) if r.theme == "swarm-simulation"]
    right = {row.name: f"{row.median:.1f} %" for row in result.rows}
    assert re.findall(r"[\d.]+ %", PIPELINE) == [
        right["two copies: swarm"],
        right["two copies: pipeline"],
        right["two copies, blocks given on: pipeline"],
    ]


def test_availability_counts_by_the_minute_in_which_a_request_was_sent(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    site = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "availability.py")))
    requests = [
        site.Request(at=0.5, ended="answered", right=True, ms=10.0),
        site.Request(at=59.9, ended="late", right=True, ms=2500.0),
        site.Request(at=60.0, ended="degraded", right=False, ms=20.0),
        site.Request(at=70.0, ended="failed", right=False, ms=30.0, why="nobody answers"),
    ]
    kills = [site.Kill(name="host-1", at=10.0), site.Kill(name="gateway 1", at=61.0, back=3.0)]
    lines = site.lines_of(requests, kills, [(0.0, 2.0), (10.0, 4.0), (60.0, 9.0)])
    first, second, ten, whole = lines
    assert ten == {**whole, "minute": "1 to 2"}
    shares = ("failed", "late", "in_part", "right")
    assert [first[name] for name in shares] == ["0", "50", "0", "100"]
    assert [second[name] for name in shares] == ["50", "0", "50", "0"]
    assert [whole[name] for name in shares] == ["25", "25", "25", "50"]
    assert [line["minute"] for line in (first, second, whole)] == ["1", "2", "all"]
    assert [first["half_ms"], second["half_ms"], whole["requests"]] == ["10", "20", "4"]
    assert [first["killed"], second["killed"]] == ["1 hosts", "0 hosts, gateway 1"]
    assert [first["load"], whole["load"]] == ["3", "5"]


# --- on a GPU machine -----------------------------------------------------------------------------

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


# --- pairs and results ----------------------------------------------------------------------------


def test_a_pair_is_the_mean_of_turns_in_which_both_go_first():
    log = []

    def side(name, seconds):
        return lambda: log.append((name, gc.isenabled())) or seconds

    a, b = side("a", 0.2), side("b", 0.1)
    row = compare("name", "A / B", a=a, b=b, effort=Effort(pairs=5, seconds=0.75))
    turns = 3  # 0.75 s of turns that take 0.3 s
    assert row.settings["turns_per_pair"] == turns
    assert row.values == pytest.approx((2.0,) * 5)
    assert row.pairs == tuple(pytest.approx((0.2, 0.1)) for _ in range(5))
    names = [name for name, _ in log]
    assert names[:4] == ["a", "a", "b", "b"]  # the warm-up
    first = names[4::2]
    assert len(names) == 4 + 5 * turns * 2
    assert abs(first.count("a") - first.count("b")) <= 1
    assert all(first[i] != first[i + 1] for i in range(turns - 1))
    assert not any(collecting for _, collecting in log)
    assert gc.isenabled()


@pytest.mark.parametrize(("count", "low"), [(5, 0), (6, 0), (9, 1), (15, 3), (21, 5)])
def test_the_interval_of_the_median_is_the_binomial_one(count, low):
    """Narrowest pair of order statistics that misses the median in at most 5 % of all samples."""
    assert interval_of_median([float(value) for value in range(count)]) == (low, count - 1 - low)
    misses = [2 * sum(math.comb(count, k) for k in range(n + 1)) / 2**count for n in (low, low + 1)]
    assert count == 5 or misses[0] <= 0.05 < misses[1]  # of five even the whole range is too few


BOUNDS = [
    (Bound("at_most", 1.05), [1.0, 1.05, 9.0], True),
    (Bound("at_most", 1.05), [1.0, 1.06, 1.07], False),
    (Bound("at_least", 4.5), [4.0, 4.5, 5.0], True),
    (Bound("at_least", 4.5), [4.0, 4.4, 9.0], False),
    (Bound("equal", 12), [12, 12], True),
    (Bound("equal", 12), [12, 12, 13], False),
    (Bound("not_above", 1.0), [0.99, 0.99, 1.02, 1.02, 1.03, 1.04, 1.04, 1.05, 1.2], True),
    (Bound("not_above", 1.0), [0.99, 1.01, 1.02, 1.02, 1.03, 1.04, 1.04, 1.05, 1.2], False),
    (Bound("not_above", 1.0), [0.5, 0.5, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2], False),
]


@pytest.mark.parametrize(("bound", "values", "holds"), BOUNDS)
def test_bounds(bound, values, holds):
    assert bound.holds(values) is holds
    assert ClaimRow(name="n", what="w", values=tuple(values), bound=bound).holds is holds


def claim_of(*values, bound):
    row = ClaimRow(name="a row", what="A / B", values=values, bound=bound, pairs=((2.0, 1.0),))
    return Claim(theme="theme", text="It is so.", rows=lambda effort: [row])


def test_a_result_is_written_and_read(tmp_path):
    lines = []
    claim = claim_of(1.0, 1.5, 3.0, bound=Bound("at_most", 2.0))
    assert run_claim(claim, str(tmp_path / "x.py"), tell=lines.append, argv=[]) == 0
    (path,) = (tmp_path / "results").iterdir()
    (result,) = read_results(path)
    assert (result.theme, result.claim) == ("theme", "It is so.")
    assert result.command == "python benchmarks/x.py"
    assert result.hardware["threads"] == 1
    assert result.seconds >= 0
    assert "a row: A / B 1.5 (1 to 3, 3 pairs); at most 2: holds" in lines
    # What the pages show.
    text = path.read_text()
    assert ",a row,A / B,1.500,1 to 3,3 pairs,at most 2,holds," in text
    write_results(read_results(path), path)
    assert path.read_text() == text


def test_a_new_result_replaces_that_of_its_theme_alone_on_any_processor(tmp_path):
    path = tmp_path / "results" / "claims.csv"
    run_claim(claim_of(7.0, bound=None), str(tmp_path / "x.py"), tell=lambda _: None, argv=[])
    (own,) = read_results(path)
    elsewhere = replace(own, hardware={**own.hardware, "gpu": "another machine"})
    another = replace(own, theme="another theme")
    old = replace(
        own,
        hardware={**own.hardware, "gpu": None, "processor": "another processor"},
        rows=(replace(own.rows[0], values=(3.0,)),),
    )
    write_results([elsewhere, another, old], path)
    run_claim(claim_of(7.0, bound=None), str(tmp_path / "x.py"), tell=lambda _: None, argv=[])
    found = {result.key: result.rows[0].median for result in read_results(path)}
    assert found == {elsewhere.key: 7.0, another.key: 7.0, own.key: 7.0}
    assert len(found) == 3


def test_a_missed_bound_is_exit_code_1_but_not_in_a_smoke(tmp_path):
    claim = claim_of(3.0, bound=Bound("at_most", 2.0))
    lines = []
    assert run_claim(claim, str(tmp_path / "x.py"), tell=lines.append, argv=[]) == 1
    assert "MISSED" in lines[0]
    out = tmp_path / "y"
    assert run_claim(claim, str(out / "x.py"), tell=lines.append, argv=["--smoke"]) == 0
    assert not out.exists()
    assert "at most" not in lines[-1]


def test_rows_before_a_failure_are_saved_beside_the_complete_result(tmp_path):
    def rows(effort):
        yield ClaimRow(name="first", what="w", values=(1.0,))
        if fails:
            raise LayerShuffleError("the second one failed")

    claim, fails = Claim(theme="theme", text="It is so.", rows=rows), False
    script, results = str(tmp_path / "x.py"), tmp_path / "results"
    run_claim(claim, script, tell=lambda _: None, argv=[])
    whole, fails = (results / "claims.csv").read_bytes(), True
    with refuses(LayerShuffleError):
        run_claim(claim, script, tell=lambda _: None, argv=[])
    assert (results / "claims.csv").read_bytes() == whole
    (part,) = read_results(results / "theme.csv.part")
    assert [row.name for row in part.rows] == ["first"]
    fails = False
    run_claim(claim, script, tell=lambda _: None, argv=[])
    assert [path.name for path in results.iterdir()] == ["claims.csv"]
