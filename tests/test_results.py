"""Rows of scores: round trips, and impossible rows, which are refused with their line."""

import csv
import json

import pytest

from layershuffle.ground.errors import DataError
from layershuffle.ground.rows import MergingRow, ScoreRow, read_rows, score_of, write_rows
from layershuffle.study.paper.summary import estimate_rows
from layershuffle.study.plan import read_plan
from refusals import refuses

COLUMNS = ScoreRow.columns()


def row(**fields):
    known = {
        "method": "layershuffle",
        "seed": 0,
        "mode": "arbitrary",
        "kept": 3,
        "choose": "",
        "order_seed": 0,
        "order": "2,0,1",
        "n": 200,
        "top1": 45.5,
        "top5": 1 / 3 + 70,
        "cross_entropy": 2 / 3,
        "draw": "pass",
    }
    return ScoreRow(**{**known, **fields})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.csv"
    write_rows(path, [row(order_seed=index) for index in range(3)])
    return path


def test_the_fewest_images_give_the_interval():
    """However the rows are sorted: two models, of which one was scored on few images."""
    rows = [row(top1=60.0, n=900), row(top1=60.0, n=40, seed=1)]
    merges = []
    for index, count in enumerate((900, 40)):
        merges.append(
            MergingRow(
                kind="merge", index=index, donors="", mode="arbitrary", order="0", n=count,
                top1=90.0, top5=99.0, cross_entropy=1.0,
            )
        )  # fmt: skip
    for score, group in ((estimate_rows, rows), (score_of, merges)):
        first, second = score(group), score(group[::-1])
        assert first.images == second.images
        assert first == second
    alone = estimate_rows(rows[1:])
    assert estimate_rows(rows).images == alone.images


def test_rows_are_written_and_read_back(tmp_path):
    rows = (row(), row(order_seed=1, order="", draw="batch"), row(order_seed=2, seconds="0.5"))
    path = tmp_path / "results.csv"
    write_rows(path, rows[:2])
    assert path.read_text() == (
        "method,seed,mode,kept,choose,order_seed,order,n,top1,top5,cross_entropy,draw\n"
        'layershuffle,0,arbitrary,3,,0,"2,0,1",200,45.5,70.33333333333333,0.6666666666666666,pass\n'
        "layershuffle,0,arbitrary,3,,1,,200,45.5,70.33333333333333,0.6666666666666666,batch\n"
    )
    write_rows(path, rows)
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "draw", "seconds"])
    first, second, third = read_rows(path, ScoreRow)
    assert (first.model_extra, third.model_extra) == ({"seconds": ""}, {"seconds": "0.5"})
    assert first.top5 == rows[0].top5  # every digit
    assert (second.order, second.draw) == ("", "batch")


def test_numbers_of_independent_images_have_a_column_where_some_row_has_them(tmp_path):
    path = tmp_path / "results.csv"
    rows = (row(top1_n=123, seconds="2"), row(order_seed=1, seconds="3"))
    write_rows(path, rows)
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "top1_n", "seconds"])
    assert read_rows(path, ScoreRow) == rows
    assert path.read_text().endswith(",,3\n")
    # A hundred and more are whole numbers. Few images differ by a tenth.
    path.write_text(path.read_text().replace(",123,", ",122.6,"))
    assert read_rows(path, ScoreRow) == rows
    path.write_text(path.read_text().replace("122.6", "6.6"))
    assert read_rows(path, ScoreRow)[0].top1_n == 6.6
    path.write_text(path.read_text().replace("6.6", "0.5"))
    with refuses(DataError, f"{path}, line 2"):
        read_rows(path, ScoreRow)


def test_columns_that_hold_their_default_in_every_row_are_left_out(tmp_path):
    path = tmp_path / "results.csv"
    rows = (row(), row(parallel=2, order="2+0,1"), row(passes=2, order="2,0,1,2@1,0,1"))
    write_rows(path, rows)
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "parallel", "passes"])
    assert read_rows(path, ScoreRow) == rows
    write_rows(path, rows[::2])
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "passes"])
    assert read_rows(path, ScoreRow) == rows[::2]
    write_rows(path, rows[:1])
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [(r.draw, r.parallel, r.passes) for r in read_rows(path, ScoreRow)] == [("pass", 1, 1)]
    path.write_text(path.read_text().replace("2,0,1", "2,0,1,2"))
    with refuses(DataError, f"{path}, line 2"):
        read_rows(path, ScoreRow)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("mode", "random"),
        ("choose", "best"),
        ("draw", "epoch"),
        ("kept", "0"),
        ("kept", "11"),
        ("kept", "2.5"),
        ("n", "0"),
        ("order", ""),
        ("order", "a,b"),
        ("top1", "101"),
        ("top1", "nan"),
        ("top1", "99"),
        ("cross_entropy", "inf"),
    ],
)
def test_impossible_rows_are_refused_with_their_line(path, column, value):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rows[1][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "draw"], restval="pass")
        writer.writeheader()
        writer.writerows(rows)
    with refuses(DataError, f"{path}, line 3"):
        read_rows(path, ScoreRow)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace(",top5", ""), *lines[1:]],
        lambda lines: [lines[0] + ",n", *lines[1:]],
        lambda lines: lines[:1],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines, "a,b"],
    ],
)
def test_wrong_csv_is_refused(path, change):
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with refuses(DataError):
        read_rows(path, ScoreRow)


def test_a_file_that_is_cut_off_anywhere_is_refused(path):
    text = path.read_text()
    for length in range(len(text)):
        if not text[:length].endswith("\n"):  # a whole number of lines cannot be told from the file
            path.write_text(text[:length])
            with pytest.raises(DataError):
                read_rows(path, ScoreRow)
    path.unlink()
    with refuses(DataError, path.parent):
        read_rows(path, ScoreRow, hint="run it again")


def test_every_kept_study_is_read(repository):
    """Their plans are from before the methods had these names; rows keep the labels of arms."""
    for plan in sorted((repository / "docs" / "results").glob("*/plan.json")):
        arms = json.loads(plan.read_text())["recipe"]["arms"]
        labels = {arm.get("name") or arm["method"] for arm in arms}
        assert {arm.label for arm in read_plan(plan.parent).arms} == labels
