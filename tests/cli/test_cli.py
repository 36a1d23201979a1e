"""Commands from flags to output: `fit`, `eval`, `predict`, `demo`, `doctor`; closed pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

import layershuffle as ls
from common import DIGITS_VIT, redraw
from layershuffle.cli import main
from layershuffle.core.policies import Kept
from layershuffle.ground.errors import SettingsError
from layershuffle.ground.extras import EXTRAS
from layershuffle.ground.stats import wilson_interval
from layershuffle.models import set_class_names, truncate
from layershuffle.training.history import read_history

MODEL = DIGITS_VIT
DATA = "digit-pairs?train=64&validation=32&test=32"
FIT = ["fit", "--method", "layershuffle", "--model", MODEL, "--data", DATA, "--steps", "2"]


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A directory in which `layershuffle fit` made a tiny model."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main([*FIT, "--batch-size", "16", "--log-every", "1", "--out", str(out)]) == 0
    return out


def test_fit_prints_the_next_command_and_keeps_every_step(capsys, tmp_path):
    words = ("--batch-size", "16", "--log-every", "1", "--out", str(tmp_path))
    code, out, err = run(capsys, *FIT, *words)
    assert code == 0
    assert f"layershuffle eval {tmp_path} --data '{DATA}'" in out
    assert len(err.splitlines()) >= 2, "a line for every logged step"
    assert {row["step"] for row in read_history(tmp_path / "history.csv")} == {1, 2}


def test_eval_table_and_json_agree_and_replay(capsys, fitted):
    words = ["eval", str(fitted), "--data", DATA, "--modes", "sequential,arbitrary,kept:2"]
    words += ["--num-orders", "3"]
    code, table, _ = run(capsys, *words)
    assert code == 0
    code, text, _ = run(capsys, *words, "--json")
    report = json.loads(text)
    assert [m["mode"] for m in report["modes"]] == ["sequential", "arbitrary", "kept:2:sequential"]
    assert [m["orders"] for m in report["modes"]] == [1, 3, 3]
    arbitrary = report["modes"][1]
    tops = [score["top1"] for score in arbitrary["scores"]]
    assert arbitrary["top1"]["mean"] == pytest.approx(sum(tops) / 3)
    assert f" {arbitrary['top1']['mean']:.2f} " in table
    sequential = report["modes"][0]["top1"]
    assert [sequential["low"], sequential["high"]] == pytest.approx(
        wilson_interval(sequential["mean"], sequential["images"])
    )
    counts = [
        round(mode["top1"]["images"])
        for mode in report["modes"]
        if mode["top1"]["kind"] == "images"
    ]
    span = " to ".join(map(str, sorted({min(counts), max(counts)})))
    words = f"of one order or equal scores Wilson over {span} images that count as independent"
    assert words in " ".join(table.split())
    assert (arbitrary["top1"]["kind"] == "orders") == (len(set(tops)) > 1)
    assert report["modes"][0]["top5"]["low"] is None, "its images are counted for top-1 alone"
    drawn = arbitrary["scores"][2]
    _, text, _ = run(
        capsys, "eval", str(fitted), "--data", DATA, "--order", drawn["order"], "--json"
    )
    (replayed,) = json.loads(text)["modes"][0]["scores"]
    assert replayed == drawn


def test_eval_that_stops_says_how_many_blocks_it_takes(capsys):
    words = ["eval", "bundled:digits-swarm", "--data", DATA, "--max-images", "40"]
    words += ["--modes", "sequential,kept:6:arbitrary", "--num-orders", "2", "--stop", "0.95"]
    code, table, _ = run(capsys, *words)
    assert code == 0
    report = json.loads(run(capsys, *words, "--json")[1])
    assert report["stop"] == 0.95
    for mode, least in zip(report["modes"], (12, 6), strict=True):
        assert [score["blocks"] for score in mode["scores"]] == pytest.approx(
            [mode["blocks"]["mean"]] * len(mode["scores"]), abs=2
        )
        assert 1 < mode["blocks"]["mean"] < mode["kept"] == least
        assert f"{mode['blocks']['mean']:.1f} of {mode['kept']} " in table


@pytest.mark.parametrize("place", [0, 1, 2, 6])
def test_debug_shows_the_traceback_from_any_position(fitted, place):
    words = ["eval", str(fitted), "--data", DATA, "--modes", "shuffled"]
    words.insert(place, "--debug")
    with pytest.raises(SettingsError, match="not an evaluation mode"):
        main(words)


def test_flags_may_come_first(capsys, fitted):
    words = ["eval", "--json", f"--data={DATA}", "--num-orders=1", str(fitted)]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert [mode["orders"] for mode in json.loads(out)["modes"]] == [1, 1]


def test_flags_complete_a_recipe(capsys, tmp_path):
    """What a recipe alone may not say may be right with the flags."""
    (tmp_path / "recipe.yaml").write_text(
        f"method: truncated\nmodel: {MODEL}\ndata: {DATA}\nsteps: 1\nbatch_size: 16\n"
    )
    words = ["fit", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")]
    code, _, err = run(capsys, *words)
    assert (code, "kept" in err) == (2, True)
    assert run(capsys, *words, "--kept", "2")[0] == 0
    assert ls.depth_of(ls.load(str(tmp_path / "out"))) == 2


@pytest.mark.parametrize("form", ["--recipe FILE", "--recipe=FILE"])
def test_flags_override_the_recipe(tmp_path, form):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"method: layershuffle\nmodel: {json.dumps(MODEL)}\ndata: {json.dumps(DATA)}\n"
        "steps: 2\nbatch_size: 16\nlr: 1.0e-3\nseed: 1\nencoding: {table: shared}\n"
    )
    out = tmp_path / "run"
    words = form.replace("FILE", str(recipe)).split()
    assert main(["fit", *words, "--seed", "3", f"--out={out}"]) == 0
    settings = json.loads((out / "result.json").read_text())["settings"]
    assert (settings["batch_size"], settings["lr"], settings["seed"]) == (16, 1e-3, 3)
    assert settings["encoding"]["table"] == "shared"


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert "bundled:digits" in out
    assert "Next: layershuffle predict" in out
    for name, extra in EXTRAS.items():
        assert re.search(rf"ok  extra {name} +{extra.brings}\n", out)


@pytest.mark.parametrize("words", [[], ["fit", "--help"]])
def test_a_closed_pipe_is_no_error(words):
    """As in `layershuffle fit --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "layershuffle", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")


def test_without_an_output_nothing_fails(monkeypatch):
    """As in a service whose standard output is closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0


def test_an_odd_shell_stops_neither_a_table_nor_a_figure(tmp_path):
    """Rules of tables are no ASCII, and a service may have closed its standard error. A notebook
    hands on the name of its back end, and /sys takes no files, even of root. One process for both:
    its imports take seconds."""
    data = ["bundled:digits", "--data", "digit-pairs", "--max-images", "20"]
    table = ["eval", *data, "--modes", "sequential"]
    figure = ["analyze", "norms", *data, "--out", str(tmp_path / "norms")]
    code = f"from layershuffle.cli import main; exit(main({table}) or main({figure}))"
    shell = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", code]
    env = {"MPLBACKEND": "module://matplotlib_inline.absent", "MPLCONFIGDIR": "/sys/absent"}
    env = {**os.environ, **env, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(shell, capture_output=True, text=True, env=env, check=True)
    assert "sequential" in done.stdout
    assert "????" in done.stdout
    assert list((tmp_path / "norms").glob("*.svg"))


def test_the_demo_serves_its_page_until_ctrl_c():
    words = ["-m", "layershuffle", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as demo:
        try:
            address = demo.stdout.readline().split()[4]
            # Before torch is imported, which the second question waits for.
            assert "<title>LayerShuffle</title>" in httpx.get(address, timeout=60).text
            facts = httpx.get(f"{address}/page/facts", timeout=120).json()
            assert (facts["depth"], list(facts["models"])) == (12, ["ours", "ordinary"])
        finally:
            demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0


def test_the_demo_needs_the_web_server_alone():
    """Ray and scikit-learn, of the same extra, take seconds to import."""
    code = (
        "import sys, layershuffle.gateway.http.listening, layershuffle.page.app;"
        "light = {'torch'} & set(sys.modules);"
        "import layershuffle.page.workbench;"
        "sys.exit(str(light | {'ray', 'sklearn', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


# --- predict --------------------------------------------------------------------------------------

SPEC = DIGITS_VIT.replace("classes=100", "classes=3")
NAMES = ("cat", "dog", "fox")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model with class names, and three images of its size."""
    model = redraw(ls.load(SPEC), seed=0)
    set_class_names(model, NAMES)
    ls.save(model, tmp_path / "model")
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 20), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_hand(order: str) -> list[list[float]]:
    """Probabilities of the three images, from a model with its blocks in that order."""
    rebuilt = truncate(ls.load("model"), order)
    rebuilt = ls.unwrap(rebuilt).eval()
    stock = timm.create_model("local-dir:model", pretrained=True)
    transform = create_transform(**resolve_data_config(stock.pretrained_cfg))
    images = torch.stack([transform(Image.open(f"{number}.png")) for number in range(3)])
    with torch.inference_mode():
        probabilities: list[list[float]] = rebuilt(images).softmax(dim=-1).tolist()
    return probabilities


def drawn(mode_kept: int, seed: int) -> str:
    return str(Kept(mode_kept, order="arbitrary").draw(4, seed=seed, step=0))


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ([], "0,1,2,3"),
        (["--modes", "sequential"], "0,1,2,3"),
        (["--order", "2,0"], "2,0"),
        (["--modes", "kept:3:arbitrary", "--seed", "5"], drawn(3, 5)),
    ],
)
def test_predictions_equal_those_of_a_model_in_that_order(
    work: Path, capsys: pytest.CaptureFixture[str], flags: list[str], order: str
) -> None:
    images = [f"{number}.png" for number in range(3)]
    assert main(["predict", "model", *images, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["order"]) == ("model", order)
    assert [answer["image"] for answer in report["images"]] == images
    for answer, expected in zip(report["images"], by_hand(order), strict=True):
        ranking = sorted(range(3), key=lambda index: -expected[index])
        assert [guess["label"] for guess in answer["top"]] == [NAMES[i] for i in ranking]
        assert [guess["index"] for guess in answer["top"]] == ranking
        probabilities = [guess["probability"] for guess in answer["top"]]
        assert probabilities == pytest.approx([expected[i] for i in ranking], abs=1e-6)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as the package does
def test_pictures_that_models_cannot_see(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thin one would have 144 million pixels; of a drawing on nothing, nothing is left."""
    Image.new("L", (1_000_000, 1)).save("thin.png")
    Image.new("RGBA", (20, 12), (0, 0, 0, 90)).save("blank.png")
    Image.fromarray(np.zeros((12, 20), np.float32)).save("float.tif")
    Image.new("RGB", (20, 12)).save("dark.png")
    Image.new("1", (10_000, 10_000)).save("huge.png")
    images = ["thin.png", "float.tif", "blank.png", "dark.png", "huge.png"]
    assert main(["predict", "model", *images, "--json"]) == 1
    printed, warned = capsys.readouterr()
    answers = {answer["image"]: answer for answer in json.loads(printed)["images"]}
    assert list(answers) == images
    refused = [image for image, answer in answers.items() if "error" in answer]
    assert refused == ["thin.png", "float.tif", "huge.png"]
    assert all(answers[image]["error"]["hint"] for image in refused)
    # Answered, and warned of: models see one colour.
    assert "blank.png" in warned
    assert "dark.png" not in warned


def test_an_unreadable_file_does_not_stop_the_others(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "model", "0.png", "model/config.json", "1.png", "--order", "3,1", "--top=1"]
    assert main(words) == 1
    printed = capsys.readouterr()
    *lines, last = printed.out.splitlines()
    for line, number, expected in zip(lines, (0, 1), by_hand("3,1"), strict=False):
        best = max(range(3), key=lambda index: expected[index])
        assert line == f"{number}.png: {NAMES[best]} {100 * expected[best]:.1f} %"
    assert "3,1" in last
    assert "model/config.json" in printed.err
    assert main([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["order"] == "3,1"
    images = report["images"]
    assert [answer["image"] for answer in images] == ["0.png", "model/config.json", "1.png"]
    assert [list(answer.get("error", ())) for answer in images] == [[], ["cause", "hint"], []]
    # More than a batch of files, none of which can be read, before one that can.
    assert main(["predict", "model", *["model/config.json"] * 70, *words[4:]]) == 1
    assert capsys.readouterr().out.splitlines()[0] == lines[1]
