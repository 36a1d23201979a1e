"""Claim: training here is not slower than a plain transformers Trainer doing the same.

The other side is written as the paper's authors wrote theirs: transformers' ViT with unfused
attention and its Trainer, the layers indexed by a permutation that lies on the device. Not slower
means: the 95 % interval of the median ratio reaches down to 1.0, and the median is at most 1.05.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _clocks import SMOKE, Effort, Side
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _kinds import training_state, training_steps
from _machine import PhaseTimer
from _workload import make_workload
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
from transformers.trainer_callback import PrinterCallback

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.stack import wrap
from layershuffle.training.settings import FitSettings

SMALL = {
    "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 32,
    "patch_size": 4, "num_labels": 100,
}  # fmt: skip
TINY = {**SMALL, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
TINY |= {"patch_size": 16, "num_hidden_layers": 3}
LR, WARM_UP = 1e-4, 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and batch for both sides. `half`: fp16 there (the authors' way), bf16 here."""

    config: Mapping[str, Any]
    batch: int
    steps: int = 4
    device: str = "cpu"
    half: bool = False
    compiler: Callable[[], BlockCompiler] | None = None

    def model(self, attention: str) -> ViTForImageClassification:
        """The same random weights every time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = ViTConfig(attn_implementation=attention, **self.config)
            return ViTForImageClassification(config)


class DrawnLayers(nn.ModuleList):
    """The authors' way: a permutation tensor on the device, asked for every layer's number."""

    def __iter__(self) -> Iterator[nn.Module]:
        device = next(self.parameters()).device
        return (self[index] for index in torch.randperm(len(self)).to(device))


class IndexDataset(Dataset[int]):
    """As many items as asked for; the collator knows the images."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class PlainTrainer(Trainer):
    """transformers' Trainer as it is; the timer learns when a step begins."""

    timer: PhaseTimer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """A step begins."""
        self.timer.begin("data")
        return super().get_batch_samples(*args, **kwargs)


@contextmanager
def plain(case: Case, attention: str) -> Iterator[Side]:
    """Seconds of a step of the plain Trainer; its own defaults where the authors set nothing."""
    model = case.model(attention)
    model.vit.layers.__class__ = DrawnLayers
    workload = make_workload("", batch_size=case.batch, model=wrap(case.model("sdpa")))
    batch = {"pixel_values": workload.images, "labels": workload.labels}
    if case.device == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    steps = WARM_UP + case.steps + 1
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=case.batch,
            max_steps=steps,
            learning_rate=LR,
            optim="adamw_torch",  # the default of their release of transformers
            fp16=case.half,
            use_cpu=case.device == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = PlainTrainer(
            model,
            arguments,
            train_dataset=IndexDataset(steps * case.batch),
            data_collator=lambda _: batch,
        )
        trainer.remove_callback(PrinterCallback)

        def side() -> float:
            trainer.timer = PhaseTimer(case.device, clock=time.process_time)
            trainer.train()
            seconds = [step["data"] for step in trainer.timer.steps()]
            return statistics.median(seconds[WARM_UP:])

        yield side


def ours(case: Case) -> tuple[Side, BlockCompiler]:
    """Seconds of a step of `layershuffle fit`, and the compiler of its blocks."""
    model = wrap(case.model("sdpa"))
    workload = make_workload("hf:ViT", batch_size=case.batch, device=case.device, model=model)
    settings = FitSettings(
        method="layershuffle",
        model=workload.spec,
        data="generated",
        batch_size=case.batch,
        lr=LR,
        device=case.device,
        precision="bf16" if case.half else "fp32",
        workers=0,
        log_every=1 << 30,
    )
    compiler = case.compiler() if case.compiler else BlockCompiler(reason="compile is off")
    timer = PhaseTimer(case.device, clock=time.process_time)
    state = training_state(settings, workload, compiler=compiler)
    take = training_steps(state, workload, timer=timer)

    def side() -> float:
        take(range(WARM_UP + case.steps))
        return statistics.median([sum(step.values()) for step in timer.steps()[WARM_UP:]])

    return side, compiler


def row(
    name: str, *, case: Case, attention: str, effort: Effort, bound: Bound | None, upside_down: bool
) -> ClaimRow:
    """Ours against the plain Trainer; `upside_down`: how many times as fast ours is."""
    here, compiler = ours(case)
    with plain(case, attention) as there:
        ratio = compare(
            name,
            "plain Trainer / ours" if upside_down else "ours / plain Trainer",
            a=there if upside_down else here,
            b=here if upside_down else there,
            effort=replace(effort, seconds=0.0),  # a turn is several steps already
            bound=bound,
            settings={
                "model": f"transformers ViT, {dict(case.config)}",
                "batch": case.batch,
                "attention of the plain one": attention,
            },
        )
        return replace(ratio, facts={"ours": compiler.report()})  # the state after the last step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Against unfused attention, as the authors' release of transformers had it, and today's."""
    case = Case(config=SMALL, batch=16)
    if effort is SMOKE:
        case = Case(config=TINY, batch=2, steps=1)
    measure = partial(row, case=case, effort=effort, upside_down=False)
    name = "training step against a plain Trainer, width 192, batch 16, {}"
    yield measure(name.format("as the authors'"), attention="eager", bound=Bound("not_above", 1.0))
    if effort is not SMOKE:
        yield measure(name.format("with fused attention"), attention="sdpa", bound=None)


CLAIM = Claim(theme="hf-trainer", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
