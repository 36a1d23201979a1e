"""`layershuffle analyze` on the command line, and its files."""

import io
import json
from contextlib import redirect_stdout
from html import escape

import pandas
import pytest

from common import DIGITS_VIT
from layershuffle.analysis import (
    ANALYSES,
    AnalysisSettings,
    run_analysis,
)
from layershuffle.analysis.subject import DoesNotApply
from layershuffle.cli import main
from layershuffle.ground.errors import UsageError
from pictures import noise
from refusals import refuses

MODEL = DIGITS_VIT
DATA = "digit-pairs?train=64&validation=64&test=48"
WORDS = ["--data", DATA, "--max-images", "48", "--batch-size", "24", "--neighbours", "5"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    out = tmp_path_factory.mktemp("analyses")
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["analyze", "all", MODEL, *WORDS, "--out", str(out)]) == 0
    # What it prints names the page of each analysis.
    pages = [out / name / "index.html" for name in ANALYSES]
    assert [page for page in pages if str(page) not in printed.getvalue()] == []
    assert [page for page in pages if not page.is_file()] == []
    return out


@pytest.mark.parametrize("name", ANALYSES)
def test_files_of_an_analysis(everything, name):
    out = everything / name
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == {
        "schema",
        "name",
        "title",
        "answer",
        "files",
        "settings",
        "facts",
    }
    assert (summary["schema"], summary["name"]) == (1, name)
    assert summary["settings"]["max_images"] == summary["facts"]["images"] == 48
    assert {*summary["files"], "summary.json"} == {path.name for path in out.iterdir()}
    numbers = pandas.read_csv(out / "numbers.csv")
    assert tuple(numbers.columns) == ("name", "value", "low", "high")
    assert numbers.value[numbers.name == "images"].tolist() == [48]
    page = (out / "index.html").read_text()
    assert all(f"<td>{escape(name)}</td>" in page for name in numbers.name)
    assert f"<p>{escape(summary['answer'])} (" in page
    columns = [set(pandas.read_csv(path)) for path in out.glob("*.csv")]
    for column in set().union(*columns) - {"name", "value", "low", "high"}:
        assert f"<td>{escape(column)}</td>" in page
    figures = {file for file in summary["files"] if file.endswith(".svg")}
    assert figures
    assert {file.replace(".svg", ".png") for file in figures} <= set(summary["files"])
    assert all(f'<img src="{file}"' in page for file in figures)


def test_a_repeated_analysis_is_equal_and_replaces_the_first(everything):
    settings = AnalysisSettings(max_images=48, batch_size=24, neighbours=5)
    for name in ("umap", "norms"):
        out = everything / name
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        heard: list[tuple] = []

        def hear(*stage, heard=heard):
            heard.append(stage)

        run_analysis(name, MODEL, data_spec=DATA, settings=settings, out=out, progress=hear)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert heard[:2] == [("test images", 0, 48), ("test images", 24, 48)]
        assert name == "norms" or heard[-1] == ("embeddings", 7, 8)


def test_what_is_no_analysis_is_not_deleted(tmp_path):
    (tmp_path / "summary.json").write_text('{"files": ["*"]}')
    (tmp_path / "thesis.txt").touch()
    with refuses(UsageError, tmp_path):
        run_analysis("norms", MODEL, data_spec=DATA, settings=AnalysisSettings(), out=tmp_path)


def test_images_in_a_folder_whose_name_is_no_utf8(tmp_path):
    data = tmp_path / "caf\udce9"
    for index in range(4):
        (place := data / "val" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        noise(index, size=(28, 56)).save(place / f"{index}.png")
    model, settings = MODEL.replace("num_classes=100", "num_classes=2"), AnalysisSettings()
    out = tmp_path / "norms"
    run_analysis("norms", model, data_spec=f"folder:{data}", settings=settings, out=out)
    assert r"caf\udce9" in (out / "index.html").read_text()


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (DoesNotApply("it has no attention"), 0),
        (UsageError("too few images"), 1),
        (RuntimeError("cannot cache function: no locator available"), 1),
    ],
)
def test_all_answers_what_it_can_and_lists_the_rest(capsys, tmp_path, monkeypatch, reason, code):
    def run(name, model_spec, **others):
        if name != "norms":
            raise reason
        return run_analysis(name, model_spec, **others)

    monkeypatch.setattr("layershuffle.cli.analyze.run_analysis", run)
    assert main(["analyze", "all", MODEL, *WORDS, "--out", str(tmp_path)]) == code
    text = capsys.readouterr().out
    cause = "numba finds no directory" if isinstance(reason, RuntimeError) else str(reason)
    assert text.count(f"has no answer: {cause}") == len(ANALYSES) - 1
    assert "attention has no answer" in text
    assert [path.name for path in tmp_path.iterdir()] == ["norms"]
