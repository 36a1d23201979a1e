"""No command overwrites a model that it reads: tried on every command with --out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from test_help import FLAGS

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.models.output import directory_of

DATA = "digit-pairs?train=40&validation=30&test=50"
SPEC = DIGITS_VIT.replace("depth=4", "depth=2")
SHORT = ["--steps", "1", "--batch-size", "8"]
STUDY = {
    "name": "s", "model": "dir:runs/a", "data": DATA, "fit": {"steps": 1, "batch_size": 8},
    "arms": [{"method": "baseline"}],
}  # fmt: skip
# Command: its words up to --out. {MODEL} is the model that --out is to replace.
COMMANDS = {
    "fit": f"fit --method baseline --model {{MODEL}} --data {DATA} --steps 1 --batch-size 8",
    "pretrain": "pretrain base.yaml --model {MODEL}",
    "export": "export {MODEL}",
    "analyze": f"analyze norms {{MODEL}} --data {DATA} --max-images 8",
    "merge": "merge merge.yaml",
    "merge --overwrite": "merge merge.yaml --overwrite",
    "merge --random": f"merge runs/a runs/b --random 1 --data {DATA}",
    "merge --random --overwrite": f"merge runs/a runs/b --overwrite --random 1 --data {DATA}",
    "reproduce": "reproduce study.yaml",
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models runs/a, runs/b and runs/c (of `fit`), and recipes with the first two."""
    for seed, name in enumerate(("a", "b", "c/model")):
        ls.save(redraw(ls.load(SPEC), seed=seed), tmp_path / "runs" / name)
    slices = [{"model": "runs/a", "blocks": [0]}, {"model": "runs/b", "blocks": [1]}]
    recipes = {
        "merge": {"slices": slices},
        "study": STUDY,
        "base": {"method": "baseline", "data": DATA, "steps": 1, "batch_size": 8},
    }
    for name, content in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(place: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def test_every_command_with_an_output_is_here() -> None:
    having = {command for command, flags in FLAGS.items() if "out" in flags.split()}
    assert {words.split(" --")[0] for words in COMMANDS} == having


@pytest.mark.parametrize("out", ["runs/a", "runs/a/", "runs/../runs/a", "link"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_a_model(
    work: Path, capsys: pytest.CaptureFixture[str], command: str, out: str
) -> None:
    """--out is the model that the command reads, by each of its names."""
    (work / "link").symlink_to(work / "runs" / "a")
    before = files(work / "runs")
    words = COMMANDS[command].format(MODEL="runs/a").split()
    assert main([*words, "--out", out]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "fault of layershuffle" not in error
    # There may be lock files beside the model; its own files are unchanged.
    after = files(work / "runs")
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize(
    ("out", "phrase"),
    [
        ("runs/a", "Writing here would destroy runs/a"),
        ("runs/a/merged", "Writing here would destroy runs/a"),
        (".", "Writing here would destroy runs/a"),
        ("notes", "would delete what is no saved model (thesis.txt)"),
        ("notes/thesis.txt", "would delete what is no saved model (thesis.txt)"),
    ],
)
def test_paths_that_overwrite_never_replaces(
    work: Path, capsys: pytest.CaptureFixture[str], out: str, phrase: str
) -> None:
    (work / "notes").mkdir()
    (work / "notes" / "thesis.txt").write_text("years of work")
    before = files(work)
    assert main(["merge", "merge.yaml", "--overwrite", "--out", out]) == 2
    assert phrase in capsys.readouterr().err
    assert files(work) == before


def test_another_model_or_file_is_replaced_when_asked(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "scores.csv").write_text("of last week")
    merge = ["merge", "merge.yaml", "--out", "runs/c/model"]
    score = ["merge", "runs/a", "runs/b", "--random", "1", "--no-soups", "--data", DATA]
    score += ["--num-orders", "1", "--out", "scores.csv"]
    for words in (merge, score):
        before = files(work)
        assert main(words) == 2
        assert "add --overwrite" in capsys.readouterr().err
        assert files(work) == before
        assert main([*words, "--overwrite"]) == 0
    merged, first = ls.load("runs/c"), ls.load("runs/a")
    assert torch.equal(merged.blocks[0].mlp.fc1.weight, first.blocks[0].mlp.fc1.weight)
    assert (work / "scores.csv").read_text().startswith("kind,")


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("dir:runs/c", "runs/c/model"),
        ("hf:runs/b?pretrained=false", "runs/b"),
        ("timm:vit_tiny_patch16_224?checkpoint=runs/b/model.safetensors", "runs/b"),
        ("timm:vit_tiny_patch16_224?pretrained=false", None),
    ],
)
def test_where_the_files_of_a_model_are(work: Path, spec: str, place: str | None) -> None:
    assert directory_of(spec) == (None if place is None else Path(place))
