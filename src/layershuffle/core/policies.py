"""Order policies: rules that draw execution orders, and the modes of scores, named sets of orders.

Every policy is a frozen value with one method, `draw(depth, seed=0, step=..., micro_batch=0,
rank=0)`, a pure function of its arguments (generator: `core.draws`). Without `step` a policy counts
its own draws. `rank` is for independent orders under data-parallel training only; leave it at 0
where all ranks must share their order.

A mode is written `sequential`, `arbitrary`, `kept:9` (9 blocks, ascending), `kept:9:arbitrary`,
`kept:9:sequential:spaced` (choices: random, spaced, first, last). A range of block counts stands
for each of them: `kept:1-11:arbitrary`. Behind any of them `:parallel=3` runs three blocks side by
side, and behind kept `:passes=2` runs the blocks again: `kept:6:arbitrary:passes=2:parallel=3`.

`fixed=(first, last)` names the *ends*: so many blocks at the beginning and at the end of the model
keep their place. They run in every order, once and alone, first and last, and what a policy says of
blocks it draws among the others. A number of blocks counts them all: 6 kept blocks of a model with
`fixed=(1, 1)` are its two ends and four others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import comb
from typing import Any, Literal, cast

from layershuffle.core.checks.orders import check_depth, checked_fixed
from layershuffle.core.checks.policies import (
    check_kept,
    check_kept_count,
    check_probability,
    check_random_count,
    check_sequential_every,
    checked_parallel,
    checked_range,
    passes_without_count,
    too_many_ends,
    unknown_mode,
)
from layershuffle.core.draws import Stream
from layershuffle.core.orders import ExecutionOrder
from layershuffle.ground.errors import UsageError

OrderMode = Literal["sequential", "arbitrary"]
Choice = Literal["random", "spaced", "first", "last"]
# One lock for all policies: a lock inside each could be neither copied nor pickled.
_COUNTING = threading.Lock()


@dataclass(frozen=True)
class OrderPolicy:
    """What all policies share: the counter of draws without a step, and the stream of a draw.

    `drawn` says how many orders were drawn without a step. It is no part of the value: equal
    policies may have drawn different numbers of orders.
    """

    drawn: int = field(default=0, init=False, repr=False, compare=False)

    def draw(
        self,
        depth: int,
        *,
        seed: int = 0,
        step: int | None = None,
        micro_batch: int = 0,
        rank: int = 0,
    ) -> ExecutionOrder:
        """The order for a model with `depth` blocks at (seed, step, micro_batch, rank).

        The same arguments always give the same order. Without `step` the policy takes the number
        of orders that it drew so, `drawn`, and adds one to it. Raises `UsageError` for a depth that
        does not fit the policy.

            >>> policy = Shuffled()
            >>> policy.draw(4) == Shuffled().draw(4, step=0)
            True
            >>> policy.drawn
            1
        """
        check_depth(depth)
        if step is None:
            with _COUNTING:
                step = self.drawn
                # The class is frozen for its users; this counter is no part of its value.
                object.__setattr__(self, "drawn", step + 1)
        stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
        return self._order(depth, stream, turn=stream.step + stream.micro_batch)

    def _order(self, depth: int, stream: Stream, *, turn: int) -> ExecutionOrder:
        raise NotImplementedError


@dataclass(frozen=True)
class _TrainingPolicy(OrderPolicy):
    """What the policies of training share.

    `parallel=(low, high)`: the blocks run in rounds, side by side. Each size is uniform in
    [low, high]; the last round takes the blocks that are left.
    `sequential_every=n`: if `step + micro_batch` is a multiple of n, all blocks run one after the
    other in sequential order instead. This holds for exactly one of n groups of a batch, or for one
    of n steps if a step has a single order.
    `fixed`: the ends, as at the top of this file.
    """

    parallel: tuple[int, int] | None = field(default=None, kw_only=True)
    sequential_every: int | None = field(default=None, kw_only=True)
    fixed: tuple[int, int] = field(default=(0, 0), kw_only=True)

    def __post_init__(self) -> None:
        check_sequential_every(self.sequential_every)
        # The class is frozen; a list becomes a tuple so that the policy can be hashed.
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))
        object.__setattr__(self, "fixed", checked_fixed(self.fixed))

    def _order(self, depth: int, stream: Stream, *, turn: int) -> ExecutionOrder:
        # Counted, not drawn: with a drawn share some batches would be all sequential and others not
        # at all, and several orders per batch are meant to remove exactly this variance.
        if self.sequential_every is not None and turn % self.sequential_every == 0:
            return ExecutionOrder.sequential(depth)
        blocks = self._blocks(drawn_blocks(depth, self.fixed), stream)
        return _in_rounds([blocks], depth, fixed=self.fixed, parallel=self.parallel, stream=stream)

    def _blocks(self, inner: range, stream: Stream) -> Sequence[int]:
        """Which of the `inner` blocks run, in this order, between the ends."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sequential(_TrainingPolicy):
    """Blocks in their own order, 0..depth-1: ordinary training.

    `kept=(low, high)`: the number of blocks kept is uniform in [low, high], `high=None` meaning
    all of them; which blocks is uniform too. `parallel=(1, 4)`: they run in rounds of one to four
    blocks side by side. `sequential_every=n`: one draw of n has all blocks, one after the other.
    `fixed=(1, 1)`: the first and the last block run in every order, alone, and count as kept.
    """

    kept: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kept", checked_range(self.kept))

    def _blocks(self, inner: range, stream: Stream) -> Sequence[int]:
        if self.kept is None:
            return inner
        return sorted(_kept_of(stream.shuffled(inner), self.kept, stream, ends=sum(self.fixed)))


@dataclass(frozen=True)
class Shuffled(_TrainingPolicy):
    """A uniform permutation (paper, section 3.2); optionally of a random part of the blocks.

    `drop`: each block is left out with this probability (at least one stays). `kept` in its place,
    and `parallel`, `sequential_every` and `fixed` beside it, as in `Sequential`.

        >>> str(Shuffled(fixed=(1, 1)).draw(6, step=0))
        '0,2,4,3,1,5'
    """

    drop: float | None = None
    kept: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop is not None and self.kept is not None:
            raise UsageError("Shuffled takes drop= or kept=, not both")
        if self.drop is not None:
            check_probability(self.drop)
        object.__setattr__(self, "kept", checked_range(self.kept))

    def _blocks(self, inner: range, stream: Stream) -> Sequence[int]:
        blocks = stream.shuffled(inner)
        if self.drop is not None:
            # Dropped after the shuffle: the order of the others is that of the full permutation.
            return _survivors(blocks, self.drop, stream)
        if self.kept is None:
            return blocks
        return _kept_of(blocks, self.kept, stream, ends=sum(self.fixed))


@dataclass(frozen=True)
class LayerDrop(_TrainingPolicy):
    """Sequential order; each block is left out with probability `p` (arXiv 1909.11556).

    If all blocks would be left out, a single one runs, chosen uniformly. `parallel`,
    `sequential_every` and `fixed` as in `Sequential`.
    """

    p: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability(self.p)

    def _blocks(self, inner: range, stream: Stream) -> Sequence[int]:
        return _survivors(inner, self.p, stream)


@dataclass(frozen=True)
class Kept(OrderPolicy):
    """`k` blocks of the model, chosen by `choose`, in ascending or in uniform random order.

    `choose`: "random" (a uniform subset), "spaced" (evenly from the first block to the last),
    "first", "last". The paper prunes at test time without saying how it chooses (section 4.2).
    `passes`: how often they run, in the same order each time. `parallel=(low, high)`: they run in
    rounds, as in `Sequential`; no round spans two passes. `fixed`: the ends are among the `k`, the
    others are chosen as `choose` says, and passes and rounds are those of the others.
    """

    k: int
    order: OrderMode = "sequential"
    choose: Choice = "random"
    passes: int = 1
    parallel: tuple[int, int] | None = None
    fixed: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        check_kept(self.k, order=self.order, choose=self.choose, passes=self.passes)
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))
        object.__setattr__(self, "fixed", checked_fixed(self.fixed))

    def _order(self, depth: int, stream: Stream, *, turn: int) -> ExecutionOrder:
        del turn
        inner = drawn_blocks(depth, self.fixed)
        check_kept_count(self.k, depth, fixed=self.fixed)
        # One shuffle serves both draws: its first k places are a uniform ordered subset, so the
        # orders of k = 12, 9, 6, 3 at one (seed, step) are prefixes of each other and share work.
        shuffled = stream.shuffled(inner)
        chosen = self._chosen(inner, shuffled)
        blocks = sorted(chosen)
        if self.order == "arbitrary":
            blocks = [block for block in shuffled if block in chosen]
        # Every pass has the same order: a new one was measured to score no better, and the
        # orders of one, two and three passes are prefixes of each other.
        return _in_rounds(
            [blocks] * self.passes,
            depth,
            fixed=self.fixed,
            parallel=self.parallel,
            stream=stream,
        )

    def _chosen(self, inner: range, shuffled: Sequence[int]) -> tuple[int, ...]:
        """Which of the `inner` blocks are kept beside the ends."""
        count = self.k - sum(self.fixed)
        if self.choose == "spaced":
            return tuple(inner[place] for place in spaced(count, len(inner)))
        if self.choose == "random":
            return tuple(shuffled[:count])
        return tuple(inner[:count] if self.choose == "first" else inner[len(inner) - count :])


def spaced(k: int, depth: int) -> tuple[int, ...]:
    """`k` evenly spaced block ids from 0 to depth-1, halves rounded up; for `k` = 1, block 0."""
    if k == 1:
        return (0,)
    # Integer arithmetic, because round() would round halves to even.
    return tuple((2 * i * (depth - 1) + k - 1) // (2 * (k - 1)) for i in range(k))


def policy_to_json(policy: OrderPolicy) -> dict[str, Any]:
    """`{"policy": "shuffled", "kept": [3, null]}`: its name and the options that are given."""
    fields: dict[str, Any] = asdict(policy)
    del fields["drawn"]
    given = {key: value for key, value in fields.items() if value not in (None, (0, 0))}
    return {"policy": type(policy).__name__.lower(), **given}


def _survivors(blocks: Sequence[int], p: float, stream: Stream) -> tuple[int, ...]:
    survivors = tuple(block for block in blocks if not stream.chance(p))
    # An order needs a block. Only this case draws one more number, so other orders do not change.
    return survivors or (blocks[stream.below(len(blocks))],)


def _in_rounds(
    passes: Sequence[Sequence[int]],
    depth: int,
    *,
    fixed: tuple[int, int],
    parallel: tuple[int, int] | None,
    stream: Stream,
) -> ExecutionOrder:
    """The passes one after the other, between the ends, in rounds whose sizes are drawn after
    everything else."""
    first = range(fixed[0])
    last = range(depth - fixed[1], depth)
    if parallel is None:
        return ExecutionOrder((*first, *chain.from_iterable(passes), *last), depth)
    low, high = parallel
    rounds: list[Sequence[int]] = [(block,) for block in first]
    for blocks in passes:
        start = 0
        while start < len(blocks):
            size = low + stream.below(high - low + 1)
            rounds.append(blocks[start : start + size])
            start += size
    rounds += [(block,) for block in last]
    return ExecutionOrder.in_rounds(rounds, depth)


def _kept_of(
    blocks: tuple[int, ...], limits: tuple[int, int | None], stream: Stream, *, ends: int
) -> tuple[int, ...]:
    """A random number of shuffled `blocks`: a prefix is a uniform subset in uniform order.

    The limits count the `ends`, too, which run beside them.
    """
    depth = len(blocks) + ends
    low, most = limits
    high = depth if most is None else most
    check_random_count(low, high, depth=depth, ends=ends)
    return blocks[: low - ends + stream.below(high - low + 1)]


def drawn_blocks(depth: int, fixed: tuple[int, int]) -> range:
    """The inner blocks of a model with the ends `fixed`: those that policies draw.

    Raises `UsageError` if the ends leave fewer than two, which have one order.
    """
    first, last = fixed
    ends = first + last
    if ends and ends + 2 > depth:
        raise too_many_ends(fixed, depth)
    return range(first, depth - last)


_OPTION = re.compile(r"(parallel|passes)=([1-9][0-9]{0,5})")
_RANGE = re.compile(r"kept:(\d+)-(\d+)((?::.*)?)")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """`order` as in the paper's tables; `kept=None` runs all blocks.

    The blocks run in rounds of `parallel` side by side, and `passes` times over.
    """

    order: OrderMode
    kept: int | None = None
    choose: Choice = "random"
    parallel: int = 1
    passes: int = 1

    def policy(self, *, fixed: tuple[int, int] = (0, 0)) -> OrderPolicy:
        """What draws this mode's orders for a model whose ends are `fixed`."""
        rounds = None if self.parallel == 1 else (self.parallel, self.parallel)
        if self.kept is not None:
            return Kept(
                self.kept,
                order=self.order,
                choose=self.choose,
                passes=self.passes,
                parallel=rounds,
                fixed=fixed,
            )
        if self.order == "sequential":
            return Sequential(parallel=rounds, fixed=fixed)
        return Shuffled(parallel=rounds, fixed=fixed)

    def is_drawn(self, depth: int, *, fixed: tuple[int, int] = (0, 0)) -> bool:
        """Whether more than one order of a model with `depth` blocks and the ends `fixed` belongs
        to the mode."""
        inner = depth - sum(fixed)
        kept = inner if self.kept is None else max(0, self.kept - sum(fixed))
        # "spaced", "first" and "last" name their blocks, and there is one set of all blocks.
        subsets = comb(inner, kept) if self.choose == "random" else 1
        # Blocks that all run side by side have one order.
        return subsets > 1 or (self.order == "arbitrary" and kept > self.parallel)

    def draws(self, num_orders: int, *, depth: int, fixed: tuple[int, int] = (0, 0)) -> int:
        """How many scores the mode gets: `num_orders`, or one if it has a single order."""
        return num_orders if self.is_drawn(depth, fixed=fixed) else 1

    def kept_of(self, steps: int, *, fixed: tuple[int, int]) -> int:
        """The number of blocks in an order of so many steps: those between the ends run `passes`
        times."""
        ends = sum(fixed)
        return ends + (steps - ends) // self.passes

    def __str__(self) -> str:
        # What `parse_modes` assumes is left out, so that equal modes have equal texts.
        words: list[str] = [] if self.kept is None else ["kept", str(self.kept)]
        words.append(self.order)
        if self.choose != "random":
            words.append(self.choose)
        if self.passes > 1:
            words.append(f"passes={self.passes}")
        if self.parallel > 1:
            words.append(f"parallel={self.parallel}")
        return ":".join(words)


def parse_modes(text: str) -> tuple[Mode, ...]:
    """The modes of a comma-separated list. Raises `UsageError` naming the word that is wrong."""
    words: list[str] = []
    for word in map(str.strip, text.split(",")):
        counts = _RANGE.fullmatch(word)
        if counts is None:
            words.append(word)
            continue
        # The order of the modes is that of the rows in results.csv: most blocks first.
        first, last = sorted((int(counts[1]), int(counts[2])), reverse=True)
        words += [f"kept:{kept}{counts[3]}" for kept in range(first, last - 1, -1)]
    modes = tuple(map(_parse_mode, words))
    # Equal modes draw equal orders: their scores would count twice in every mean.
    if len(set(modes)) < len(modes):
        twice = next(mode for mode in modes if modes.count(mode) > 1)
        raise UsageError(f"The mode {twice} is named twice in {text!r}")
    return modes


def _parse_mode(text: str) -> Mode:
    words = text.split(":")
    counts = {"parallel": 1, "passes": 1}
    named: list[str] = []
    # The options stand last, in any order, each once.
    while words and (option := _OPTION.fullmatch(words[-1])) and option[1] not in named:
        named.append(option[1])
        counts[option[1]] = int(option[2])
        words.pop()
    parallel = counts["parallel"]
    passes = counts["passes"]
    if words in (["sequential"], ["arbitrary"]):
        if passes > 1:
            raise passes_without_count(text)
        return Mode(order=cast(OrderMode, words[0]), parallel=parallel)
    name, *options = words or [""]
    if name != "kept" or not 1 <= len(options) <= 3 or not options[0].isdecimal():
        raise unknown_mode(text, words)
    order = options[1] if len(options) > 1 else "sequential"
    choose = options[2] if len(options) > 2 else "random"
    # Kept itself checks the words, so that there is one list of them.
    policy = Kept(int(options[0]), order=cast(OrderMode, order), choose=cast(Choice, choose))
    return Mode(
        order=policy.order, kept=policy.k, choose=policy.choose, parallel=parallel, passes=passes
    )
