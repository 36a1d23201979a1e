"""Paired comparisons against closed forms, and round trips of results."""

import gc
import math
import time

import pytest
from _harness import (
    Bound,
    Claim,
    ClaimResult,
    ClaimRow,
    compare,
    interval_of_median,
    read_results,
    run_claim,
    write_results,
)

from layershuffle.bench.timing import Effort, cpu_timed
from layershuffle.errors import LayerShuffleError
from refusals import refuses


def sides(log, a=2.0, b=1.0):
    """Two sides that always take the same time, and record their turns."""

    def side(name, seconds):
        def run():
            log.append((name, gc.isenabled()))
            return seconds

        return run

    return side("a", a), side("b", b)


def test_a_pair_is_the_mean_of_turns_in_which_both_go_first():
    log = []
    a, b = sides(log, a=0.2, b=0.1)
    row = compare("name", "A / B", a=a, b=b, effort=Effort(pairs=5, seconds=0.75))
    turns = 3  # 0.75 s of turns that take 0.3 s
    assert row.settings["turns_per_pair"] == turns
    assert row.values == pytest.approx((2.0,) * 5)
    assert row.pairs == tuple(pytest.approx((0.2, 0.1)) for _ in range(5))
    names = [name for name, _ in log]
    warm_up, rest = names[:4], names[4:]
    assert warm_up == ["a", "a", "b", "b"]
    assert len(rest) == 5 * turns * 2
    first = rest[::2]
    assert set(first) == {"a", "b"}
    assert abs(first.count("a") - first.count("b")) <= 1
    assert all(first[i] != first[i + 1] for i in range(turns - 1))
    assert not any(collecting for _, collecting in log)
    assert gc.isenabled()


@pytest.mark.parametrize("count", [5, 6, 9, 15, 21])
def test_the_interval_of_the_median_is_the_binomial_one(count):
    """Narrowest pair of order statistics that misses the median in at most 5 % of all samples."""
    low, high = interval_of_median([float(value) for value in range(count)])
    assert low + high == count - 1

    def misses(below):
        return 2 * sum(math.comb(count, k) for k in range(below + 1)) / 2**count

    if count == 5:
        assert (low, misses(0)) == (0, 0.0625)  # even the whole range misses more often
    else:
        assert misses(int(low)) <= 0.05 < misses(int(low) + 1)


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


def test_the_clock_of_a_cpu_does_not_count_waiting():
    began = time.process_time()
    seconds = cpu_timed(lambda: time.sleep(0.05))()
    assert seconds <= time.process_time() - began
    assert seconds < 0.05  # of processor time, so no load of the machine adds to it
    assert cpu_timed(lambda: sum(range(1_000_000)))() > 0.001


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
    assert result.rows[0].values == (1.0, 1.5, 3.0)
    assert result.rows[0].bound == Bound("at_most", 2.0)
    assert result.rows[0].pairs == ((2.0, 1.0),)
    assert "a row: A / B 1.5 (1 to 3, 3 pairs); at most 2: holds" in lines
    # What the pages show.
    text = path.read_text()
    assert ",a row,A / B,1.500,1 to 3,3 pairs,at most 2,holds," in text
    write_results(read_results(path), path)
    assert path.read_text() == text


def result_on(processor, *, theme, value):
    row = ClaimRow(name="row", what="w", values=(value,))
    hardware = {"processor": processor, "cores": 2, "threads": 1, "gpu": None, "precision": "fp32"}
    return ClaimResult(
        theme=theme,
        claim="It is so.",
        date="2026-01-01",
        command="python benchmarks/x.py",
        hardware=hardware,
        versions={"torch": "2.9"},
        rows=(row,),
    )


def test_a_new_result_replaces_that_of_its_theme_and_machine_alone(tmp_path):
    path = tmp_path / "results" / "claims.csv"
    claim = claim_of(7.0, bound=None)
    run_claim(claim, str(tmp_path / "x.py"), tell=lambda _: None, argv=[])
    (own,) = read_results(path)
    others = [
        result_on("another one", theme="theme", value=1.0),
        result_on(own.hardware["processor"], theme="another theme", value=2.0),
    ]
    write_results([*others, result_on(own.hardware["processor"], theme="theme", value=3.0)], path)
    run_claim(claim, str(tmp_path / "x.py"), tell=lambda _: None, argv=[])
    found = {result.key: result.rows[0].median for result in read_results(path)}
    assert found == {others[0].key: 1.0, others[1].key: 2.0, own.key: 7.0}


def test_a_missed_bound_is_exit_code_1_but_not_in_a_smoke(tmp_path):
    claim = claim_of(3.0, bound=Bound("at_most", 2.0))
    lines = []
    assert run_claim(claim, str(tmp_path / "x.py"), tell=lines.append, argv=[]) == 1
    assert "MISSED" in lines[0]
    assert run_claim(claim, str(tmp_path / "y" / "x.py"), tell=lines.append, argv=["--smoke"]) == 0
    assert not (tmp_path / "y").exists()
    assert "at most" not in lines[-1]
    out = ["--smoke", "--out", str(tmp_path / "o")]
    assert run_claim(claim, str(tmp_path / "x.py"), tell=lines.append, argv=out) == 0
    assert len(list((tmp_path / "o").iterdir())) == 1


def test_rows_before_a_failure_are_saved_beside_the_complete_result(tmp_path):
    def rows(effort):
        yield ClaimRow(name="first", what="w", values=(1.0,))
        if fails:
            raise LayerShuffleError("the second one failed")
        yield ClaimRow(name="second", what="w", values=(2.0,))

    claim = Claim(theme="theme", text="It is so.", rows=rows)
    script, fails = str(tmp_path / "x.py"), False
    run_claim(claim, script, tell=lambda _: None, argv=[])
    (whole,) = (tmp_path / "results").iterdir()
    fails = True
    with refuses(LayerShuffleError):
        run_claim(claim, script, tell=lambda _: None, argv=[])
    part = whole.with_name("theme.csv.part")
    assert sorted((tmp_path / "results").iterdir()) == [whole, part]
    assert [row.name for row in read_results(whole)[0].rows] == ["first", "second"]
    assert [row.name for row in read_results(part)[0].rows] == ["first"]
    fails = False
    run_claim(claim, script, tell=lambda _: None, argv=[])
    assert [*(tmp_path / "results").iterdir()] == [whole]


@pytest.mark.parametrize("text", ["", "{", "theme,claim\na,b\n"])
def test_other_files_are_no_results(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with refuses(LayerShuffleError):
        read_results(path)
