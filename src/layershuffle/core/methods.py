"""The training methods in one visible table.

A method is data: a policy that draws orders, and which position parts are added. One training loop
serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from layershuffle.core.policies import (
    Choice,
    Kept,
    LayerDrop,
    OrderMode,
    OrderPolicy,
    Sequential,
    Shuffled,
)
from layershuffle.errors import UsageError
from layershuffle.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of training.

    `policy` draws the order of every forward. `selects_by` is the order mode in which held-out data
    picks the checkpoint. `encoding` and `prediction` say which position parts are added. Models
    that are `shortened` are made of some of the pretrained blocks, which `blocks` names. `distinct`
    is the number of different blocks, which the places of the stack share evenly. `exit_weight` is
    the weight of the cross-entropy at an exit: the state after a random number of steps goes to the
    head as well.
    """

    name: str
    summary: str
    source: str
    policy: OrderPolicy
    selects_by: OrderMode
    encoding: bool = False
    prediction: bool = False
    shortened: bool = False
    blocks: Kept | None = None
    distinct: int | None = None
    exit_weight: float | None = None


_TABLE = (
    Method(
        name="baseline",
        summary="sequential, ordinary refinement",
        source="paper, section 4",
        policy=Sequential(),
        selects_by="sequential",
    ),
    Method(
        name="layershuffle",
        summary="a uniform permutation of the blocks per forward",
        source="paper, section 3.2",
        policy=Shuffled(),
        selects_by="arbitrary",
    ),
    Method(
        name="layershuffle-position",
        summary="shuffled, every block is told its position",
        source="paper, section 3.3",
        policy=Shuffled(),
        selects_by="arbitrary",
        encoding=True,
    ),
    Method(
        name="layershuffle-predict",
        summary="shuffled, every block's output must tell its position",
        source="paper, section 3.4",
        policy=Shuffled(),
        selects_by="arbitrary",
        prediction=True,
    ),
    Method(
        name="layerdrop",
        summary="sequential, each block left out with probability p",
        source="arXiv 1909.11556, as the paper's section 4.2 uses it",
        policy=LayerDrop(0.2),  # the rate of the paper's comparison
        selects_by="sequential",
    ),
    Method(
        name="truncated",
        summary="sequential, a model made of some of the blocks",
        source="paper, section 4.2",
        policy=Sequential(),
        selects_by="sequential",
        shortened=True,
    ),
    Method(
        name="layershuffle-depth",
        summary="shuffled, a uniform number of blocks kept",
        source="this project",
        policy=Shuffled(depth=(3, None)),
        selects_by="arbitrary",
    ),
    Method(
        name="layershuffle-parallel",
        summary="shuffled, in rounds of 1 to 4 blocks side by side",
        source="this project; pairs of layers run so in arXiv 2502.02790",
        policy=Shuffled(parallel=(1, 4)),
        selects_by="arbitrary",
    ),
    Method(
        name="layershuffle-mixed",
        summary="shuffled, every fourth order is the sequential one",
        source="this project",
        policy=Shuffled(sequential_every=4),
        selects_by="arbitrary",
    ),
    Method(
        name="layershuffle-exit",
        summary="shuffled, the state after a random number of blocks is classified as well",
        source="this project; every layer has an exit so in arXiv 2404.16710",
        policy=Shuffled(),
        selects_by="arbitrary",
        exit_weight=0.3,
    ),
    Method(
        name="layershuffle-tied",
        summary="shuffled, all places share the weights of one block, or of a few",
        source="this project; layers are shared as in arXiv 1909.11942",
        policy=Shuffled(),
        selects_by="arbitrary",
        distinct=1,
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _TABLE}


def find_method(
    name: str,
    *,
    drop: float | None = None,
    min_blocks: int | None = None,
    kept: int | None = None,
    choose: Choice | None = None,
    distinct: int | None = None,
    max_parallel: int | None = None,
    sequential_every: int | None = None,
    exit_weight: float | None = None,
) -> Method:
    """The method of that name with its options set.

    `drop`: p of `layerdrop`, or blocks left out at random in `layershuffle`. `min_blocks`: the
    fewest blocks `layershuffle-depth` keeps. `kept` and `choose`: how many and which pretrained
    blocks a `truncated` model is made of. `distinct`: how many blocks a `layershuffle-tied` model
    has. `max_parallel`: the most blocks in a round of a shuffled method. `sequential_every`: every
    n-th order of a shuffled method is the sequential one. `exit_weight`: weight of the loss at an
    exit, which every method can have. Raises `UsageError` for unknown names (with the nearest) and
    for an option that the method does not have, or lacks.
    """
    if name not in METHODS:
        hint = did_you_mean(name, METHODS, otherwise=f"one of {', '.join(METHODS)}")
        raise UsageError(f"There is no method {name!r}", hint=hint)
    # The table is never changed: options make a copy.
    method = METHODS[name]
    if drop is not None:
        method = replace(method, policy=_with_drop(method, drop))
    if min_blocks is not None:
        method = replace(method, policy=_with_min_blocks(method, min_blocks))
    if max_parallel is not None:
        method = replace(method, policy=_with_rounds(method, max_parallel))
    if sequential_every is not None:
        method = replace(method, policy=_with_sequential(method, sequential_every))
    if distinct is not None:
        if method.distinct is None:
            raise UsageError(
                f"The method {method.name!r} gives every place its own block",
                hint="only layershuffle-tied takes a number of different blocks",
            )
        method = replace(method, distinct=distinct)
    if exit_weight is not None:
        method = replace(method, exit_weight=exit_weight)
    return replace(method, blocks=_blocks(method, kept, choose))


def _with_drop(method: Method, drop: float) -> OrderPolicy:
    if method.name == "layerdrop":
        return LayerDrop(drop)
    # layershuffle-depth has a policy with a range already; the two options exclude each other.
    if isinstance(method.policy, Shuffled) and method.policy.depth is None:
        return replace(method.policy, drop=drop)
    raise UsageError(
        f"The method {method.name!r} has no drop probability",
        hint="use layerdrop, or a shuffled method that keeps all blocks",
    )


def _with_min_blocks(method: Method, min_blocks: int) -> OrderPolicy:
    if method.name != "layershuffle-depth":
        raise UsageError(
            f"The method {method.name!r} has no smallest number of blocks",
            hint="only layershuffle-depth keeps a random number of blocks",
        )
    return Shuffled(depth=(min_blocks, None))


def _with_rounds(method: Method, max_parallel: int) -> OrderPolicy:
    if isinstance(method.policy, Shuffled):
        return replace(method.policy, parallel=(1, max_parallel))
    raise UsageError(
        f"The method {method.name!r} runs one block after the other",
        hint="only shuffled methods run blocks side by side, such as layershuffle-parallel",
    )


def _with_sequential(method: Method, every: int) -> OrderPolicy:
    if isinstance(method.policy, Shuffled):
        return replace(method.policy, sequential_every=every)
    raise UsageError(
        f"The method {method.name!r} has only the sequential order",
        hint="only shuffled methods mix orders, such as layershuffle-mixed",
    )


def _blocks(method: Method, number: int | None, choose: Choice | None) -> Kept | None:
    if not method.shortened:
        # Refused, not ignored: a run would otherwise train all blocks while its owner believes
        # that it trains a shorter model.
        if number is not None or choose is not None:
            raise UsageError(
                f"The method {method.name!r} trains all blocks of the model",
                hint="only truncated takes a number of blocks and a choice of them",
            )
        return None
    if number is None:
        raise UsageError(
            "truncated needs the number of blocks that the model is made of", hint="--kept 6"
        )
    return Kept(number, choose=choose or "spaced")
