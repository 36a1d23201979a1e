"""The command line as a user meets it: exit codes, one-paragraph errors, frozen flags, speed."""

import json
import re
import resource
import subprocess
import sys

import pytest

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.cli import COMMANDS, main
from layershuffle.errors import SettingsError
from layershuffle.merging.settings import EnsembleSettings, MergingSettings
from layershuffle.settings import CacheSettings, EvalSettings, FitSettings

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


def test_fit_prints_lines_and_what_to_type_next(capsys, tmp_path):
    code, out, _ = run(
        capsys, *FIT, "--batch-size", "16", "--log-every", "1", "--out", str(tmp_path)
    )
    assert code == 0
    assert re.search(r"step 1/2: loss \d\.\d{4}, accuracy \d+\.\d %, 0:00:\d\d left", out)
    assert "held-out top-1" in out
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
    assert f"{arbitrary['top1']['mean']:9.2f}" in table
    drawn = arbitrary["scores"][2]
    _, text, _ = run(
        capsys, "eval", str(fitted), "--data", DATA, "--order", drawn["order"], "--json"
    )
    (replayed,) = json.loads(text)["modes"][0]["scores"]
    assert replayed == drawn


def test_eval_per_batch_says_so(capsys, fitted):
    words = ["eval", str(fitted), "--data", DATA, "--modes", "arbitrary", "--draw", "batch"]
    _, table, _ = run(capsys, *words, "--num-orders", "2", "--batch-size", "8")
    assert "one order per batch" in table


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        (["evel"], 2, "did you mean 'eval'"),
        (["eval"], 2, "eval needs a model and --data SPEC"),
        (["eval", "FITTED", "--data", DATA, "--modes", "kept:9"], 2, "9 blocks cannot be kept"),
        (["eval", "FITTED", "--data", DATA, "--modes", "shuffled"], 2, "not an evaluation mode"),
        (["eval", "FITTED", "--data", DATA, "--order", "0,7"], 2, "7 is not a block"),
        (["eval", "FITTED", "--data", DATA, "--order", "a"], 2, "'a' in the execution order"),
        (["eval", "nowhere", "--data", DATA], 2, "nowhere"),
        (["eval", "FITTED", "--data", "folder:/nowhere"], 1, "/nowhere"),
        (["eval", "FITTED", "--data", "digits-pairs"], 2, "digit-pairs"),
        (["fit", "--recipe", "none.yaml", "--out", "x"], 2, "none.yaml"),
        ([*FIT, "--lr", "-1", "--out", "x"], 2, "lr: Input should be greater than 0"),
        ([*FIT, "--epochs", "3", "--out", "x"], 2, "steps and epochs exclude each other"),
        (FIT, 2, "add --out DIR"),
        (["pretrain"], 2, "No recipe was given"),
        (["reproduce", "none.yaml"], 2, "none.yaml"),
        (["report", "/nowhere"], 2, "no readable study"),
    ],
)
def test_errors_are_one_paragraph(capsys, fitted, words, code, phrase):
    words = [str(fitted) if word == "FITTED" else word for word in words]
    got, out, err = run(capsys, *words)
    assert got == code, err
    assert phrase in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_debug_shows_where(fitted):
    with pytest.raises(SettingsError, match="not an evaluation mode"):
        main(["eval", str(fitted), "--data", DATA, "--modes", "shuffled", "--debug"])


def test_wrong_flags_exit_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        main([*FIT, "--lrr", "1", "--out", "x"])
    assert caught.value.code == 2
    assert "lrr" in capsys.readouterr().err


def test_recipe_environment_flag(capsys, tmp_path, monkeypatch):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"method: layershuffle\nmodel: {json.dumps(MODEL)}\ndata: {json.dumps(DATA)}\n"
        "steps: 2\nbatch_size: 16\nlr: 1.0e-3\nseed: 1\nencoding: {table: shared}\n"
    )
    monkeypatch.setenv("LAYERSHUFFLE_LR", "2e-3")
    monkeypatch.setenv("LAYERSHUFFLE_SEED", "2")
    out = tmp_path / "run"
    assert main(["fit", "--recipe", str(recipe), "--seed", "3", "--out", str(out)]) == 0
    settings = json.loads((out / "result.json").read_text())["settings"]
    assert (settings["batch_size"], settings["lr"], settings["seed"]) == (16, 2e-3, 3)
    assert settings["encoding"]["table"] == "shared"


def test_unknown_key_in_a_recipe(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("method: layershuffle\nmodel: m\ndata: d\nstepz: 3\n")
    code, _, err = run(capsys, "fit", "--recipe", str(recipe), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "'stepz' is not a setting, did you mean 'steps'" in err
    assert "r.yaml" in err


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
    assert "Next: layershuffle reproduce" in out


@pytest.mark.parametrize("command", ["", "fit", "eval", "cache", "merge", "ensemble", "doctor"])
def test_help_is_quick(command):
    """Under half a second of processor time (wall time on an idle machine), the best of five."""
    words = [sys.executable, "-m", "layershuffle", *command.split(), "--help"]
    times = []
    for _ in range(5):
        before = children_seconds()
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        times.append(children_seconds() - before)
        assert "usage: layershuffle" in done.stdout
    assert min(times) < 0.5, times


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", [[], ["fit", "--help"]])
def test_a_reader_that_goes_is_no_fault(words):
    """As in `layershuffle fit --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "layershuffle", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, "")


def test_without_an_output_nothing_fails(monkeypatch):
    """As in a service whose standard output is closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0


def test_commands_are_documented(repository):
    pages = {path.stem for path in (repository / "docs" / "commands").glob("*.md")}
    assert pages == set(COMMANDS)


def test_the_flags_are_frozen(repository):
    """A new flag is a promise: it enters this list and the command's page in the same commit."""
    assert sorted(FitSettings.model_fields) == FIT_FLAGS
    assert sorted(EvalSettings.model_fields) == EVAL_FLAGS
    assert sorted(AnalysisSettings.model_fields) == ANALYZE_FLAGS
    assert sorted(MergingSettings.model_fields) == MERGE_FLAGS
    assert sorted(EnsembleSettings.model_fields) == ENSEMBLE_FLAGS
    assert sorted(CacheSettings.model_fields) == CACHE_FLAGS


FIT_FLAGS = [
    *("accumulate", "activation_checkpointing", "augment", "batch_size", "checkpoint_every"),
    *("choose", "clip", "compile", "data", "device", "drop", "ema", "encoding", "epochs"),
    *("eval_batch_size", "eval_every", "eval_orders", "holdout", "kept", "log_every", "lr"),
    *("method", "min_blocks", "model", "orders_per_batch", "paper_protocol", "parallel"),
    *("precision", "prediction", "rank_orders", "resize", "schedule", "seed", "select_by"),
    *("skip_corrupt", "steps", "streaming", "threads", "warmup", "weight_decay", "workers"),
]
EVAL_FLAGS = [
    *("batch_size", "compile", "draw", "max_images", "modes", "num_orders", "precision", "resize"),
    *("seed", "skip_corrupt", "streaming"),
]
MERGE_FLAGS = [
    *("batch_size", "compile", "draw", "ends", "ensemble_combine", "ensemble_orders", "max_images"),
    *("merges", "mixed", "num_orders", "precision", "replacement", "resize", "seed"),
    *("skip_corrupt", "soups"),
]
CACHE_FLAGS = ["quality", "size", "skip_corrupt", "workers"]
ENSEMBLE_FLAGS = [
    *("batch_size", "combine", "compile", "draw", "max_images", "mixed", "mode", "num_orders"),
    *("orders", "precision", "resize", "seed", "skip_corrupt"),
]
ANALYZE_FLAGS = [
    *("batch_size", "block", "images", "neighbours", "orders", "resize", "seed"),
    *("skip_corrupt", "streaming"),
]
