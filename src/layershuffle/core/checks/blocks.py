"""What a backbone may not do with its blocks where something stands around or between them."""

from __future__ import annotations

import torch

from layershuffle.ground.errors import StackError


class Replays:
    """Tells the forward of an entry from its replay by gradient checkpointing."""

    def __init__(self) -> None:
        self._had_graph: bool | None = None

    @property
    def begun(self) -> bool:
        """Whether the entry has run before."""
        return self._had_graph is not None

    def refuse_reentrant(self, what: str, *, cut: bool) -> None:
        """Note a run, and raise `StackError` if it is a replay in which gradients would be wrong.

        Reentrant checkpointing runs the forward without a graph, so that what an entry takes from
        others (`cut`: whether it does, `what`: a word for it) has none in the replay either.
        """
        graph = torch.is_grad_enabled()
        if self._had_graph is None:
            self._had_graph = graph
        elif cut and graph and not self._had_graph:
            raise StackError(
                f"Reentrant gradient checkpointing cuts {what}, so gradients would be wrong",
                hint="checkpoint with use_reentrant=False (timm: TIMM_REENTRANT_CKPT=0)",
            )
