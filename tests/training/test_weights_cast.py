"""Pure bf16 over fp32 weights. The slow path: a copy of the model made bf16, step by step."""

import copy
import functools
import sys

import pytest
import torch
import torch._dynamo
from runs import NO_DROPOUT, assert_same_weights, losses, settings, weights
from torch import nn

import layershuffle as ls
from common import FAMILIES, gradients, images, score
from layershuffle.core.compiling import BlockCompiler
from layershuffle.errors import LayerShuffleError
from layershuffle.settings import FitSettings
from layershuffle.training import fit
from layershuffle.training.weights_cast import weights_cast_to

# torch warns of its own doings while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
HALF = torch.bfloat16
JOB = sys.modules["layershuffle.training.job"]


def positioned(name):
    """With all parts."""
    return ls.add_position(
        FAMILIES[name].wrapped(),
        encoding=ls.EncodingForm(),
        prediction=ls.PredictionForm(pooling="mean"),
    )


def in_bf16(model):
    """A copy, its batch norms left in fp32."""
    twin = copy.deepcopy(model).to(HALF)
    exact = dict(model.named_modules())
    for name, module in twin.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float().load_state_dict(exact[name].state_dict())
    return twin


def loss_of(model, pixels, order):
    with ls.running(model, order), model.guessing() as guesses:
        return score(model(pixels)).float() + guesses.loss()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_a_bf16_copy(name):
    model = positioned(name).eval()
    twin = in_bf16(model)
    order = list(reversed(range(ls.depth_of(model))))
    pixels = images(2).to(HALF)
    wanted = loss_of(twin, pixels, order)
    wanted.backward()
    with weights_cast_to(model, HALF):
        got = loss_of(model, pixels, order)
        got.backward()
    assert torch.equal(got, wanted)
    mine, theirs = gradients(model), gradients(twin)
    for weight, grad in mine.items():
        if theirs[weight] is None:
            assert grad is None
        else:
            assert grad.dtype == torch.float32
            # The sum over uses of a weight is taken in bf16 by the copy, as by the rounded one.
            assert torch.equal(grad, theirs[weight].float()), weight


def test_everything_is_put_back_also_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].register_buffer("count", torch.zeros(2, dtype=torch.long))
    before = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}

    def look_and_fail():
        with weights_cast_to(model, HALF):
            assert model[0].weight.dtype == HALF
            assert model[0].weight is model[2].weight, "what is shared stays shared"
            assert model[0].count.dtype == torch.long
            assert model[1].running_mean.dtype == model[1].weight.dtype == torch.float32
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look_and_fail()
    assert before == {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}


def test_buffers_are_rounded_once_and_anew_when_they_change(monkeypatch):
    model = nn.Module()
    model.register_buffer("table", torch.full((2,), 1.0 + 2**-10))
    with weights_cast_to(model, HALF):
        first = model.table
        assert torch.equal(first, torch.ones(2, dtype=HALF))
    with weights_cast_to(model, HALF):
        assert model.table is first
    model.table.add_(1)
    with weights_cast_to(model, HALF):
        assert torch.equal(model.table, torch.full((2,), 2.0, dtype=HALF))
    model.table = torch.zeros(2)
    with weights_cast_to(model, HALF):
        assert torch.equal(model.table, torch.zeros(2, dtype=HALF))
    assert model.table.dtype == torch.float32


def test_the_loss_of_position_guesses_is_not_rounded():
    """It is a sum over samples and blocks, of which bf16 would keep two digits."""
    model = positioned("timm-vit").to(HALF)
    with model.guessing() as guesses:
        model(images(2).to(HALF))
    assert {guess.logits.dtype for guess in guesses.items} == {torch.float32}
    assert guesses.loss().dtype == torch.float32


def run(tmp_path, name, **changes):
    events = []
    out = tmp_path / name
    result = fit(
        settings(**{"precision": "bf16-pure", "model": NO_DROPOUT, **changes}),
        out,
        listeners=[events.append],
    )
    return result, weights(out), losses(events)


def test_steps_too_small_for_bf16_are_not_lost(tmp_path):
    """At this rate Adam moves a weight by less than a bf16 number near one can tell."""
    result, moved, heard = run(tmp_path, "pure", lr=1e-5, warmup=0, schedule="constant")
    _, exact, exactly = run(
        tmp_path, "fp32", lr=1e-5, warmup=0, schedule="constant", precision="fp32"
    )
    assert result.hardware["precision"] == "bf16-pure"
    assert {weight.dtype for weight in moved.values()} == {torch.float32}
    norm = moved["blocks.0.norm1.weight"]  # ones at the start
    assert torch.equal(norm.to(HALF), torch.ones_like(norm).to(HALF))
    assert 1e-5 < float((norm - 1).abs().max()) < 1e-3
    assert_same_weights(moved, exact, tolerance=16e-5)  # 8 steps of 1e-5, to either side
    assert heard == pytest.approx(exactly, rel=5e-3)
    assert heard != exactly


def test_activations_computed_again_are_the_same(tmp_path):
    _, once, _ = run(tmp_path, "kept", method="layershuffle-predict")
    _, twice, _ = run(
        tmp_path, "again", method="layershuffle-predict", activation_checkpointing=True
    )
    assert_same_weights(once, twice)


def test_one_graph_for_training_and_one_for_scores(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(JOB, "BlockCompiler", functools.partial(BlockCompiler, backend="aot_eager"))
    result, compiled, _ = run(tmp_path, "compiled", compile=True)
    _, eager, _ = run(tmp_path, "eager", compile=False)
    assert result.compile == {"mode": "compiled", "reason": None, "graphs": 2, "recompiles": 0}
    assert_same_weights(compiled, eager, tolerance=2e-3)


def test_shards_are_not_rounded():
    with pytest.raises(LayerShuffleError, match="bf16-pure casts whole weights"):
        FitSettings(model="m", data="d", method="layershuffle", parallel="fsdp",
                    precision="bf16-pure")  # fmt: skip
