"""The report's files: numbers equal the CSV's, one self-contained page, the same bytes twice."""

from __future__ import annotations

import csv
import re
import statistics
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from fixture import LEVELS, write_study

from layershuffle.errors import LayerShuffleError
from layershuffle.files import write_bytes
from layershuffle.stats import compare, estimate
from layershuffle.study.headline import headline, key_facts
from layershuffle.study.report import Report, write_report
from layershuffle.study.score_tables import scores_table
from layershuffle.study.summary import label
from layershuffle.study.tables import duration, flatten

FILES = [
    *("results.csv", "table.md", "report.md", "claims.md", "report.html"),
    *("figure1.svg", "figure1.png"),
]
VOID = {"meta", "br", "img", "input", "hr", "col", "link"}
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
        assert len(dict(attrs)) == len(attrs), f"<{tag}> names an attribute twice: {attrs}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
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
def page(report: Report) -> Page:
    return Page(report.html.read_text())


def _from_csv(report: Report) -> dict[tuple[str, str, int], dict[int, list[float]]]:
    scores: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    with (report.html.parent / "results.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["mode"], int(row["kept"]))
            scores.setdefault(key, {}).setdefault(int(row["seed"]), []).append(float(row["top1"]))
    return scores


def test_all_files_are_written_and_nothing_else(report: Report):
    assert [path.name for path in report.files] == FILES
    here = {path.name for path in report.html.parent.iterdir()}
    assert here == {*FILES, "plan.json", "runs"}
    assert report.complete


def test_numbers_of_the_page_equal_the_csv(report: Report, page: Page):
    shown = [float(str(data["value"])) for data in page.all("data")]
    scores = _from_csv(report)
    slow = [
        statistics.fmean(statistics.fmean(values) for values in scores[arm, mode, kept].values())
        for arm in LEVELS
        for mode, kept in CONDITIONS
    ]
    assert shown == pytest.approx(slow, rel=1e-12)
    intervals = [
        estimate(scores[arm, *condition], images=5000) for arm in LEVELS for condition in CONDITIONS
    ]
    for interval in intervals:
        assert f"{interval.low:.1f}-{interval.high:.1f}" in page.text


def test_numbers_of_the_markdown_equal_the_csv(report: Report):
    lines = (report.html.parent / "table.md").read_text().splitlines()
    assert (
        lines
        == report.html.with_suffix(".md")
        .read_text()
        .split("beside the paper\n\n")[1]
        .splitlines()[: len(lines)]
    )
    scores = _from_csv(report)
    for arm in LEVELS:
        (line,) = [line for line in lines if line.startswith(f"| {label(arm)} |")]
        means = [float(text) for text in re.findall(r"\*\*([\d.]+)\*\*", line)]
        for mean, condition in zip(means, CONDITIONS, strict=True):
            values = scores[arm, *condition].values()
            slow = statistics.fmean(statistics.fmean(scores_of_seed) for scores_of_seed in values)
            assert abs(mean - slow) <= 0.05 + 1e-9


def test_numbers_of_the_terminal_equal_the_csv(report: Report):
    lines = report.text.splitlines()
    assert max(map(len, lines)) <= 100
    scores = _from_csv(report)
    for arm in LEVELS:
        shown = [
            word for line in lines if line.split(" ")[0] == label(arm) for word in line.split()[1:]
        ]
        for text, condition in zip(shown, CONDITIONS, strict=True):
            values = scores[arm, *condition].values()
            slow = statistics.fmean(statistics.fmean(scores_of_seed) for scores_of_seed in values)
            assert abs(float(text) - slow) <= 0.05 + 1e-9


def test_headline_is_drawn_from_the_numbers(report: Report, page: Page):
    scores = _from_csv(report)
    means = [
        statistics.fmean(statistics.fmean(v) for v in scores[arm, "arbitrary", 12].values())
        for arm in ("baseline", "layershuffle")
    ]
    sentence = (
        f"Blocks in arbitrary order: baseline {means[0]:.1f} %, LayerShuffle {means[1]:.1f} %"
    )
    assert sentence in page.text
    assert report.html.with_suffix(".md").read_text().startswith(f"# {sentence}")


def test_the_headline_names_a_winner_only_with_an_interval(tmp_path: Path):
    first = write_report(write_study(tmp_path / "one"))
    assert headline(first.summary).endswith("(no interval: too few models, or equal differences)")
    assert "no arm can be called best" in key_facts(first.summary)[0]
    three = write_report(write_study(tmp_path / "three", seeds=(0, 1, 2))).summary
    means = [three.means(arm, "arbitrary") for arm in ("layershuffle", "baseline")]
    gap = compare(*means)
    assert gap.low > 0
    words = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    assert headline(three).endswith(f": LayerShuffle is better by {words}")
    (fact,) = key_facts(three)
    assert "LayerShuffle-depth is best: " in fact
    arms = {"baseline": "baseline", "layershuffle": "layerdrop"}
    study = write_study(tmp_path / "alike", seeds=(0, 1, 2), orders=2, arms=arms)
    alike = write_report(study).summary
    gap = compare(*(alike.means(arm, "arbitrary") for arm in arms))
    assert gap.low <= 0 <= gap.high
    assert ", which may be chance: they differ by " in headline(alike)


def test_the_contents_lead_to_every_section(page: Page, report: Report):
    targets = [str(a["href"]).removeprefix("#") for a in page.all("a")]
    headings = [str(a["id"]) for a in page.all("h2") if "id" in a and a["id"] != "contents"]
    assert targets == headings
    assert len(targets) == len(page.all("section"))


def test_a_number_is_shown_once(report: Report, page: Page):
    """Tables below the main table do not repeat its numbers."""
    scores = [
        report.summary.cell(arm, column).top1 for arm in LEVELS for column in report.summary.columns
    ]
    intervals = Counter(f"{score.low:.1f}-{score.high:.1f}" for score in scores)
    shown = Counter(re.findall(r"(?<![\d.])\d+\.\d-\d+\.\d(?![\d.])", page.text))
    assert {text: shown[text] for text in intervals} == intervals
    table = scores_table(report.summary)
    place = {name: number for number, name in enumerate(table.head)}
    assert {row[place["Top-1"]] for row in table.rows} == {"-"}
    assert {row[place["95 %"]] for row in table.rows} == {"-"}


def test_the_papers_numbers_are_beside_ours(report: Report, page: Page):
    for number in ("82.61", "0.13", "75.22", "62.77", "~18", "~70-80", "~0"):
        assert f"paper {number}" in page.text
    assert "ImageNet2012 with ViT-B/16" in page.text
    assert "digit pairs with bundled:digits" in page.text
    assert "compare the pattern, and not the level" in page.text
    for text in ("82.61", "62.77", "~18", "~70-80"):
        assert text in report.text


def test_the_page_is_self_contained(report: Report, page: Page):
    text = report.html.read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form"} & {
        tag for tag, _ in page.elements
    }
    assert not re.search(r"url\((?!#)|@import|javascript:", text)
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "action", "background"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)


def test_the_page_is_accessible(page: Page):
    assert page.all("html") == [{"lang": "en"}]
    (viewport,) = [meta for meta in page.all("meta") if meta.get("name") == "viewport"]
    assert viewport["content"] == "width=device-width, initial-scale=1"
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert all(deep <= before + 1 for before, deep in pairwise(headings))
    assert all(th.get("scope") in ("col", "row", "colgroup") for th in page.all("th"))
    assert len(page.all("svg")) == 2
    assert all(
        svg["role"] == "img" and "blocks kept" in str(svg["aria-label"]) for svg in page.all("svg")
    )
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    boxes = [a for tag, a in page.elements if tag == "div" and a.get("class") == "scroll"]
    assert boxes
    assert len(boxes) == len(page.all("table"))
    assert all(box.get("tabindex") == "0" and box.get("role") == "region" for box in boxes)


def test_tables_scroll_in_their_own_box_and_cut_no_word(report: Report):
    style = re.search(r"<style>(.*?)</style>", report.html.read_text(), re.DOTALL)
    assert style
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto", style[1])
    assert re.search(r"\ntable \{[^}]*overflow-wrap: normal", style[1])
    assert not re.search(r"overflow-wrap: anywhere|word-break|hyphens: auto", style[1])


def test_settings_and_facts_are_on_the_page(report: Report, page: Page):
    markdown = report.html.with_suffix(".md").read_text()
    for words in (
        "policy.policy", "sizes.holdout", "20000", "x86_64, 2.5 GHz", "2.9.1", "shuffled",
        "digits split by instance before pairs are made", "results.csv holds one row per run",
        "holdout cross-entropy, arbitrary orders", "on the reported split) was not used",
    ):  # fmt: skip
        assert words in page.text
        assert words.replace("_", r"\_") in markdown
    for words in ("precision", "1,500"):  # the same for all runs, and of every run: folded
        assert words in page.text
    assert re.search(r"Every run: \d+ rows, in report.html", markdown)
    assert len(markdown.splitlines()) < 250


def test_the_replay_command_has_a_real_order_and_its_score(report: Report, page: Page):
    match = re.search(
        r"gives LayerShuffle, seed 0, in arbitrary order with 12 blocks: top-1 ([\d.]+) %.*?"
        r"layershuffle eval runs/layershuffle-seed0/fit --data digit-pairs --order ([\d,]+)",
        page.text,
    )
    assert match
    with (report.html.parent / "results.csv").open() as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if row["order"] == match[2] and (row["method"], row["seed"]) == ("layershuffle", "0")
        ]
    assert f"{float(row['top1']):.2f}" == match[1]


def test_same_results_give_the_same_bytes(tmp_path: Path):
    texts = []
    for name in ("one", "two"):
        report = write_report(write_study(tmp_path / name, orders=3))
        texts.append([path.read_bytes() for path in report.files])
    again = [path.read_bytes() for path in write_report(tmp_path / "one").files]
    assert texts[0] == texts[1] == again


def test_a_half_done_study_says_what_is_missing(tmp_path: Path):
    failed = {"layerdrop-seed1": "The loss became NaN at step 812. Next: lower the rate."}
    undone = ["layershuffle-seed2"]
    out = write_study(tmp_path, orders=3, seeds=(0, 1, 2), failed=failed, undone=undone)
    report = write_report(out)
    page = Page(report.html.read_text())
    assert not report.complete
    assert "10 of 12 runs are finished; 1 failed, 1 not done yet." in page.text
    assert "layerdrop-seed1 failed: The loss became NaN at step 812." in page.text
    assert "layershuffle-seed2 not done yet" in page.text
    assert "FAILED layerdrop-seed1: The loss became NaN at step 812." in report.text
    assert "Not done yet: layershuffle-seed2. Run the same command again" in report.text
    markdown = report.html.with_suffix(".md").read_text()
    assert "- layershuffle-seed2 not done yet\n\n## Table 1" in markdown


def test_an_arm_without_results_is_shown_as_not_measured(tmp_path: Path):
    report = write_report(write_study(tmp_path, orders=2, undone=["baseline-seed0"]))
    page = Page(report.html.read_text())
    assert report.html.read_text().count('<span class="interval">not measured</span>') == 8
    assert "Blocks in arbitrary order: LayerShuffle" in page.text
    lines = [line.split() for line in report.text.splitlines() if line.startswith("baseline")]
    assert [word for line in lines for word in line if word != "baseline"] == ["-"] * 8


def test_a_study_before_its_first_run(tmp_path: Path):
    names = [f"{method}-seed0" for method in LEVELS]
    report = write_report(write_study(tmp_path, undone=names))
    assert [path.name for path in report.files] == FILES[:5]
    page = Page(report.html.read_text())
    assert "No score in arbitrary order yet" in page.text
    assert "0 of 4 runs are finished; 0 failed, 4 not done yet." in page.text
    assert not page.all("svg")
    assert report.text.startswith("No run has finished yet.\nNot done yet: baseline-seed0")


def test_the_papers_protocol_is_described_in_full(tmp_path: Path):
    out = write_study(tmp_path, orders=2)
    for path in (out / "runs").glob("*/result.json"):
        path.write_text(
            path.read_text().replace('"paper_protocol": false', '"paper_protocol": true')
        )
    page = Page(write_report(out).html.read_text())
    assert "picked on the same images that the scores are reported on" in page.text
    assert "was not used" not in page.text


def test_orders_drawn_per_batch_are_called_so(tmp_path: Path):
    report = write_report(write_study(tmp_path, orders=3, draw="batch"))
    assert "Orders: a new order for every batch." in report.text
    page = Page(report.html.read_text())
    assert "No finished run has an order to replay yet." in page.text


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>|`*_{{ 7*7 }}'
HOSTILE_NAME = HOSTILE.replace("/", "")


def test_hostile_text_is_escaped(tmp_path: Path):
    arms = {f"baseline{HOSTILE_NAME}": "baseline", "layershuffle": "layershuffle"}
    out = write_study(
        tmp_path,
        orders=2,
        seeds=(0, 1),
        arms=arms,
        name=HOSTILE_NAME,
        hostile=f"{HOSTILE}\x1b[31m\n# heading",
        failed={f"baseline{HOSTILE_NAME}-seed1": f"{HOSTILE}\n| a | b |"},
    )
    report = write_report(out)
    page = Page(report.html.read_text())
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert page.text.count("<script>alert(1)</script>") >= 3
    assert "{{ 7*7 }}" in page.text
    markdown = report.html.with_suffix(".md").read_text()
    prose, _, fence = markdown.partition("```sh\n")
    assert fence.count("```") == 1
    assert fence.endswith("\n```\n")
    assert "<script" not in prose
    assert "<img" not in prose
    assert "\x1b" not in markdown + report.html.read_text()
    assert "\n# heading" not in markdown
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "\x1b" not in report.text
    assert max(map(len, report.text.splitlines())) <= 100


def test_long_names_and_full_marks_still_fit_the_terminal(tmp_path: Path):
    out = write_study(
        tmp_path, orders=2, arms={"layershuffle-with-a-very-long-name-indeed": "baseline"}
    )
    for path in (out / "runs").glob("*/results.csv"):
        path.write_text(re.sub(r",5000,[\d.]+,[\d.]+,", ",5000,100.0,100.0,", path.read_text()))
    lines = write_report(out).text.splitlines()
    assert max(map(len, lines)) <= 100
    shown = [line.split()[1:] for line in lines if line.startswith("LayerShuffle-with-a-v")]
    assert [word for words in shown for word in words] == ["100.0"] * 8


def test_a_read_only_place_is_one_paragraph(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LayerShuffleError, match="A file stands where a directory is needed"):
        write_bytes(tmp_path / "file" / "figure1.png", b"")


def test_write_bytes_replaces_in_one_step(tmp_path: Path):
    path = tmp_path / "new" / "a.png"
    write_bytes(path, b"one")
    write_bytes(path, b"\x00two")
    assert path.read_bytes() == b"\x00two"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


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
