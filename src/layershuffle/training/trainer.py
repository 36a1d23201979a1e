"""The one trainer: transformers' Trainer, given an execution order for every forward.

What Trainer does well (mixed precision, accumulation, clipping, schedules, exact resume, data
parallelism) it does here too. This file adds the orders, the losses, scores on held-out data, and
checkpoints that are whole or absent.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from layershuffle.compiling import BlockCompiler
from layershuffle.draws import Stream
from layershuffle.errors import TrainingError
from layershuffle.models import logits_of
from layershuffle.orders import ExecutionOrder
from layershuffle.position import PositionedModel
from layershuffle.stack import recomputing, running
from layershuffle.training.checkpoints import CHECKPOINT_FORM, remove_older
from layershuffle.training.drawing import Orders, by_row
from layershuffle.training.ranks import Ranks
from layershuffle.training.rounding import rounded
from layershuffle.training.sharding import (
    all_finite,
    gathered,
    is_sharded,
    load_optimizer_state,
    optimizer_state,
    shard,
)
from layershuffle.training.waiting import WaitingShare

EMA_FILE = "ema.safetensors"
SECONDS_FILE = "seconds.txt"


class EpochSampler(Sampler[int]):
    """A new permutation of the data for every epoch, a pure function of (seed, epoch).

    Nothing needs saving to resume in the middle of an epoch. It passes the epoch on to the data
    set, which needs it for augmentation.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Show `epoch` from the next iteration on."""
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        key = Stream(self._seed, self._epoch).below(1 << 63)
        generator = torch.Generator().manual_seed(key)
        return iter(torch.randperm(len(self), generator=generator).tolist())


class OrderTrainer(Trainer):
    """Trains a `PositionedModel` under an order policy; see the module's first lines.

    `score(model)` gives the held-out metrics by name, `keep(model, metrics)` stores a new best,
    `finish(pixels)` makes images of a batch of pixels that has arrived on the device. Forwards are
    of `round_to` altogether, if it is given.
    """

    def __init__(
        self,
        model: PositionedModel,
        *,
        orders: Orders,
        ranks: Ranks,
        compiler: BlockCompiler,
        score: Callable[[nn.Module], dict[str, float]],
        keep: Callable[[nn.Module, int, float], None],
        checkpoints: Path,
        ema_decay: float | None,
        finish: Callable[[Tensor], Tensor],
        recompute: bool,
        round_to: torch.dtype | None = None,
        sharded: bool = False,
        **trainer_arguments: Any,
    ) -> None:
        # transformers' word for: place it nowhere and wrap it in nothing, it is sharded already.
        vars(model)["is_distributed_loading_by_transformers"] = sharded
        super().__init__(model=model, **trainer_arguments)
        self.orders, self.ranks, self.compiler = orders, ranks, compiler
        self.score, self.keep_best = score, keep
        self.checkpoints, self.finish = checkpoints, finish
        self.ema = ModelEmaV3(model, decay=ema_decay) if ema_decay is not None else None
        # What scores and saves the model needs it whole.
        self._whole = copy.deepcopy(model) if sharded else None
        self._recompute, self._round_to = recompute, round_to
        self.loss_is_scaled_for_ga = False
        self.model_accepts_loss_kwargs = False  # nobody needs to count labels in every step
        self._micro_batch = (-1, 0)
        self._hits = torch.zeros((), dtype=torch.long, device=self.args.device)
        self._seen = 0
        self._seconds_before, self._started = 0.0, time.monotonic()
        self._share = WaitingShare()
        self._sampler = EpochSampler(self.train_dataset, orders.seed)
        self.add_callback(_TellEpoch(self._sampler))
        if self.ema is not None:
            self.add_callback(_UpdateEma(self.ema, model))
        for one in (model, self._whole, self.ema.module if self.ema else None):
            if one is not None:
                compiler.add(one)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        del train_dataset
        return self._sampler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next step; the time that takes is counted."""
        with self._share.waiting():
            found = super().get_batch_samples(*args, **kwargs)
        # accelerate forgets it where a run goes on inside an epoch: every copy would be waited for.
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is not None:
            loader._non_blocking = self.accelerator.non_blocking
        return found

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._share.aside():
            return super()._evaluate(*args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        arrived = super()._prepare_inputs(inputs)
        images = self.finish(arrived["images"])
        return {**arrived, "images": images.to(self._round_to) if self._round_to else images}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shards the model first, if it is to be sharded; a checkpoint's weights are in it then."""
        if self._whole is not None and not is_sharded(self.model):
            shard(self.model.to(self.args.device))
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def _defer_fsdp_gradient_reduction(self) -> Any:
        # Shards reduce their gradients at every micro-batch: put off to the last one, those of a
        # block that it leaves out would be lost.
        return contextlib.nullcontext()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Forward and backward of one micro-batch, in an order, or orders, of its own."""
        step, micro_batch = self.state.global_step, 0
        if self._micro_batch[0] == step:
            micro_batch = self._micro_batch[1] + 1
        self._micro_batch = (step, micro_batch)
        orders = self.orders.draw(step=step, micro_batch=micro_batch)
        blocks = {block for order in orders for block in order}
        with (
            self.running(orders, len(inputs["labels"])),
            self.compiler.step(inputs["images"].shape, blocks),
        ):
            loss: Tensor = super().training_step(model, inputs, *args)
        return loss

    @contextmanager
    def running(self, orders: Sequence[ExecutionOrder], images: int) -> Iterator[None]:
        """Run forwards of `images` along `orders`, as the settings say."""
        again = recomputing(self.model) if self._recompute else contextlib.nullcontext()
        with running(self.model, by_row(orders, images)), again, self._rounded(self.model):
            yield

    def _rounded(self, model: nn.Module) -> AbstractContextManager[None]:
        return rounded(model, self._round_to) if self._round_to else contextlib.nullcontext()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of `loss_and_logits`; counts right answers."""
        del num_items_in_batch
        loss, logits = self.loss_and_logits(model, inputs)
        self._hits += (logits.argmax(-1) == inputs["labels"]).sum()
        self._seen += len(logits)
        return (loss, {"logits": logits}) if return_outputs else loss

    def loss_and_logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the classes, plus the position loss of the paper's section 3.4."""
        images, labels = inputs["images"], inputs["labels"]
        logits, guessed = self.compiler.or_eager(lambda: self._forward(model, images))
        loss = F.cross_entropy(logits, labels)
        return (loss if guessed is None else loss + guessed), logits

    def _forward(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss of the position guesses of exactly this forward."""
        positioned = self.model
        if positioned.prediction is None:
            return logits_of(model(images)).float(), None
        # DDP takes parameters that no output of the model's call depends on for unused, so the
        # guesses' loss has to be one: the hook adds it inside of what DDP wraps.
        with positioned.guessing() as guesses:
            add_loss = positioned.register_forward_hook(lambda *call: (call[-1], guesses.loss()))
            with add_loss:
                output, guessed = model(images)
        return logits_of(output).float(), guessed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds training accuracy and the share of time spent waiting for data, both in percent.

        A loss that is not finite ends the run.
        """
        if "loss" in logs:
            self._refuse_non_finite(logs["loss"])
            hits, seen = self.ranks.total([float(self._hits), float(self._seen)])
            logs = {**logs, "accuracy": 100.0 * hits / max(seen, 1.0)}
            self._hits.zero_()
            self._seen = 0
            logs["waiting"] = self._share.take()
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The held-out scores, logged once; a new best by `metric_for_best_model` is stored."""
        del args, kwargs
        model = self._scored_model()
        try:
            with self.accelerator.autocast(), torch.no_grad(), self._rounded(model):
                metrics = self.compiler.or_eager(lambda: self.score(model))
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"Scoring needs more than the memory of the device ({_first_sentence(error)})",
                hint="a smaller --eval-batch-size",
            ) from error
        value = metrics[self.args.metric_for_best_model]
        self._refuse_non_finite(value)
        best = self.state.best_metric is None or value < self.state.best_metric
        if best and self.ranks.first:
            self.keep_best(model, self.state.global_step, value)
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _scored_model(self) -> nn.Module:
        if self._whole is not None:
            return gathered(self.model, into=self._whole.to(self.args.device))
        averaged: nn.Module | None = self.ema.module if self.ema is not None else None
        return averaged or self.model

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        del model, trial
        # A step that was still finite may have left weights that are not.
        value = float(self._tr_loss) if all_finite(self.model) else math.inf
        if self.ranks.any(not math.isfinite(value)):
            self._refuse_non_finite(math.inf if math.isfinite(value) else value)
        final = self.checkpoints / CHECKPOINT_FORM.format(self.state.global_step)
        with self._share.aside(), self.ranks.stage(final) as stage:
            # Every process its own random state; what is sharded is put together.
            self._save_rng_state(str(stage))
            model, optimizer = self.model, None
            if self._whole is not None:
                model = self._scored_model()
                optimizer = optimizer_state(self.model, self.optimizer.optimizer)
            if self.ranks.first:
                self._save_whole(stage, model)
                self._save_optimizer_and_scheduler(str(stage))
                self._save_scaler(str(stage))
                if optimizer is not None:
                    torch.save(optimizer, stage / OPTIMIZER_NAME)  # instead of this process's part
        if self.ranks.first:
            remove_older(self.checkpoints, final)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._whole is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        place = Path(checkpoint)
        state = torch.load(place / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        load_optimizer_state(self.model, self.optimizer.optimizer, state=state)
        self.lr_scheduler.load_state_dict(torch.load(place / SCHEDULER_NAME, weights_only=True))

    def _save_whole(self, stage: Path, model: nn.Module) -> None:
        # Not Trainer.save_model, which leaves a pickle of its arguments beside the weights.
        safetensors.torch.save_model(model, str(stage / "model.safetensors"))
        if self.ema is not None:
            safetensors.torch.save_model(self.ema.module, str(stage / EMA_FILE))
        self.state.save_to_json(str(stage / "trainer_state.json"))
        (stage / SECONDS_FILE).write_text(str(self.seconds()), encoding="utf-8")

    def take_up(self, checkpoint: Path) -> None:
        """Load what Trainer does not know of: the moving average, and the time spent so far."""
        if self.ema is not None:
            safetensors.torch.load_model(self.ema.module, str(checkpoint / EMA_FILE))
        self._seconds_before = float((checkpoint / SECONDS_FILE).read_text(encoding="utf-8"))

    def seconds(self) -> float:
        """Time spent on the run, evaluation included, in all processes that worked on it."""
        return self._seconds_before + time.monotonic() - self._started

    def _refuse_non_finite(self, value: float) -> None:
        if math.isfinite(value):
            return
        last = sorted(self.checkpoints.glob("step-*"))
        raise TrainingError(
            f"Loss or weights became {value} by step {self.state.global_step}; nothing was saved "
            f"since {last[-1].name if last else 'the start'}",
            place=self.checkpoints.parent,
            hint="start again in another --out with a lower --lr or a longer --warmup",
        )


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ", maxsplit=1)[0]


class _TellEpoch(TrainerCallback):
    """Trainer and accelerate lose sight of the sampler where several processes resume."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before anything is read; `state.epoch` counts the share of an epoch that is done too."""
        del args, control, kwargs
        self._sampler.set_epoch(int(state.epoch or 0))


class _UpdateEma(TrainerCallback):
    def __init__(self, ema: ModelEmaV3, model: nn.Module) -> None:
        self._ema, self._model = ema, model

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every optimiser step."""
        del args, control, kwargs
        self._ema.update(self._model, step=state.global_step)
