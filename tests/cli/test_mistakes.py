"""Each mistake ends in one paragraph with cause, place and next step, and no traceback; no command
overwrites a model that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from test_help import FLAGS

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.models.spec import directory_of

MODEL = DIGITS_VIT
DATA = "digit-pairs?train=40&validation=30&test=20"
NEW = f"fit --method layershuffle --model {MODEL} --steps 1 --batch-size 4"
FIT = f"{NEW} --data {DATA}"
EVAL = f"eval {MODEL} --data {DATA}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file, a binary file, an empty directory, files that are no images, and recipes."""
    path: Path = tmp_path_factory.mktemp("mistakes")
    (path / "file").write_text("x")
    (path / "bytes").write_bytes(bytes(range(256)))
    (path / "empty").mkdir()
    for split in ("train", "val"):
        (path / "images" / split / "a").mkdir(parents=True)
        for number in range(4):
            (path / "images" / split / "a" / f"{number}.png").write_bytes(b"no image")
    recipes = {
        "stepz": "method: layershuffle\nmodel: m\ndata: d\nstepz: 3\n",
        "modle": "modle: bundled:digits\n",
        "orders": "arms: [{method: baseline}]\nnum_orders: 3\n",
        "drop": "arms: [{method: layershuffle, block_drop: 0.2}]\nname: n\nmodel: m\ndata: d\n",
        "lr": "lr: -1\n",
        "dropped": "drop: 0.1\n",
    }
    for name, text in recipes.items():
        (path / f"{name}.yaml").write_text(text)
    ls.save(ls.load(MODEL), path / "model")
    return path


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        # commands and flags
        ("evel", 'Unknown command "evel". Did you mean "eval"? Next: layershuffle --help'),
        ("swarm upp", 'Unknown command "upp". Did you mean "up"? Next: layershuffle swarm --help'),
        ("eval", "MODEL is missing. Next: layershuffle eval --help"),
        (f"{FIT} --learning-rate 1", "Unknown option: --learning-rate. Next: here it is --lr ("),
        (f"{FIT} --amp", "Unknown option: --amp. Next: here it is --precision bf16 ("),
        ("predict bundled:digits x.png --amp", "Unknown option: --amp. Did you mean --top? "),
        (
            "export bundled:digits --out x --bf16",
            "Unknown option: --bf16. Next: layershuffle export",
        ),
        (
            f"{FIT} --label-smoothing 0.1",
            "Unknown option: --label-smoothing. Next: here it is --smoothing (",
        ),
        (
            f"{EVAL} --modes shuffled",
            "'shuffled' is not an evaluation mode: did you mean 'arbitrary'?",
        ),
        (
            f"{FIT} --augment yes --out x",
            "The command takes no further word, and got: yes. Next: f",
        ),
        (
            f"{FIT} --opt adamm --out x",
            "timm has no optimiser 'adamm'. Where: --opt. Next: did you",
        ),
        (f"{FIT} --freeze block.0 --out x", "The model has no part 'block.0' to freeze"),
        (f"{FIT} --device gpu --out x", "There is no device 'gpu'"),
        (f"analyze norms {MODEL} --data {DATA} --out x --block 3", "--block belongs to umap"),
        (f"ensemble {MODEL} --data {DATA}", "An ensemble has at least two models"),
        (f"compare {MODEL} nowhere", "'nowhere' is neither a path that exists nor a model spec"),
        (f"compare {MODEL} bundled:digits --data {DATA}", "The models have 4 and 12 blocks"),
        ("predict model bundled:digitpair.png", "This package has no 'digitpair.png'"),
        ("merge a b --random 0", 'Invalid value "0" for --random. Must be >= 1.'),
        ("demo --port 99999", 'Invalid value "99999" for --port. Must be <= 65535.'),
        ("swarm up --port 99999", "port: Input should be less than or equal to 65535"),
        ("eval bundled:digits", "--data is missing"),
        ("swarm drain", "HOST is missing"),
        ("merge", "MODEL is missing"),
        (f"ensemble --data {DATA}", "MODEL is missing"),
        ("analyze", "NAME is missing"),
        (f"analyze nroms {MODEL} --data {DATA} --out x", "There is no analysis 'nroms'"),
        (f"analyze norms {MODEL} --data {DATA} --out x --max-images 0", "max_images: Input should"),
        ("merge a --random 2", "merge --random needs --data SPEC"),
        (f"{FIT} --lrr 1 --out x", "Unknown option: --lrr. Did you mean --lr?"),
        (f"{FIT} --ou x", "Unknown option: --ou. Did you mean --out?"),  # not: --out is missing
        (f"{FIT} --recipe", 'Command "fit" parameter --recipe requires an argument'),
        (f"{FIT} --out x more", "The command takes no further word, and got: more"),
        (f"{EVAL} --threads x", 'Invalid value for --threads: unable to convert "x" into int'),
        ("predict M --image", 'Command "predict" parameter --image requires at least 1 element'),
        # values
        (f"{FIT} --lr -1 --out x", "lr: Input should be greater than 0"),
        (f"{FIT} --epochs 3 --out x", "steps and epochs exclude each other"),
        (f"{EVAL} --threads 0", 'Invalid value "0" for --threads. Must be >= 1.'),
        (f"eval {MODEL} --data folder:none --modes kept:9", "Cannot keep 9 blocks"),  # before data
        (f"{EVAL} --modes shuffled", "'shuffled' is not an evaluation mode"),
        (f"{EVAL} --order 0,7", "7 is not a block"),
        (f"{EVAL} --order a", "'a' in the execution order"),
        (f"{EVAL} --order 0 --num-orders 3", "--order and --num-orders exclude each other"),
        ("predict model file --top 0", "top is 1 or more"),
        ("predict model file --order 9", "9 is not a block"),
        ("predict model file --fixed 1", "fixed: '1' is not two numbers of blocks, such as 1,1"),
        (
            "predict model file --order -1,2",
            'Command "predict" parameter --order requires an argument, and -1,2 is read as one ',
        ),
        ("predict model file --modes kept:1-2", "predict takes one order mode; 'kept:1-2' names 2"),
        ("predict M I --modes arbitrary --order 1", "--order and --modes exclude each other"),
        # outputs
        (f"{FIT} --out file", "A file stands where a directory is needed"),
        (f"{FIT} --out file/x", "A file stands where a directory is needed"),
        (f"{FIT} --out /proc/x", "There is no such place"),
        (f"analyze norms {MODEL} --data {DATA} --max-images 8 --out /proc/x", "There is no such"),
        ("reproduce digits-quick --out file", "A file stands where a directory is needed"),
        (
            f"analyze all {MODEL} --data {DATA} --out file",
            "A file stands where a directory is needed",
        ),
        ("reproduce digits-quick --data images --dry-run", "unknown data source 'images'"),
        (
            "reproduce digits-quick --out images --dry-run",
            "The directory is not empty and holds no",
        ),
        (f"merge model model --random 2 --data {DATA} --out empty", "--out must be a file for the"),
        ("swarm drain x --state file", "A file stands where a directory is needed"),
        ("swarm up --state file/x", "A file stands where a directory is needed"),
        # data
        (f"{NEW} --data folder:file --out o", "The data folder is a file"),
        (f"{NEW} --data folder:images --out o", "Cannot read image"),
        (f"{NEW} --data folder:images/train --out o", "This is the folder of one split"),
        (f"{NEW} --data folder:empty --out o", "there is no train/"),
        (f"{NEW} --data hf:images --out o", "no label column"),
        (f"{NEW} --data digits-pairs --out o", "unknown data source 'digits-pairs'"),
        # models and images
        (f"eval {MODEL.replace('=100', '=0')} --data {DATA}", "the model has no classifier"),
        (f"eval nowhere --data {DATA}", "'nowhere' is neither a path that exists nor a model spec"),
        (f"eval file --data {DATA}", "A model is a directory, and this is a file"),
        ("predict file model", "A model is a directory, and this is a file"),
        (f"eval hf:empty --data {DATA}", "There is no layershuffle.json and no config.json here"),
        (f"eval timm:test_vit?checkpoint=bytes --data {DATA}", "torch refuses this"),
        (f"eval timm:test_vit?checkpoint=none --data {DATA}", "There is no such file"),
        ("predict model empty", "Cannot read image (Is a directory)"),
        ("predict model bytes", "Cannot read image"),
        ("predict model none.png", "Cannot read image"),
        # recipes, plans and studies
        ("fit --recipe none.yaml --out x", "There is no recipe of this name"),
        ("fit --recipe stepz.yaml --out x", "'stepz' is not a setting, did you mean 'steps'?"),
        (
            "fit --recipe dropped.yaml --out x",
            "'drop' is not a setting. Where: dropped.yaml. Next: he",
        ),
        ("fit --recipe modle.yaml --out x", "'modle' is not a setting, did you mean 'model'?"),
        ("fit --recipe lr.yaml --out x", "lr: Input should be greater than 0. Where: lr.yaml"),
        ("reproduce modle.yaml", "'modle' is not a setting, did you mean 'model'?"),
        ("reproduce orders.yaml", "'num_orders' is not a setting, did you mean 'evaluate.num_ord"),
        ("reproduce drop.yaml", "'block_drop' is not a setting, did you mean 'fit.block_drop'?"),
        ("fit --recipe digits-quick --out x", "This is the recipe of a study, not of"),
        ("reproduce digits-base", "This is the recipe of a single training, not of a study"),
        ("reproduce file", "A recipe must be a YAML mapping of settings"),
        ("reproduce bytes", "The recipe cannot be read"),
        ("merge empty --out m", "The recipe cannot be read"),
        ("merge none.yaml --out m", "There is no such file. Where: none.yaml"),
        ("report empty", "There is no readable study here: no plan.json"),
    ],
)
def test_a_mistake(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    cause: str,
) -> None:
    monkeypatch.chdir(place)
    assert main(words.split()) in (1, 2)
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"error: {cause}")
    assert ". Next: " in error or "? Next: " in error
    assert "fault of layershuffle" not in error
    assert "weights_only=False" not in error
    assert "Traceback" not in captured.out + captured.err


# --- outputs --------------------------------------------------------------------------------------

IMAGES = "digit-pairs?train=40&validation=30&test=50"
SPEC = DIGITS_VIT.replace("depth=4", "depth=2")
SHORT = ["--steps", "1", "--batch-size", "8"]
STUDY = {
    "name": "s", "model": "dir:runs/a", "data": IMAGES, "fit": {"steps": 1, "batch_size": 8},
    "arms": [{"method": "baseline"}],
}  # fmt: skip
# Command: its words up to --out. {MODEL} is the model that --out is to replace.
OUTPUTS = {
    "fit": f"fit --method baseline --model {{MODEL}} --data {IMAGES} --steps 1 --batch-size 8",
    "export": "export {MODEL}",
    "analyze": f"analyze norms {{MODEL}} --data {IMAGES} --max-images 8",
    "merge": "merge merge.yaml",
    "merge --overwrite": "merge merge.yaml --overwrite",
    "merge --random": f"merge runs/a runs/b --random 1 --data {IMAGES}",
    "merge --random --overwrite": f"merge runs/a runs/b --overwrite --random 1 --data {IMAGES}",
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
    }
    for name, content in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(place: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def test_every_command_with_an_output_is_here() -> None:
    having = {command for command, flags in FLAGS.items() if "out" in flags.split()}
    assert {words.split(" --")[0] for words in OUTPUTS} == having


@pytest.mark.parametrize("out", ["runs/a", "runs/a/", "runs/../runs/a", "link"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_replaces_a_model(
    work: Path, capsys: pytest.CaptureFixture[str], command: str, out: str
) -> None:
    """--out is the model that the command reads, by each of its names."""
    (work / "link").symlink_to(work / "runs" / "a")
    before = files(work / "runs")
    words = OUTPUTS[command].format(MODEL="runs/a").split()
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
    score = ["merge", "runs/a", "runs/b", "--random", "1", "--no-soups", "--data", IMAGES]
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
