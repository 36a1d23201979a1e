"""The pages beside the commands: their numbers, their example files and the notebook."""

import csv
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import recipes_page
import science_page
import yaml

from layershuffle.bundled import asset
from layershuffle.core.stack import depth_of
from layershuffle.recipes import read_recipe
from layershuffle.stats import compare
from layershuffle.study.dry_run import Forecast, StudySubject, forecast
from layershuffle.study.selection import tasks_for
from layershuffle.study.settings import StudySettings
from pages import misplaced_numbers
from test_house import LAYERS, layer

KEPT = (12, 9, 6, 3)
# As the table of docs/methods.md names them: the arm of the study, and the blocks that a training
# step runs in the mean: drop 0.2 leaves 12 x 0.8, and 3 to 12 blocks are (3 + 12) / 2.
METHODS = {
    "`baseline`": ("baseline", "12"),
    "`truncated`, 9 blocks": ("truncated-9", "9"),
    "`truncated`, 6 blocks": ("truncated-6", "6"),
    "`truncated`, 3 blocks": ("truncated-3", "3"),
    "`layerdrop`": ("layerdrop", "9.6"),
    "`layershuffle`": ("layershuffle", "12"),
    "`layershuffle --drop 0.2`": ("layershuffle-drop", "9.6"),
    "`layershuffle-depth`": ("layershuffle-depth", "7.5"),
    "`layershuffle-position`": ("layershuffle-position", "12"),
    "`layershuffle-predict`": ("layershuffle-predict", "12"),
}
# Those of other studies, which run all blocks in a training step: the study, and the arm in it.
OTHER_METHODS = {
    "`layershuffle-exit --orders-per-batch 4`": ("digits-recipes", "layershuffle-exit-orders-4"),
    "`layershuffle-mixed --orders-per-batch 4`": ("digits-recipes", "layershuffle-mixed"),
    "`layershuffle-parallel`": ("digits-rounds", "layershuffle-parallel"),
    "`layershuffle-tied`": ("digits-tied", "layershuffle-tied"),
    "`layershuffle-tied --distinct 3`": ("digits-tied", "layershuffle-tied-3"),
}


@pytest.fixture(scope="module")
def measured(repository: Path) -> dict[tuple[str, str, int], dict[str, list[float]]]:
    """(arm, mode, blocks kept) -> seed -> top-1 of every order, of `digits-paper`."""
    return scores_of(repository, "digits-paper")


def scores_of(repository: Path, study: str) -> dict[tuple[str, str, int], dict[str, list[float]]]:
    """The same of any study: one pass, one block after the other."""
    scores: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    path = repository / "docs" / "results" / study / "results.csv"
    with path.open() as file:
        for row in csv.DictReader(file):
            in_turn = {row.get("passes", "1"), row.get("parallel", "1")} <= {"1", ""}
            if row["choose"] in ("", "random") and in_turn:
                key = (row["method"], row["mode"], int(row["kept"]))
                scores.setdefault(key, {}).setdefault(row["seed"], []).append(float(row["top1"]))
    return scores


def mean_of(scores: dict[str, list[float]]) -> float:
    """Mean over models of their means over orders."""
    return statistics.mean(statistics.mean(values) for values in scores.values())


def words(page: Path) -> str:
    """A page as one line, so that sentences can be searched."""
    return " ".join(page.read_text(encoding="utf-8").split())


def rows_of(page: Path) -> list[list[str]]:
    """The cells of all lines of a page's tables."""
    lines = (line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_picture_of_the_rooms_shows_all_of_them(repository):
    """Each row of boxes of the architecture holds rooms that lie above those of the next row."""
    page = (repository / "docs" / "architecture.md").read_text("utf-8")
    every = {room for rooms in LAYERS for room in rooms} - {"_version", "__main__"}
    rows = [[]]
    for line in page.split("```")[1].splitlines():
        # Behind the label of the row.
        rows[-1] += [name for name in re.findall(r"\w+", line[24:]) if name in every]
        if "▼" in line:
            rows.append([])
    assert sorted(name for row in rows for name in row) == sorted(every)
    heights = [sorted(map(layer, row)) for row in rows]
    assert all(high[0] > low[-1] for high, low in pairwise(heights)), heights


def test_the_table_of_methods_is_the_measured_one(repository, measured):
    page = rows_of(repository / "docs" / "methods.md")
    rows = {label: (measured, arm, trained) for label, (arm, trained) in METHODS.items()}
    for label, (study, arm) in OTHER_METHODS.items():
        rows[label] = (scores_of(repository, study), arm, "12")
    for label, (scores, arm, trained) in rows.items():
        cells = [
            f"{mean_of(scores[arm, mode, kept]):.1f}" if (arm, mode, kept) in scores else ""
            for mode in ("sequential", "arbitrary")
            for kept in KEPT
        ]
        assert [label, trained, *cells] in page, f"expected: | {label} | {' | '.join(cells)} |"


def test_the_sentences_on_methods_are_measured(repository, measured):
    page = words(repository / "docs" / "methods.md")
    readme = words(repository / "README.md")

    def top1(arm, kept):
        return f"{mean_of(measured[arm, 'sequential', kept]):.1f} %"

    assert f"with 3 blocks it reaches {top1('truncated-3', 3)}, where `layershuffle`" in page
    assert f"cut to 3 blocks reaches {top1('layershuffle', 3)} and `layershuffle-depth`" in page
    assert f"`layershuffle-depth` {top1('layershuffle-depth', 3)}." in page
    assert f"with 3 blocks it reaches {top1('truncated-3', 3)} in order, where a" in readme
    assert f"cut to 3 blocks reaches {top1('layershuffle', 3)}." in readme

    def spread(arm):
        """As in table.md: within models, over their orders, all degrees of freedom pooled."""
        orders = measured[arm, "arbitrary", 12].values()
        return statistics.mean(statistics.variance(values) for values in orders) ** 0.5

    assert f"over orders is {spread('layerdrop'):.1f} points" in page
    assert f"that of `layershuffle` {spread('layershuffle'):.1f}." in page
    swarm = repository / "src" / "layershuffle" / "assets" / "digits-swarm" / "calibration.json"
    calibration = json.loads(swarm.read_text())
    queue = [row for row in calibration["rows"] if row["passes"] == row["parallel"] == 1]
    by_kept = {row["kept"]: f"{row['top1']:.1f} %" for row in queue}
    assert f"reaches {by_kept[12]} in any order, {by_kept[6]} with 6 of 12" in page
    assert f"and {by_kept[3]} with 3." in page


def test_the_sentence_on_rounds_is_measured(repository):
    page = words(repository / "docs" / "methods.md")
    report = rows_of(repository / "docs" / "results" / "digits-rounds" / "report.md")
    (head,) = [row for row in report if row[:3] == ["Arm", "Order", "12 rounds"]]
    queue, four = head.index("12 rounds"), head.index("4 rounds")
    for arm, sentence in (
        ("LayerShuffle", "where `layershuffle` reaches {} % and {} %."),
        (
            "LayerShuffle-parallel",
            "it reaches {} % one block after the other and {} % in four rounds,",
        ),
    ):
        (row,) = [row for row in report if row[:2] == [arm, "arbitrary"] and len(row) == len(head)]
        means = [row[column].split()[0] for column in (queue, four)]
        assert sentence.format(*means) in page


def test_the_readme_counts_the_claims_that_hold(repository):
    text = (repository / "docs" / "results" / "digits-paper" / "claims.md").read_text()
    verdicts = ("Holds.", "Holds partly.", "Does not hold.", "Undecided.")
    counts = [text.count(f"**{verdict}**") for verdict in verdicts]
    numbers = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    holds, partly, fails, undecided = (numbers[count] for count in counts)
    assert (
        f"Of the paper's {sum(counts)} claims, {holds} hold on digit pairs, {partly} hold in part, "
        f"{fails} do not hold and {undecided} is undecided"
    ) in words(repository / "README.md")


def test_the_gains_of_training_in_rounds_are_measured(repository):
    page = words(repository / "docs" / "rounds.md")
    scores = science_page.read_rounds()

    def gain(arm, size, reference, of_size):
        sides = ((arm, size), (reference, of_size))
        means = [{s: statistics.mean(v) for s, v in scores[side].items()} for side in sides]
        gap = compare(*means)
        return [f"{round(x, 1) + 0.0:+.1f}" for x in (gap.points, gap.low, gap.high)]

    own, plain = "layershuffle-parallel", "layershuffle"
    points, low, high = gain(own, 3, own, 1)  # twelve places in four rounds of three
    assert f"nothing in four of them ({points} points, {low} to {high}, in pairs" in page
    points, low, high = gain(own, 4, own, 1)
    assert f"and {points.lstrip('-')} in three ({low} to {high})" in page
    losses = [gain(plain, size, plain, 1)[0].lstrip("-") for size in (3, 4)]
    assert f"plain LayerShuffle loses {losses[0]} and {losses[1]}." in page
    assert f"it is {gain(own, 1, plain, 1)[0].lstrip('-')} points less accurate" in page
    assert "in three rounds ({}, {} to {})".format(*gain(own, 4, plain, 4)) in page
    assert "from it in four ({}, {} to {})".format(*gain(own, 3, plain, 3)) in page


@pytest.mark.parametrize("name", ["docs/concept.md", "docs/troubleshooting.md", "README.md"])
def test_the_price_of_any_order_is_the_measured_one(repository, name):
    """In pairs over all seeds, five of them at 8,000 steps; the table is on docs/recipes.md."""
    scores = recipes_page.read_scores()
    gaps = {
        steps: recipes_page.gap(
            scores,
            (recipes_page.PLAIN, steps, recipes_page.ANY),
            (recipes_page.BASELINE, steps, recipes_page.ORDERED),
        )
        for steps in (500, 2000, 8000)
    }
    costs = {steps: f"{-gap.points:.1f}" for steps, gap in gaps.items()}
    assert gaps[8000].seeds == 5
    assert science_page.verdict(gaps[8000]) == "not told apart"
    page = words(repository / name)
    if name == "README.md":
        assert f"At 2,000 steps shuffling costs {costs[2000]} points" in page
        assert f"at 500 steps it costs {costs[500]}, and at 8,000 steps {costs[8000]}, " in page
        return
    assert f"{costs[500]} points after 500 steps" in page
    assert f"{costs[8000]} after 8,000" in page
    if name == "docs/concept.md":
        assert f"{costs[2000]} after 2,000 and" in page


def planned(recipe: str, *, only: str | None, test_images: int) -> Forecast:
    """The output of `--dry-run` for a recipe with ViT-B/16, with the published size of its data."""
    study = StudySettings(**read_recipe(asset("recipes", f"{recipe}.yaml")))
    tasks = tasks_for(study, only)
    images, classes = (1_281_167, 1000) if recipe == "imagenet-paper" else (47_500, 100)
    # 85,798,656 parameters, and a head of 768 weights and a bias for each class.
    weights = 4 * (85_798_656 + 769 * classes)
    subject = StudySubject(
        depth=12, parameter_bytes=weights, train_images=images, test_images=test_images
    )
    subjects = dict.fromkeys((task.name for task in tasks), subject)
    return forecast(study, tasks, subjects=subjects, out=Path("absent"), workers=1)


PAPER_SPEED = 1017  # images per second in training, 20 epochs in about 7 hours on one H100
DOLLARS = 3  # for an hour of GPU, as the page assumes


@pytest.mark.parametrize("only", ["fig4", "table2", "table1", None])
def test_the_hours_and_bytes_of_the_imagenet_study_are_those_of_its_plan(repository, only):
    plan = planned("imagenet-paper", only=only, test_images=50_000)
    hours = plan.work.trained / PAPER_SPEED / 3600
    cells = [
        f"{plan.work.steps:,.0f}",
        f"{hours:.0f}",
        f"${hours * DOLLARS:.0f}",
        f"{plan.bytes_left / 1e9:.1f} GB",
        f"{plan.bytes_peak / 1e9:.1f} GB",
    ]
    page = rows_of(repository / "docs" / "imagenet.md")
    (row,) = [row for row in page if row[1] == (f"`{only}`" if only else "") and len(row) > 3]
    assert row[3:] == cells
    assert f"{(plan.bytes_peak - plan.bytes_left) / 1e9:.1f} GB" == "2.1 GB"
    if only is None:
        scored = plan.work.block_runs / 12 / 1e6
        assert f"the whole paper scores {scored:.0f} million images" in words(
            repository / "docs" / "imagenet.md"
        )


def test_the_steps_of_the_cifar_study_are_those_of_its_plan(repository):
    plan = planned("cifar100-paper", only=None, test_images=10_000)
    page = words(repository / "docs" / "imagenet.md")
    assert f"{plan.work.steps:,.0f} steps of 128 images" in page


def test_the_recipes_of_the_pages_are_those_that_ship(repository):
    """By name: after `pip install` there is no directory `recipes` to name a file in."""
    commands = repository / "docs" / "commands"
    listed = {row[0].strip("`") for row in rows_of(commands / "reproduce.md")}
    shipped = asset("recipes").glob("*.yaml")
    studies = {path.stem for path in shipped if "arms" in yaml.safe_load(path.read_text())}
    assert not studies - listed
    pages = [repository / "README.md", *(repository / "docs").glob("*.md"), *commands.glob("*.md")]
    history = repository / "docs" / "log.md"
    named = re.compile(r"(?<!-)recipes/")  # results of digits-recipes are no recipe
    assert [p for p in pages if p != history and named.search(p.read_text())] == []


def test_the_example_files_are_read_by_our_readers(repository):
    from layershuffle.models import load
    from layershuffle.swarm.plan import read_swarm_plan
    from layershuffle.swarm.planning.hosts import read_hosts

    examples = repository / "docs" / "examples"
    hosts = read_hosts(examples / "HOSTS.yaml").hosts
    assert {name: host.count for name, host in hosts.items()} == {"pi": 4, "zero": 2}
    plan = read_swarm_plan(examples / "plan.yaml")
    plan.check(depth_of(load(plan.model)))
    copies = [block for host in plan.hosts.values() for block in host.blocks]
    assert sorted(copies) == sorted(2 * list(range(12)))


def test_the_notebook_runs_and_shows_what_it_says(repository, tmp_path, monkeypatch, capsys):
    notebook = json.loads((repository / "docs" / "examples" / "layershuffle.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    import matplotlib.pyplot as plt

    assert len(plt.get_fignums()) == 2
    plt.close("all")
    top1 = names["top1"]
    assert isinstance(top1, dict)
    # 200 images: two standard errors are 3 points at 95 %.
    assert abs(top1["refined"][12] - 95.0) < 4
    assert top1["refined"][3] > 50 > 20 > top1["ordinary"][12]
    assert "% right in this order" in capsys.readouterr().out
    assert (tmp_path / "refined" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "elsewhere"),
    [
        ("formula", {}),
        (
            "methods",
            {
                "25.8": "digits-paper, spread of layerdrop over orders",
                "0.7": "digits-paper, spread of layershuffle over orders",
                "92.0": "log.md, six of twelve blocks of bundled:digits-swarm",
                "75.7": "log.md, three of twelve blocks of bundled:digits-swarm",
            },
        ),
    ],
)
def test_numbers_in_the_words_stand_in_tables(repository, name, elsewhere):
    assert misplaced_numbers(repository / "docs" / f"{name}.md", elsewhere) == set()
