"""Users with their own training loop need one call: `method.loss(model, images, labels, step=...)`.

Each loop ends with the weights of a loop written out by hand over physically rebuilt models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, SEQUENTIAL, Family, images, logits_of
from contracts import Rebuilt
from layershuffle.core.stack import blocks_of

STEPS, BATCH, RATE, SEED = 3, 4, 0.05, 11
LOOP_FAMILIES = [FAMILIES["timm-vit"], FAMILIES["hf-dinov2"], FAMILIES["torchvision-vit"]]
METHODS = {
    # The loop by hand begins with the weights as they are.
    "anyorder": ls.Method("anyorder", branch_scale=1, seed=SEED),
    "plain": ls.Method("layershuffle", seed=SEED),
}
ANYORDER = METHODS["anyorder"]


def data(step: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one step."""
    labels = torch.arange(BATCH) % CLASSES
    return images(BATCH, seed=100 + step), (labels + step) % CLASSES


def logits_along(model: Rebuilt, batch: Tensor, order: tuple[int, ...]) -> Tensor:
    """Logits of `batch`, run through the blocks of `order`."""
    model.set_order(order)
    return logits_of(model.model(batch))


def loss_by_hand(
    model: Rebuilt, method: ls.Method, batch: Tensor, labels: Tensor, **place: int
) -> Tensor:
    """The loss of one forward: every group alone, in a model with its blocks in its order."""
    orders = method.orders(DEPTH, **place)
    exit_after = method.exit_after(orders, **place)
    total = torch.zeros(())
    for group, order in enumerate(orders):
        own, truth = batch[group :: len(orders)], labels[group :: len(orders)]
        final = logits_along(model, own, order.blocks)
        loss = F.cross_entropy(final, truth)
        if None not in (exit_after, method.exit_weight, method.self_distillation):
            last = order.blocks[len(order) - method.fixed[1] :]
            early = logits_along(model, own, order.blocks[:exit_after] + last)
            loss = loss + method.exit_weight * F.cross_entropy(early, truth)
            target = final.detach().softmax(1)
            gap = target * (target.log() - early.log_softmax(1))
            loss = loss + method.self_distillation * gap.sum(1).mean()
        total = total + loss * len(own) / len(batch)
    return total


def weights_by_hand(family: Family, method: ls.Method, *, accumulate: int = 1) -> dict[str, Tensor]:
    """Plain SGD; with `accumulate`, a step has as many forwards, each of one batch of `data`."""
    model = Rebuilt(family, SEQUENTIAL)
    parameters = list(model.model.train().parameters())
    names = [name for name, _ in family.plain().named_parameters()]
    for step in range(STEPS):
        losses = [
            loss_by_hand(
                model, method, *data(step * accumulate + micro), step=step, micro_batch=micro
            )
            for micro in range(accumulate)
        ]
        loss = torch.stack(losses).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(RATE * gradient)
    return {name: value.detach() for name, value in zip(names, parameters, strict=True)}


def assert_weights(model: nn.Module, family: Family, method: ls.Method, **options: Any) -> None:
    """The trained weights are those of the loop by hand, and not those of a sequential loop."""
    wanted = weights_by_hand(family, method, **options)
    got = dict(model.named_parameters())
    assert got.keys() == wanted.keys()
    errors = [(got[name].detach() - wanted[name]).abs().max() for name in wanted]
    worst = torch.stack(errors)
    assert worst.max() <= 1e-6, f"max error {worst.max():.2e}, mean error {worst.mean():.2e}"
    start = dict(family.plain().named_parameters())
    moved = [(wanted[name] - start[name]).abs().max() for name in wanted]
    assert torch.stack(moved).max() > 1e-3


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("family", LOOP_FAMILIES, ids=lambda family: family.name)
def test_plain_pytorch(family: Family, method: ls.Method) -> None:
    model = method.prepare(family.plain()).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        loss = method.loss(model, *data(step), step=step)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert_weights(model, family, method)


def test_a_policy_alone() -> None:
    """The two lines that `loss` replaces, for a loss that is not one of a classifier."""
    family, method = LOOP_FAMILIES[0], METHODS["plain"]
    model = ls.wrap(family.plain()).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    policy = ls.Shuffled()
    for step in range(STEPS):
        batch, labels = data(step)
        with ls.running(model, policy.draw(DEPTH, seed=SEED)):  # the policy counts the steps
            loss = F.cross_entropy(model(batch), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert policy.drawn == STEPS
    assert_weights(model, family, method)


def test_gradient_accumulation() -> None:
    family = LOOP_FAMILIES[0]
    model = ANYORDER.prepare(family.plain()).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for micro_batch in range(2):
            batch = data(2 * step + micro_batch)
            loss = ANYORDER.loss(model, *batch, step=step, micro_batch=micro_batch)
            (loss / 2).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert_weights(model, family, ANYORDER, accumulate=2)


# torch's own look at a state between two blocks while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks() -> None:
    family = LOOP_FAMILIES[0]
    model = ANYORDER.prepare(family.plain()).train()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for block in blocks_of(model):
        block.compile(backend=backend, fullgraph=True, dynamic=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        ANYORDER.loss(model, *data(step), step=step).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert graphs
    assert_weights(model, family, ANYORDER)


def test_autocast() -> None:
    """The loss is in fp32, and near that of fp32 forwards."""
    family = LOOP_FAMILIES[0]
    model = ANYORDER.prepare(family.plain()).train()
    exact = ANYORDER.loss(model, *data(0), step=0)
    orders = ANYORDER.orders(ls.depth_of(model), step=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = ANYORDER.loss_and_logits(model, *data(0), orders=orders, step=0)
    assert loss.dtype == logits.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    loss.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process alone, as torchrun starts the first of several."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("position", ["none", "predict"])
def test_distributed_data_parallel(position: Any) -> None:
    """Every parameter that has a gradient without the wrapper has the same one inside it."""
    family = LOOP_FAMILIES[0]
    method = ls.Method("anyorder", branch_scale=1, seed=SEED, position=position)
    alone, model = (method.prepare(family.wrapped()).train() for _ in range(2))
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        for trained in (alone, parallel):
            trained.zero_grad()
            method.loss(trained, *data(step), step=step).backward()
        for name, parameter in alone.named_parameters():
            got = model.get_parameter(name).grad
            assert parameter.grad is not None, name
            torch.testing.assert_close(got, parameter.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", LOOP_FAMILIES[:2], ids=lambda family: family.name)
def test_accelerate(family: Family) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped = ANYORDER.prepare(family.plain()).train()
    model, optimiser = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=RATE))
    for index in range(2 * STEPS):
        step, micro_batch = divmod(index, 2)
        with accelerator.accumulate(model):
            loss = ANYORDER.loss(model, *data(index), step=step, micro_batch=micro_batch)
            accelerator.backward(loss)  # divides it by the number of forwards
            optimiser.step()
            optimiser.zero_grad()
    assert_weights(wrapped, family, ANYORDER, accumulate=2)


@pytest.mark.parametrize("family", LOOP_FAMILIES[:2], ids=lambda family: family.name)
def test_lightning_fabric(family: Family) -> None:
    import lightning  # two seconds, which one worker needs to spend

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped = ANYORDER.prepare(family.plain()).train()
    model, optimiser = fabric.setup(wrapped, torch.optim.SGD(wrapped.parameters(), lr=RATE))
    for step in range(STEPS):
        loss = ANYORDER.loss(model, *data(step), step=step)
        optimiser.zero_grad()
        fabric.backward(loss)
        optimiser.step()
    assert_weights(wrapped, family, ANYORDER)


class Pairs(Dataset):
    """The images and labels of all steps, one after the other."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch, labels = data(index // BATCH)
        return batch[index % BATCH], labels[index % BATCH]


# Lightning looks at torch's trees in an old way, and advises processes for the loader.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*:UserWarning")
def test_lightning_module(tmp_path: Path) -> None:
    """`training_step` is called once per forward, with the number of the batch in its epoch."""
    import lightning

    family = LOOP_FAMILIES[0]

    class Shuffling(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = ANYORDER.prepare(family.plain()).train()

        def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
            return ANYORDER.loss(
                self.model, *batch, step=self.global_step, micro_batch=batch_index % 2
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=RATE)

    module = Shuffling()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with torch.random.fork_rng():
        trainer.fit(module, DataLoader(Pairs(2 * STEPS), batch_size=BATCH))
    assert trainer.global_step == STEPS
    assert_weights(module.model, family, ANYORDER, accumulate=2)


class Steps(Pairs):
    """The same as transformers wants them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels, label = super().__getitem__(index)
        return {"pixel_values": pixels, "labels": label}


class AnyOrderTrainer(Trainer):
    """transformers' Trainer with the loss of a method."""

    forwards = 0

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        micro_batch = self.forwards % self.args.gradient_accumulation_steps
        self.forwards += 1
        return ANYORDER.loss(
            model,
            inputs["pixel_values"],
            inputs["labels"],
            step=self.state.global_step,
            micro_batch=micro_batch,
        )

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", LOOP_FAMILIES[:2], ids=lambda family: family.name)
def test_transformers_trainer(family: Family, accumulate: int, tmp_path: Path) -> None:
    model = ANYORDER.prepare(family.plain())
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=BATCH, max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, label_names=["labels"],
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    with torch.random.fork_rng():
        trainer = AnyOrderTrainer(
            model=model, args=settings, train_dataset=Steps(accumulate * STEPS)
        )
        # Else the Trainer takes the loss for one that is divided by the images of the whole step.
        # Before transformers 5.6, accelerate divides it a second time.
        trainer.model_accepts_loss_kwargs = Version(transformers.__version__) < Version("5.6")
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert_weights(model, family, ANYORDER, accumulate=accumulate)
    assert not list(tmp_path.iterdir())
