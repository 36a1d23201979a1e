"""The report: numbers equal the CSV's, one self-contained page, the same bytes twice."""

from __future__ import annotations

import csv
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from fixture import CONDITIONS, LEVELS, facts, run_of, run_rows, tell, write_study

from layershuffle.stats import compare, estimate
from layershuffle.study.paper.report import gain, report_text, write_report
from layershuffle.study.paper.summary import Summary, label, summarise
from layershuffle.study.paper.tables import flatten
from layershuffle.study.store import read_study

VOID = {"meta", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements with their attributes; complains about tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module", params=[(0,), (0, 1, 2)], ids=["one seed", "three seeds"])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = write_study(tmp_path_factory.mktemp("report"), seeds=request.param)
    write_report(out)
    return out


@pytest.fixture(scope="module")
def html(out: Path) -> Page:
    return Page((out / "report.html").read_text())


def markdown_of(out: Path) -> str:
    return (out / "report.md").read_text()


def from_csv(out: Path) -> dict[tuple[str, str, int], dict[int, list[float]]]:
    scores: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    with (out / "results.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["mode"], int(row["kept"]))
            scores.setdefault(key, {}).setdefault(int(row["seed"]), []).append(float(row["top1"]))
    return scores


def slow_mean(scores: dict[int, list[float]]) -> float:
    return statistics.fmean(statistics.fmean(values) for values in scores.values())


def summary_of(out: Path) -> Summary:
    return summarise(read_study(out))


def test_all_files_are_written_and_nothing_else(out: Path):
    files = {"plan.json", "tasks.jsonl", "results.csv", "report.md", "report.html", ".lock"}
    assert {path.name for path in out.iterdir()} == {*files, "figures"}
    assert {path.name for path in (out / "figures").iterdir()} == {"bars.svg", "figure1.svg"}


def test_numbers_of_the_tables_equal_the_csv(out: Path):
    """Of the report and of the terminal."""
    lines, scores = markdown_of(out).splitlines(), from_csv(out)
    printed = report_text(summary_of(out)).splitlines()
    assert max(map(len, printed)) <= 100
    for arm in LEVELS:
        line = next(line for line in lines if line.startswith(f"| {label(arm)} | **"))
        shown = next(line.split() for line in printed if line.split(" ")[0] == label(arm))
        for cell, condition in zip(line.split("|")[2:-1], CONDITIONS, strict=True):
            values = scores[arm, *condition]
            score = estimate(values, images=5000)
            mean = re.search(r"\*\*([\d.]+)\*\*", cell)
            assert mean
            assert abs(float(mean[1]) - slow_mean(values)) <= 0.05 + 1e-9
            interval = f"{score.low:.1f}-{score.high:.1f}"
            assert f"({interval})" in cell
            if condition[1] == 12:
                assert shown[shown.index(mean[1]) + 1] == interval


def test_the_headline_says_what_the_study_shows(out: Path, html: Page):
    scores = from_csv(out)
    means = {arm: slow_mean(scores[arm, "arbitrary", 12]) for arm in LEVELS}
    sentence = (
        f"Shuffled, the ordinary model is right on {means['baseline']:.1f} of 100 images, "
        f"LayerShuffle on {means['layershuffle']:.0f}, "
        f"LayerShuffle-depth on {means['layershuffle-depth']:.0f}"
    )
    assert sentence in html.text
    assert markdown_of(out).startswith(f"# {sentence}\n\n![")
    assert " ".join(report_text(summary_of(out)).split()).startswith(sentence)


def test_a_difference_is_given_with_its_interval(tmp_path: Path):
    first = summary_of(write_study(tmp_path / "one", orders=2))
    assert gain(first) == "There is one model of each: only more seeds show what is chance."
    three = summary_of(write_study(tmp_path / "three", seeds=(0, 1, 2), orders=2))
    gap = compare(*(three.means(arm, "arbitrary") for arm in ("layershuffle", "baseline")))
    points = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    assert gain(three) == f"LayerShuffle and the ordinary model, shuffled, differ by {points}."
    arms = {"baseline": "baseline", "layershuffle": "layerdrop"}
    alike = write_study(tmp_path / "alike", seeds=(0, 1, 2), orders=2, arms=arms)
    assert gain(summary_of(alike)).endswith(": that may be chance.")


def test_the_page_is_the_markdown(out: Path, html: Page):
    """Every heading, cell and figure."""
    text = markdown_of(out)
    lines = re.findall(r"^\|.*[^-:|\n].*$", text, re.MULTILINE)
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(html.all("td")) + len(html.all("th")) == len(cells)
    assert len(html.all("h2")) == len(re.findall("^## ", text, re.MULTILINE))
    targets = [str(a["href"]).removeprefix("#") for a in html.all("a")]
    assert targets == [str(h["id"]) for h in html.all("h2")]
    assert len(html.all("img")) == text.count("\n![") == 2
    for words in ("82.61", "~70-80", "ImageNet2012", "digit pairs with bundled:digits", "20000"):
        assert words in html.text
    assert len(text.splitlines()) < 250


def test_the_page_is_self_contained_and_accessible(out: Path, html: Page):
    text = (out / "report.html").read_text()
    assert not re.search(r"https?://|url\((?!#)|@import|javascript:", text)
    tags = {tag for tag, _ in html.elements}
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & tags
    for image in html.all("img"):
        assert str(image["src"]).startswith("data:image/svg+xml;base64,")
        assert image["alt"]
    assert html.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in html.elements if re.fullmatch("h[1-6]", tag)]
    assert (headings[0], headings.count(1)) == (1, 1)
    assert all(deep <= before + 1 for before, deep in pairwise(headings))


def test_same_results_give_the_same_bytes(tmp_path: Path):
    names = ("report.md", "report.html", "figures/figure1.svg", "figures/bars.svg")
    texts = []
    for name in ("one", "two", "one"):
        if not (tmp_path / name).exists():
            write_study(tmp_path / name, orders=3)
        write_report(tmp_path / name)
        texts.append([(tmp_path / name / file).read_bytes() for file in names])
    assert texts[0] == texts[1] == texts[2]


def test_an_unfinished_study_says_what_is_missing(tmp_path: Path):
    failed = {"layerdrop-seed1": "The loss became NaN at step 812. Next: lower the rate."}
    undone = ["layershuffle-seed2", *(f"baseline-seed{seed}" for seed in (0, 1, 2))]
    out = write_study(tmp_path, orders=3, seeds=(0, 1, 2), failed=failed, undone=undone)
    write_report(out)
    text = markdown_of(out)
    assert "7 of 12 tasks are finished" in text
    assert "- layerdrop-seed1 failed: The loss became NaN at step 812." in text
    assert "- layershuffle-seed2 not done yet\n\n## Table 1" in text
    assert "layershuffle-seed2 not done yet" in report_text(summary_of(out))
    (line,) = [line for line in text.splitlines() if line.startswith("| baseline |")]
    assert line.count("| - ") == 8
    assert text.startswith("# Shuffled, LayerShuffle is right on 7")


def test_a_study_before_its_first_run(tmp_path: Path):
    out = write_study(tmp_path, undone=[f"{arm}-seed0" for arm in LEVELS])
    write_report(out)
    assert markdown_of(out).startswith("# No score in arbitrary order yet\n\nStudy")
    assert "![" not in markdown_of(out)
    assert "baseline-seed0 not done yet" in report_text(summary_of(out))


def test_the_papers_protocol_is_described_in_full(tmp_path: Path):
    out = write_study(tmp_path, orders=2, undone=["baseline-seed0"])
    task = run_of(out, "baseline-seed0")
    told = facts(task) | {"paper_protocol": True}
    tell(out, task.name, **told, rows=run_rows(task, 2, "pass"))
    write_report(out)
    assert "was picked on the same images that the scores are reported on" in markdown_of(out)
    assert "was not used" in markdown_of(out)  # by the other arms


def test_hostile_text_stays_text(tmp_path: Path):
    bad = "<script>alert(1)</script>`|*x*\x1b[31m\n# no [e](f) & $h$ \\ ~i~"
    names = ("<img src=x onerror=alert(1)>", "$\\frac$&", "_hidden")
    arms = dict.fromkeys(names, "baseline") | {"layershuffle": "layershuffle"}
    failed = {"layershuffle-seed0": bad}
    out = write_study(tmp_path, orders=2, arms=arms, failed=failed, hostile=bad)
    write_report(out)
    html = Page((out / "report.html").read_text())
    assert not html.all("script")
    assert {str(image["src"])[:5] for image in html.all("img")} == {"data:"}
    assert "<script>alert(1)</script>`|*x*?[31m # no [e](f) & $h$ \\ ~i~" in html.text
    assert "\x1b" not in report_text(summary_of(out)) + markdown_of(out)
    assert [heading for heading in html.all("h2") if "id" not in heading] == []


def test_a_study_of_sixteen_arms_has_no_figure(tmp_path: Path):
    arms = {"layershuffle": "layershuffle", **{f"arm{i}": "layerdrop" for i in range(15)}}
    out = write_study(tmp_path, orders=1, arms=arms)
    write_report(out)
    words = "16 arms are too many lines for a figure: results.csv has every score."
    assert words in markdown_of(out)
    assert "![" not in markdown_of(out)


def test_flatten_names_every_value():
    nested = {"a": {"b": 1, "c": {}}, "d": [1, 2], "g": None, "h": True}
    flat = {"a.b": "1", "a.c": "{}", "d": "[1, 2]", "g": "none", "h": "true"}
    assert flatten(nested) == flat
