"""The report: numbers equal the CSV's, one self-contained page, the same bytes twice."""

from __future__ import annotations

import csv
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from fixture import LEVELS, facts, run_of, run_rows, tell, write_study

from layershuffle.stats import compare, estimate
from layershuffle.study.dry_run import duration
from layershuffle.study.paper.markdown import grid, literal, page, section
from layershuffle.study.paper.report import Report, headline, key_facts, write_report
from layershuffle.study.paper.summary import label
from layershuffle.study.paper.tables import flatten

VOID = {"meta", "br", "img", "hr"}
CONDITIONS = [
    ("sequential", 12),
    ("arbitrary", 12),
    *((mode, kept) for mode in ("arbitrary", "sequential") for kept in (9, 6, 3)),
]


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
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(write_study(tmp_path_factory.mktemp("report"), seeds=request.param))


@pytest.fixture(scope="module")
def html(report: Report) -> Page:
    return Page(report.html.read_text())


def markdown_of(report: Report) -> str:
    return report.html.with_suffix(".md").read_text()


def from_csv(report: Report) -> dict[tuple[str, str, int], dict[int, list[float]]]:
    scores: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    with (report.html.parent / "results.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["mode"], int(row["kept"]))
            scores.setdefault(key, {}).setdefault(int(row["seed"]), []).append(float(row["top1"]))
    return scores


def slow_mean(scores: dict[int, list[float]]) -> float:
    return statistics.fmean(statistics.fmean(values) for values in scores.values())


def test_all_files_are_written_and_nothing_else(report: Report):
    names = {path.name for path in report.html.parent.iterdir()}
    files = {"plan.json", "tasks.jsonl", "results.csv", "report.md", "report.html", ".lock"}
    assert names == {*files, "figures"}
    figures = report.html.parent / "figures"
    assert {path.name for path in figures.iterdir()} == {"bars.svg", "figure1.svg"}
    assert report.complete


def test_numbers_of_the_main_table_equal_the_csv(report: Report):
    lines, scores = markdown_of(report).splitlines(), from_csv(report)
    for arm in LEVELS:
        line = next(line for line in lines if line.startswith(f"| {label(arm)} | **"))
        for cell, condition in zip(line.split("|")[2:-1], CONDITIONS, strict=True):
            values = scores[arm, *condition]
            interval = estimate(values, images=5000)
            mean = re.search(r"\*\*([\d.]+)\*\*", cell)
            assert mean
            assert abs(float(mean[1]) - slow_mean(values)) <= 0.05 + 1e-9
            assert f"({interval.low:.1f}-{interval.high:.1f})" in cell


def test_numbers_of_the_terminal_equal_the_csv(report: Report):
    lines, scores = report.text.splitlines(), from_csv(report)
    assert max(map(len, lines)) <= 100
    for arm in LEVELS:
        (line,) = [line for line in lines if line.split(" ")[0] == label(arm)]
        words = line.split()[1:]
        assert abs(float(words[0]) - slow_mean(scores[arm, "sequential", 12])) <= 0.05 + 1e-9
        arbitrary = words[3 if arm in ("baseline", "layershuffle") else 2]
        assert abs(float(arbitrary) - slow_mean(scores[arm, "arbitrary", 12])) <= 0.05 + 1e-9


def test_the_headline_says_what_the_study_shows(report: Report, html: Page):
    scores = from_csv(report)
    means = {arm: slow_mean(scores[arm, "arbitrary", 12]) for arm in LEVELS}
    sentence = (
        f"Shuffled, the ordinary model is right on {means['baseline']:.1f} of 100 images, "
        f"LayerShuffle on {means['layershuffle']:.0f}, "
        f"LayerShuffle-depth on {means['layershuffle-depth']:.0f}"
    )
    assert headline(report.summary) == sentence
    assert sentence in html.text
    assert markdown_of(report).startswith(f"# {sentence}\n\n![")
    assert " ".join(report.text.split()).startswith(sentence)


def test_an_arm_is_called_better_only_with_an_interval(tmp_path: Path):
    first = write_report(write_study(tmp_path / "one")).summary
    assert key_facts(first)[0] == (
        "There is one model of each: only more seeds show what is chance."
    )
    assert "no arm can be called best" in key_facts(first)[1]
    three = write_report(write_study(tmp_path / "three", seeds=(0, 1, 2))).summary
    gap = compare(*(three.means(arm, "arbitrary") for arm in ("layershuffle", "baseline")))
    assert gap.low > 0
    points = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    fact, best = key_facts(three)
    assert fact == f"LayerShuffle and the ordinary model, shuffled, differ by {points}."
    assert "LayerShuffle-depth is best: " in best
    arms = {"baseline": "baseline", "layershuffle": "layerdrop"}
    study = write_study(tmp_path / "alike", seeds=(0, 1, 2), orders=2, arms=arms)
    assert key_facts(write_report(study).summary)[0].endswith(": that may be chance.")


def test_the_page_is_the_markdown(report: Report, html: Page):
    """Every heading and every cell of a table."""
    text = markdown_of(report)
    lines = re.findall(r"^\|.*[^-:|\n].*$", text, re.MULTILINE)
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(html.all("td")) + len(html.all("th")) == len(cells)
    headings = re.findall("^## (.*)", text, re.MULTILINE)
    assert len(html.all("h2")) == len(headings)
    targets = [str(a["href"]).removeprefix("#") for a in html.all("a")]
    assert targets == [str(h["id"]) for h in html.all("h2")]
    assert len(html.all("img")) == text.count("\n![") == 2


def test_the_papers_numbers_are_beside_ours(report: Report, html: Page):
    for number in ("82.61", "0.13", "75.22", "62.77", "~18", "~70-80", "~0"):
        assert number in html.text
    assert "ImageNet2012 with ViT-B/16" in html.text
    assert "digit pairs with bundled:digits" in html.text
    for text in ("82.61", "62.77"):
        assert text in report.text


def test_the_page_is_self_contained_and_accessible(report: Report, html: Page):
    text = report.html.read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in html.elements
    }
    assert not re.search(r"url\((?!#)|@import|javascript:", text)
    for image in html.all("img"):
        assert str(image["src"]).startswith("data:image/svg+xml;base64,")
        assert image["alt"]
    assert html.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in html.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert all(deep <= before + 1 for before, deep in pairwise(headings))


def test_settings_and_facts_are_in_the_report(report: Report):
    text = markdown_of(report)
    for words in (
        "policy.policy", "sizes.holdout", "20000", "x86\\_64, 2.5 GHz", "2.9.1", "shuffled",
        "digits split by instance before pairs are made", "results.csv a row per run",
        "holdout cross-entropy, arbitrary orders", "on the reported split) was not used",
    ):  # fmt: skip
        assert words in text
    assert len(text.splitlines()) < 250


def test_same_results_give_the_same_bytes(tmp_path: Path):
    names = ("report.md", "report.html", "figures/figure1.svg", "figures/bars.svg")
    texts = []
    for name in ("one", "two", "one"):
        if not (tmp_path / name).exists():
            write_study(tmp_path / name, orders=3)
        write_report(tmp_path / name)
        texts.append([(tmp_path / name / file).read_bytes() for file in names])
    assert texts[0] == texts[1] == texts[2]


def test_a_half_done_study_says_what_is_missing(tmp_path: Path):
    failed = {"layerdrop-seed1": "The loss became NaN at step 812. Next: lower the rate."}
    undone = ["layershuffle-seed2"]
    out = write_study(tmp_path, orders=3, seeds=(0, 1, 2), failed=failed, undone=undone)
    report = write_report(out)
    assert not report.complete
    text = markdown_of(report)
    assert "10 of 12 tasks are finished; 1 failed, 1 not done yet." in text
    assert "- layerdrop-seed1 failed: The loss became NaN at step 812." in text
    assert "- layershuffle-seed2 not done yet\n\n## Table 1" in text
    assert "layershuffle-seed2 not done yet" in report.text


def test_arms_and_studies_without_results(tmp_path: Path):
    report = write_report(write_study(tmp_path / "one", orders=2, undone=["baseline-seed0"]))
    (line,) = [line for line in markdown_of(report).splitlines() if line.startswith("| baseline |")]
    assert line.count("| - ") == 8
    assert headline(report.summary).startswith("Shuffled, LayerShuffle is right on 7")
    report = write_report(write_study(tmp_path / "none", undone=[f"{arm}-seed0" for arm in LEVELS]))
    text = markdown_of(report)
    assert text.startswith("# No score in arbitrary order yet")
    assert "0 of 4 tasks are finished; 0 failed, 4 not done yet." in text
    assert "![" not in text
    assert "baseline-seed0 not done yet" in report.text


def test_the_papers_protocol_is_described_in_full(tmp_path: Path):
    out = write_study(tmp_path, orders=2, undone=["baseline-seed0"])
    task = run_of(out, "baseline-seed0")
    told = facts(task) | {"paper_protocol": True}
    tell(out, task.name, **told, rows=run_rows(task, 2, "pass"))
    text = markdown_of(write_report(out))
    assert "the checkpoint was picked on the same images that the scores are reported on" in text
    assert "was not used" in text  # by the other arms


def test_hostile_text_stays_text(tmp_path: Path):
    bad = "<script>alert(1)</script>`|*x*\x1b[31m\n# no"
    arms = {"<img src=x onerror=alert(1)>": "baseline", "layershuffle": "layershuffle"}
    failed = {"layershuffle-seed0": bad}
    report = write_report(write_study(tmp_path, orders=2, arms=arms, failed=failed, hostile=bad))
    html = Page(report.html.read_text())
    assert not html.all("script")
    assert {str(image["src"])[:5] for image in html.all("img")} == {"data:"}
    assert "<script>alert(1)</script>`|*x*?[31m # no" in html.text
    assert "\x1b" not in report.text + markdown_of(report) + report.html.read_text()
    assert [heading for heading in html.all("h2") if "id" not in heading] == []


def test_a_study_of_sixteen_arms_has_no_figure(tmp_path: Path):
    arms = {"layershuffle": "layershuffle", **{f"arm{i}": "layerdrop" for i in range(15)}}
    text = markdown_of(write_report(write_study(tmp_path, orders=1, arms=arms)))
    assert "16 arms are too many lines for a figure: results.csv has every score." in text
    assert "![" not in text


def test_markdown_is_literal_and_empty_sections_go():
    hostile = "a|b `c` *d* [e](f) <g> $h$ & \\ ~i~"
    html = Page(page(f"# {literal(hostile)}\n\n{grid(('x',), [(hostile,)])}\n", place=Path()))
    assert html.text.count(hostile) == 3  # title, heading, cell
    assert section("Title", "", "") == ""
    assert grid(("a",), []) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.0, "59 min 59 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, words: str):
    assert duration(seconds) == words


def test_flatten_names_every_value():
    nested = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": "x"}], "g": None, "h": True}
    flat = {"a.b": "1", "a.c": "{}", "d": "[1, 2]", "e.0.f": "x", "g": "none", "h": "true"}
    assert flatten(nested) == flat
