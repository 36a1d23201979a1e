"""Each mistake ends in one paragraph with cause, place and next step, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

import layershuffle as ls
from common import DIGITS_VIT
from layershuffle.cli import main

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
        "drop": "arms: [{method: layershuffle, drop: 0.2}]\nname: n\nmodel: m\ndata: d\n",
        "lr": "lr: -1\n",
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
        ("eval bundled:digits", "--data is missing"),
        ("swarm drain", "HOST is missing"),
        ("pretrain", "RECIPE is missing"),
        ("pretrain digits-base", "--out is missing"),
        ("merge", "MODEL is missing"),
        (f"ensemble --data {DATA}", "MODEL is missing"),
        ("analyze", "NAME is missing"),
        (f"analyze nroms {MODEL} --data {DATA} --out x", "There is no analysis 'nroms'"),
        (f"analyze norms {MODEL} --data {DATA} --out x --max-images 0", "max_images: Input should"),
        ("merge a --random 2", "merge --random needs --data SPEC"),
        (f"{FIT} --lrr 1 --out x", "Unknown option: --lrr. Did you mean --lr?"),
        (f"{FIT} --ou x", "Unknown option: --ou. Did you mean --out?"),  # not: --out is missing
        (f"{FIT} --recipe", 'Command "fit" parameter --recipe requires an argument'),
        (f"{FIT} --out x more", "Unused Tokens: ['more']"),
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
        ("predict model file --modes kept:1-2", "predict takes one order mode; 'kept:1-2' names 2"),
        ("predict M I --modes arbitrary --order 1", "--order and --modes exclude each other"),
        # outputs
        (f"{FIT} --out file", "A file stands where a directory is needed"),
        (f"{FIT} --out file/x", "A file stands where a directory is needed"),
        (f"{FIT} --out /proc/x", "There is no such place"),
        (f"analyze norms {MODEL} --data {DATA} --max-images 8 --out /proc/x", "There is no such"),
        ("reproduce digits-quick --out file", "A file stands where a directory is needed"),
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
        (f"eval file --data {DATA}", "There is no layershuffle.json"),
        (f"eval hf:empty --data {DATA}", "There is no layershuffle.json and no config.json here"),
        (f"eval timm:test_vit?checkpoint=bytes --data {DATA}", "torch refuses this"),
        (f"eval timm:test_vit?checkpoint=none --data {DATA}", "There is no such file"),
        ("predict model empty", "Cannot read image (Is a directory)"),
        ("predict model bytes", "Cannot read image"),
        ("predict model none.png", "Cannot read image"),
        # recipes, plans and studies
        ("fit --recipe none.yaml --out x", "There is no recipe of this name"),
        ("fit --recipe stepz.yaml --out x", "'stepz' is not a setting, did you mean 'steps'?"),
        ("fit --recipe modle.yaml --out x", "'modle' is not a setting, did you mean 'model'?"),
        ("fit --recipe lr.yaml --out x", "lr: Input should be greater than 0. Where: lr.yaml"),
        ("reproduce modle.yaml", "'modle' is not a setting, did you mean 'model'?"),
        ("reproduce orders.yaml", "'num_orders' is not a setting, did you mean 'evaluate.num_ord"),
        ("reproduce drop.yaml", "'drop' is not a setting, did you mean 'fit.drop'?"),
        ("fit --recipe digits-quick --out x", "This is the recipe of a study, not of"),
        ("pretrain digits-quick --out x", "This is the recipe of a study, not of"),
        ("reproduce digits-base", "This is the recipe of a single training, not of a study"),
        ("reproduce file", "A recipe must be a YAML mapping of settings"),
        ("reproduce bytes", "The recipe cannot be read"),
        ("merge empty --out m", "The recipe cannot be read"),
        ("merge none.yaml --out m", "There is no such file. Where: none.yaml"),
        ("report empty", "There is no readable study here: no plan.json"),
        ("swarm plan bytes", "The recipe cannot be read"),
        ("swarm simulate none.yaml", "There is no such file. Where: none.yaml"),
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
