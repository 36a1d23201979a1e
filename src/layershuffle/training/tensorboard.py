"""Write a run's events as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from layershuffle.training.events import Event, Listener


def tensorboard_listener(directory: Path) -> Listener:
    """A listener that writes every number of `log` and `scores` events, by step."""
    writer = SummaryWriter(str(directory))

    def listen(event: Event) -> None:
        if event["kind"] == "end":
            writer.close()
        if event["kind"] not in ("log", "scores"):
            return
        for name, value in event.items():
            if name not in ("kind", "step", "epoch"):
                writer.add_scalar(f"{event['kind']}/{name}", value, event["step"])

    return listen
