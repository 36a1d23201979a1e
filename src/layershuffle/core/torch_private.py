"""What we use of torch although it is no public interface: the one file to read when torch moves.

Each name has a reason, and the version from which a public one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def queue_callback(callback: Callable[[], None]) -> None:
    """Let torch call `callback` at the end of the backward pass in which this code runs.

    Raises `RuntimeError` outside of a backward pass. Before 2.15 torch has this only on its
    private engine; from 2.15 on it is `torch.autograd.graph.queue_callback`.
    """
    public = getattr(torch.autograd.graph, "queue_callback", None)
    if public is not None:
        public(callback)
        return
    torch.autograd.Variable._execution_engine.queue_callback(callback)
