"""Order policies: rules that draw execution orders.

Every policy is a frozen value with one method, `draw(depth, seed=, step=, micro_batch=0, rank=0)`,
a pure function of its arguments (generator: `core.draws`). `rank` is for independent orders
under data-parallel training only; leave it at 0 where all ranks must share their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from layershuffle.core.draws import Stream
from layershuffle.core.orders import ExecutionOrder, check_depth, is_integer, order_of
from layershuffle.errors import UsageError

OrderMode = Literal["sequential", "arbitrary"]
Choice = Literal["random", "spaced", "first", "last"]


@runtime_checkable
class OrderPolicy(Protocol):
    """The interface of all policies below."""

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """The order of this policy at (seed, step, micro_batch, rank)."""


@dataclass(frozen=True)
class Sequential:
    """Always 0..depth-1: ordinary training.

    `parallel=(low, high)`: the blocks run in rounds, side by side. Each size is uniform in
    [low, high]; the last round takes the blocks that are left.
    """

    parallel: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parallel", _checked_parallel(self.parallel))

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """The sequential order; the other arguments determine the sizes of its rounds, if any."""
        check_depth(depth)
        stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
        return _in_rounds([range(depth)], depth, parallel=self.parallel, stream=stream)


@dataclass(frozen=True)
class Shuffled:
    """A uniform permutation (paper, section 3.2); optionally of a random part of the blocks.

    `drop`: each block is left out with this probability (at least one stays).
    `depth=(low, high)`: the number of blocks kept is uniform in [low, high], `high=None` meaning
    all of them; which blocks is uniform too. The two options exclude each other.
    `parallel=(low, high)`: the kept blocks run in rounds, as in `Sequential`.
    `sequential_every=n`: if `step + micro_batch` is a multiple of n, all blocks run one after the
    other in sequential order instead. This holds for exactly one of n groups of a batch, or for one
    of n steps if a step has a single order.
    """

    drop: float | None = None
    depth: tuple[int, int | None] | None = None
    parallel: tuple[int, int] | None = None
    sequential_every: int | None = None

    def __post_init__(self) -> None:
        every = self.sequential_every
        if every is not None and (not is_integer(every) or every < 2):
            raise UsageError(
                f"sequential_every must be an integer of at least 2, got {every!r}",
                hint="sequential_every=4; Sequential() draws only the sequential order",
            )
        if self.drop is not None and self.depth is not None:
            raise UsageError("Shuffled takes drop= or depth=, not both")
        if self.drop is not None:
            _check_probability(self.drop)
        if self.depth is not None:
            # The class is frozen; a list becomes a tuple so that the policy can be hashed.
            object.__setattr__(self, "depth", _checked_range(self.depth))
        object.__setattr__(self, "parallel", _checked_parallel(self.parallel))

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """A uniform permutation of the kept blocks; `UsageError` if `depth=` does not fit."""
        check_depth(depth)
        # Counted, not drawn: with a drawn share some batches would be all sequential and others not
        # at all, and several orders per batch are meant to remove exactly this variance.
        if self.sequential_every is not None and (step + micro_batch) % self.sequential_every == 0:
            return ExecutionOrder.sequential(depth)
        stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
        blocks = stream.shuffled(range(depth))
        if self.drop is not None:
            # Dropped after the shuffle: the order of the others is that of the full permutation.
            blocks = _survivors(blocks, self.drop, stream)
        if self.depth is not None:
            # A prefix of a uniform permutation is a uniform subset in uniform order.
            low, high = _kept_range(self.depth, depth)
            blocks = blocks[: low + stream.below(high - low + 1)]
        return _in_rounds([blocks], depth, parallel=self.parallel, stream=stream)


@dataclass(frozen=True)
class LayerDrop:
    """Sequential order; each block is left out with probability `p` (arXiv 1909.11556).

    If all blocks would be left out, a single one runs, chosen uniformly.
    """

    p: float = 0.2

    def __post_init__(self) -> None:
        _check_probability(self.p)

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """The surviving blocks, ascending."""
        check_depth(depth)
        stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
        return ExecutionOrder(_survivors(range(depth), self.p, stream), depth)


@dataclass(frozen=True)
class Kept:
    """`k` blocks of the model, chosen by `choose`, in ascending or in uniform random order.

    `choose`: "random" (a uniform subset), "spaced" (evenly from the first block to the last),
    "first", "last". The paper prunes at test time without saying how it chooses (section 4.2).
    `passes`: how often they run, in the same order each time. `parallel=(low, high)`: they run in
    rounds, as in `Sequential`; no round spans two passes.
    """

    k: int
    order: OrderMode = "sequential"
    choose: Choice = "random"
    passes: int = 1
    parallel: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.k):
            raise UsageError(f"k must be an integer, got {self.k!r}", hint="Kept(9)")
        _check_word("order", self.order, ("sequential", "arbitrary"))
        _check_word("choose", self.choose, ("random", "spaced", "first", "last"))
        if not is_integer(self.passes) or self.passes < 1:
            raise UsageError(f"passes must be an integer of at least 1, got {self.passes!r}")
        object.__setattr__(self, "parallel", _checked_parallel(self.parallel))

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """`k` blocks, `passes` times; raises `UsageError` unless 1 <= k <= depth."""
        check_depth(depth)
        if not 1 <= self.k <= depth:
            raise UsageError(
                f"Cannot keep {self.k} blocks of a model with {depth}",
                hint=f"choose a number between 1 and {depth}",
            )
        # One shuffle serves both draws: its first k places are a uniform ordered subset, so the
        # orders of k = 12, 9, 6, 3 at one (seed, step) are prefixes of each other and share work.
        stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
        shuffled = stream.shuffled(range(depth))
        chosen = self._chosen(depth, shuffled)
        blocks = sorted(chosen)
        if self.order == "arbitrary":
            blocks = [block for block in shuffled if block in chosen]
        # Every pass has the same order: a new one scores no better (docs/rounds.md), and this way
        # the orders of one, two and three passes are prefixes of each other.
        return _in_rounds([blocks] * self.passes, depth, parallel=self.parallel, stream=stream)

    def _chosen(self, depth: int, shuffled: Sequence[int]) -> tuple[int, ...]:
        every = range(depth)
        if self.choose == "spaced":
            return spaced(self.k, depth)
        if self.choose == "random":
            return tuple(shuffled[: self.k])
        return tuple(every[: self.k] if self.choose == "first" else every[depth - self.k :])


@dataclass(frozen=True)
class Fixed:
    """Always the given order."""

    order: ExecutionOrder

    def __post_init__(self) -> None:
        if not isinstance(self.order, ExecutionOrder):
            raise UsageError(
                f"Fixed takes an ExecutionOrder, not {self.order!r}",
                hint='Fixed(ExecutionOrder.parse("3,0,2", depth=12))',
            )

    def draw(
        self, depth: int, *, seed: int, step: int, micro_batch: int = 0, rank: int = 0
    ) -> ExecutionOrder:
        """The order itself; raises `UsageError` if it was made for another depth."""
        check_depth(depth)
        del seed, step, micro_batch, rank
        return order_of(self.order, depth)


POLICIES: dict[str, type[OrderPolicy]] = {
    "sequential": Sequential,
    "shuffled": Shuffled,
    "layerdrop": LayerDrop,
    "kept": Kept,
    "fixed": Fixed,
}
# Options that models saved by earlier versions lack, with the values that they had there.
_LATER = {"parallel": None, "passes": 1, "sequential_every": None}


def spaced(k: int, depth: int) -> tuple[int, ...]:
    """`k` evenly spaced block ids from 0 to depth-1, halves rounded up; for `k` = 1, block 0."""
    if k == 1:
        return (0,)
    # Integer arithmetic, because round() would round halves to even.
    return tuple((2 * i * (depth - 1) + k - 1) // (2 * (k - 1)) for i in range(k))


def policy_to_json(policy: OrderPolicy) -> dict[str, Any]:
    """`{"policy": "shuffled", "drop": null, "depth": [3, null]}`: JSON types only."""
    name = next(name for name, kind in POLICIES.items() if type(policy) is kind)
    fields: dict[str, Any] = asdict(policy)  # type: ignore[call-overload]  # all are dataclasses
    # Records of models are compared, so a record from before these options must equal a new one.
    later = [key for key, default in _LATER.items() if fields.get(key) == default]
    return {"policy": name} | {key: value for key, value in fields.items() if key not in later}


def policy_from_json(data: Mapping[str, Any]) -> OrderPolicy:
    """The policy that `policy_to_json` wrote. Raises `UsageError` for anything else."""
    if not isinstance(data, Mapping):
        raise UsageError(f"A stored order policy must be a mapping, got {data!r}")
    fields = dict(data)
    name = fields.pop("policy", None)
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(f"{name!r} is not an order policy", hint=f"one of {', '.join(POLICIES)}")
    # `Kept` also has a field named "order", which is a word.
    if isinstance(fields.get("order"), Mapping):
        fields["order"] = ExecutionOrder.from_json(fields["order"])
    try:
        return POLICIES[name](**fields)
    except TypeError as error:
        raise UsageError(
            f"These are not the options of the order policy {name!r}: {error}"
        ) from error


def _survivors(blocks: Sequence[int], p: float, stream: Stream) -> tuple[int, ...]:
    survivors = tuple(block for block in blocks if not stream.chance(p))
    # An order needs a block. Only this case draws one more number, so other orders do not change.
    return survivors or (blocks[stream.below(len(blocks))],)


def _in_rounds(
    passes: Sequence[Sequence[int]],
    depth: int,
    *,
    parallel: tuple[int, int] | None,
    stream: Stream,
) -> ExecutionOrder:
    """The passes one after the other, in rounds whose sizes are drawn after everything else."""
    if parallel is None:
        return ExecutionOrder(tuple(block for blocks in passes for block in blocks), depth)
    low, high = parallel
    rounds: list[Sequence[int]] = []
    for blocks in passes:
        start = 0
        while start < len(blocks):
            size = low + stream.below(high - low + 1)
            rounds.append(blocks[start : start + size])
            start += size
    return ExecutionOrder.in_rounds(rounds, depth)


def _kept_range(limits: tuple[int, int | None], depth: int) -> tuple[int, int]:
    low, high = limits[0], depth if limits[1] is None else limits[1]
    if not 1 <= low <= high <= depth:
        raise UsageError(
            f"A random number of blocks between {low} and {high} does not fit a model with {depth}",
            hint=f"choose 1 <= low <= high <= {depth}, or leave high out for all blocks",
        )
    return low, high


def _checked_range(limits: Sequence[int | None]) -> tuple[int, int | None]:
    # A list is accepted because JSON and YAML have no tuples.
    parts = tuple(limits) if isinstance(limits, tuple | list) else ()
    if len(parts) == 2 and is_integer(parts[0]) and (parts[1] is None or is_integer(parts[1])):
        return parts[0], parts[1]
    raise UsageError(
        f"depth must be (low, high), got {limits!r}", hint="depth=(3, None) is 3 to all"
    )


def _checked_parallel(limits: Sequence[int] | None) -> tuple[int, int] | None:
    if limits is None:
        return None
    # A list is accepted because JSON and YAML have no tuples.
    parts = tuple(limits) if isinstance(limits, tuple | list) else ()
    if len(parts) == 2 and all(map(is_integer, parts)) and 1 <= parts[0] <= parts[1]:
        return parts[0], parts[1]
    raise UsageError(
        f"parallel must be (low, high) with 1 <= low <= high, got {limits!r}",
        hint="parallel=(1, 4) is one to four blocks side by side",
    )


def _check_probability(p: float) -> None:
    number = isinstance(p, int | float) and not isinstance(p, bool)
    if not number or not 0.0 <= p < 1.0:
        raise UsageError(f"A drop probability must be in [0, 1), got {p}", hint="0.2 is usual")


def _check_word(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{field}={value!r} is not an option of Kept", hint=f"one of {', '.join(allowed)}"
        )
