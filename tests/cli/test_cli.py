"""The command line: exit codes, errors of one paragraph, flags over recipes."""

import json
import os
import re
import subprocess
import sys

import pytest

from common import DIGITS_VIT
from layershuffle.cli import main
from layershuffle.errors import SettingsError
from layershuffle.extras import EXTRAS
from layershuffle.stats import wilson_interval

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


def test_fit_prints_lines_and_the_next_command(capsys, tmp_path):
    words = ("--batch-size", "16", "--log-every", "1", "--out", str(tmp_path))
    code, out, err = run(capsys, *FIT, *words)
    assert code == 0
    assert re.search(r"step 2/2: loss \d\.\d{4}, accuracy \d+\.\d %, .*held-out top-1 ", err)
    assert f"Next: layershuffle eval {tmp_path} --data '{DATA}'" in out


def test_eval_table_and_json_agree_and_replay(capsys, fitted):
    words = ["eval", str(fitted), "--data", DATA, "--modes", "sequential,arbitrary,kept:2"]
    words += ["--num-orders", "3"]
    code, table, _ = run(capsys, *words)
    assert code == 0
    assert "one order per pass" in table
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
        wilson_interval(sequential["mean"], sequential["effective"])
    )
    counted = f"which count as {round(sequential['effective'])} independent ones"
    words = f"of one order or equal scores Wilson over the images, {counted}"
    assert words in " ".join(table.split())
    assert (arbitrary["top1"]["effective"] is None) == (len(set(tops)) > 1)
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
    assert "stop at 0.95" in " ".join(table.split())


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


def test_a_notebook_s_shell_and_an_unwritable_cache_stop_no_figure(tmp_path):
    """A notebook hands on the name of its back end, and /sys takes no files, even of root."""
    words = ["analyze", "norms", "bundled:digits", "--data", "digit-pairs", "--max-images", "20"]
    env = {"MPLBACKEND": "module://matplotlib_inline.absent", "MPLCONFIGDIR": "/sys/absent"}
    words = [sys.executable, "-m", "layershuffle", *words, "--out", str(tmp_path / "norms")]
    subprocess.run(words, env=os.environ | env, check=True)
    assert list((tmp_path / "norms").glob("*.svg"))


def test_a_shell_that_lacks_characters_or_an_end_shows_the_rest():
    """Rules of tables are no ASCII, and a service may have closed its standard error."""
    words = [sys.executable, "-m", "layershuffle", "eval", "bundled:digits"]
    words += ["--data", "digit-pairs", "--max-images", "20", "--modes", "sequential"]
    shell = ["sh", "-c", '"$@" 2>&-', "sh"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*shell, *words], capture_output=True, text=True, env=env, check=True)
    assert "sequential" in done.stdout
    assert "????" in done.stdout
