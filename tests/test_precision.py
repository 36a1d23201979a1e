"""Scores in bf16 and with compiled blocks: their numbers, and the reported precision."""

import json
import sys

import pytest
import torch

import layershuffle as ls
from common import DIGITS_VIT, FAMILIES, images, logits_of, redraw
from layershuffle.cli import main
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.evaluation import Tally, evaluate, micro_batches
from layershuffle.core.stack import running
from layershuffle.ground.machine import choose_precision
from layershuffle.merging.ensembles import evaluate_ensemble
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings

BATCHES = [(images(8, seed=s), torch.arange(8) % 5) for s in range(2)]
MODES = "sequential,arbitrary,kept:2:arbitrary"
MODEL = DIGITS_VIT.replace("depth=4", "depth=3")
DATA = "digit-pairs?train=8&validation=8&test=10"


def one_by_one(model, order):
    """Every order by itself, the images in bf16, logits compared in fp32."""
    tally = Tally()
    with torch.inference_mode(), running(model, order):
        for batch, labels in BATCHES:
            logits = logits_of(model(batch.bfloat16()))
            assert logits.dtype == torch.bfloat16
            tally.add(logits.float(), labels)
    return tuple(tally.values()[name] for name in ("top1", "top5", "cross_entropy"))


def check_bf16(model):
    """Bit-equal to one by one in bf16; cross-entropies within 1 % of fp32's (found: 0.3 %)."""
    exact = evaluate(model, BATCHES, modes=MODES, num_orders=2)
    rough = evaluate(model.to(torch.bfloat16), BATCHES, modes=MODES, num_orders=2)
    for score, other in zip(exact, rough, strict=True):
        scores = (other.top1, other.top5, other.cross_entropy)
        assert scores == one_by_one(model, other.order), other.order
        assert other.cross_entropy == pytest.approx(score.cross_entropy, rel=0.01)
        assert other.cross_entropy != score.cross_entropy


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_bf16_model_is_scored_in_bf16(family):
    check_bf16(FAMILIES[family].wrapped())


@pytest.mark.parametrize("family", ["timm-vit", "hf-vit", "torchvision-vit"])
@pytest.mark.parametrize("table", ["shared", "per-block"])
def test_with_position_parts(family, table):
    form = ls.EncodingForm(table=table)
    host = FAMILIES[family].plain()
    check_bf16(ls.add_position(host, encoding=form, prediction=ls.PredictionForm()).eval())


def test_pixels_that_are_whole_numbers_stay_so():
    model = FAMILIES["timm-vit"].wrapped().to(torch.bfloat16)
    batch = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    ((pixels, labels),) = micro_batches(model, batch)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.long)


def test_an_ensemble_of_bf16_models_averages_in_fp32():
    donors = [redraw(FAMILIES["timm-vit"].wrapped(), seed=seed).bfloat16() for seed in (1, 2)]
    (score,) = evaluate_ensemble(donors, BATCHES, mode="sequential")
    tally = Tally()
    for batch, labels in BATCHES:
        with torch.inference_mode():
            members = [logits_of(donor(batch.bfloat16())).float() for donor in donors]
        tally.add((members[0] + members[1]) / 2, labels)
    assert score.cross_entropy == pytest.approx(tally.values()["cross_entropy"], rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "device", "has_bf16", "warned"),
    [
        ("bf16", "cpu", False, True),
        ("bf16", "cpu", True, False),
        ("bf16", "cuda", False, False),
        ("fp32", "cpu", False, False),
    ],
)
def test_slow_bf16_is_reported(monkeypatch, caplog, precision, device, has_bf16, warned):
    monkeypatch.setattr("layershuffle.ground.machine.cpu_has_bf16", lambda: has_bf16)
    choose_precision(precision, device=device, training=True)
    assert ("several times slower" in caplog.text) is warned


@pytest.fixture
def compilers(monkeypatch):
    """All compilers that are created, which run their graphs uncompiled."""
    torch._dynamo.reset()
    compilers = []

    def make(**given):
        compilers.append(BlockCompiler(backend="eager", **given))
        return compilers[-1]

    monkeypatch.setattr(sys.modules["layershuffle.scoring.evaluate_spec"], "BlockCompiler", make)
    return compilers


def scored(**settings):
    settings = {"batch_size": 4, "modes": "sequential,arbitrary", "num_orders": 3, **settings}
    return evaluate_spec(MODEL, DATA, settings=EvalSettings(**settings))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_give_the_same_scores(compilers, precision):
    plain, compiled = scored(precision=precision), scored(precision=precision, compile=True)
    assert compiled.scores == plain.scores
    assert plain.blocks == {"mode": "eager", "reason": "compile is off", "graphs": 0}
    assert compiled.blocks == {"mode": "compiled", "reason": None, "graphs": 2}  # sizes: 4 and 2
    assert [compiler.graphs for compiler in compilers] == [0, 2]


def test_the_command_says_what_ran(compilers, capsys):
    words = ["eval", MODEL, "--data", DATA, "--num-orders", "2"]
    for flags, precision, mode in (
        (["--precision", "bf16", "--compile"], "bf16", "compiled"),
        (["--precision", "bf16"], "bf16", "eager"),
        ([], "fp32", "eager"),
    ):
        assert main([*words, *flags, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["hardware"]["precision"] == precision
        assert report["blocks"]["mode"] == mode


class Broken(BlockCompiler):
    def _compile(self, graph, inputs):
        raise RuntimeError("no such machine")


def test_a_failed_compilation_is_reported_and_runs_in_eager_mode(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["layershuffle.scoring.evaluate_spec"], "BlockCompiler", Broken)
    compiled = scored(compile=True)
    assert compiled.scores == scored().scores
    assert compiled.blocks["mode"] == "eager"
    assert compiled.blocks["reason"] == "RuntimeError: no such machine"
    assert caplog.text.count("NOT compiled") == 1


@pytest.mark.parametrize("how", ["a stance", "TORCH_COMPILE_DISABLE"])
def test_torch_compile_switched_off_is_reported(compilers, caplog, how):
    off = (
        torch.compiler.set_stance("force_eager")
        if how == "a stance"
        else torch._dynamo.config.patch(disable=True)  # as that variable does
    )
    with off:
        compiled = scored(compile=True)
    assert compiled.scores == scored().scores
    assert compiled.blocks["mode"] == "eager"
    assert compiled.blocks["reason"].startswith("torch.compile is switched off")
    assert caplog.text.count("NOT compiled") == 1


# --- a dtype chosen by a table --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "training", "gpu_has_it", "precision"),
    [
        ("cpu", True, False, "fp32"),
        ("cpu", False, False, "fp32"),
        ("cuda", True, True, "bf16"),
        ("cuda", True, False, "fp32"),
        ("cuda", False, True, "fp32"),
    ],
)
def test_auto_is_a_table_with_reasons(monkeypatch, device, training, gpu_has_it, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: gpu_has_it)
    chosen, why = choose_precision("auto", device=device, training=training)
    assert chosen == precision
    assert why.startswith(f"auto is {precision}")
    assert choose_precision("bf16", device="cuda", training=training) == ("bf16", "")
    assert choose_precision("fp32", device=device, training=training) == ("fp32", "")
