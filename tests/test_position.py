"""Position encoding and prediction: sizes, forms, losses, seeds, and modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    LONGER,
    PERMUTED,
    PRUNED,
    REPEATED,
    SEQUENTIAL,
    WIDTH,
    Family,
    assert_close,
    global_generators_untouched,
    images,
    logits_of,
)
from layershuffle.core.hooks import Step
from layershuffle.core.position import (
    PositionEncoding,
    PositionGuess,
    PositionPrediction,
    has_class_token,
    width_of,
)
from layershuffle.core.position_forms import AUTHORS_ENCODING
from layershuffle.ground.errors import StackError, UsageError
from refusals import refuses

VIT = FAMILIES["timm-vit"]
MEAN = ls.PredictionForm(loss="sum")


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


# --- the paper's sizes ----------------------------------------------------------------------------


def test_parameters_of_the_papers_encoding() -> None:
    """Width 768: LayerNorm(800) and Linear(800 -> 768) of each block, and a 12 x 32 table."""
    encoding = PositionEncoding(12, 768, form=ls.EncodingForm(), seed=0)
    for norm, projection in zip(encoding.norms, encoding.projections, strict=True):
        assert count(norm) + count(projection) == 616_768 == 2 * 800 + 800 * 768 + 768
    assert encoding.table.shape == (12, 12, 32)
    assert count(encoding) == 12 * (616_768 + 12 * 32)


def test_parameters_of_the_papers_prediction() -> None:
    prediction = PositionPrediction(12, 768, form=ls.PredictionForm(), seed=0)
    for norm, classifier in zip(prediction.norms, prediction.classifiers, strict=True):
        assert count(norm) + count(classifier) == 10_764 == 2 * 768 + 768 * 12 + 12
    assert count(prediction) == 12 * 10_764


def test_authors_forms() -> None:
    """One shared zero table, token mean, mean of the losses (the paper is silent or differs)."""
    encoding = PositionEncoding(12, 768, form=AUTHORS_ENCODING, seed=0)
    assert encoding.table.shape == (12, 32)
    assert not encoding.table.any()
    assert count(encoding) == 12 * 616_768 + 12 * 32
    # Their linear layers start normal with deviation 0.02.
    prediction = PositionPrediction(12, 768, form=ls.PredictionForm(), seed=0)
    for layers in (encoding.projections, prediction.classifiers):
        weights = torch.cat([layer.weight.detach().flatten() for layer in layers])
        # The deviation of n normal draws is known to sigma / sqrt(2 n); five of these.
        bound = 5 * 0.02 / math.sqrt(2 * weights.numel())
        assert abs(float(weights.double().std()) - 0.02) < bound
        assert float(weights.abs().max()) > 0.06  # a uniform law of that deviation ends at 0.035
        assert not any(layer.bias.any() for layer in layers)


def test_defaults_are_the_text_of_3_3_and_the_authors_prediction() -> None:
    form = ls.EncodingForm()
    assert (form.table, form.features, form.table_init) == ("per-block", 32, "normal")
    assert (form.projection_init, form.dropout) == ("default", 0.0)
    prediction = ls.PredictionForm()
    assert (prediction.pooling, prediction.loss, prediction.init) == ("mean", "mean", "normal")


# --- initialisation -------------------------------------------------------------------------------


def test_seeds_are_reproducible_and_global_generators_untouched() -> None:
    def values(seed: int) -> Tensor:
        model = ls.add_position(VIT.plain(), encoding=ls.EncodingForm(), prediction=MEAN, seed=seed)
        parts = [*model.encoding.parameters(), *model.prediction.parameters()]
        return torch.cat([p.detach().flatten() for p in parts])

    VIT.plain()
    with global_generators_untouched():
        first = values(3)
        assert torch.equal(values(3), first)
        assert not torch.equal(values(4), first)
    assert first.isfinite().all()


def test_initial_laws() -> None:
    """Table normal with deviation 1; Linear uniform in +-1/sqrt(inputs), as torch's own."""
    encoding = PositionEncoding(12, 96, form=ls.EncodingForm(), seed=1).requires_grad_(False)
    assert abs(float(encoding.table.std()) - 1.0) < 0.05
    assert abs(float(encoding.table.mean())) < 0.05
    bound = 1.0 / math.sqrt(128)
    for projection in encoding.projections:
        for values in (projection.weight, projection.bias):
            assert values.abs().max() <= bound
            assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.25)
    assert all((n.weight == 1).all() and (n.bias == 0).all() for n in encoding.norms)
    different = encoding.projections[0].weight - encoding.projections[1].weight
    assert different.abs().min(dim=1).values.max() > 0


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [ls.EncodingForm(), ls.EncodingForm(table="shared")], ids=str)
def test_the_table_row_is_the_position(form: ls.EncodingForm) -> None:
    """Own table per block or one for all: changing a row changes exactly those steps."""
    encoding = PositionEncoding(3, 8, form=form, seed=0)
    state = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    steps = [Step(position, block) for position in range(3) for block in range(3)]
    before = {step: encoding.before(state, step) for step in steps}
    with torch.no_grad():
        encoding.table[(1, 2) if form.table == "per-block" else (2,)] += 1.0
    changed = {
        (s.position, s.block)
        for s in steps
        if not torch.equal(encoding.before(state, s), before[s])
    }
    wanted = {(2, 1)} if form.table == "per-block" else {(2, 0), (2, 1), (2, 2)}
    assert changed == wanted


def test_encoding_dropout_is_off_in_eval_mode() -> None:
    form = ls.EncodingForm(dropout=0.5)
    encoding = PositionEncoding(2, 8, form=form, seed=0)
    state = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    quiet = encoding.eval().before(state, Step(0, 0))
    assert torch.equal(encoding.before(state, Step(0, 0)), quiet)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noisy = encoding.train().before(state, Step(0, 0)) - state
    assert 0.3 < float((noisy == 0).float().mean()) < 0.7


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_pooling(pooling: Any) -> None:
    prediction = PositionPrediction(4, 8, form=ls.PredictionForm(pooling=pooling), seed=0)
    state = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    for block in range(4):
        rows = []
        for sample in state:
            pooled = sample[0] if pooling == "class" else sum(sample) / 5
            layer = prediction.classifiers[block]
            rows.append(layer.weight @ nn.functional.layer_norm(pooled, (8,)) + layer.bias)
        assert_close(prediction(state, block), torch.stack(rows), tolerance=1e-5)


# --- the loss -------------------------------------------------------------------------------------


def slow_loss(guesses: list[PositionGuess], form: ls.PredictionForm, *, batch: int) -> float:
    """Plain loops: each sample's own loss as if it ran alone, then the mean over samples."""
    total = 0.0
    for sample in range(batch):
        losses = []
        for guess in guesses:
            rows = list(range(batch)) if guess.step.rows is None else list(guess.step.rows)
            if sample in rows:
                logits = guess.logits[rows.index(sample)].tolist()
                log_sum = math.log(sum(math.exp(value) for value in logits))
                losses.append(log_sum - logits[guess.step.position])
        total += sum(losses) / (1 if form.loss == "sum" else len(losses))
    return form.weight * total / batch


LOSS_FORMS = [
    MEAN,
    ls.PredictionForm(),
    ls.PredictionForm(loss="sum", weight=0.25),
]
SHARED_ORDERS = {"none": None, "permuted": PERMUTED, "pruned": PRUNED, "repeated": REPEATED}
OWN_ORDERS = {
    "equal lengths": (PERMUTED, (0, 1, 2, 3), (3, 2, 1, 0)),
    "different lengths": (PERMUTED, PRUNED, (2,)),
}


@pytest.mark.parametrize("form", LOSS_FORMS, ids=["sum", "mean", "weighted"])
@pytest.mark.parametrize("order", [*SHARED_ORDERS.values(), *OWN_ORDERS.values()], ids=str)
def test_loss_equals_plain_loops(form: ls.PredictionForm, order: Any) -> None:
    model = ls.add_position(VIT.wrapped(), prediction=form, seed=2)
    guesses = _guesses(model, order)
    assert float(guesses.loss().detach()) == pytest.approx(
        slow_loss(guesses.items, form, batch=3), rel=1e-5
    )


def _guesses(model: Any, order: Any, batch: Tensor | None = None) -> Any:
    batch = images() if batch is None else batch
    order = range(DEPTH) if order is None else order
    if isinstance(order[0], tuple):
        order = [ls.ExecutionOrder(blocks, DEPTH) for blocks in order]
    with ls.running(model, order), model.guessing() as guesses:
        model(batch)
    return guesses


@pytest.mark.parametrize("form", LOSS_FORMS, ids=["sum", "mean", "weighted"])
def test_loss_of_per_sample_orders_is_the_mean_of_single_runs(form: ls.PredictionForm) -> None:
    model = ls.add_position(VIT.wrapped(), encoding=ls.EncodingForm(), prediction=form, seed=2)
    for orders in OWN_ORDERS.values():
        together = _guesses(model, orders).loss()
        alone = [
            _guesses(model, order, images()[row : row + 1]).loss()
            for row, order in enumerate(orders)
        ]
        assert_close(together, torch.stack(alone).mean(), tolerance=1e-5)


def test_perfect_and_ignorant_guesses() -> None:
    """Zero logits give log(depth) per position; certain, correct ones no loss and 100 %."""
    model = ls.add_position(VIT.wrapped(), prediction=MEAN)
    with torch.no_grad():
        for parameter in model.prediction.classifiers.parameters():
            parameter.zero_()
    assert float(_guesses(model, PERMUTED).loss().detach()) == pytest.approx(
        DEPTH * math.log(DEPTH)
    )
    with torch.no_grad():
        for position, block in enumerate(PERMUTED):
            model.prediction.classifiers[block].bias[position] = 100.0
    right = _guesses(model, PERMUTED)
    assert torch.equal(right.loss(), torch.tensor(0.0))
    assert right.accuracy() == 100.0
    assert _guesses(model, (PERMUTED[1], PERMUTED[0], *PERMUTED[2:])).accuracy() == 50.0


# --- the model around host and parts --------------------------------------------------------------


def test_one_module_for_optimiser_device_and_mode() -> None:
    plain = VIT.plain()
    model = ls.add_position(VIT.plain(), encoding=ls.EncodingForm(dropout=0.1), prediction=MEAN)
    parts = [*model.encoding.modules(), *model.prediction.modules()]
    names = dict(model.named_parameters())
    assert {n.split(".")[0] for n in names} == {"backbone", "encoding", "prediction"}
    assert [n.removeprefix("backbone.") for n in names if n.startswith("backbone.")] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(model.backbone.state_dict()) == list(plain.state_dict())
    for mode in (True, False):
        model.train(mode)
        assert all(module.training == mode for module in parts)
        assert all(block.training == mode for block in ls.blocks_of(model))
    twin = ls.add_position(VIT.plain().double(), encoding=ls.EncodingForm(), prediction=MEAN)
    for precise in (twin, model.to(torch.float64)):
        assert {p.dtype for p in precise.parameters()} == {torch.float64}
    with ls.running(model, PERMUTED):
        assert model(images().double()).dtype == torch.float64
    model.to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "torchvision-vit"])
def test_a_projection_of_zero_is_the_plain_model(name: str) -> None:
    model = FAMILIES[name].wrapped()
    encoded = ls.add_position(model, encoding=ls.EncodingForm(projection_init="zero"))
    for order in (SEQUENTIAL, PERMUTED, REPEATED):
        with ls.running(model, order), torch.no_grad():
            assert torch.equal(logits_of(encoded(images())), logits_of(model(images())))


def test_positioned_model_without_parts_is_the_host() -> None:
    model = ls.add_position(VIT.plain())
    assert torch.equal(model(images()), VIT.plain()(images()))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_width(family: Family) -> None:
    assert width_of(family.wrapped()) == WIDTH


def test_wrong_answers_do_not_leak_between_calls() -> None:
    """The encoding is active only inside the call of the positioned model."""
    model = ls.add_position(VIT.plain(), encoding=ls.EncodingForm())
    encoded = model(images())
    assert not torch.equal(encoded, VIT.plain()(images()))
    assert torch.equal(model.backbone(images()), VIT.plain()(images()))
    with pytest.raises(RuntimeError):
        model(images()[:, :1])
    assert torch.equal(model.backbone(images()), VIT.plain()(images()))


# --- refused --------------------------------------------------------------------------------------


def _positioned(**forms: Any) -> Any:
    return ls.add_position(VIT.wrapped(), **forms)


def _run(order: tuple[int, ...], **forms: Any) -> Callable[[], object]:
    def run() -> Tensor:
        model = _positioned(**forms)
        with ls.running(model, order), torch.no_grad():
            if model.prediction is None:
                return logits_of(model(images()))
            with model.guessing():
                return logits_of(model(images()))

    return run


def _no_forward(what: str) -> Callable[[], object]:
    def run() -> object:
        with _positioned(prediction=MEAN).guessing() as guesses:
            return getattr(guesses, what)()

    return run


def _guess_without_prediction() -> None:
    with _positioned(encoding=ls.EncodingForm()).guessing():
        pass


def _positioned_of(name: str) -> object:
    form = ls.PredictionForm(pooling="class")
    return ls.add_position(FAMILIES[name].wrapped(), prediction=form)


BAD: dict[str, Callable[[], object]] = {
    "encoding beyond": _run(LONGER, encoding=ls.EncodingForm()),
    "prediction beyond": _run(LONGER, prediction=MEAN),
    "loss of nothing": _no_forward("loss"),
    "accuracy of nothing": _no_forward("accuracy"),
    "no prediction": _guess_without_prediction,
    "table": lambda: ls.EncodingForm(table="own"),  # type: ignore[arg-type]
    "init": lambda: ls.EncodingForm(table_init="x"),  # type: ignore[arg-type]
    "pooling": lambda: ls.PredictionForm(pooling="max"),  # type: ignore[arg-type]
    "loss": lambda: ls.PredictionForm(loss="max"),  # type: ignore[arg-type]
    "features": lambda: ls.EncodingForm(features=0),
    "dropout": lambda: ls.EncodingForm(dropout=1.0),
    **{
        f"class of {name}": partial(_positioned_of, name)
        for name in ("timm-mixer", "timm-xcit", "hf-siglip")
    },
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_refused_with_the_reason(make: Callable[[], object]) -> None:
    with refuses(UsageError):
        make()


def test_unknown_width_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
            self.blocks = nn.Sequential(*layers)

    with refuses(StackError):
        ls.add_position(Plain(), encoding=ls.EncodingForm())


def test_class_tokens_are_known() -> None:
    without = {name for name, family in FAMILIES.items() if not has_class_token(family.wrapped())}
    assert without == {"timm-xcit", "timm-mixer", "hf-siglip"}
    registers = timm.create_model(
        "vit_medium_patch16_reg4_gap_256", img_size=32, depth=2, num_classes=5
    )
    assert registers.num_prefix_tokens == 4
    assert not has_class_token(ls.wrap(registers))


def test_a_second_forward_does_not_double_the_loss() -> None:
    """The guesses are those of the last forward, as a tap's records are."""
    model = _positioned(prediction=MEAN)
    for order in (
        PERMUTED,
        [ls.ExecutionOrder(blocks, DEPTH) for blocks in (PERMUTED, PRUNED, (2,))],
    ):
        single = _guesses(model, order)
        with ls.running(model, order), model.guessing() as guesses:
            model(images(seed=8))
            model(images())
        assert torch.equal(guesses.loss(), single.loss())
        assert guesses.accuracy() == single.accuracy()
