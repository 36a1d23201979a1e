"""What a run tells whoever listens: the terminal, TensorBoard, a study."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from layershuffle.training.ranks import Ranks

Event = dict[str, Any]
Listener = Callable[[Event], None]
"""Events: kind "data" (text, notes), "start" (steps, at), "log" (step, loss, accuracy,
learning_rate, waiting: percent of the steps' time in which the next batch was not there yet),
"scores" (step and metrics), "checkpoint" (step), "best" (step, cross_entropy), "end" (step)."""


class Flow(TrainerCallback):
    """Says when to evaluate, save and stop, and passes on what happened."""

    def __init__(
        self,
        *,
        eval_every: int,
        checkpoint_every: int,
        listeners: tuple[Listener, ...],
        ranks: Ranks,
    ) -> None:
        self._eval_every, self._checkpoint_every = eval_every, checkpoint_every
        self._listeners, self._ranks = listeners, ranks
        self.stop_asked = threading.Event()

    def tell(self, kind: str, **facts: Any) -> None:
        """One event to every listener."""
        for listener in self._listeners:
            listener({"kind": kind, **facts})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save at their intervals and at the last step; stop when asked."""
        del args, kwargs
        step, last = state.global_step, state.global_step >= state.max_steps
        stopping = self._ranks.any(self.stop_asked.is_set())
        control.should_evaluate = last or step % self._eval_every == 0
        control.should_save = last or stopping or step % self._checkpoint_every == 0
        control.should_training_stop = last or stopping

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training progress; the scores come from `on_evaluate`."""
        del args, control
        logs = kwargs["logs"]
        if "loss" in logs:
            self.tell("log", step=state.global_step, **logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Held-out scores."""
        del args, control
        self.tell("scores", step=state.global_step, **kwargs["metrics"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is on disk."""
        del args, control, kwargs
        self.tell("checkpoint", step=state.global_step)


@contextmanager
def stopping_on_signals(stop_asked: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set the event: the run saves a checkpoint after its step and ends.

    Outside the main thread, where Python allows no handlers, signals keep their meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop_asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
