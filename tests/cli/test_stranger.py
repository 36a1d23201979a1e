"""The steps of a new user in an empty directory: each command as help and README name it.

Four visits of somebody who reads the help, has own pictures, makes mistakes, runs a study, and
starts a swarm. That the wheel has what they need is a test of the package.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import layershuffle as ls
from layershuffle.cli import main
from waiting import STARTS, wait_for, wait_for_address

PICTURE = "bundled:digit-pair.png"
MODEL = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=2&img_size=32&patch_size=8"
    "&embed_dim=32&depth=3&num_heads=2&mlp_ratio=2"
)
STUDY = """
name: mine
model: dir:base
data: folder:photos
arms: [{method: layershuffle}]
fit: {steps: 2, batch_size: 4, holdout: 0.3}
evaluate: {modes: "sequential,arbitrary", num_orders: 2}
"""
# The longest allowed deadline, because visits are slow on a busy machine, and hosts go away.
PATIENT = ("--deadline-ms", "30000")


@dataclass(frozen=True)
class Stranger:
    """A user at a shell in the empty directory `folder`."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def types(self, *words: str, code: int = 0) -> str:
        """Run `layershuffle WORDS`, check the exit code, and return the output."""
        self.capsys.readouterr()
        done = main(list(words))
        out, err = self.capsys.readouterr()
        assert done == code, (words, out, err)
        return out

    def gets(self, *words: str) -> Any:
        """What a command prints with --json."""
        return json.loads(self.types(*words, "--json"))

    def refused(self, *words: str, saying: str) -> None:
        """Run an invalid command and check for one paragraph with the cause, and code 1 or 2."""
        assert main(list(words)) in (1, 2), words
        lines = self.capsys.readouterr().err.splitlines()
        (paragraph,) = [line for line in lines if line.startswith("error: ")]
        assert saying in paragraph, (words, paragraph)
        assert "fault of layershuffle" not in paragraph, paragraph


@pytest.fixture
def stranger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Stranger:
    """Somebody in an empty directory, with an empty home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Stranger(tmp_path, capsys)


def write_photos(folder: Path, *, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    """Pictures of noise, 16 to train on and 8 to test on, bright ones and dark ones."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for index, name in enumerate(classes):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 128, (40, 36, 3), dtype=np.uint8) + 127 * index
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")


# --- the way in -----------------------------------------------------------------------------------


def test_arriving(stranger: Stranger, repository: Path) -> None:
    types, refused = stranger.types, stranger.refused
    assert types("--version") == f"{ls.__version__}\n"
    first = re.search(r"Start here: layershuffle (.+?) *\n", types("--help"))
    assert first is not None
    refused("evla", "x", saying='Did you mean "eval"?')
    doctor = types("doctor")
    assert f"Next: layershuffle {first[1]} " in doctor
    assert "NO " not in doctor
    assert "complete" in types("completion", "bash")

    # The first command that help and doctor name.
    lines = types(*first[1].split()).splitlines()
    assert re.match(rf"{PICTURE}: 42 [\d.]+ %, ", lines[0])
    assert lines[1].endswith("12 of 12 blocks in the order 0,1,2,3,4,5,6,7,8,9,10,11")
    words = ("predict", "bundled:digits-swarm", PICTURE, "--modes", "kept:9:arbitrary")
    drawn = types(*words, "--seed", "1")
    assert "9 of 12 blocks in the order" in drawn
    assert drawn == types(*words, "--seed", "1")

    refused("predict", "bundled:digits-swarm", "cat.png", saying="Where: cat.png")
    refused("predict", "bundled:digit-swarm", PICTURE, saying="digits-swarm")
    refused("predict", "bundled:digits-swarm", PICTURE, "--modes", "arbitary", saying="'arbitrary'")
    refused("predict", "bundled:digits-swarm", PICTURE, "--order", "0,12", saying="12")
    types("predict", "bundled:digits-swarm", PICTURE, "--topp", "3", code=2)


# --- own pictures ---------------------------------------------------------------------------------


def test_own_pictures(stranger: Stranger) -> None:
    types, gets, refused = stranger.types, stranger.gets, stranger.refused
    folder = stranger.folder
    write_photos(folder / "photos")
    ls.save(ls.load(MODEL), "base")
    data, short = ("--data", "folder:photos"), ("--steps", "4", "--batch-size", "4")
    fit = ("fit", "--method", "layershuffle", "--model", "dir:base", *data, *short)
    refused("fit", "--method", "layershufle", *fit[3:], "--out", "a", saying="layershuffle")
    refused(*fit, "--lr", "-1", "--out", "a", saying="lr")
    refused(*fit[:5], "--data", "folder:fotos", *short, "--out", "a", saying="fotos")
    trained = types(*fit, "--holdout", "0.3", "--out", "a")
    assert "Next: layershuffle eval a --data folder:photos" in trained
    assert "cat" in (folder / "a" / "model" / "README.md").read_text()
    again = types(*fit, "--holdout", "0.3", "--out", "a")
    assert again.splitlines()[-1] == trained.splitlines()[-1]
    refused(*fit, "--holdout", "0.4", "--out", "a", saying="a")
    types(*fit, "--holdout", "0.3", "--seed", "1", "--out", "b")

    assert "8 images each." in types("eval", "a", *data, "--num-orders", "3")
    report = gets("eval", "a", *data, "--num-orders", "3")
    (drawn,) = [mode for mode in report["modes"] if mode["mode"] == "arbitrary"]
    score = drawn["scores"][0]
    replayed = gets("eval", "a", *data, "--order", score["order"])
    assert replayed["modes"][0]["scores"][0]["cross_entropy"] == score["cross_entropy"]
    refused("eval", "a", "--data", "digit-pairs", saying="100 classes")
    refused("eval", "a", *data, "--modes", "sequentiel", saying="'sequential'")
    refused("eval", "c", *data, saying="c")
    guess = gets("predict", "a", "photos/val/cat/0.png")
    assert {guessed["label"] for guessed in guess["images"][0]["top"]} == {"cat", "dog"}

    # Models of several trainings; none is overwritten by another one.
    recipe = {"slices": [{"model": "a", "blocks": [0, 2]}, {"model": "b", "blocks": [1]}]}
    (folder / "merge.yaml").write_text(json.dumps({**recipe, "stem": "average", "head": "a"}))
    assert "blocks 0,2 from a" in types("merge", "merge.yaml", "--out", "merged")
    refused("merge", "merge.yaml", "--out", "merged", saying="--overwrite")
    donor = (folder / "a" / "model" / "model.safetensors").read_bytes()
    refused("merge", "merge.yaml", "--out", "a", "--overwrite", saying="a")
    assert (folder / "a" / "model" / "model.safetensors").read_bytes() == donor
    few = ("--num-orders", "2", *data)
    refused("merge", "a", "b", "--random", "2", *few, saying="--replacement")
    random = ("--random", "2", "--replacement", "--no-soups")
    assert "8 images each" in types("merge", "a", "b", *random, *few)
    assert "Ensemble of 2 models" in types("ensemble", "a", "b", *few)

    answer = types("analyze", "norms", "a", *data, "--out", "norms")
    assert (folder / "norms" / "norms.svg").is_file()
    assert "All of it: norms/index.html\n" in answer
    calibrated = gets("swarm", "calibrate", "a", *data, "--num-orders", "2")
    queue = [row for row in calibrated["rows"] if (row["passes"], row["parallel"]) == (1, 1)]
    assert [row["kept"] for row in queue] == [1, 2, 3]


# --- a study --------------------------------------------------------------------------------------


def test_a_study(stranger: Stranger) -> None:
    types, refused, folder = stranger.types, stranger.refused, stranger.folder
    paper = types("reproduce", "imagenet-paper", "--dry-run")
    assert paper.startswith("imagenet-paper: 59 runs, 2 mergings, 6 analysis tasks, on folder:")
    refused("reproduce", "digit-quick", saying="did you mean 'digits-quick'")
    write_photos(folder / "photos")
    ls.save(ls.load(MODEL), "base")
    (folder / "mine.yaml").write_text(STUDY)
    study = types("reproduce", "mine.yaml", "--workers", "1")
    assert "Report: runs/mine/report.html" in study
    page = (folder / "runs" / "mine" / "report.html").read_text()
    assert "http-equiv" not in page or 'src="http' not in page
    (folder / "runs" / "mine" / "report.html").unlink()
    types("report", "runs/mine")
    assert (folder / "runs" / "mine" / "report.html").read_text() == page
    (folder / "mine.yaml").write_text(STUDY.replace("steps: 2", "stepz: 2"))
    refused("reproduce", "mine.yaml", "--out", "x", saying="did you mean 'steps'")


# --- a swarm --------------------------------------------------------------------------------------


def test_a_swarm(stranger: Stranger) -> None:
    types, refused, folder = stranger.types, stranger.refused, stranger.folder
    refused("swarm", "status", "--address", "http://127.0.0.1:9", saying="swarm up")
    refused("swarm", "drain", "host-1", "--state", "s", saying="swarm up")

    with (folder / "up.log").open("w") as log:
        words = ["swarm", "up", "--hosts", "2", "--port", "0", "--state", "s"]
        up = subprocess.Popen(
            [sys.executable, "-u", "-m", "layershuffle", *words], stdout=log, stderr=log
        )
        try:
            address = ("--address", wait_for_address(folder / "up.log", up))
            # Hosts of a busy machine are suspect for a moment now and then, so each of these comes
            # to be true, and need not be so at once.
            wait_for(lambda: types("swarm", "status", *address).count("healthy") == 2)
            # It would be sure after a block or two.
            ask = ("classify", PICTURE, *address, *PATIENT, "--confidence", "off")
            answer = wait_for(lambda: types(*ask), holds=in_full)
            assert re.match(rf"{PICTURE}: \d\d [\d.]+ %, ", answer)
            assert "On images like digit-pairs" in answer
            drained = types("swarm", "drain", "host-2", "--state", "s")
            assert "Next: layershuffle swarm readmit host-2 --state s" in drained
            types("swarm", "readmit", "host-2", "--state", "s")
            # It comes back in the background.
            wait_for(lambda: types("swarm", "status", *address).count("healthy") == 2)
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(STARTS)
    assert up.returncode == 0
    assert "The swarm has ended" in (folder / "up.log").read_text()


def in_full(answer: str) -> bool:
    """Whether `classify` printed an answer to which all blocks of the hosts contributed."""
    return "\n10 of 10 blocks in " in answer
