"""What we use of torch although it is no public interface: the one file to read when torch moves.

Each name has a reason why there is no public one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def parts_by_name(module: nn.Module) -> dict[str, nn.Module | None]:
    """The direct parts of a module, in their order.

    `named_children` leaves out a module that comes a second time, as tied blocks do, and builds a
    set at each call; this runs in every forward.
    """
    return module._modules


def is_replica(module: nn.Module) -> bool:
    """Whether `module` is a copy that `nn.DataParallel` made for one GPU.

    Nothing else tells such a copy from the model.
    """
    return "_is_replica" in vars(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs a graph made by torch.compile.

    torch.compile has no question of this kind. `module.compile()` sets the first attribute,
    `torch.compile(module)` makes a module that holds the second one.
    """
    # Not `hasattr`: nn.Module makes the text of an error for every attribute that it lacks.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def uncompiled(module: nn.Module) -> nn.Module:
    """The model inside the wrapper that `torch.compile(model)` makes; any other module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def undo_compile(module: nn.Module) -> None:
    """Undo `module.compile()`, which has no counterpart."""
    vars(module).pop("_compiled_call_impl", None)


def compiling_is_off() -> bool:
    """Whether TORCH_COMPILE_DISABLE is set; torch reads it once and answers nobody."""
    from torch._dynamo import config

    return bool(config.disable)


def graph_limits(limit: int) -> AbstractContextManager[Any]:
    """At most `limit` graphs for a function, and an error beyond it, inside the `with` block.

    The public `torch.compiler.config` has none of these settings. torch 2.6 has them under names
    of the cache of graphs.
    """
    from torch._dynamo import config

    settings: dict[str, Any] = {
        "recompile_limit": limit,
        "accumulated_recompile_limit": 8 * limit,
        "fail_on_recompile_limit_hit": True,
    }
    if not hasattr(config, "recompile_limit"):
        settings = {
            "cache_size_limit": limit,
            "accumulated_cache_size_limit": 8 * limit,
            "fail_on_cache_limit_hit": True,
        }
    changes: AbstractContextManager[Any] = config.patch(settings)
    return changes


def backend_named(name: str) -> Callable[..., Any]:
    """The compiler behind the name of a backend: the public `list_backends` only names them."""
    from torch._dynamo import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


def graph_limit_error() -> type[Exception]:
    """What is raised at the limit of `graph_limits`; it has no public name."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises where it cannot compile; they have no public name."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException, graph_limit_error()


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
