"""The command line: exit codes, errors of one paragraph, flags over recipes."""

import json
import re
import subprocess
import sys

import pytest

from layershuffle.cli import main
from layershuffle.errors import SettingsError
from layershuffle.extras import EXTRAS
from layershuffle.stats import wilson_interval
from without import run_without

MODEL = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=32&depth=4&num_heads=2&mlp_ratio=2"
)
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
    assert re.search(r"step 2/2: loss \d\.\d{4}, accuracy \d+\.\d %, held-out top-1 ", err)
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


def test_eval_table_breaks_long_modes_at_a_colon(capsys):
    words = ["eval", "bundled:digits", "--data", DATA, "--max-images", "4", "--num-orders", "2"]
    code, text, _ = run(capsys, *words, "--modes", "kept:12:arbitrary:passes=2:parallel=3")
    assert code == 0
    assert re.search(r"^kept:12:arbitrary:passes=2: .*\nparallel=3$", text, re.MULTILINE)


def test_eval_per_batch_says_so(capsys):
    words = ["eval", "bundled:digits", "--data", DATA, "--modes", "arbitrary", "--draw", "batch"]
    _, table, _ = run(capsys, *words, "--num-orders", "4", "--batch-size", "8")
    assert "one order per batch" in table
    assert "Wilson" not in table


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        (["evel"], 2, 'Unknown command "evel". Did you mean "eval"? Next: layershuffle --help'),
        (["swarm", "upp"], 2, 'Unknown command "upp". Did you mean "up"? Next: layershuffle swarm'),
        (["eval"], 2, "--model requires an argument. Next: layershuffle eval --help"),
        (["eval", "bundled:digits"], 2, "--data requires an argument"),
        (["swarm", "drain"], 2, "--host requires an argument. Next: layershuffle swarm drain --h"),
        ([*FIT, "--lrr", "1", "--out", "x"], 2, "Unknown option: --lrr. Did you mean --lr?"),
        # What is missing because it is misspelt.
        ([*FIT, "--ou", "x"], 2, "Unknown option: --ou. Did you mean --out?"),
        ([*FIT, "--recipe"], 2, "--recipe requires an argument"),
        ([*FIT, "--out", "x", "more"], 2, "Unused Tokens: ['more']"),
        (["eval", "M", "--data", "D", "--threads", "x"], 2, 'unable to convert "x" into int'),
        (["predict", "M", "--image"], 2, "--image requires at least 1 element"),
        (["eval", "FITTED", "--data", DATA, "--modes", "kept:9"], 2, "Cannot keep 9 blocks"),
        (["eval", "FITTED", "--data", DATA, "--modes", "shuffled"], 2, "not an evaluation mode"),
        (["eval", "FITTED", "--data", DATA, "--order", "0,7"], 2, "7 is not a block"),
        (["eval", "FITTED", "--data", DATA, "--order", "a"], 2, "'a' in the execution order"),
        (["eval", "M", "--data", "D", "--order", "0", "--modes", "kept:2"], 2, "exclude"),
        (["eval", "M", "--data", "D", "--order", "0", "--num-orders", "3"], 2, "and --num-orders"),
        (["eval", "M", "--data", "D", "--order", "0", "--seed", "1"], 2, "and --seed exclude"),
        (["eval", "M", "--data", "D", "--order", "0", "--draw", "batch"], 2, "and --draw exclude"),
        (
            ["eval", MODEL.replace("classes=100", "classes=0"), "--data", DATA],
            1,
            "the model has no classifier, the data has 100 classes",
        ),
        (["eval", "nowhere", "--data", DATA], 2, "nowhere"),
        (["eval", "FITTED", "--data", "folder:/nowhere"], 1, "/nowhere"),
        (["eval", "FITTED", "--data", "digits-pairs"], 2, "digit-pairs"),
        (["fit", "--recipe", "none.yaml", "--out", "x"], 2, "none.yaml"),
        ([*FIT, "--lr", "-1", "--out", "x"], 2, "lr: Input should be greater than 0"),
        ([*FIT, "--epochs", "3", "--out", "x"], 2, "steps and epochs exclude each other"),
        (["pretrain"], 2, "--recipe requires an argument"),
        (["pretrain", "digits-base", "--method", "baseline"], 2, "--out requires an argument"),
        (["reproduce", "none.yaml"], 2, "none.yaml"),
        (
            ["report", "/nowhere"],
            2,
            "no readable study here: no plan.json. Where: /nowhere. Next: ",
        ),
        (["merge", "a", "--random", "2"], 2, "--random needs --data SPEC"),
        (["eval", "FITTED", "--data", DATA, "--threads", "0"], 2, "--threads must be at least 1"),
    ],
)
def test_errors_are_one_paragraph(capsys, fitted, words, code, phrase):
    words = [str(fitted) if word == "FITTED" else word for word in words]
    got, out, err = run(capsys, *words)
    assert got == code, err
    assert phrase in err
    assert err.startswith("error: ")
    assert " Next: " in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


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


def test_unknown_key_in_a_recipe(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("method: layershuffle\nmodel: m\ndata: d\nstepz: 3\n")
    code, _, err = run(capsys, "fit", "--recipe", str(recipe), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "'stepz' is not a setting, did you mean 'steps'" in err
    assert "r.yaml" in err


@pytest.mark.parametrize(
    ("words", "cause", "next_command"),
    [
        ("reproduce digits-base", "the recipe of a single training", "layershuffle fit --recipe "),
        ("pretrain digits-quick", "the recipe of a study", "layershuffle reproduce digits-quick"),
        ("fit --recipe digits-quick", "the recipe of a study", "layershuffle reproduce digits-qui"),
    ],
)
def test_a_recipe_of_another_command(capsys, tmp_path, words, cause, next_command):
    code, _, err = run(capsys, *words.split(), "--out", str(tmp_path / "o"))
    assert code == 2
    assert f"This is {cause}, not of " in err
    assert f"Next: {next_command}" in err


def test_a_key_that_belongs_to_a_group_is_named_with_it(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("arms: [{method: baseline}]\nnum_orders: 3\n")
    code, _, err = run(capsys, "reproduce", str(recipe), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "'num_orders' is not a setting, did you mean 'evaluate.num_orders'?" in err
    recipe.write_text("arms: [{method: layershuffle, drop: 0.2}]\nname: n\nmodel: m\ndata: d\n")
    code, _, err = run(capsys, "reproduce", str(recipe), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "'drop' is not a setting, did you mean 'fit.drop'?" in err


def test_absent_files(capsys, tmp_path):
    for words in ("swarm plan", "swarm simulate", f"merge --out {tmp_path / 'm'}"):
        code, _, err = run(capsys, *words.split(), str(tmp_path / "no.yaml"))
        assert code == 2
        assert f"There is no such file. Where: {tmp_path / 'no.yaml'}. Next: name a " in err
    code, _, err = run(capsys, "predict", "bundled:digits", str(tmp_path))
    assert code == 1
    assert f"Cannot read image (Is a directory). Where: {tmp_path}." in err


@pytest.mark.parametrize("command", ["fit --recipe", "reproduce"])
def test_a_misspelt_key_is_named_before_what_is_missing(capsys, tmp_path, command):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("modle: bundled:digits\n")
    code, _, err = run(capsys, *command.split(), str(recipe), "--out", str(tmp_path / "o"))
    assert code == 2
    assert f"'modle' is not a setting, did you mean 'model'? Where: {recipe}. Next: " in err


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert "bundled:digits" in out
    assert "Next: layershuffle predict" in out
    for name, extra in EXTRAS.items():
        assert re.search(rf"ok  extra {name} +{extra.brings}\n", out)


def test_doctor_runs_without_torch(tmp_path):
    """Missing extras are no error either (tests/test_package.py)."""
    ask = "import sys\nfrom layershuffle.cli import main\nsys.exit(main(['doctor']))"
    absent = {module for extra in EXTRAS.values() for module in extra.modules}
    done = run_without(
        {*absent, "torch", "timm", "transformers", "huggingface_hub"}, ask, at=tmp_path
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be loaded without torch, timm" in done.stdout


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
