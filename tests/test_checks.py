"""What is tried before it runs: every kind once, against a slow path of plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layershuffle as ls
from layershuffle.core.runs import in_eval
from layershuffle.ground.errors import StackError, UsageError

WIDTH = 16
CLASSES = 7
DEPTH = 4


class Block(nn.Module):
    """Adds a change to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def change(self, x: Tensor) -> Tensor:
        """What the block adds."""
        return torch.relu(self.mix(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        return x + self.change(x)


class Net(nn.Module):
    """Tokens `[batch, 3, 8]`, blocks, and a linear head over their mean."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, x: Tensor) -> Tensor:
        """The blocks, with what this backbone does between them."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.head(self.run(self.stem(x)).mean(1))


def wrapped(kind: type[nn.Module], **settings: Any) -> Any:
    """A wrapped model in eval mode, the same at every call."""
    torch.manual_seed(0)
    return ls.wrap(kind(**settings), "blocks").eval()


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 8, generator=generator), torch.arange(samples) % CLASSES


class FirstBlock(Net):
    """A single block, which the backbone runs once whatever the order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]

    def run(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_an_order_that_repeats_the_only_block_is_not_cut_in_silence() -> None:
    model = wrapped(FirstBlock)
    x, _ = batch()
    alone = model(x)
    with ls.running(model, "0"):
        assert torch.equal(model(x), alone)
    with pytest.raises(StackError), ls.running(model, "0,0"):
        model(x)


# --- rounds ---------------------------------------------------------------------------------------


class ResidualOutside(Net):
    """The backbone adds the residual."""

    class Change(Block):
        """Returns the change alone."""

        def forward(self, x: Tensor) -> Tensor:
            """The change."""
            return self.change(x)

    block = Change

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class NormBetween(Net):
    """A norm after every block."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.layer_norm(block(x), (WIDTH,))
        return x


class GatesBetween(Net):
    """A gate of its own at every position."""

    def run(self, x: Tensor) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = x + (position + 1) / DEPTH * (block(x) - x)
        return x


class TwoTensors(Net):
    """Blocks hand a second tensor to the next one, as scores or a memory."""

    class Handing(Block):
        """Adds what it was handed, and hands its change on."""

        def forward(self, x: Tensor, handed: Tensor) -> Any:
            """The next state, and what goes to the next block."""
            change = self.change(x) + handed
            return x + change, change / 2

    block = Handing

    def run(self, x: Tensor) -> Tensor:
        handed = torch.zeros_like(x)
        for block in self.blocks:
            x, handed = block(x, handed)
        return x


@pytest.mark.parametrize(
    "kind", [ResidualOutside, NormBetween, GatesBetween, TwoTensors], ids=lambda kind: kind.__name__
)
def test_rounds_are_refused_where_the_backbone_does_more(kind: type[Net]) -> None:
    model = wrapped(kind)
    x, labels = batch()
    with ls.running(model, "0+1,2+3"), pytest.raises(StackError, match="side by side"):
        model(x)
    for modes in ("sequential:parallel=2", "sequential,sequential:parallel=2,arbitrary:parallel=2"):
        with pytest.raises(StackError, match="side by side"):
            ls.evaluate(model, [(x, labels)], modes=modes, num_orders=2)
    for groups in (1, 4):
        method = ls.Method("layershuffle", max_parallel=3, orders_per_batch=groups, seed=1)
        with pytest.raises(StackError, match="side by side"):
            method.loss(model.train(), x, labels, step=0)
    model.eval()
    # One block after the other stays right.
    with torch.no_grad(), ls.running(model, "3,1"):
        got = model(x)
    model = ls.unwrap(model)
    model.blocks = nn.ModuleList([model.blocks[3], model.blocks[1]])
    with torch.no_grad():
        assert torch.equal(got, model(x))


def test_rounds_are_the_sum_of_what_their_blocks_add() -> None:
    model = wrapped(Net)
    x, labels = batch()
    blocks = ls.blocks_of(model)
    with torch.no_grad():
        state = model.stem(x)
        for several in ((2, 0), (3, 1)):
            state = state + sum(blocks[block](state) - state for block in several)
        wanted = model.head(state.mean(1))
        with ls.running(model, "2+0,3+1"):
            assert torch.allclose(model(x), wanted, atol=1e-5)
    (score,) = ls.evaluate(model, [(x, labels)], orders=["0+2,3+1"])
    assert score.cross_entropy == pytest.approx(float(F.cross_entropy(wanted, labels)), rel=1e-5)


def test_a_gate_that_opens_is_seen_when_the_model_is_scored() -> None:
    """While it is zero nothing is wrong; a verdict does not outlive it."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x = x + self.gate * F.layer_norm(x, (WIDTH,))
            return x

    model = wrapped(Gated)
    data = [batch()]
    ls.evaluate(model, data, orders=["0+1,2+3"])
    model.gate.data.fill_(1)
    with pytest.raises(StackError, match="side by side"):
        ls.evaluate(model, data, orders=["0+1,2+3"])


# --- outputs --------------------------------------------------------------------------------------


class Two(Net):
    """Returns two tensors of one width, of which only the first are logits."""

    def forward(self, x: Tensor) -> Any:
        """Logits, and something else."""
        logits = super().forward(x)
        return logits, 5 * logits.flip(1)


class Map(Net):
    """Returns logits of every place, `[n, classes, 3]`."""

    def forward(self, x: Tensor) -> Any:
        """A map."""
        return self.head(self.run(self.stem(x))).mT


def slow_loss(
    model: Any,
    method: ls.Method,
    *,
    x: Tensor,
    read: Callable[[Any], Tensor],
    criterion: Callable[[Tensor], Tensor],
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The loss of `method` at step 1, one sample and one order at a time."""
    orders = method.orders(DEPTH, step=1)
    exit_after = method.exit_after(orders, step=1)
    assert exit_after is not None
    final = []
    early = []
    for row in range(len(x)):
        order = orders[row % len(orders)]
        with ls.running(model, order):
            final.append(read(model(x[row : row + 1])))
        with ls.running(model, order.beginning(exit_after)):
            early.append(read(model(x[row : row + 1])))
    answers = torch.cat(final)
    exits = torch.cat(early)
    return criterion(answers) + 0.3 * criterion(exits) + 0.3 * divergence(exits, answers)


def first(output: Any) -> Tensor:
    """The first of two outputs."""
    return output[0]  # type: ignore[no-any-return]


def over_classes(early: Tensor, final: Tensor) -> Tensor:
    """The KL divergence of softmaxes over the axis of the classes, a mean over all places."""
    own = final.log_softmax(1)
    return (own.exp() * (own - early.log_softmax(1))).sum(1).mean()


def test_two_tensors_are_refused_until_one_is_named() -> None:
    model = wrapped(Two)
    x, labels = batch(8)
    method = ls.Method("anyorder", fixed=(0, 0), branch_scale=1)
    with pytest.raises(UsageError, match=r"logits=lambda output: output\[0\]"):
        ls.evaluate(model, [(x, labels)], modes="sequential")
    with pytest.raises(UsageError, match=r"logits=lambda output: output\[0\]"):
        method.loss(model, x, labels, step=1)
    wanted = F.cross_entropy(model(x)[0], labels).detach()
    (score,) = ls.evaluate(model, [(x, labels)], modes="sequential", logits=first)
    assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)
    loss = method.loss(model, x, labels, step=1, logits=first)
    slow = slow_loss(
        model,
        method,
        x=x,
        read=first,
        criterion=lambda answers: F.cross_entropy(answers, labels),
        divergence=over_classes,
    )
    assert loss.item() == pytest.approx(slow.item(), rel=1e-5)


def test_a_map_is_distilled_by_the_divergence_of_its_criterion() -> None:
    model = wrapped(Map)
    x, _ = batch(8)
    labels = torch.arange(24).reshape(8, 3) % CLASSES
    method = ls.Method("anyorder", fixed=(0, 0), branch_scale=1)

    def read(output: Tensor) -> Tensor:
        return output

    with pytest.raises(UsageError, match="logits=lambda output: output"):
        method.loss(model, x, labels, step=1)
    with pytest.raises(UsageError, match="divergence"):
        method.loss(model, x, labels, step=1, logits=read)
    with pytest.raises(UsageError, match="one row of"):
        ls.evaluate(model, [(x, labels[:, 0])], modes="sequential", logits=read)
    pair = (F.cross_entropy, over_classes)
    loss = method.loss(model, x, labels, step=1, logits=read, criterion=pair)
    slow = slow_loss(
        model,
        method,
        x=x,
        read=read,
        criterion=lambda answers: F.cross_entropy(answers, labels),
        divergence=over_classes,
    )
    assert loss.item() == pytest.approx(slow.item(), rel=1e-5)


def test_several_labels_get_no_softmax() -> None:
    model = wrapped(Net)
    x, _ = batch(8)
    labels = (torch.arange(8 * CLASSES).reshape(8, CLASSES) % 3 == 0).float()

    def divergence(early: Tensor, final: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(early, final.sigmoid())

    method = ls.Method("anyorder", fixed=(0, 0), branch_scale=1)
    for _ in range(2):
        with pytest.raises(UsageError, match="several classes"):
            method.loss(model, x, labels, step=1)
        with pytest.raises(UsageError, match="several classes"):
            method.loss(model, x, labels, step=1, criterion=F.binary_cross_entropy_with_logits)
    pair = (F.binary_cross_entropy_with_logits, divergence)
    loss = method.loss(model, x, labels, step=1, criterion=pair)
    slow = slow_loss(
        model,
        method,
        x=x,
        read=lambda output: output,
        criterion=lambda answers: F.binary_cross_entropy_with_logits(answers, labels),
        divergence=divergence,
    )
    assert loss.item() == pytest.approx(slow.item(), rel=1e-5)
    soft = F.one_hot(torch.arange(8) % CLASSES, CLASSES).float().mul(0.9).add(0.1 / CLASSES)
    assert method.loss(model, x, soft, step=1).item() > 0


# --- trials ---------------------------------------------------------------------------------------

NOTED: list[Tensor] = []
CALLS = 0


class Noting(Net):
    """Blocks that note what they compute in several places."""

    class Notes(Block):
        """Counts its runs, and notes a loss."""

        runs = 0

        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Tensor] = {}
            self.register_buffer("seen", torch.zeros(()))
            self.total = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            global CALLS  # noqa: PLW0603  # as users write it
            CALLS += 1
            type(self).runs += 1
            change = self.change(x)
            NOTED.append(change.square().mean())
            self.cache[len(x)] = change.detach()
            self.seen += len(x)
            self.total += len(x)
            return x + change

    block = Notes


def test_what_a_trial_notes_is_put_back() -> None:
    """Losses, counters, caches and hooks of the user have seen the images alone, bit for bit."""
    x, labels = batch(8)
    hooked: list[int] = []

    def note(_module: nn.Module, _args: object, out: Tensor) -> None:
        hooked.append(len(out))

    seen = []
    for tried_before in (False, True):
        model = wrapped(Noting).train()
        method = ls.Method("anyorder", fixed=(0, 0), branch_scale=1)
        if tried_before:  # the verdict stands, so that there is no trial in the next step
            method.loss(model, x, labels, step=1)
        blocks = ls.blocks_of(model)
        for block in blocks:
            block.cache.clear()
            block.seen.zero_()
            block.total.zero_()
        Noting.Notes.runs = 0
        calls = CALLS
        NOTED.clear()
        hooked.clear()
        with blocks[0].register_forward_hook(note):
            method.loss(model, x, labels, step=1)
        seen.append(
            (
                CALLS - calls,
                Noting.Notes.runs,
                list(hooked),
                [note.item() for note in NOTED],
                [note.requires_grad for note in NOTED],
                [(sorted(block.cache), float(block.seen), float(block.total)) for block in blocks],
            )
        )
    assert seen[0] == seen[1]
    assert all(seen[0][4])
    ls.evaluate(model.eval(), [(x, labels)], orders=["0,1,2,3"])
    hooked.clear()
    with blocks[0].register_forward_hook(note):
        ls.evaluate(model, [(x, labels)] * 2, modes="sequential,arbitrary", num_orders=2)
    assert set(hooked) == {8}


class Weighted(Net):
    """Needs as many states as it has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, DEPTH))

    def run(self, x: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return (torch.stack(states, -1) * self.weights.softmax(0)).sum(-1)


class Looped(Net):
    """Runs its blocks twice."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


@pytest.mark.parametrize("kind", [Weighted, Looped], ids=lambda kind: kind.__name__)
def test_an_error_of_a_trial_leads_to_one_group_after_the_other(
    kind: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    model = wrapped(kind)
    x, labels = batch(8)
    weight = None if kind is Weighted else 0.3
    method = ls.Method("layershuffle", orders_per_batch=4, exit_weight=weight)
    for _ in range(2):
        loss = method.loss(model, x, labels, step=1)
    orders = method.orders(DEPTH, step=1)
    exit_after = method.exit_after(orders, step=1)
    wanted = torch.zeros(())
    for row in range(8):
        order = orders[row % 4]
        with ls.running(model, order):
            wanted = wanted + F.cross_entropy(model(x[row : row + 1]), labels[row : row + 1]) / 8
        if exit_after is not None:
            with ls.running(model, order.beginning(exit_after)):
                early = F.cross_entropy(model(x[row : row + 1]), labels[row : row + 1])
            wanted = wanted + 0.3 * early / 8
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    said = [record for record in caplog.records if "one after the other" in record.message]
    assert len(said) <= 1


def test_a_weight_that_is_no_number_is_not_blamed_on_what_blocks_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = wrapped(Net)
    model.head.weight.data[0] = float("nan")
    x, labels = batch(8)
    ls.evaluate(model, [(x, labels)], modes="arbitrary", num_orders=3)
    with ls.running(model, [ls.ExecutionOrder.sequential(DEPTH)] * 8), torch.no_grad():
        assert model(x)[:, 0].isnan().all()
    assert not [record for record in caplog.records if "one by one" in record.message]


# --- replays, caches, numbers, modes, steps -------------------------------------------------------


class Checkpointed(Net):
    """Checkpoints its blocks."""

    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("rounds", [None, 3])
def test_reentrant_checkpointing_is_refused_where_its_gradient_would_be_wrong(
    rounds: int | None,
) -> None:
    x, labels = batch(8)
    for method in (
        ls.Method("anyorder", fixed=(0, 0), branch_scale=1, max_parallel=rounds, seed=1),
        ls.Method("layershuffle", max_parallel=rounds, orders_per_batch=4, seed=1),
    ):
        gradients = []
        for kind in (Net, Checkpointed):
            model = wrapped(kind)
            method.loss(model, x, labels, step=1).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert torch.allclose(*gradients, atol=1e-6)
        model = wrapped(Checkpointed)
        model.reentrant = True
        loss = method.loss(model, x, labels, step=1)
        if method.name == "anyorder" or rounds:
            with pytest.raises(StackError, match="use_reentrant=False"):
                loss.backward()
        else:
            loss.backward()
            got = torch.cat([p.grad.flatten() for p in model.parameters()])
            stem = model.stem.weight.numel() + model.stem.bias.numel()
            assert torch.allclose(got[stem:], gradients[0][stem:], atol=1e-6)


def test_a_cache_of_a_decoder_and_repeats_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ls.wrap(transformers.LlamaForCausalLM(config)).eval()
    tokens = torch.arange(10).reshape(2, 5)
    model.config.use_cache = True
    with torch.no_grad(), ls.running(model, "0,2,1,1"):
        with pytest.raises(UsageError, match="use_cache=False"):
            model(tokens)
        got = model(tokens, use_cache=False).logits
    model = ls.unwrap(model)
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[0], layers[2], layers[1], layers[1]])
    model.config.num_hidden_layers = 4
    with torch.no_grad():
        assert torch.allclose(got, model(tokens, use_cache=False).logits, atol=1e-6)


@pytest.mark.parametrize("number", [3.0, 2.5, None, True, "3", torch.tensor(3.0)])
def test_numbers_of_a_draw_are_integers(number: Any) -> None:
    method = ls.Method("anyorder", fixed=(0, 0), branch_scale=1)
    with pytest.raises(UsageError, match="step must be an integer"):
        method.orders(6, step=number)
    for name in ("micro_batch", "rank"):
        with pytest.raises(UsageError, match=f"{name} must be an integer"):
            method.orders(6, step=0, **{name: number})
    with pytest.raises(UsageError, match="seed must be an integer"):
        ls.Method("anyorder", seed=number)
    with pytest.raises(UsageError, match="seed must be an integer"):
        ls.Shuffled().draw(6, seed=number, step=0)
    assert method.orders(6, step=torch.tensor(3)) == method.orders(6, step=3)


class Whitened(Net):
    """Subtracts the mean of its batch, as models that adapt to it do."""

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        answers = super().forward(x)
        return answers - answers.mean(0)


class BatchStatistics(Net):
    """A norm that uses the statistics of its batch in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.head(self.norm(self.run(self.stem(x)).mean(1)))


@pytest.mark.parametrize("kind", [Whitened, BatchStatistics], ids=lambda kind: kind.__name__)
def test_a_batch_that_is_read_as_a_whole_is_not_cut(kind: type[Net]) -> None:
    model = wrapped(kind)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 1024, 8, generator=generator)  # large enough to be cut on a CPU
    labels = torch.arange(64) % CLASSES
    parts: list[int] = []
    scores = ls.evaluate(model, [(x, labels)], orders=["0,1,2,3", "3,1"], on_images=parts.append)
    assert parts == [64]
    ls.evaluate(wrapped(Net), [(x, labels)], orders=["0,1,2,3", "3,1"], on_images=parts.append)
    assert len(parts) > 2
    for score in scores:
        with torch.no_grad(), ls.running(model, score.order):
            wanted = F.cross_entropy(model(x), labels)
        assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-6)


def test_two_threads_leave_the_modes_that_they_found() -> None:
    model = wrapped(Net).train()
    model.head.eval()
    both = threading.Barrier(2, timeout=60)
    left = threading.Event()
    modes = []

    def score(*, first_to_leave: bool) -> None:
        with in_eval(model):
            both.wait()
            if not first_to_leave:
                left.wait(60)
                modes.append(model.training)
        left.set()

    threads = [threading.Thread(target=score, kwargs={"first_to_leave": k}) for k in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modes == [False]
    assert (model.training, model.head.training, model.stem.training) == (True, False, True)


def test_a_step_that_comes_again_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped(Net).train()
    method = ls.Method("layershuffle")
    x, labels = batch(8)
    for epoch in range(3):
        for step in range(2):
            method.loss(model, x + step + 10 * epoch, labels, step=step)
    said = [record for record in caplog.records if "comes again" in record.message]
    assert len(said) == 1
    caplog.clear()
    other = wrapped(Net).train()
    for step in range(3):
        for _ in range(2):  # the same images, as in a closure of an optimiser
            method.loss(other, x, labels, step=step)
    assert not [record for record in caplog.records if "comes again" in record.message]


def test_a_backbone_that_records_its_states_trains_group_by_group() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=2, image_size=32,
        patch_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ls.wrap(transformers.Dinov2Backbone(config)).eval()
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % CLASSES

    def pooled(output: Any) -> Tensor:
        maps: Tensor = output.feature_maps[0]
        return maps.mean((2, 3))

    method = ls.Method("layershuffle", orders_per_batch=4)
    loss = method.loss(model, x, labels, step=1, logits=pooled)
    orders = method.orders(DEPTH, step=1)
    rows = []
    for row in range(8):
        with ls.running(model, orders[row % 4]):
            rows.append(pooled(model(x[row : row + 1])))
    wanted = F.cross_entropy(torch.cat(rows), labels)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


# --- batches without an image ---------------------------------------------------------------------


def test_an_empty_batch_has_logits_but_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """No trial runs without an image, so nothing is said of blocks that share more than a state."""
    model = wrapped(Net)
    inputs, labels = batch(0)
    for _, logits in ls.forward_many(model, inputs, ["1,0,2,3", "0,1,2,3"]):
        assert logits.shape == (0, CLASSES)
    assert not caplog.messages
    for method in (ls.Method("layershuffle"), ls.Method("anyorder", fixed=(0, 0), branch_scale=1)):
        with pytest.raises(UsageError, match="no image"):
            method.loss(model, inputs, labels, step=0)
