"""The trials of what rounds, orders per sample and shared beginnings need of a backbone.

When they are made, what they see, how long their verdicts last, and that they leave nothing behind.
"""

from __future__ import annotations

import copy
import gc
import importlib
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    PERMUTED,
    PRUNED,
    SEQUENTIAL,
    WIDTH,
    Family,
    assert_close,
    images,
)
from contracts import TOLERANCE
from layershuffle.core.checks.untouched import is_own_package, nothing_noted
from layershuffle.core.stack import recomputing
from layershuffle.ground.errors import StackError, UsageError
from own_models import (
    CHAINS,
    Asked,
    Block,
    Masked,
    MaybeMasked,
    Own,
    TrainedWithPatches,
    Values,
)
from refusals import refuses
from test_contract import EQUAL_LENGTHS, one_by_one

ORDERS = ["3,0,2,1", "3,0", "3,0,1,2", "0,1,2,3", "0,1,3,2", "3,1"]
EACH = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]


def own(backbone: type[nn.Module], **arguments: Any) -> Any:
    """A wrapped backbone of one's own."""
    torch.manual_seed(0)
    return ls.wrap(backbone(**arguments), "blocks").eval()


def alone(model: nn.Module, order: Any, batch: Tensor) -> Tensor:
    """Logits of one order, by a forward of its own."""
    with torch.no_grad(), ls.running(model, order):
        logits: Tensor = model(batch)
    return logits


# --- verdicts -------------------------------------------------------------------------------------


def test_a_gate_that_is_trained_later_hides_nothing() -> None:
    """What blocks share is looked for again in every evaluation."""
    model, batch, labels = own(Values), images(3), torch.tensor([0, 1, 2])
    mixes = [block.channels.mix for block in ls.blocks_of(model)]
    trained = [copy.deepcopy(mix.state_dict()) for mix in mixes]
    for mix in mixes:  # the shared values are zero now
        nn.init.zeros_(mix.weight)
        nn.init.zeros_(mix.bias)
    ls.evaluate(model, [(batch, labels)], orders=ORDERS)
    for mix, weights in zip(mixes, trained, strict=True):
        mix.load_state_dict(weights)
    for score in ls.evaluate(model, [(batch, labels)], orders=ORDERS):
        wanted = F.cross_entropy(alone(model, score.order, batch), labels)
        assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)


def test_a_verdict_ends_with_its_model() -> None:
    """Read-outs are built on the same blocks again and again, at the same addresses."""

    class Last(nn.Module):
        def __init__(self, parts: Own) -> None:
            super().__init__()
            self.blocks, self.parts = parts.blocks, [parts]

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0].patches(x).flatten(2).mT
            for block in self.blocks:
                x = block(x)
            return self.parts[0].head(x.mean(1))  # type: ignore[no-any-return]

    class AllStates(Last):
        def forward(self, x: Tensor) -> Tensor:
            x, states = self.parts[0].patches(x).flatten(2).mT, []
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return self.parts[0].head(sum(states).mean(1))  # type: ignore[no-any-return, attr-defined]

    parts, labels = own(Own), torch.tensor([0, 1, 2])
    for kind in (Last, AllStates) * 3:
        model = kind(parts).eval()
        for score in ls.evaluate(model, [(images(3), labels)], orders=ORDERS[:3]):
            wanted = F.cross_entropy(alone(model, score.order, images(3)), labels)
            assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)
        del model
        gc.collect()


def test_observers_see_the_images_and_nothing_else() -> None:
    """Ranges of quantisation are those of the forward alone: trials put them back."""

    class Observed(Own):
        class Quantised(Block):
            def __init__(self) -> None:
                super().__init__()
                self.quantise = FakeQuantize()

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(self.quantise(x))

        block = Quantised

    model, x = own(Observed), torch.randn(2, 16, WIDTH)
    twin = copy.deepcopy(ls.unwrap(copy.deepcopy(model)))
    with torch.no_grad():
        with ls.running(model, EACH), pytest.raises(StackError):
            model(images(3))
        with ls.running(model, "2+0"):
            model.run(x)
        for block in (2, 0):
            twin.blocks[block](x)
    ranges = zip(model.named_buffers(), twin.buffers(), strict=True)
    assert [name for (name, ours), theirs in ranges if not torch.equal(ours, theirs)] == []


def test_beit_can_be_trained_after_evaluate() -> None:
    """It keeps its relative positions from forward to forward."""
    model = FAMILIES["timm-beit"].wrapped()
    labels = torch.tensor([0, 1, 2])
    ls.evaluate(model, [(images(3), labels)], modes="sequential,arbitrary", num_orders=2)
    model.train()
    with ls.running(model, PERMUTED):
        F.cross_entropy(model(images(3)), labels).backward()
    assert all(p.grad is not None for p in ls.blocks_of(model)[0].parameters())


def test_as_many_tokens_as_samples() -> None:
    """The samples are found by batches of two sizes, not by equal numbers."""

    class Positions(Own):
        class Shifted(Block):
            def forward(self, x: Tensor, shift: Any = 0.0) -> Tensor:
                return super().forward(x + shift)

        block = Shifted

        def run(self, x: Tensor) -> Tensor:
            shift = torch.linspace(0, 1, x.shape[1])[:, None]  # [tokens, 1]
            for block in self.blocks:
                x = block(x, shift)
            return x

    model = own(Positions)
    orders = (EQUAL_LENGTHS * 6)[:16]  # as many samples as tokens
    with torch.no_grad(), ls.running(model, [ls.ExecutionOrder(o, DEPTH) for o in orders]):
        together = model(images(16))
    assert_close(together, one_by_one(model, orders), tolerance=TOLERANCE)


# --- the trial ------------------------------------------------------------------------------------


def test_the_trial_is_made_in_the_mode_of_the_call() -> None:
    """A step that the backbone takes in training alone comes once per block; statistics stay."""
    model = own(TrainedWithPatches)
    with torch.no_grad(), ls.running(model, EACH):
        model(images(3))
        model.train()(images(3))
        assert model.norm_of_patches.training
        assert model.norm_of_patches.num_batches_tracked == 1
        model.norm_of_patches.eval()
        together = model(images(3))
    assert_close(together, one_by_one(model, EQUAL_LENGTHS), tolerance=TOLERANCE)
    uneven = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED)]
    with ls.running(model.eval(), uneven):
        model(images(2))
        with pytest.raises(StackError):
            model.train()(images(2))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_orders_of_several_lengths_in_training(family: Family) -> None:
    """The libraries' loops do nothing between the blocks in training either."""
    model = family.wrapped().train()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED, SEQUENTIAL)]
    with torch.no_grad(), ls.running(model, orders):
        model(images(3))


def test_flags_of_a_call_have_a_trial_of_their_own() -> None:
    model = own(Asked)
    for every in (False, True, False):
        with torch.no_grad(), ls.running(model, EACH):
            together = model(images(3), every=every)
        for row, order in enumerate(EACH):
            with torch.no_grad(), ls.running(model, order):
                single = model(images(3)[row : row + 1], every=every)
            assert_close(together[row : row + 1], single, tolerance=TOLERANCE)


def test_an_error_before_the_blocks_is_the_callers() -> None:
    model = own(Own)
    with ls.running(model, EACH), pytest.raises(RuntimeError, match="to have 3 channels"):
        model(images(3)[:, :2])
    with ls.running(model, EACH):
        model(images(3))


class Table(dict[str, Any]):
    """Looks up its keys in a way of its own, as the tables of classes in transformers."""

    def __getitem__(self, key: str) -> Any:
        raise TypeError("what is asked for is made then")

    def get(self, key: str) -> Any:  # type: ignore[override]
        return self[key]


def test_a_table_with_look_ups_of_its_own_is_put_back() -> None:
    model = own(Own)
    model.table = table = Table(a=1, b=2)
    with nothing_noted(model):
        table["a"] = 3
        del table["b"]
        table["c"] = 4
    assert dict(table.items()) == {"a": 1, "b": 2}
    with torch.no_grad(), ls.running(model, EACH):
        model(images(3))


def test_packages_of_other_environments_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `pip install --user`, or of the environment below this one: they are not walked."""
    owned = {}
    for place in ("site-packages", "dist-packages", "mine"):
        name = f"placed_in_{place.replace('-', '_')}"
        (tmp_path / place / name).mkdir(parents=True)
        (tmp_path / place / name / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / place)
        importlib.import_module(name)
        owned[place] = is_own_package(name)
    assert owned == {"site-packages": False, "dist-packages": False, "mine": True}


def test_a_trial_waits_for_that_of_another_thread() -> None:
    """Two at a time would take each other's modes for those to come back to."""
    model = own(TrainedWithPatches).train()
    # Not a list, which the trial would put back.
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    begun = threading.Event()

    def run() -> None:
        with torch.no_grad(), ls.running(model, EACH):
            model(images(3))

    def once(*_: object) -> None:
        if not begun.is_set():
            begun.set()
            thread = threading.Thread(target=run)
            threads.put(thread)
            thread.start()

    model.patches.register_forward_hook(once)
    run()
    threads.get().join()
    assert all(module.training for module in model.modules())


def test_the_trial_leaves_no_trace() -> None:
    """It changes no modes, is seen by no hook, and draws nothing that others would have drawn."""
    model = CHAINS["own-own"].wrapped().train()
    model.norm.eval()
    heads: list[tuple[bool, float]] = []
    model.head.register_forward_hook(
        lambda *_: heads.append((model.training, float(torch.rand(()))))
    )
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    before = torch.get_rng_state()
    drawn = torch.rand(2).tolist()
    torch.set_rng_state(before)
    for _ in range(2):
        with ls.running(model, orders):
            model(images(3))
    assert [training for training, _ in heads] == [True] * 2
    assert [number for _, number in heads] == drawn
    assert (model.training, model.norm.training, model.head.training) == (True, False, True)


# --- arguments beside the state -------------------------------------------------------------------


OF_TWO = [ls.ExecutionOrder(order, 2) for order in ((0, 1), (1, 0), (0, 0))]


def assert_masked(model: nn.Module, *arguments: Tensor) -> None:
    """Every sample gets what it gets alone with its part of the arguments."""
    with ls.running(model, OF_TWO), torch.no_grad():
        together = model(*arguments)
    for row, order in enumerate(OF_TWO):
        with ls.running(model, order), torch.no_grad():
            alone = model(*(argument[row : row + 1] for argument in arguments))
        assert_close(together[row : row + 1], alone, tolerance=1e-6)


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 1), (3, 1, 1)])
def test_arguments_with_a_part_per_sample_are_cut(shape: tuple[int, ...]) -> None:
    assert_masked(ls.wrap(Masked()), torch.ones(3, 5, 4), torch.rand(shape))


def test_a_mask_across_samples_is_refused() -> None:
    """[samples, 1, width] times [samples, width] pairs every sample with every mask."""
    model = ls.wrap(Masked())
    with ls.running(model, OF_TWO), refuses(StackError):
        model(torch.ones(3, 1, 4), torch.ones(3, 4))


def test_a_mask_that_only_the_second_call_has_is_cut() -> None:
    model = ls.wrap(MaybeMasked())
    assert_masked(model, torch.ones(3, 5, 4))
    assert_masked(model, torch.ones(3, 5, 4), torch.rand(3, 5, 4))


@pytest.mark.parametrize("by", ["argument", "config"])
def test_hidden_states_of_groups_are_refused(by: str) -> None:
    """transformers collects the output of every block run, here of some samples only."""
    model = FAMILIES["hf-vit"].wrapped()
    asked = {"output_hidden_states": True} if by == "argument" else {}
    model.config.output_hidden_states = by == "config"
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    for run in (model, model.vit):
        if run is model or asked:
            with (
                ls.running(model, each),
                refuses(UsageError),
            ):
                run(images(3), **asked)


def test_another_method_under_an_order_per_sample_is_refused() -> None:
    """Whether its blocks mix samples is tried in calls of the model alone."""
    model = FAMILIES["timm-vit"].wrapped()
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    with torch.no_grad(), refuses(StackError), ls.running(model, each):
        model.forward_intermediates(images(3), intermediates_only=True)


def test_batch_norm_inside_blocks_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = FAMILIES["timm-xcit"].wrapped()
    caplog.clear()
    each = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    for training, messages in ((False, 0), (True, 1), (True, 1)):
        model.train(training)
        with recomputing(model), ls.running(model, each):
            model(images(3))
        assert len(caplog.records) == messages
    assert "BatchNorm layers in training mode: each batch counts twice" in caplog.text


def test_training_without_an_order_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the backbone cuts a part from its blocks, at every call."""
    model = FAMILIES["timm-vit"].wrapped().train()
    for _ in range(2):
        model.forward_intermediates(images(3), indices=[0], stop_early=True)
        model(images(3))
    assert caplog.text.count("in training mode without an execution order") == 1
