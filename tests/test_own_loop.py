"""Users with their own training loop need two lines before `forward`.

    order = ls.Shuffled().draw(depth, seed=seed, step=step)
    with ls.running(model, order):
        ...

Each loop ends with the weights of a loop written out by hand over physically rebuilt models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, Family, images, logits_of

STEPS, BATCH, RATE, SEED = 3, 4, 0.05, 11
LOOP_FAMILIES = [FAMILIES["timm-vit"], FAMILIES["hf-dinov2"], FAMILIES["torchvision-vit"]]


def data(step: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one step."""
    labels = torch.arange(BATCH) % CLASSES
    return images(BATCH, seed=100 + step), (labels + step) % CLASSES


def weights_by_hand(family: Family) -> dict[str, Tensor]:
    """Plain SGD; at every step the container is replaced by one with the blocks in order."""
    model = family.plain().train()
    blocks = list(family.container(model).children())
    owner, _, name = family.path.rpartition(".")
    sequential = isinstance(family.container(model), nn.Sequential)
    parameters = dict(model.named_parameters())
    for step in range(STEPS):
        order = ls.Shuffled().draw(DEPTH, seed=SEED, step=step)
        run = [blocks[block] for block in order]
        in_order = nn.Sequential(*run) if sequential else nn.ModuleList(run)
        setattr(model.get_submodule(owner), name, in_order)
        batch, labels = data(step)
        loss = F.cross_entropy(logits_of(model(batch)), labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(RATE * gradient)
    return {key: value.detach() for key, value in parameters.items()}


def assert_weights(model: nn.Module, family: Family) -> None:
    """The trained weights are those of the loop by hand, and not those of a sequential loop."""
    wanted = weights_by_hand(family)
    got = dict(model.named_parameters())
    assert got.keys() == wanted.keys()
    errors = [(got[name].detach() - wanted[name]).abs().max() for name in wanted]
    worst = torch.stack(errors)
    assert worst.max() <= 1e-6, f"max error {worst.max():.2e}, mean error {worst.mean():.2e}"
    start = dict(family.plain().named_parameters())
    moved = [(wanted[name] - start[name]).abs().max() for name in wanted]
    assert torch.stack(moved).max() > 1e-3


@pytest.mark.parametrize("family", LOOP_FAMILIES, ids=lambda family: family.name)
def test_plain_pytorch(family: Family) -> None:
    model = ls.wrap(family.plain()).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    depth = ls.depth_of(model)
    for step in range(STEPS):
        batch, labels = data(step)
        order = ls.Shuffled().draw(depth, seed=SEED, step=step)
        with ls.running(model, order):
            loss = F.cross_entropy(logits_of(model(batch)), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert_weights(model, family)


def test_a_sequential_loop_ends_elsewhere() -> None:
    """The comparison above can fail."""
    family = LOOP_FAMILIES[0]
    model = ls.wrap(family.plain()).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        batch, labels = data(step)
        optimiser.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimiser.step()
    with pytest.raises(AssertionError, match="max error"):
        assert_weights(model, family)


@pytest.mark.parametrize("family", LOOP_FAMILIES[:2], ids=lambda family: family.name)
def test_lightning_fabric(family: Family) -> None:
    import lightning  # two seconds, which one worker needs to spend

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    host = ls.wrap(family.plain()).train()
    model, optimiser = fabric.setup(host, torch.optim.SGD(host.parameters(), lr=RATE))
    depth = ls.depth_of(model)
    for step in range(STEPS):
        batch, labels = data(step)
        order = ls.Shuffled().draw(depth, seed=SEED, step=step)
        with ls.running(model, order):
            loss = F.cross_entropy(logits_of(model(batch)), labels)
        optimiser.zero_grad()
        fabric.backward(loss)
        optimiser.step()
    assert_weights(host, family)


class Steps(Dataset):
    """The images of all steps, one after the other."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, labels = data(index // BATCH)
        return {"pixel_values": batch[index % BATCH], "labels": labels[index % BATCH]}


class ShufflingTrainer(Trainer):
    """transformers' Trainer with the two lines in `compute_loss`."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        order = ls.Shuffled().draw(ls.depth_of(model), seed=SEED, step=self.state.global_step)
        with ls.running(model, order):
            logits = logits_of(model(inputs["pixel_values"]))
        return F.cross_entropy(logits, inputs["labels"])

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(Steps())


@pytest.mark.parametrize("family", LOOP_FAMILIES[:2], ids=lambda family: family.name)
def test_transformers_trainer(family: Family, tmp_path: Path) -> None:
    model = ls.wrap(family.plain())
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=BATCH, max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, label_names=["labels"],
    )  # fmt: skip
    with torch.random.fork_rng():
        trainer = ShufflingTrainer(model=model, args=settings, train_dataset=Steps())
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert_weights(model, family)
    assert not list(tmp_path.iterdir())
