"""The numbers of the docs are the measured ones, and their examples run."""

import csv
import json
import re
import shutil
import statistics

import pytest
import timm

from layershuffle.swarm.calibration import read_calibration
from layershuffle.swarm.expectations import useful_blocks

ARMS = {
    "baseline": "baseline",
    "LayerShuffle": "layershuffle",
    "LayerDrop (p = 0.2)": "layerdrop",
    "LayerShuffle-depth (ours)": "layershuffle-depth",
    "LayerShuffle-mixed with an exit loss (ours)": "layershuffle-mixed-exit",
}
COLUMNS = [
    ("sequential", 12),
    ("arbitrary", 12),
    ("arbitrary", 9),
    ("arbitrary", 6),
    ("arbitrary", 3),
]


@pytest.fixture(scope="module")
def rows(repository):
    path = repository / "docs" / "results" / "digits-quick" / "results.csv"
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("label", ARMS)
def test_the_readme_table_is_the_measured_one(repository, rows, label):
    text = (repository / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    for cell, (mode, kept) in zip(cells, COLUMNS, strict=False):
        scores = [
            float(row["top1"])
            for row in rows
            if (row["method"], row["mode"], int(row["kept"])) == (ARMS[label], mode, kept)
        ]
        assert len(scores) == (1 if (mode, kept) == ("sequential", 12) else 20)
        expected = f"{statistics.mean(scores):.1f}"
        if len(scores) > 1:
            expected += f" &plusmn;{statistics.stdev(scores):.1f}"
        assert cell == expected, f"{label}, {mode}, {kept} kept"


def test_links_lead_somewhere(repository):
    pages = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_readme_loop_runs(repository, tmp_path, monkeypatch):
    """The lines of the README, with a small model instead of a download."""
    text = (repository / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(re.findall(r"^.+$", code, re.MULTILINE)) <= 12
    big = '"vit_base_patch16_224", pretrained=True'
    assert big in code
    small = '"vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2'
    monkeypatch.chdir(tmp_path)
    assert code.count("224, 224") == 1
    exec(code.replace(big, small).replace("224, 224", "32, 32"), {})
    again = timm.create_model("local-dir:shuffled", pretrained=True)
    assert again.num_classes == 10
    assert len(again.blocks) == 3


def test_the_python_page_runs_from_top_to_bottom(repository, tmp_path, monkeypatch):
    text = (repository / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert names["logits"].shape == (3, 3)
    assert len(names["tap"].records) == 3
    assert len(names["scores"]) == 1 + 20 + 20
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def table_cells(page):
    """The cells of every line of a table; prose and figures may change their words."""
    lines = (line for line in page.read_text().splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def judgements(page):
    """Verdict and numbers of every claim."""
    return re.findall(
        r"\*\*(Holds(?: partly)?|Does not hold|Undecided)\.\*\* (.*)", page.read_text()
    )


@pytest.mark.parametrize(
    "name",
    [
        "digits-paper",
        "digits-rounds",
        "digits-swarm-tune",
        "digits-tied",
    ],
)
def test_committed_reports_say_what_the_committed_results_say(repository, tmp_path, name):
    """Every number of a report comes from the files beside it."""
    from layershuffle.study.report import write_report

    stored, study = repository / "docs" / "results" / name, tmp_path / "study"
    shutil.copytree(stored, study)
    write_report(study)
    assert (study / "results.csv").read_bytes() == (stored / "results.csv").read_bytes()
    # A page that is sent by mail, with all of its figures inside.
    assert (study / "report.html").stat().st_size <= 2e6
    assert table_cells(study / "report.md") == table_cells(stored / "report.md")
    judged = judgements(study / "claims.md")
    assert len(judged) == {"digits-paper": 19, "digits-tied": 3}.get(name, 0)
    # A page is kept where a claim was measured.
    assert (stored / "claims.md").exists() == bool(judged)
    if judged:
        assert judged == judgements(stored / "claims.md")
    headings = re.findall("^## (.+)", (stored / "report.md").read_text(), re.MULTILINE)
    named = {heading: re.findall(r"(?:Figure|Table) \d", heading) for heading in headings}
    assert [heading for heading, ids in named.items() if len(ids) > len(set(ids))] == []
    assert len((stored / "report.md").read_text().splitlines()) < 500


def test_tables_of_rounds_are_those_of_the_reports(repository):
    """docs/rounds.md copies rows of two reports, which come from the committed results."""
    page = (repository / "docs" / "rounds.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| LayerShuffle")]
    reports = [
        (repository / "docs" / "results" / name / "report.md").read_text().splitlines()
        for name in ("digits-rounds", "digits-swarm-tune")
    ]
    assert len(rows) == 40
    assert all(row in reports[0] or row in reports[1] for row in rows)


def test_the_results_are_small(repository):
    """Only files for readers are committed; `layershuffle report` makes the page from them."""
    files = [path for path in (repository / "docs" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.name != "report.html") < 3.0e6


PAPER_ARMS = {
    "baseline": "baseline",
    "LayerShuffle": "layershuffle",
    "LayerShuffle-position": "layershuffle-position",
    "LayerShuffle-position, zero start": "layershuffle-position-zero",
    "LayerShuffle-predict": "layershuffle-predict",
    "LayerShuffle-predict, the text's sum": "layershuffle-predict-sum",
    "LayerDrop (p = 0.2)": "layerdrop",
    "LayerShuffle with drop 0.2 (ours)": "layershuffle-drop",
    "LayerShuffle-depth (ours)": "layershuffle-depth",
}


def paper_cell(rows, arm, mode, kept):
    """Mean over models of their means over orders, and its deviation, in the README's format."""
    scores = {}
    for row in rows:
        key = (row["method"], row["mode"], int(row["kept"]))
        if key == (arm, mode, kept) and row["choose"] in ("", "random"):
            scores.setdefault(row["seed"], []).append(float(row["top1"]))
    if not scores:
        return ""
    means = [statistics.mean(values) for values in scores.values()]
    return f"{statistics.mean(means):.1f} &plusmn;{statistics.stdev(means):.1f}"


@pytest.mark.parametrize("label", PAPER_ARMS)
def test_the_readme_table_of_the_paper_study_is_the_measured_one(repository, label):
    with (repository / "docs" / "results" / "digits-paper" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    text = (repository / "README.md").read_text()
    text = text[text.index("## The whole paper") : text.index("## Your own model")]
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    for cell, (mode, kept) in zip(cells, COLUMNS, strict=False):
        assert cell == paper_cell(rows, PAPER_ARMS[label], mode, kept), (label, mode, kept)


def test_the_budget_in_readme_and_log_is_the_measured_one(repository):
    with (repository / "docs" / "results" / "digits-paper" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))

    def mean(method, mode):
        scores = {}
        for row in rows:
            if (row["method"], row["mode"], row["kept"]) == (method, mode, "12"):
                scores.setdefault(row["seed"], []).append(float(row["top1"]))
        return statistics.mean(statistics.mean(values) for values in scores.values())

    def pair(steps):
        name = "" if steps == 2000 else f"-{steps}-steps"
        return mean(f"baseline{name}", "sequential"), mean(f"layershuffle{name}", "arbitrary")

    readme = " ".join((repository / "README.md").read_text().split())
    log = (repository / "docs" / "log.md").read_text()
    pairs = {steps: pair(steps) for steps in (500, 1000, 2000, 4000, 8000)}
    gaps = {steps: f"{plain - shuffled:.1f}" for steps, (plain, shuffled) in pairs.items()}
    plain, shuffled = (f"{value:.1f}" for value in pairs[2000])
    assert (
        f"At 2,000 steps shuffling costs {gaps[2000]} points ({plain} in order against {shuffled}"
        in readme
    )
    for title, values in (
        ("baseline, sequential", [f"{plain:.1f}" for plain, _ in pairs.values()]),
        ("LayerShuffle, arbitrary", [f"{shuffled:.1f}" for _, shuffled in pairs.values()]),
        ("gap", list(gaps.values())),
    ):
        assert f"| {title} | {' | '.join(values)} |" in log


def test_the_calibration_in_the_swarm_page_is_that_of_the_bundled_model(repository):
    assets = repository / "src" / "layershuffle" / "assets" / "digits-swarm"
    stored = json.loads((assets / "calibration.json").read_text())
    page = (repository / "docs" / "swarm.md").read_text()
    queue = [row for row in stored["rows"] if row["passes"] == row["parallel"] == 1]
    rows = sorted(queue, key=lambda row: -row["kept"])
    assert f"| top-1, % | {' | '.join(format(row['top1'], '.1f') for row in rows)} |" in page
    for title, key in (("nine of ten orders, from", "orders_low"), ("to", "orders_high")):
        assert f"| {title}, % | {' | '.join(format(row[key], '.1f') for row in rows)} |" in page
    assert f"| blocks, any order | {' | '.join(str(row['kept']) for row in rows)} |" in page
    assert f"--orders {stored['orders']} --images {stored['images']}" in page
    calibration = read_calibration(assets / "calibration.json", weights=stored["weights"])
    assert f"half of the accuracy ({useful_blocks(calibration)} of the digits model)" in page
    cells = {(row["kept"], row["passes"], row["parallel"]): row["top1"] for row in stored["rows"]}
    for kept in (12, 9, 6, 3):
        columns = [(kept, passes, under_way) for passes in (1, 2) for under_way in (1, 2, 3, 4)]
        figures = [f"{cells[cell]:.1f}" if cell in cells else "" for cell in columns]
        assert f"| {kept} | {' | '.join(figures)} |".replace("  ", " ") in page


def test_the_load_figures_of_the_swarm_page_are_the_measured_ones(repository):
    (path,) = (repository / "benchmarks" / "results").glob("swarm-load_*.json")
    facts = json.loads(path.read_text())
    free, fixed, slow = facts["order-free"], facts["sequential"], facts["slow"]
    page = " ".join((repository / "docs" / "swarm.md").read_text().split())
    for title, key in (("answered in full", "answered"), ("failed", "failed"), ("late", "late")):
        assert f"| {title}, % | {free[key]:.1f} | {fixed[key]:.1f} |" in page
    assert f"blocks missing, % | {free['degraded']:.1f} | {fixed['degraded']:.1f} |" in page
    times = [f"{figures['p50_ms']:.0f}, {figures['p99_ms']:.0f}" for figures in (free, fixed)]
    assert f"99 % within, ms | {times[0]} | {times[1]} |" in page
    right = [figures["accuracy"] for figures in (free, fixed)]
    assert f"right, % of the answers | {right[0]['top1']:.1f} | {right[1]['top1']:.1f} |" in page
    bounds = [
        f"{figures['expected']:.1f} ({figures['low']:.1f} to {figures['high']:.1f})"
        for figures in right
    ]
    assert f"lets expect, % | {bounds[0]} | {bounds[1]} |" in page
    times = [f"{slow[key]:.0f} ms" for key in ("p99_slow_ms", "p99_ms")]
    assert f"99 % of the requests ended within {times[0]}, against {times[1]}" in page
    assert slow["degraded"] == 0
    assert "and no answer lacks its blocks" in page
    memory = facts["memory"]
    assert f"{memory['requests']:,} requests with no host failed" in page
    assert (memory["failed"], memory["late"], memory["degraded"]) == (0, 0, 0)
    assert "none failed, none was late, and none was answered in part" in page
    grown = [memory[key][1] - memory[key][0] for key in ("gateway_mb", "hosts_mb")]
    assert f"gateway grew by {grown[0]:.1f} MB of {memory['gateway_mb'][0]:,.0f}" in page
    assert f"six hosts by {grown[1]:.1f} MB of {memory['hosts_mb'][0]:,.0f}" in page


def test_the_scaling_curve_of_the_swarm_page_is_the_measured_one(repository):
    (path,) = (repository / "benchmarks" / "results").glob("swarm-simulation_*.json")
    first, *rows = json.loads(path.read_text())["rows"]
    page = (repository / "docs" / "swarm.md").read_text()
    assert f"take {statistics.median(first['values']):.1f} times as long with 10,000" in page
    for row in rows:
        facts = row["facts"]
        shares = [facts["answered"], facts["degraded"], facts["sequential"]["failed"]]
        cells = [row["name"].removesuffix(" hosts"), *(f"{share:.1f}" for share in shares)]
        cells += [f"{facts['p99_ms']:.0f}", f"{statistics.median(row['values']):,.0f}"]
        assert f"| {' | '.join(cells)} |" in page
