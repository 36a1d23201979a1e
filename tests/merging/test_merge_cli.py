"""`layershuffle merge` and `ensemble` on three tiny models in a directory."""

import copy
import csv
import hashlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import Shuffled, policy_to_json
from layershuffle.core.stack import stack_of
from layershuffle.data import DataOptions, open_data
from layershuffle.data.splits import DeviceBatches
from layershuffle.ground.errors import DataError, SettingsError, UsageError
from layershuffle.ground.rows import MergingRow, read_rows, write_rows
from layershuffle.ground.stats import wilson_interval
from layershuffle.merging.ensembles import combined
from layershuffle.merging.plans import MergePlan, orders_seed, sample_plans
from layershuffle.merging.recipe import merge_recipe, read_merge_recipe
from layershuffle.merging.scoring import load_donors, load_group, score_ensemble, score_merging
from layershuffle.merging.settings import EnsembleSettings, MergingSettings
from layershuffle.models import file_view, image_view
from layershuffle.models.files import weights_digest
from layershuffle.models.origin import training_settings
from refusals import refuses

DATA = "digit-pairs?train=40&validation=30&test=50"
SPEC = DIGITS_VIT.replace("depth=4", "depth=3")
RECIPE = """
slices:
  - model: runs/a
    blocks: [0, 2]
  - model: runs/b
    blocks: [1]
stem: average
head: runs/b
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """runs/a, runs/b, runs/c, of which c is the output of a fit (the model one level below)."""
    place = tmp_path_factory.mktemp("merging")
    ls.save(ls.load(SPEC), place / "base")
    provenance = {"base": f"dir:{place / 'base'}", "data": DATA}
    for seed, name in enumerate("abc"):
        record = {
            "method": "layershuffle",
            "policy": policy_to_json(Shuffled()),
            "settings": {"seed": seed, "holdout": 0.05},
            "provenance": provenance,
        }
        directory = place / "runs" / name / ("model" if name == "c" else "")
        ls.save(redraw(ls.load(SPEC), seed=seed), directory, record=record)
    return place


@pytest.fixture
def work(made, monkeypatch, tmp_path):
    """A copy of the models' directory, as the working directory."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_recipe_becomes_a_model_that_timm_loads(capsys, work):
    (work / "m.yaml").write_text(RECIPE)
    code, _, err = run(capsys, "merge", "m.yaml", "--out", "merged")
    assert code == 0, err
    donors = [ls.load("runs/a"), ls.load("runs/b")]
    view = ls.merge(donors, MergePlan((0, 1, 0), stem="average", head=1))
    stock = timm.create_model("local-dir:merged", pretrained=True).eval()
    images = torch.randn(2, 1, 12, 20, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(stock(images), view(images))
    merge = json.loads((work / "merged" / "layershuffle.json").read_text())["provenance"]["merge"]
    assert (merge["blocks"], merge["stem"], merge["head"]) == ([0, 1, 0], "average", "runs/b")
    card = (work / "merged" / "README.md").read_text()
    for donor in merge["donors"]:
        content = (work / donor["model"] / "model.safetensors").read_bytes()
        assert donor["sha256"] == {"model.safetensors": hashlib.sha256(content).hexdigest()}
        assert donor["sha256"]["model.safetensors"] in card
    assert run(capsys, "eval", "merged", "--data", DATA, "--num-orders", "2")[0] == 0


def test_base_ends_and_the_directory_of_a_fit(capsys, work, made):
    text = RECIPE.replace("runs/a", "runs/c").replace("stem: average", "stem: base")
    (work / "m.yaml").write_text(text)
    assert run(capsys, "merge", "m.yaml", "--out", "merged")[0] == 0
    merged, base = ls.load("merged"), ls.load(str(made / "base"))
    assert torch.equal(merged.patch_embed.proj.weight, base.patch_embed.proj.weight)
    assert torch.equal(merged.head.weight, ls.load("runs/b").head.weight)
    content = (work / "runs" / "c" / "model" / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() in (work / "merged" / "README.md").read_text()


def test_the_base_of_ends_is_that_of_the_donors(work, made):
    """Another one, as that of another seed, was taken, and the record named the first."""
    digest = weights_digest(stack_of(ls.load(str(made / "base"))))
    for name in ("a", "b"):
        path = work / "runs" / name / "layershuffle.json"
        record = json.loads(path.read_text())
        record["provenance"]["base_sha256"] = digest
        path.write_text(json.dumps(record))
    donors = ["runs/a", "runs/b"]
    assert load_group(donors, base=None, needs_base=True).depth == 3
    ls.save(redraw(ls.load(SPEC), seed=9), work / "other")
    with refuses(UsageError, "other"):
        load_group(donors, base="other", needs_base=True)
    assert load_group(donors, base="other", needs_base=False).depth == 3


def test_one_model_under_two_names_is_refused(work):
    """It would count twice in every average."""
    for name in ("runs/a", "runs/a/", "./runs/a", "dir:runs/a"):
        with refuses(UsageError):
            load_donors(["runs/a", "runs/b", name])
    assert len(load_donors(["runs/a", "runs/b"])) == 2


def test_merges_and_soups_know_how_their_donors_were_trained(work):
    """How they read images, and which of them no donor has trained on."""
    for name, holdout in (("a", 0.1), ("b", 0.02)):
        path = work / "runs" / name / "layershuffle.json"
        record = json.loads(path.read_text())
        record["settings"] |= {"data": DATA, "holdout": holdout, "paper_protocol": False}
        path.write_text(json.dumps(record))
    donors = load_donors(["runs/a", "runs/b"])
    wanted = {"data": DATA, "holdout": 0.02}
    for model in (ls.uniform_soup(donors), ls.merge(donors, MergePlan((0, 1, 0)))):
        ls.save(model, work / "made")
        assert training_settings(ls.load("made")) == wanted
        assert file_view(ls.load("made")) == file_view(donors[0])
    assert file_view(donors[0]).resize == "squash"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slices", "slises"),
        ("- model: runs/a", "- modle: runs/a"),
        ("blocks: [1]", "blocks: [2]"),
        ("blocks: [1]", "blocks: [3]"),
        ("[0, 2]", "[0, 2, 3]"),
        ("head: runs/b", "head: runs/d"),
        ("average", "avrage"),
        ("model: runs/b", "model: runs/x"),
        ("[1]", "1"),
    ],
)
def test_recipes_that_are_wrong(work, old, new):
    (work / "m.yaml").write_text(RECIPE.replace(old, new))
    with refuses((SettingsError, UsageError)):
        merge_recipe(read_merge_recipe(Path("m.yaml")), work / "merged")
    assert not (work / "merged").exists()


@pytest.fixture
def compilers(monkeypatch):
    """All compilers that are created, which run their graphs uncompiled."""
    torch._dynamo.reset()
    built = []

    def make(**options):
        built.append(BlockCompiler(backend="eager", **options))
        return built[-1]

    monkeypatch.setattr(sys.modules["layershuffle.scoring.evaluate_spec"], "BlockCompiler", make)
    return built


@pytest.mark.parametrize(("precision", "graphs"), [("fp32", []), ("bf16", [2])])
def test_rows_equal_the_slow_path(work, compilers, precision, graphs):
    """Every kind of row is measured again by hand, from its own columns.

    Merges and soups are averaged in fp32 and rounded then. Graphs: of test and held-out images.
    """
    specs = [f"runs/{name}" for name in "abc"]
    settings = MergingSettings(
        merges=4, ends=("average", "first"), num_orders=2, seed=5,
        precision=precision, compile=bool(graphs),
    )  # fmt: skip
    passes = []
    rows, notes = score_merging(
        specs, DATA, settings=settings, progress=lambda *at: passes.append(at)
    )
    assert [compiler.graphs for compiler in compilers] == (graphs or [0])
    assert rows == score_merging(specs, DATA, settings=settings)[0]
    # Donors, merges, soups with the held-out ones of the greedy soup, the ensemble.
    every = 3 + 8 + 7 + 1
    assert passes[-1] == ("models", every, every)
    assert [done for _, done, _ in passes] == sorted(done for _, done, _ in passes)
    write_rows(work / "rows.csv", rows)
    assert read_rows(work / "rows.csv", MergingRow) == tuple(rows)
    assert any("split by instance" in note for note in notes)
    kinds = [row.kind for row in rows]
    assert [kinds.count(k) for k in ("donor", "merge", "soup", "ensemble")] == [6, 8, 4, 8]
    donors = [ls.load(spec) for spec in specs]
    data = open_data(DATA, image_view(donors[0]), options=DataOptions(train=False))
    batches = list(DeviceBatches(data.splits["test"], data.finish, batch_size=250, device="cpu"))

    (images, labels) = batches[0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    def logits(model, order):
        rounded = copy.deepcopy(model).to(dtype)
        with torch.inference_mode(), ls.running(rounded, order):
            return rounded(images.to(dtype)).float()

    def check(row, logits):
        top1 = 100.0 * float((logits.argmax(-1) == labels).float().mean())
        assert row.top1 == pytest.approx(top1, abs=1e-4)
        assert row.cross_entropy == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-6)

    assert sum(row.main for row in rows if row.kind == "merge") == 4
    for row in rows:
        assert (row.mode, row.n) == ("arbitrary", 50)
        parts = [int(word) for word in row.donors.split(",")]
        if row.kind == "donor":
            check(row, logits(donors[row.index], row.order))
        elif row.kind == "merge":
            end = "average" if row.ends == "average" else parts[0]
            model = ls.merge(donors, MergePlan(tuple(parts), stem=end, head=end))
            check(row, logits(model, row.order))
        elif row.kind == "soup":
            taken = [donors[i] for i in parts]
            soup = ls.uniform_soup(taken) if len(taken) > 1 else taken[0]
            check(row, logits(soup, row.order))
        else:
            orders = row.order.split(";")
            orders = orders * len(donors) if len(orders) == 1 else orders
            members = [logits(*pair) for pair in zip(donors, orders, strict=True)]
            check(row, combined(torch.stack(members), row.name.split("-")[0]))
    seeds = [orders_seed(5, 1, index=i) for i in range(4)]
    wanted = [str(Shuffled().draw(3, seed=seed, step=0)) for seed in seeds]
    assert [row.order for row in rows if row.kind == "merge"] == wanted * 2
    plans = sample_plans(3, 3, count=4, seed=5)
    assert [row.donors for row in rows if row.kind == "merge"] == [str(p) for p in plans] * 2
    main = [row for row in rows if row.kind == "ensemble" and row.main]
    assert {row.name for row in main} == {"logits-independent"}
    assert all(len(row.order.split(";")) == 3 for row in main)


def test_the_greedy_soup_never_sees_the_reported_images(work, monkeypatch):
    """Scores on other test images do not change which donors are taken."""
    specs = [f"runs/{name}" for name in "abc"]
    settings = MergingSettings(merges=1, num_orders=2)
    chosen = []
    for test in (20, 45):
        data = f"digit-pairs?train=40&validation=60&test={test}"
        rows, _ = score_merging(specs, data, settings=settings)
        chosen.append(next(row.donors for row in rows if row.name == "greedy"))
    assert chosen[0] == chosen[1]
    none = MergingSettings(merges=1, soups=False)
    rows, _ = score_merging(specs, DATA, settings=none, mode="sequential")
    assert {row.kind for row in rows} == {"donor", "merge", "ensemble"}
    assert {row.name for row in rows if row.kind == "ensemble"} == {
        "logits-same", "probabilities-same",
    }  # fmt: skip
    assert [row.main for row in rows if row.kind == "ensemble"] == [1, 0]


def test_the_greedy_soup_is_chosen_on_what_no_donor_trained_on(work, monkeypatch):
    record = work / "runs" / "b" / "layershuffle.json"
    record.write_text(record.read_text().replace('"holdout": 0.05', '"holdout": 0.01'))
    shares = []

    def opened(*_, options, **__):
        shares.append(options.holdout)
        raise DataError("enough")

    monkeypatch.setattr("layershuffle.merging.scoring.open_scored", opened)
    for donors in (["runs/a", "runs/b", "runs/c"], ["runs/b", "runs/c", "runs/a"]):
        with pytest.raises(DataError, match="enough"):
            score_merging(donors, DATA, settings=MergingSettings(merges=1))
    assert shares == [0.01, 0.01]


def test_random_merges_table_csv_and_json_agree(capsys, work):
    words = ["merge", "runs/a", "runs/b", "runs/c", "--random", "5", "--data", DATA]
    words += ["--num-orders", "2", "--max-images", "30"]
    code, table, err = run(capsys, *words, "--out", "scores.csv")
    assert code == 0, err
    report = json.loads(run(capsys, *words, "--json")[1])
    groups = {group["what"]: group for group in report["groups"]}
    assert list(groups) == [
        "donor", "merge average", "soup uniform", "soup greedy", "ensemble logits-same",
        "ensemble logits-independent", "ensemble probabilities-same",
        "ensemble probabilities-independent",
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO((work / "scores.csv").read_text())))
    assert tuple(rows[0]) == (*MergingRow.columns(), "name", "ends", "main", "top1_n")
    tops = [float(row["top1"]) for row in rows if row["kind"] == "merge"]
    assert (len(tops), len({row["donors"] for row in rows if row["kind"] == "merge"})) == (5, 5)
    assert groups["merge average"]["top1"]["mean"] == pytest.approx(sum(tops) / 5)
    assert f" {sum(tops) / 5:.2f} " in next(x for x in table.splitlines() if "merge average" in x)
    assert {row["n"] for row in rows} == {"30"}


def test_ensemble_command(capsys, work):
    words = ["ensemble", "runs/a", "runs/b", "--data", DATA, "--num-orders", "3"]
    report = json.loads(run(capsys, *words, "--json")[1])
    scores, _ = score_ensemble(["runs/a", "runs/b"], DATA, settings=EnsembleSettings(num_orders=3))
    assert [s["top1"] for s in report["scores"]] == [s.top1 for s in scores]
    assert [len(s["orders"]) for s in report["scores"]] == [2, 2, 2]
    assert report["top1"]["mean"] == pytest.approx(sum(s.top1 for s in scores) / 3)
    assert (report["images"], report["orders"]) == (50, 3)
    _, text, _ = run(capsys, *words, "--modes", "sequential")
    report = json.loads(run(capsys, *words, "--modes", "sequential", "--json")[1])["top1"]
    assert report["kind"] == "images"
    assert 1 <= report["images"] < 50, "pairs with a digit in common are wrong together"
    assert f"Wilson over {round(report['images'])} images that count as independent" in text
    assert [report["low"], report["high"]] == pytest.approx(
        wilson_interval(report["mean"], report["images"])
    )


RANDOM = ["merge", "runs/a", "runs/b", "--random", "2", "--data", DATA]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["merge", "m.yaml"], UsageError),
        (["merge", "m.yaml", "--out", "x"], UsageError),
        (["merge", "runs/a", *RANDOM[3:]], UsageError),
        (["merge", "runs/a", "runs/a", *RANDOM[3:]], UsageError),
        ([*RANDOM[:4], "0", *RANDOM[5:]], UsageError),
    ],
)
def test_errors_are_one_paragraph(capsys, work, words, error):
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    with refuses(error):
        main([*words, "--debug"])
