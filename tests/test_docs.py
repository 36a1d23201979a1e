"""The tables and numbers of the docs are those of their files, their links lead somewhere, their
examples run, and the site, which `scripts/check` builds, sends no requests to other origins."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import fashion_tables
import numpy as np
import pytest
import sure_page
import tables
import timm
import torch
import yaml
from docs_hooks import SEARCHES, foreign_requests, inside, not_found, with_options
from PIL import ExifTags, Image

import layershuffle as ls
from exported import SHIPPED, exported_digits
from layershuffle.cli import SWARM_COMMANDS, main
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.models import image_view
from pictures import noise
from refusals import refuses


def rows_of(repository: Path, name: str) -> list[dict[str, str]]:
    """The rows of a file in docs/results/tables."""
    with (repository / "docs" / "results" / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", list(tables.pages()), ids=lambda page: page.stem)
def test_the_tables_and_numbers_of_a_page_are_those_of_their_files(page):
    shown = page.read_text(encoding="utf-8")
    assert shown == tables.render(shown, page=page), "run scripts/tables.py"


ROWS = "name,score,low,group\nb,2.25,1,x\na,10,,x\nb,2.25,1,y\nc,3,0,z\n"
MARK = """<!-- table
csv: rows.csv
columns: {who: "`{name}`", score: "{score:.1f}", from: "{low:g} to {score:g}"}
where: {group: [x, y]}
-->
old
<!-- end of table -->"""
TABLE = """
| who | score | from |
|:--|--:|--:|
| `b` | 2.2 | 1 to 2.25 |
| `a` | 10.0 |  |

"""


def test_a_table_is_rendered_from_its_file(tmp_path):
    """Chosen rows in their order, equal lines once, and an empty cell where a number is missing."""
    (tmp_path / "rows.csv").write_text(ROWS)
    page = tmp_path / "page.md"
    text = tables.render(f"before\n{MARK}\nbetween\n{MARK}\nafter", page=page)
    whole = MARK.replace("old\n", TABLE)
    assert text == f"before\n{whole}\nbetween\n{whole}\nafter"
    assert tables.render(text, page=page) == text
    with refuses(LayerShuffleError, page):
        tables.render(MARK.replace("[x, y]", "nobody"), page=page)


def test_a_number_in_a_sentence_is_that_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    mark = "<!-- from rows.csv, name=a, group=x: {score:.1f} -->"
    page = tmp_path / "page.md"
    assert tables.render(f"from 3.2{mark} to 7", page=page) == f"from 10.0{mark} to 7"
    wrong = [
        mark.replace("rows.csv", "none.csv"),
        mark.replace("name=a", "name=b").replace(", group=x", ""),  # two rows
        mark.replace("name=a", "name=z"),  # no row
        mark.replace("score", "nobody"),
        mark.replace("{score:.1f}", "score"),
    ]
    for other in wrong:
        with refuses(LayerShuffleError, page):
            tables.render(f"from 3.2{other} to 7", page=page)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("rows.csv", "none.csv"),
        lambda text: text.replace("{name}", "{nobody}"),
        lambda text: text.replace("{name}", "{name:.1f}"),
        lambda text: text.replace("<!-- end of table -->", ""),
    ],
)
def test_a_table_that_cannot_be_rendered_names_page_and_cause(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    with refuses(LayerShuffleError, tmp_path / "page.md"):
        tables.render(change(MARK), page=tmp_path / "page.md")


def test_the_calibration_on_the_page_is_that_of_the_bundled_model(repository):
    stored = json.loads(asset("digits-swarm", "calibration.json").read_text())["rows"]
    cells = {(row["kept"], row["passes"], row["parallel"]): row for row in stored}
    rows = rows_of(repository, "calibration")
    assert [int(row["kept"]) for row in rows] == sorted({key[0] for key in cells}, reverse=True)
    for row in rows:
        alone = cells[int(row["kept"]), 1, 1]
        for column in ("top1", "orders_low", "orders_high"):
            assert float(row[column]) == pytest.approx(alone[column], abs=1e-3)
        for passes in (1, 2):
            for under_way in (1, 2, 3, 4):
                cell = cells.get((int(row["kept"]), passes, under_way))
                text = row[f"p{passes}_f{under_way}"]
                assert (text == "") is (cell is None)
                assert cell is None or float(text) == pytest.approx(cell["top1"], abs=1e-3)


def test_the_tables_of_fashion_mnist_are_those_of_the_kept_studies(
    repository, tmp_path, monkeypatch
):
    """And those of sureness those of the calibration that ships."""
    kept = repository / "docs" / "results" / "tables"
    monkeypatch.setattr(fashion_tables, "TABLES", tmp_path)
    monkeypatch.setattr(sure_page, "TABLES", tmp_path)
    fashion_tables.write_scores()
    fashion_tables.write_lengths()
    fashion_tables.write_rounds()
    fashion_tables.write_stops()
    sure_page.write_tables()
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(written) == 8
    assert {name: (kept / name).read_bytes() for name in written} == written


# --- links ----------------------------------------------------------------------------------------


_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*([^)\s]*)\)")
_FOLDERS_OF_OTHERS = {"runs", "build", "dist", "node_modules"}


def every_page(repository: Path) -> list[Path]:
    """All Markdown of the repository, without what is not ours: environments, builds, runs."""
    pages = []
    for path in sorted(repository.rglob("*.md")):
        folders = path.relative_to(repository).parts[:-1]
        hidden = any(folder.startswith(".") and folder != ".github" for folder in folders)
        if not hidden and not _FOLDERS_OF_OTHERS.intersection(folders):
            pages.append(path)
    return pages


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and mkdocs make them; of equal ones the first."""
    titles = re.findall("^#+ (.+)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    words = [re.sub(r"[^\w -]", "", title).strip().lower() for title in titles]
    return {word.replace(" ", "-") for word in words}


def broken_links(page: Path) -> list[str]:
    """The relative links of a page to a file that is not there, or to a heading that is not."""
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        place, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", place):
            continue
        target = page.parent / place if place else page
        known = target.exists()
        if known and anchor:
            known = anchor in anchors(target.read_text(encoding="utf-8"))
        if not known:
            broken.append(link)
    return broken


def test_links_lead_somewhere(repository: Path) -> None:
    pages = every_page(repository)
    assert repository / "research" / "log.md" in pages
    broken = {str(page.relative_to(repository)): broken_links(page) for page in pages}
    assert {page: links for page, links in broken.items() if links} == {}


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One `two`, three\n```\n# no heading\n```\n")
    good = (
        "[a](other.md#one-two-three) [b](#here) [c](https://a.example/x#y) `[d](no.md)`\n# Here\n"
    )
    bad = "![e](no.png) [f\ng](other.md#no-heading) [h](#there)"
    page.write_text(good + bad)
    assert broken_links(page) == ["no.png", "other.md#no-heading", "#there"]


# --- results ------------------------------------------------------------------------------------


KEPT = sorted(path.parent for path in (tables.ROOT / "docs" / "results").glob("*/plan.json"))


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
def test_a_kept_study_gives_its_report(kept: Path, tmp_path: Path) -> None:
    """From its plan and rows alone: the same rows, and one page that holds its figures."""
    from layershuffle.study.paper.report import write_report

    study = tmp_path / kept.name
    shutil.copytree(kept, study)
    write_report(study)
    assert (study / "results.csv").read_bytes() == (kept / "results.csv").read_bytes()
    # It is sent by mail.
    assert (study / "report.html").stat().st_size <= 2e6
    text = (study / "report.md").read_text()
    headings = re.findall("^## (.+)", text, re.MULTILINE)
    named = {heading: re.findall(r"(?:Figure|Table) \d", heading) for heading in headings}
    assert named, "no section"
    assert [heading for heading, ids in named.items() if len(ids) > len(set(ids))] == []


# --- examples -----------------------------------------------------------------------------------


def test_the_example_of_the_readme_prints_what_the_readme_says(
    repository, tmp_path, monkeypatch, capsys
):
    text = (repository / "README.md").read_text()
    code, promised = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    printed = capsys.readouterr().out
    assert re.sub(r"\d+ %", "%", printed) == re.sub(r"\d+ %", "%", promised)
    # 1,024 images, and another processor rounds otherwise while it trains.
    percents = [re.findall(r"(\d+) %", lines) for lines in (printed, promised)]
    for ours, theirs in zip(*percents, strict=True):
        assert abs(int(ours) - int(theirs)) <= 8
    again = timm.create_model("local-dir:shuffled", pretrained=True)
    assert again.num_classes == 100
    assert len(again.blocks) == 12


# What the Trainer, Lightning and what they import say of a machine without a GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*:UserWarning")
def test_the_pages_on_python_run_from_top_to_bottom(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python, own = {}, {}
    for page, names in (("python", python), ("own-loop", own)):
        text = (repository / "docs" / f"{page}.md").read_text()
        exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    assert python["logits"].shape == (3, 3)
    assert len(python["tap"].records) == 3
    assert len(python["scores"]) == 1 + 20 + 20
    assert (tmp_path / "mine" / "model.safetensors").is_file()
    assert own["loss"].requires_grad
    assert own["policy"].drawn == 1
    assert own["features"].shape[0] == 8
    assert own["step"] == 3  # of the loop with accelerate, the last on the page
    assert own["mixed"].requires_grad
    assert own["answers"].shape == (16, 10)
    assert own["scores"]["eval_loss"] > 0
    assert own["lit"].global_step == 4


def test_the_page_on_onnx_runs_from_top_to_bottom(
    repository, tmp_path, tmp_path_factory, monkeypatch, capsys
):
    text = (repository / "docs" / "onnx.md").read_text()
    one, parts = re.findall(r"^layershuffle (export .+)$", text, re.MULTILINE)
    assert parts == f"export {SHIPPED} --out digits"
    shutil.copytree(exported_digits(tmp_path_factory), tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert main(one.split()) == 0
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    capsys.readouterr()
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out.split() == re.findall(r"^print\(.*\)  # (\w+)$", code, re.M)
    between = re.search(r"for block in \((.+)\):", code)[1].replace(" ", "")
    order = f"0,{between},11"  # stem and head have the ends
    assert f"--order {order}" in one
    model = ls.load(SHIPPED)
    with torch.no_grad(), ls.running(model, order):
        wanted = model(torch.from_numpy(names["images"]))
    assert float((torch.from_numpy(names["logits"]) - wanted).abs().max()) < 1e-4
    prepared = names["prepared"]
    assert callable(prepared)
    compare_with_timm(prepared, tmp_path=tmp_path)


def compare_with_timm(prepared: Callable[..., np.ndarray], *, tmp_path: Path) -> None:
    """`prepared` gives what timm's own transform gives of photographs that are not square.

    For a square and an oblong model, wide and high photographs, smaller and larger than the model;
    and of a turned one what a person sees.
    """
    configs = [
        {"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"},
        {"input_size": (3, 240, 240), "crop_pct": 0.875, "interpolation": "bilinear"},
        {"input_size": (3, 96, 160), "crop_pct": 1.0, "interpolation": "bicubic"},
    ]
    for config in configs:
        backbone = timm.create_model("vit_tiny_patch16_224", depth=2, pretrained_cfg_overlay=config)
        view = dataclasses.asdict(image_view(ls.wrap(backbone)))
        transform = timm.data.create_transform(**timm.data.resolve_data_config(model=backbone))
        for size in ((301, 200), (200, 301), (97, 61), (640, 481)):
            photograph = noise(size[0], size=size)
            difference = prepared(photograph, view)[0] - transform(photograph).numpy()
            assert prepared(photograph, view).shape == (1, *config["input_size"])
            assert float(np.abs(difference).max()) < 1e-6
    turned = noise(1, size=(120, 80))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = turned.transpose(Image.Transpose.ROTATE_270)
    with Image.open(tmp_path / "turned.png") as photograph:
        assert np.array_equal(prepared(photograph, view), prepared(upright, view))


def test_the_recipes_of_the_pages_are_those_that_ship(repository):
    """By name: after `pip install` there is no directory `recipes` to name a file in."""
    commands = (repository / "docs" / "commands.md").read_text()
    (section,) = re.findall("^## reproduce\n(.*?)\n## ", commands, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE))
    shipped = asset("recipes").glob("*.yaml")
    studies = {path.stem for path in shipped if "arms" in yaml.safe_load(path.read_text())}
    assert listed == studies
    pages = [repository / "README.md", *(repository / "docs").glob("*.md")]
    assert [page for page in pages if "recipes/" in page.read_text()] == []


def test_the_notebook_holds_the_output_of_every_cell(repository: Path) -> None:
    """Its three pictures, and that training made more of it right in any order."""
    notebook = json.loads((repository / "docs" / "examples" / "layershuffle.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    pictures = 0
    printed = ""
    for output in itertools.chain.from_iterable(cell["outputs"] for cell in cells):
        pictures += "image/png" in output.get("data", {})
        printed += "".join(output.get("text", []))
    assert pictures == 3
    shuffled = dict(re.findall(r"^(\S+) \{12: '(\S+) %'", printed, re.MULTILINE))
    assert float(shuffled["fine-tuned"]) > 60 > 20 > float(shuffled["ordinary"])
    # The command that made them is on the page and in the notebook.
    command = "jupyter nbconvert --to notebook --execute --inplace docs/examples/layershuffle.ipynb"
    assert command in (repository / "docs" / "index.md").read_text()
    assert command in "".join(notebook["cells"][0]["source"])


def test_the_cells_of_the_notebook_run(repository, tmp_path, monkeypatch, capsys):
    """With four steps of training in place of three epochs."""
    notebook = json.loads((repository / "docs" / "examples" / "layershuffle.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, object] = {}
    shortened = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text, found = re.subn("^steps = .*", "steps = 4", "".join(cell["source"]), flags=re.M)
            shortened += found
            exec(text, names)
    assert shortened == 1
    import matplotlib.pyplot as plt

    assert len(plt.get_fignums()) == 3
    plt.close("all")
    assert names["step"] == 4
    top1 = names["top1"]
    assert isinstance(top1, dict)
    # 200 images: two standard errors are 3 points at 95 %.
    assert abs(top1["refined"][12] - 95.0) < 4
    assert top1["refined"][3] > 50 > 20 > top1["ordinary"][12]


# --- the site -------------------------------------------------------------------------------------

OWN = """<link rel="stylesheet" href="assets/main.css"><link rel="canonical" href="https://a.example/x">
<script src="../bundle.js"></script><a href="https://a.example">follow me</a>
<img src="data:image/png;base64,AA"><style>p { background: url("own.png") }</style>"""


def test_a_page_of_its_own_asks_nobody_else():
    assert foreign_requests(OWN) == []
    assert foreign_requests("@font-face { src: url(own.woff2) }", css=True) == []


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://a.example/x"></script>',
        '<link rel="preconnect" href="https://a.example/x">',
        '<img src="//a.example/x">',
        '<img srcset="own.png 1x, https://a.example/x 2x">',
        "<style>@import 'https://a.example/x';</style>",
        '<p style="background: url(https://a.example/x)"></p>',
    ],
)
def test_a_request_to_another_origin_is_seen(element):
    (address,) = foreign_requests(OWN + element)
    assert address.endswith("//a.example/x")


def test_style_sheets_and_drawings_are_searched_too():
    assert foreign_requests("p { src: url('https://a.example/x') }", css=True) == [
        "https://a.example/x"
    ]
    assert foreign_requests('<pre class="mermaid">graph</pre>') == ["mermaid"]


def test_a_search_that_finds_nothing_is_seen():
    """The page that is about it has to have it, within one section."""
    sections = []
    for words, page in SEARCHES.items():
        sections.append({"location": f"{page}.html#x", "title": "", "text": f"<p>{words}.\n</p>"})
    assert not_found(sections) == {}
    (exit_,) = [section for section in sections if "early exit" in section["text"]]
    exit_["text"] = "An early<br>exit"
    assert not_found(sections) == {"early exit": "missing-blocks"}
    exit_["text"] = "An EARLY\nexit"
    assert not_found(sections) == {}


def test_links_that_leave_the_pages_become_paths(repository):
    docs = repository / "docs"
    text = "[a](../log.md) [b](../../Makefile) [c](https://a.example) [`deploy/x`](../../deploy/x)"
    assert inside(text, page=docs / "results" / "x.md", docs=docs) == (
        "[a](../log.md) b (`Makefile`) [c](https://a.example) `deploy/x`"
    )


def test_the_reference_has_every_public_name(repository):
    page = (repository / "docs" / "python.md").read_text()
    names = [name.rpartition(".")[2] for name in re.findall(r"^::: (.+)$", page, re.MULTILINE)]
    assert len(names) == len(set(names))
    assert set(ls.__all__) - {"__version__"} <= set(names)


def test_the_page_of_commands_gets_the_options_of_each_command():
    page = with_options("# title\n\n## doctor\n\nwords\n\n## report\n\nmore\n\n## swarm\n")
    assert page.startswith('# title\n\n## doctor\n\nwords\n\n??? note "Options of `doctor`"\n')
    report, swarm = page.split("## report")[1].split("## swarm")
    assert re.findall("^    \\| `([^`]+)`", report, re.MULTILINE) == ["--directory"]
    assert swarm.count("??? note") == len(SWARM_COMMANDS)
    assert "    | `--hosts` | " in swarm
