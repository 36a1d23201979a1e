"""The one trainer: transformers' Trainer, given an execution order for every forward.

What Trainer does well (mixed precision, accumulation, clipping, schedules, exact resume, data
parallelism) it does here too. This file adds the orders, the losses, scores on held-out data, and
checkpoints that are whole or absent.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback

from layershuffle.draws import Stream
from layershuffle.errors import TrainingError
from layershuffle.files import staged_directory
from layershuffle.models import logits_of
from layershuffle.policies import OrderPolicy
from layershuffle.position import PositionedModel
from layershuffle.stack import depth_of, running
from layershuffle.training.checkpoints import CHECKPOINT_FORM, remove_older

EMA_FILE = "ema.safetensors"
SECONDS_FILE = "seconds.txt"


class EpochSampler(Sampler[int]):
    """A new permutation of the data for every epoch, a pure function of (seed, epoch).

    Nothing needs saving to resume in the middle of an epoch. It passes the epoch on to the data
    set, which needs it for augmentation: accelerate does that itself except when it resumes.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate before every epoch."""
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

    `score(model)` gives the held-out metrics by name, `keep(model, metrics)` stores a new best.
    """

    def __init__(
        self,
        model: PositionedModel,
        *,
        policy: OrderPolicy,
        score: Callable[[nn.Module], dict[str, float]],
        keep: Callable[[nn.Module, int, float], None],
        checkpoints: Path,
        ema_decay: float | None,
        **trainer_arguments: Any,
    ) -> None:
        super().__init__(model=model, **trainer_arguments)
        self.policy, self.score, self.keep_best = policy, score, keep
        self.checkpoints = checkpoints
        self.depth = depth_of(model)
        self.ema = ModelEmaV3(model, decay=ema_decay) if ema_decay is not None else None
        self.loss_is_scaled_for_ga = False
        self._micro_batch = (-1, 0)
        self._hits = torch.zeros((), dtype=torch.long, device=self.args.device)
        self._seen = 0
        self._seconds_before, self._started = 0.0, time.monotonic()
        if self.ema is not None:
            self.add_callback(_UpdateEma(self.ema, model))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return EpochSampler(dataset, self.args.seed)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Forward and backward of one micro-batch, in an order of its own."""
        step, micro_batch = self.state.global_step, 0
        if self._micro_batch[0] == step:
            micro_batch = self._micro_batch[1] + 1
        self._micro_batch = (step, micro_batch)
        order = self.policy.draw(
            self.depth, seed=self.args.seed, step=step, micro_batch=micro_batch
        )
        with running(self.model, order):
            loss: Tensor = super().training_step(model, inputs, *args)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean cross-entropy of the classes, plus the position loss of the paper's section 3.4."""
        del num_items_in_batch
        images, labels = inputs["images"], inputs["labels"]
        positioned = self.model
        predicting = positioned.prediction is not None
        with positioned.guessing() if predicting else contextlib.nullcontext() as guesses:
            logits = logits_of(model(images)).float()
        loss = F.cross_entropy(logits, labels)
        self._hits += (logits.argmax(-1) == labels).sum()
        self._seen += len(labels)
        if guesses is not None:
            loss = loss + guesses.loss()
        return (loss, {"logits": logits}) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds training accuracy; a loss that is not finite ends the run."""
        if "loss" in logs:
            self._refuse_non_finite(logs["loss"])
            logs = {**logs, "accuracy": 100.0 * int(self._hits) / max(self._seen, 1)}
            self._hits.zero_()
            self._seen = 0
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The held-out scores, logged once; a new best by `metric_for_best_model` is stored."""
        del args, kwargs
        model = self.model if self.ema is None else self.ema.module
        metrics = self.score(model)
        value = metrics[self.args.metric_for_best_model]
        self._refuse_non_finite(value)
        if self.state.best_metric is None or value < self.state.best_metric:
            self.keep_best(model, self.state.global_step, value)
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        del model, trial
        # A step that was still finite may have left weights that are not.
        finite = all(bool(torch.isfinite(weight).all()) for weight in self.model.parameters())
        self._refuse_non_finite(float(self._tr_loss) if finite else math.inf)
        final = self.checkpoints / CHECKPOINT_FORM.format(self.state.global_step)
        with staged_directory(final) as stage:
            # Not Trainer.save_model, which leaves a pickle of its arguments beside the weights.
            safetensors.torch.save_model(self.model, str(stage / "model.safetensors"))
            if self.ema is not None:
                safetensors.torch.save_model(self.ema.module, str(stage / EMA_FILE))
            self._save_optimizer_and_scheduler(str(stage))
            self._save_scaler(str(stage))
            self._save_rng_state(str(stage))
            self.state.save_to_json(str(stage / "trainer_state.json"))
            (stage / SECONDS_FILE).write_text(str(self.seconds()), encoding="utf-8")
        remove_older(self.checkpoints, final)

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


class _UpdateEma(TrainerCallback):
    def __init__(self, ema: ModelEmaV3, model: nn.Module) -> None:
        self._ema, self._model = ema, model

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every optimiser step."""
        del args, control, kwargs
        self._ema.update(self._model, step=state.global_step)
